"""Precision: refused where it cannot be used, applied around each call, and never in the way."""

from __future__ import annotations

import copy
import io
import pickle

import cloudpickle
import pytest
import torch
from torch import nn

from jupyter_accel.errors import ConfigError
from jupyter_accel.precision import Autocast, Precision, attach


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.computed = None
        self.interrupt = False

    def forward(self, x, *, scale=1.0):
        y = self.layer(x)
        self.computed = y.dtype
        if self.interrupt:
            raise KeyboardInterrupt
        return {"y": y * scale, "n": 3}


@pytest.fixture
def net():
    return Net()


def call(net):
    return net(torch.ones(2, 4), scale=2.0)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_model_computes_in_the_precision_and_gives_float32(net, name, dtype):
    attach(net, Precision(name), "cpu")
    output = call(net)
    assert net.computed == dtype
    assert output["y"].dtype == torch.float32
    assert output["n"] == 3
    assert all(p.dtype == torch.float32 for p in net.parameters())


def test_no_precision_leaves_the_model_alone(net):
    attach(net, Precision("no"), "cpu")
    assert type(net) is Net
    assert call(net)["y"].dtype == torch.float32


def test_the_forward_and_the_kind_of_the_model_stay_as_they_were(net):
    attach(net, Precision("bf16"), "cpu")
    assert "forward" not in vars(net)
    assert isinstance(net, Net)
    assert type(net).__name__ == "Net"
    assert not net._forward_hooks
    assert net.state_dict().keys() == Net().state_dict().keys()


def test_a_removed_precision_is_gone(net):
    handle = attach(net, Precision("bf16"), "cpu")
    handle.remove()
    handle.remove()
    call(net)
    assert type(net) is Net
    assert net.computed == torch.float32


def test_attaching_again_replaces_the_former_precision(net):
    attach(net, Precision("bf16"), "cpu")
    attach(net, Precision("fp16"), "cpu")
    call(net)
    assert net.computed == torch.float16
    attach(net, Precision("no"), "cpu")
    assert type(net) is Net


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_forward_does_not_leave_autocast_on(net, error):
    attach(net, Precision("bf16"), "cpu")
    net.interrupt = error is KeyboardInterrupt
    with pytest.raises(error):
        net(torch.ones(2, 4 if net.interrupt else 5))
    assert not torch.is_autocast_enabled("cpu")
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_a_copy_computes_in_the_precision_too(net):
    attach(net, Precision("bf16"), "cpu")
    twin = copy.deepcopy(net)
    call(twin)
    assert twin.computed == torch.bfloat16
    assert isinstance(net, Autocast)
    assert twin.layer.weight is not net.layer.weight


@pytest.mark.parametrize("library", [pickle, cloudpickle])
def test_a_pickled_model_is_the_plain_one(net, library):
    attach(net, Precision("bf16"), "cpu")
    loaded = pickle.loads(library.dumps(net))
    assert type(loaded) is Net
    assert torch.equal(loaded.layer.weight, net.layer.weight)
    assert isinstance(net, Autocast)


def test_a_saved_model_is_the_plain_one(net):
    attach(net, Precision("bf16"), "cpu")
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)) is Net


def test_an_unknown_precision_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="unknown precision 'fp8'; choose one of no, fp16, bf16"):
        Precision("fp8")


@pytest.mark.parametrize(
    ("name", "device", "native_bf16", "works"),
    [
        ("no", "cpu", None, True),
        ("bf16", "cpu", None, True),
        ("fp16", "cpu", None, True),
        ("fp16", "cuda:0", False, True),
        ("bf16", "cuda:0", True, True),
        ("bf16", "cuda:0", False, False),
        ("no", "hpu", None, True),
        ("fp16", "hpu", None, False),
    ],
)
def test_the_device_is_checked_before_the_start(name, device, native_bf16, works):
    precision = Precision(name)
    if works:
        precision.check(device, native_bf16=native_bf16)
        return
    with pytest.raises(ConfigError, match=f"{device} cannot compute in {name}; use mixed_prec"):
        precision.check(device, native_bf16=native_bf16)


def test_half_parameters_are_refused_where_the_loss_is_scaled(net):
    net.half()
    Precision("bf16").check_model(net)
    with pytest.raises(ConfigError, match=r"'layer.weight' is float16.*call model.float\(\)"):
        Precision("fp16").check_model(net)
    net.requires_grad_(requires_grad=False)
    Precision("fp16").check_model(net)


def test_the_autocast_block_is_plain_for_no_precision():
    with Precision("no").autocast("cpu"):
        assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype == torch.float32
    with Precision("bf16").autocast("cpu"):
        assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype == torch.bfloat16


@pytest.mark.gpu
def test_bf16_on_the_gpu_computes_in_bf16(net):
    net.cuda()
    Precision("bf16").check("cuda:0")
    attach(net, Precision("bf16"), "cuda")
    assert net(torch.ones(2, 4, device="cuda"))["y"].dtype == torch.float32
    assert net.computed == torch.bfloat16
