"""Gathering checks first, on every rank, and gives the same kind of value on one process."""

from __future__ import annotations

import os

import pytest
import torch
from ranks import in_ranks

from jupyter_accel.collectives import gather, share_from_main, wait_for_all
from jupyter_accel.errors import ConfigError
from jupyter_accel.world import World


def here():
    return World.from_env(os.environ)


def test_tensors_join_in_rank_order_and_scalars_become_vectors():
    def values():
        rank = here().rank
        tree = {"x": torch.full((2, 1), rank), "loss": torch.tensor(float(rank)), "name": "n"}
        joined = gather(tree, here())
        return joined["x"].tolist(), joined["loss"].tolist(), joined["name"]

    expected = ([[0], [0], [1], [1], [2], [2]], [0.0, 1.0, 2.0], "n")
    assert in_ranks(values, size=3) == [expected] * 3


def test_one_process_gives_the_same_kind_of_value():
    assert gather(torch.tensor(2.0), World()).tolist() == [2.0]
    assert gather([torch.ones(2, 1)], World())[0].tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize(
    "make",
    [
        lambda rank: torch.ones(rank + 1),
        lambda rank: torch.ones(2, dtype=torch.float32 if rank else torch.float64),
        lambda rank: [torch.ones(1)] * (rank + 1),
    ],
)
def test_unequal_shapes_are_an_error_on_every_rank(make):
    def unequal():
        with pytest.raises(ConfigError, match=r"same shapes.*rank 0: .*; rank 1: ") as info:
            gather(make(here().rank), here())
        return str(info.value)

    first, second = in_ranks(unequal, size=2)
    assert first == second


def test_what_holds_no_tensor_is_refused_on_one_process_too():
    with pytest.raises(ConfigError, match="needs tensors, or containers of tensors; got str"):
        gather("text", World())


def test_the_main_ranks_value_reaches_all():
    assert in_ranks(lambda: share_from_main([here().rank, "x"], here()), size=2) == [[0, "x"]] * 2
    assert share_from_main("mine", World()) == "mine"


def test_waiting_ends_when_all_are_there():
    in_ranks(lambda: wait_for_all(here()), size=2)
    wait_for_all(World())
