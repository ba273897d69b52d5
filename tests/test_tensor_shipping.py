from __future__ import annotations

import copy
import warnings

import pytest
import torch
from fresh_interpreter import modules_after
from notebook_pair import Pair
from torch import nn

from jupyter_accel.errors import ShippingError
from jupyter_accel.launcher.parcels.shipping import pack, unpack

BIG = 100_000  # elements: more than fits into the stream


@pytest.fixture
def pair():
    pair = Pair()
    yield pair
    pair.close()


def there_and_back(**values):
    """Pack and unpack in this process: enough where memory is not the point."""
    parcel = pack(values, namespace=None, follow=False)
    arrived = unpack(parcel, namespace=None)
    if parcel.segment is not None:
        parcel.segment.close()
    return arrived


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int8),
    *(torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2),
]


@pytest.mark.parametrize("size", [3, BIG])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives_bit_by_bit(dtype, size):
    tensor = torch.randint(0, 2, (size,)).to(dtype)
    arrived = there_and_back(t=tensor)["t"]
    assert arrived.dtype is dtype
    assert torch.equal(arrived.view(torch.uint8), tensor.view(torch.uint8))


SHAPES = {
    "scalar": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 3),
    "transposed": lambda: torch.arange(BIG).view(100, -1).t(),
    "every third": lambda: torch.arange(BIG)[10:5000:3],
    "expanded": lambda: torch.ones(1, 5).expand(4, 5),
    "channels last": lambda: torch.rand(2, 3, 40, 40).to(memory_format=torch.channels_last),
    "conjugated": lambda: torch.full((3,), 1j).conj(),
    "negated": lambda: torch.full((3,), 1 + 2j).conj().imag,
}


@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES)
def test_views_keep_shape_strides_and_lazy_bits(make):
    tensor = make()
    arrived = there_and_back(t=tensor)["t"]
    assert torch.equal(arrived, tensor)
    for fact in (
        torch.Tensor.stride,
        torch.Tensor.storage_offset,
        torch.Tensor.is_conj,
        torch.Tensor.is_neg,
    ):
        assert fact(arrived) == fact(tensor)


OTHERS = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_what_is_not_dense_goes_torchs_own_way(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, on some of these being young or old
        tensor = make()
        arrived = there_and_back(t=tensor)["t"]
        assert arrived.layout is tensor.layout
        dense = (
            [t.dequantize() if t.is_quantized else t.to_dense() for t in (arrived, tensor)]
            if (not tensor.is_nested)
            else [torch.cat(t.unbind()) for t in (arrived, tensor)]
        )
    assert torch.equal(*dense)


def test_meta_tensors_stay_meta():
    plain = torch.empty(3, 4, device="meta")
    arrived = there_and_back(t=plain, p=nn.Parameter(plain))
    assert arrived["t"].is_meta
    assert arrived["p"].is_meta
    assert type(arrived["p"]) is nn.Parameter
    assert arrived["t"].shape == (3, 4)


class Tagged(torch.Tensor):
    pass


def test_subclasses_stay_what_they_are():
    arrived = there_and_back(t=torch.ones(3).as_subclass(Tagged), u=nn.UninitializedParameter())
    assert type(arrived["t"]) is Tagged
    assert type(arrived["u"]) is nn.UninitializedParameter
    assert isinstance(there_and_back(b=nn.Buffer(torch.ones(2)))["b"], nn.Buffer)


def test_gradients_are_asked_for_as_before_and_attributes_stay():
    leaf = torch.ones(2, requires_grad=True)
    leaf.tag = {"a": 1}
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    arrived = there_and_back(leaf=leaf, frozen=frozen, plain=torch.ones(1), made=leaf * 2)
    assert arrived["leaf"].requires_grad
    assert arrived["leaf"].tag == {"a": 1}
    assert not arrived["frozen"].requires_grad
    assert not arrived["plain"].requires_grad
    assert arrived["made"].requires_grad
    (arrived["leaf"] * 3).sum().backward()
    assert arrived["leaf"].grad.tolist() == [3, 3]
    assert leaf.grad is None


@pytest.mark.parametrize("size", [12, BIG])
def test_one_storage_travels_once_and_stays_one(size):
    whole = torch.arange(float(size))
    parcel = pack({"w": whole, "h": whole[: size // 2], "l": [whole]}, namespace=None, follow=False)
    assert parcel.nbytes < size * 4 + 1000
    arrived = unpack(parcel, namespace=None)
    assert arrived["l"][0] is arrived["w"]
    arrived["w"][0] = -1
    assert arrived["h"][0] == -1


def test_small_tensors_can_grow_on_arrival():
    assert there_and_back(t=torch.ones(3))["t"].resize_(1000).shape == (1000,)


def test_large_tensors_are_views_of_shared_memory_and_changes_are_private(pair):
    big = pair.namespace["big"] = torch.zeros(BIG)
    assert len(pair.ship("big").stream) < 1000
    pair.launch("big += 1\nn = big.sum().item()")
    assert pair.rank("n") == BIG
    assert big.sum() == 0


def test_a_model_comes_back_trained(pair):
    pair.cell("import torch\nmodel = torch.nn.Linear(400, 400)")
    before = copy.deepcopy(pair.namespace["model"].state_dict())
    pair.launch("import torch\nwith torch.no_grad():\n  for p in model.parameters(): p.fill_(2)")
    trained = pair.bring("model")["model"]
    assert all((p == 2).all() for p in trained.parameters())
    now = pair.namespace["model"].state_dict()
    assert all(torch.equal(now[key], before[key]) for key in before)


def test_weights_that_are_tied_stay_tied_and_the_optimizer_keeps_its_parameters(pair):
    pair.cell(
        "import torch\nfrom torch import nn\n"
        "m = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200))\nm[1].weight = m[0].weight\n"
        "o = torch.optim.Adam(m.parameters())\n"
        "m(torch.randn(2, 200)).sum().backward(); o.step(); o.zero_grad()"
    )
    pair.launch(
        "r = (m[0].weight is m[1].weight, o.param_groups[0]['params'][0] is m[0].weight,"
        " len(o.state), list(o.state)[0] is m[0].weight)\n"
        "before = m[0].weight.clone()\nm(torch.randn(2, 200)).sum().backward()\no.step()\n"
        "moved = not torch.equal(before, m[0].weight)"
    )
    assert pair.rank("r, moved") == ((True, True, 3, True), True)


def test_a_scheduler_goes_on_without_a_warning(pair):
    pair.cell(
        "import torch\nm = torch.nn.Linear(2, 2)\no = torch.optim.SGD(m.parameters(), lr=1.0)\n"
        "s = torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5)"
    )
    step = "m(torch.ones(1, 2)).sum().backward(); o.step(); s.step()\n"
    pair.launch(f"import warnings\nwarnings.simplefilter('error')\n{step}{step}")
    back = pair.bring("s", "o")
    assert back["s"].optimizer is back["o"]
    assert back["o"].param_groups[0]["lr"] == 0.25
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back["o"].step()
        back["s"].step()
    assert back["o"].param_groups[0]["lr"] == 0.125


def test_an_optimizer_from_a_cell_keeps_its_own_attributes_and_hooks(pair):
    pair.cell(
        "import torch\nclass Mine(torch.optim.SGD):\n"
        "  def __init__(self, p): super().__init__(p, lr=0.1); self.k = 7\n"
        "m = torch.nn.Linear(2, 2)\no = Mine(m.parameters())\nseen = []\n"
        "def hook(*_): seen.append(1)\nh = o.register_step_post_hook(hook)"
    )
    pair.launch("m(torch.ones(1, 2)).sum().backward(); o.step()\nr = o.k, len(seen)")
    assert pair.rank("r") == (7, 1)


WORKS = {
    "modules with hooks": (
        (
            "m = nn.Linear(2, 2)\nseen = []\ndef hook(*_): seen.append(1)\n"
            "h = m.register_forward_hook(hook)"
        ),
        "m(torch.ones(1, 2)); h.remove(); m(torch.ones(1, 2))",
        "len(seen) == 1",
    ),
    "a module from a cell, with buffers": (
        (
            "class Net(nn.Module):\n"
            "  def __init__(self): super().__init__(); self.register_buffer('b', torch.ones(3))\n"
            "  def forward(self, x): return super().extra_repr() + f'{scale * self.b.sum()}'\n"
            "scale = 2\nnet = Net()"
        ),
        "r = net(None), list(net.state_dict())",
        "r == ('6.0', ['b'])",
    ),
    "layers with state of their own": (
        "a = nn.LSTM(3, 4)\nb = nn.TransformerEncoderLayer(8, 2, 16)\nc = nn.BatchNorm1d(3)",
        "r = a(torch.ones(1, 1, 3))[0].shape, b(torch.ones(1, 1, 8)).shape, c.running_mean.shape",
        "r == ((1, 1, 4), (1, 1, 8), (3,))",
    ),
    "small things of torch": (
        (
            "g = torch.Generator().manual_seed(3); d = torch.device('cpu'); t = torch.float16\n"
            "s = torch.Size([1, 2]); f = nn.functional.relu; sin = torch.sin\n"
            "want = torch.randn(2, generator=torch.Generator().manual_seed(3))"
        ),
        (
            "r = torch.equal(torch.randn(2, generator=g), want), d.type, t is torch.float16, s\n"
            "r2 = f(torch.tensor(-1.0)).item(), sin(torch.tensor(0.0)).item()"
        ),
        "r == (True, 'cpu', True, (1, 2)) and r2 == (0, 0)",
    ),
    "datasets and loaders": (
        (
            "from torch.utils.data import *\nclass D(Dataset):\n  def __len__(self): return 8\n"
            "  def __getitem__(self, i): return torch.tensor(i)\n"
            "l = DataLoader(D(), batch_size=2, shuffle=True)\na, b = random_split(D(), [4, 4])\n"
            "c = DataLoader(TensorDataset(torch.ones(70_000, 2)), 7000, collate_fn=len)"
        ),
        "r = len(list(l)), len(a), list(c)",
        "r == (4, 4, [7000] * 10)",
    ),
    "functions under no_grad": (
        "@torch.no_grad()\ndef f(): return torch.is_grad_enabled(), k\nk = 1",
        "k = 2; r = f()",
        "r == (False, 2)",
    ),
    "tensors from inference mode": (
        "with torch.inference_mode(): x = torch.ones(100_000)",
        "r = x.sum().item()",
        "r == 100_000",
    ),
}


@pytest.mark.parametrize("case", WORKS)
def test_these_work_in_a_rank_as_in_the_kernel(pair, case):
    kernel, rank, holds = WORKS[case]
    pair.cell(f"import torch\nfrom torch import nn\n{kernel}")
    pair.launch(f"import torch\n{rank}")
    assert pair.rank(f"bool({holds})"), pair.rank("repr(globals().get('r'))")


def test_a_model_leaves_its_wrapper_behind(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.Linear(2, 2)
        wrapped = nn.parallel.DistributedDataParallel(model)
        parcel = pack({"w": wrapped, "m": model, "p": [wrapped]}, namespace=None, follow=False)
    finally:
        torch.distributed.destroy_process_group()
    arrived = unpack(parcel, namespace=None)
    assert type(arrived["w"]) is nn.Linear
    assert arrived["m"] is arrived["w"] is arrived["p"][0]
    assert parcel.notes == ("`w` came without its DistributedDataParallel wrapper",)


@pytest.mark.gpu
def test_tensors_on_a_gpu_travel_as_copies_on_the_cpu_and_say_so():
    tensor = torch.arange(BIG, device="cuda")
    parcel = pack({"t": tensor, "v": tensor[5:]}, namespace=None, follow=False)
    arrived = unpack(parcel, namespace=None)
    parcel.segment.close()
    assert arrived["t"].device.type == "cpu"
    assert torch.equal(arrived["t"], tensor.cpu())
    assert storage(arrived["t"]) == storage(arrived["v"])
    assert parcel.notes[0] == "`t` was on cuda:0 and travelled as a copy on the CPU"


def test_a_loader_with_a_live_iterator_is_refused_by_name():
    loader = torch.utils.data.DataLoader(range(4))
    box = {"it": iter(loader)}
    with pytest.raises(ShippingError) as caught:
        pack({"box": box}, namespace={}, follow=True)
    message = str(caught.value)
    assert caught.value.name == "box"
    assert "`box['it']` is a live iterator of a DataLoader" in message
    assert "Build the DataLoader in the cell that the ranks run" in message


def test_the_torch_part_is_loaded_only_where_torch_is():
    code = (
        "from jupyter_accel.launcher.parcels.shipping import pack, unpack\n"
        "unpack(pack({'a': [1, print]}, namespace={}, follow=True), namespace={})"
    )
    assert "torch" not in modules_after(code)
