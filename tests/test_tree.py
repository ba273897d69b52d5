"""Nested tensors keep their containers."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from jupyter_accel.tree import batch_size, leaves, move, to_float32, tree_map

Pair = namedtuple("Pair", ["a", "b"])  # noqa: PYI024 - the untyped kind is met in the wild


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str = "n"
    size: int = field(init=False, default=7)

    def __post_init__(self):
        assert self.x is not None


def one():
    return torch.ones(2)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: [x],
        lambda x: (x,),
        lambda x: Pair(x, "b"),
        lambda x: {"k": x},
        lambda x: OrderedDict(k=x),
        lambda x: UserDict(k=x),
        lambda x: MappingProxyType({"k": x}),
        lambda x: defaultdict(list, k=x),
        Frozen,
        lambda x: {"deep": [(Pair(x, None), 3)]},
    ],
)
def test_each_container_comes_back_as_its_own_type(make):
    mapped = tree_map(lambda t: t + 1, make(one()))
    assert type(mapped) is type(make(one()))
    assert [leaf.tolist() for leaf in leaves(mapped)] == [[2.0, 2.0]]


def test_a_mapped_tree_is_a_copy():
    tree = {"k": [one()]}
    tree_map(lambda t: t + 1, tree)
    assert tree["k"][0].tolist() == [1.0, 1.0]


def test_a_default_factory_and_fields_outside_init_survive():
    assert tree_map(lambda t: t, defaultdict(list, k=one()))["new"] == []
    assert tree_map(lambda t: t, Frozen(one(), "m")).size == 7


def test_what_is_no_tensor_is_handed_through():
    thing = object()
    assert tree_map(lambda t: t, [thing, "text", None]) == [thing, "text", None]


def test_tensors_move_and_objects_move_themselves():
    meta = torch.device("meta")
    assert move({"k": (one(),)}, meta)["k"][0].device == meta
    packed = pack_sequence([torch.ones(2, 1), torch.ones(1, 1)])
    assert type(move(packed, torch.device("cpu"))) is type(packed)


def test_half_precision_becomes_float32_and_integers_stay():
    tree = to_float32([one().half(), one().bfloat16(), one().double(), torch.tensor(1)])
    assert [leaf.dtype for leaf in tree] == [
        torch.float32,
        torch.float32,
        torch.float64,
        torch.int64,
    ]


def test_the_batch_size_is_that_of_the_first_tensor_with_a_dimension():
    assert batch_size({"scalar": torch.tensor(1), "x": torch.ones(5, 2)}) == 5
    assert batch_size(["text", torch.tensor(1)]) is None
