"""The facade: what prepare gives back, what it refuses, and what a training loop sees."""

from __future__ import annotations

import os
import socket
import warnings
from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch
from ranks import in_ranks
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

from jupyter_accel import accelerator as module
from jupyter_accel.accelerator import Accelerator, OneProcessWarning
from jupyter_accel.data import PreparedLoader
from jupyter_accel.devices import Devices
from jupyter_accel.errors import AccelError, ConfigError, NotPreparedError
from jupyter_accel.strategies.single import Single
from jupyter_accel.training import PreparedOptimizer, PreparedScheduler


def parts(length=4, batch=2):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(torch.ones(length, 1)), batch_size=batch)
    scheduler = LinearLR(optimizer, 1.0, 0.0, total_iters=100)
    return model, optimizer, loader, scheduler


def test_a_lone_process_is_rank_0_of_1():
    accelerator = Accelerator(cpu=True)
    assert (accelerator.num_processes, accelerator.process_index) == (1, 0)
    assert accelerator.local_process_index == 0
    assert accelerator.is_main_process
    assert accelerator.is_local_main_process
    assert accelerator.is_last_process
    assert accelerator.device == torch.device("cpu")
    assert accelerator.mixed_precision == "no"
    accelerator.wait_for_everyone()


def test_objects_come_back_in_the_order_of_the_call():
    model, optimizer, loader, scheduler = parts()
    kinds = (PreparedScheduler, PreparedLoader, PreparedOptimizer, nn.Linear, type(None))
    given = (scheduler, loader, optimizer, model, None)
    assert tuple(map(type, Accelerator(cpu=True).prepare(*given))) == kinds


def test_one_object_comes_back_alone():
    model = nn.Linear(1, 1)
    assert Accelerator(cpu=True).prepare(model) is model


def test_preparing_again_gives_what_was_prepared():
    accelerator = Accelerator("bf16", cpu=True)
    given = parts()
    first = accelerator.prepare(*given)
    assert all(a is b for a, b in zip(accelerator.prepare(*first), first, strict=True))
    again = accelerator.prepare(*given)
    assert all(again[i] is first[i] for i in (0, 1))


def test_a_rerun_cell_makes_a_new_accelerator_of_the_old_objects():
    first = Accelerator("bf16", cpu=True).prepare(*parts())
    second = Accelerator("fp16", cpu=True)
    model, optimizer, loader, scheduler = second.prepare(*first)
    assert optimizer.optimizer is first[1].optimizer
    assert loader.source is first[2].source
    assert scheduler.scheduler is first[3].scheduler
    seen = []
    model.register_forward_hook(lambda _m, _i, output: seen.append(output.dtype))
    model(torch.ones(1, 1))
    assert seen == [torch.float16]


def test_two_accelerators_do_not_see_each_other():
    one, two = Accelerator("bf16", cpu=True), Accelerator(cpu=True)
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    one.prepare(first)
    two.prepare(second)
    assert type(second) is nn.Linear
    assert one.mixed_precision == "bf16"
    assert two.mixed_precision == "no"
    with pytest.raises(NotPreparedError):
        two.no_sync(first)


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_a_loop_trains_and_the_gradients_are_true(precision):
    accelerator = Accelerator(precision, cpu=True)
    model, optimizer, loader, scheduler = accelerator.prepare(*parts())
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    for (x,) in loader:
        loss = model(x).mean() / 4  # or fp16 overflows at the scaler's first scale
        assert loss.dtype == torch.float32
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 100.0)
        assert norm.item() == pytest.approx(2**0.5 / 4)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert model.weight.item() == pytest.approx(-(1 + 0.99) / 4)
    assert optimizer.steps_taken == 2


def test_an_overflow_is_told_and_does_not_move_the_schedule():
    accelerator = Accelerator("fp16", cpu=True)
    model, optimizer, _, scheduler = accelerator.prepare(*parts())
    accelerator.backward(model(torch.ones(1, 1)).sum() * float("inf"))
    optimizer.step()
    scheduler.step()
    assert accelerator.optimizer_step_was_skipped
    assert scheduler.get_last_lr() == [1.0]


def test_the_learning_rate_after_50_steps_is_that_of_one_process():
    def rate():
        accelerator = Accelerator()
        model, optimizer, loader, scheduler = accelerator.prepare(*parts(100, 1))
        for (x,) in loader:
            accelerator.backward(model(x).sum())
            optimizer.step()
            scheduler.step()
        return optimizer.steps_taken, scheduler.get_last_lr()[0]

    assert in_ranks(rate) == [(50, pytest.approx(0.5))] * 2


def test_clipping_a_part_unscales_each_optimizer_once():
    accelerator = Accelerator("fp16", cpu=True)
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 1)).sum() / 8)
    for layer in model:
        accelerator.clip_grad_norm_(layer.parameters(), 9.0)
    accelerator.clip_grad_norm_(model[0].weight, 9.0)
    assert model[1].bias.grad.item() == 1 / 8
    optimizer.step()
    assert optimizer.steps_taken == 1


def test_clipping_one_model_leaves_the_gradients_of_another_scaled():
    accelerator = Accelerator("fp16", cpu=True)
    pairs = [accelerator.prepare(*parts()[:2]) for _ in range(2)]
    for model, _ in pairs:
        accelerator.backward(model(torch.ones(1, 1)).sum() / 8)
    (first, _), (second, _) = pairs
    accelerator.clip_grad_norm_(first.parameters(), 9.0)
    assert first.bias.grad.item() == 1 / 8
    assert second.bias.grad.item() == 65536 / 8
    before = second.bias.item()
    for _, optimizer in pairs:
        optimizer.step()
    assert second.bias.item() == pytest.approx(before - 1 / 8)


def test_the_launchers_precision_is_the_default_and_an_argument_wins(monkeypatch):
    monkeypatch.setenv("JUPYTER_ACCEL_MIXED_PRECISION", "bf16")
    assert Accelerator(cpu=True).mixed_precision == "bf16"
    assert Accelerator("no", cpu=True).mixed_precision == "no"


def test_the_launchers_device_is_used_and_cpu_wins(monkeypatch):
    monkeypatch.setenv("JUPYTER_ACCEL_DEVICE", "meta")
    assert Accelerator().device == torch.device("meta")
    assert Accelerator(cpu=True).device == torch.device("cpu")


def test_cpu_ranks_form_a_group_by_themselves_under_torchrun():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}

    def ranks():
        accelerator = Accelerator()
        return accelerator.gather(torch.tensor([accelerator.process_index])).tolist()

    assert in_ranks(ranks, size=2, connect=False, env=address) == [[0, 1], [0, 1]]


def test_a_group_that_the_environment_does_not_know_is_refused():
    def mismatch():
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        with pytest.raises(ConfigError, match=r"the process group has 2 ranks, but .* say 1"):
            Accelerator(cpu=True)

    in_ranks(mismatch, size=2)


def test_only_the_main_process_prints():
    def printed():
        with redirect_stdout(StringIO()) as out:
            Accelerator().print("one", 2, sep="-")
        return out.getvalue()

    assert in_ranks(printed, size=2) == ["one-2\n", ""]


def test_the_model_that_the_user_built_comes_back():
    def unwrapped():
        accelerator = Accelerator()
        model = nn.Linear(1, 1)
        prepared = accelerator.prepare(model)
        again = accelerator.prepare(model) is accelerator.prepare(prepared) is prepared
        return again, accelerator.unwrap_model(prepared) is model, prepared is model

    assert in_ranks(unwrapped, size=2) == [(True, True, False)] * 2


def test_a_model_wrapped_by_hand_is_refused():
    def wrapped():
        model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
        with pytest.raises(ConfigError, match="wrapped by DistributedDataParallel already"):
            Accelerator().prepare(model)

    in_ranks(wrapped, size=1)


def test_the_autocast_block_uses_the_precision():
    with Accelerator("bf16", cpu=True).autocast():
        assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype == torch.bfloat16


def test_a_strategy_may_be_a_name_or_an_object():
    for strategy in ("single", "ddp", Single()):
        assert Accelerator(cpu=True, strategy=strategy).prepare(nn.Linear(1, 1)) is not None


# ---------------------------------------------------------------- refused, never ignored


@pytest.mark.parametrize(
    ("things", "error", "words"),
    [
        (lambda: ["text"], ConfigError, "prepare.. takes models, .*; got str"),
        (lambda: [TensorDataset(torch.ones(1))], ConfigError, "got TensorDataset"),
        (lambda: [parts()[1]], NotPreparedError, "SGD holds 2 parameters of no prepared model"),
        (lambda: [parts()[3]], NotPreparedError, "the optimizer of LinearLR is not prepared"),
    ],
)
def test_what_cannot_be_prepared_is_refused(things, error, words):
    with pytest.raises(error, match=words):
        Accelerator(cpu=True).prepare(*things())


def test_an_optimizer_with_a_parameter_that_ranks_would_not_share_is_refused():
    def stray():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))], lr=0.1)
        accelerator = Accelerator()
        if accelerator.num_processes == 1:
            return accelerator.prepare(model, optimizer) is not None
        with pytest.raises(NotPreparedError, match="holds 1 parameters of no prepared model"):
            accelerator.prepare(model, optimizer)
        return True

    assert in_ranks(stray, size=2) == [True, True]
    assert in_ranks(stray, size=1) == [True]


def test_a_backward_before_prepare_says_what_to_call():
    with pytest.raises(NotPreparedError, match="no model is prepared yet; call"):
        Accelerator(cpu=True).backward(torch.ones(1))


def test_half_parameters_with_fp16_are_refused():
    with pytest.raises(ConfigError, match=r"call model.float\(\) before prepare"):
        Accelerator("fp16", cpu=True).prepare(nn.Linear(1, 1).half())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mixed_precision": "fp8"}, "unknown precision 'fp8'"),
        ({"strategy": "zero9"}, "unknown strategy 'zero9'"),
    ],
)
def test_unknown_names_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        Accelerator(cpu=True, **options)


def test_what_this_version_has_not_yet_is_said_with_a_way_to_go():
    accelerator = Accelerator(cpu=True)
    with pytest.raises(AttributeError, match=r"accumulate is not in this version .*no_sync"):
        accelerator.accumulate()
    with pytest.raises(AttributeError, match="has no attribute 'accumlate'"):
        accelerator.accumlate()
    with pytest.raises(TypeError, match="gradient_accumulation_steps"):
        Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert issubclass(NotPreparedError, AccelError)


# ---------------------------------------------------------------- the hint


@pytest.fixture
def two_devices(monkeypatch):
    monkeypatch.setattr(module, "usable_devices", lambda _env: Devices("cuda", 2, "two"))
    module._hint_once.cache_clear()
    yield
    module._hint_once.cache_clear()


@pytest.mark.usefixtures("two_devices")
def test_a_lone_process_beside_idle_devices_is_told_once_how_to_launch():
    def create_twice():
        for _ in range(2):
            Accelerator()

    with pytest.warns(OneProcessWarning, match="2 devices are visible.*%%accel_launch") as seen:
        create_twice()
    assert len(seen) == 1
    assert seen[0].filename == __file__


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("launched", [True, False])
def test_no_hint_in_a_launch_nor_where_the_cpu_was_asked_for(monkeypatch, launched):
    if launched:
        for name, value in zip(
            ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "0101", strict=True
        ):
            monkeypatch.setenv(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Accelerator(cpu=not launched)


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_the_gpu_is_used_unless_the_cpu_is_asked_for():
    assert Accelerator().device == torch.device("cuda:0")
    assert Accelerator(cpu=True).device == torch.device("cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_a_loop_trains_on_the_gpu(precision):
    accelerator = Accelerator(precision)
    model, optimizer, loader, scheduler = accelerator.prepare(*parts())
    for (x,) in loader:
        assert x.is_cuda
        accelerator.backward(model(x).sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert optimizer.steps_taken + optimizer.steps_skipped == 2
    assert model.weight.is_cuda
