"""The place of a process, and the environment that tells it."""

from __future__ import annotations

import dataclasses

import pytest

from jupyter_accel.errors import ConfigError
from jupyter_accel.world import Environment, World

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_a_lone_process_is_rank_0_of_1_on_the_cpu():
    assert World.from_env({}) == World(0, 1, 0, 1, "cpu")


def test_torchruns_names_are_read():
    assert World.from_env(TORCHRUN, "cuda:1") == World(3, 4, 1, 2, "cuda:1")


def test_the_launchers_device_wins():
    env = {"JUPYTER_ACCEL_DEVICE": "cuda:0"}
    assert World.from_env(env, "cpu").device == "cuda:0"


@pytest.mark.parametrize("name", sorted(TORCHRUN))
def test_a_missing_variable_is_named(name):
    env = {key: value for key, value in TORCHRUN.items() if key != name}
    with pytest.raises(ConfigError, match=f"missing {name}$"):
        World.from_env(env)


def test_a_value_that_is_no_number_is_named_with_its_variable():
    with pytest.raises(ConfigError, match="WORLD_SIZE must be a whole number, got 'four'"):
        World.from_env({**TORCHRUN, "WORLD_SIZE": "four"})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rank": 2, "size": 2}, r"rank must be in \[0, 2\), got 2"),
        ({"rank": -1}, "rank must be in"),
        ({"size": 0}, "size must be at least 1, got 0"),
        ({"local_size": 2}, "local_size must be in"),
        ({"size": 2, "local_size": 2, "local_rank": 2}, "local_rank must be in"),
        ({"device": "cuda:"}, "device must look like"),
        ({"device": ""}, "device must look like"),
    ],
)
def test_an_impossible_place_is_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        World(**values)


def test_a_world_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        World().rank = 1


def test_main_and_last_are_the_ends():
    first, last = World(0, 3), World(2, 3)
    assert (first.is_main, first.is_last) == (True, False)
    assert (last.is_main, last.is_last) == (False, True)
    other_machine = World(2, 4, 0, 2)
    assert (other_machine.is_main, other_machine.is_local_main) == (False, True)


def test_the_device_type_has_no_number():
    assert World(device="cuda:3").device_type == "cuda"


def test_the_environment_tells_what_the_launcher_chose():
    env = Environment.from_env(
        {**TORCHRUN, "JUPYTER_ACCEL_DEVICE": "cuda:1", "JUPYTER_ACCEL_MIXED_PRECISION": "bf16"}
    )
    assert env == Environment(World(3, 4, 1, 2, "cuda:1"), "cuda:1", "bf16", launched=True)
    assert Environment.from_env({}) == Environment(World(), None, None, launched=False)
