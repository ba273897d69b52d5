"""The settings of a launch: bounds, sizes, and the list of options itself."""

from __future__ import annotations

import pytest

from jupyter_accel.errors import ConfigError
from jupyter_accel.settings import LaunchOptions, size_in_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("2GB", 2 * 10**9),
        ("2gb", 2 * 10**9),
        ("1.5GiB", 3 * 2**29),
        (" 512 MiB ", 512 * 2**20),
        ("3k", 3000),
    ],
)
def test_a_size_is_a_number_and_a_unit(text, size):
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "1.2.3GB", ".", "2TB", "-1GB", "two"])
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="write a number and a unit, such as 2GB"):
        size_in_bytes(text)


def test_the_options_of_a_launch_are_these():
    assert set(LaunchOptions.metadata()) == {
        "num_processes",
        "start_method",
        "precision",
        "device",
        "timeout",
        "memory_limit",
        "connect_timeout",
    }


def test_every_option_has_a_help_text():
    assert all(setting["help"] for setting in LaunchOptions.metadata().values())


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_processes": 0}, "must be at least 1, got 0"),
        ({"start_method": "thread"}, "unknown start_method 'thread'; choose one of forkserver"),
        ({"precision": "fp8"}, "unknown precision 'fp8'; choose one of no, fp16, bf16"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"timeout": 0.0}, "timeout must be more than 0, got 0"),
        ({"memory_limit": -1}, "memory_limit must be more than 0, got -1"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_the_bound(wrong, words):
    with pytest.raises(ConfigError, match=words):
        LaunchOptions(**wrong)
