"""The options of the magics: what is read, and what is said of mistakes."""

from __future__ import annotations

import pytest

from jupyter_accel.errors import ConfigError
from jupyter_accel.notebook.options import flags, help_text, parse


def test_an_empty_line_asks_for_the_defaults():
    options, rest = parse("")
    assert rest == ""
    assert options.launch.num_processes is None
    assert options.ranks == (0,)
    assert not options.ordered


@pytest.mark.parametrize(
    "line",
    [
        "-n 2 --ordered",
        "--num-processes 2 --ordered",
        "--num_processes=2 --ordered",
        "-n=2 --ordered",
    ],
)
def test_every_spelling_is_understood(line):
    options, rest = parse(line)
    assert (options.launch.num_processes, options.ordered, rest) == (2, True, "")


def test_what_follows_the_options_is_left_as_it_was_written():
    assert parse("-n 2 f('a  b', -1) - g( x )")[1] == "f('a  b', -1) - g( x )"
    assert parse("-n 2 -- -x")[1] == "-x"
    assert parse("'text'")[1] == "'text'"


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--pull model,loss", "pull", ("model", "loss")),
        ("--pull 'model, loss'", "pull", ("model", "loss")),
        ("--pull größe", "pull", ("größe",)),
        ("--ranks all", "ranks", None),
        ("--ranks 0,2", "ranks", (0, 2)),
        ("--keep lab", "keep", "lab"),
        ("--all-ranks", "all_ranks", True),
        ("--help", "help", True),
        ("-h", "help", True),
    ],
)
def test_values_are_read(line, name, value):
    assert getattr(parse(line)[0], name) == value


@pytest.mark.parametrize(
    ("line", "value"), [("--memory-limit 2GB", 2 * 10**9), ("--memory-limit 1.5GiB", 3 * 2**29)]
)
def test_sizes_have_units(line, value):
    assert parse(line)[0].launch.memory_limit == value


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--orderd", "did you mean --ordered?"),
        ("--num-proceses 2", "did you mean --num-processes?"),
        ("-n2", "write -n 2"),
        ("--zzzzzz", "--help shows them all"),
        ("-n", "needs a value"),
        ("-n two", "needs a number, got 'two'"),
        ("-n 0", "at least 1, got 0"),
        ("--timeout -1", "more than 0"),
        ("--ordered=yes", "takes no value"),
        ("--start-method forkserve", "did you mean forkserver?"),
        ("--precision fp8", "precision"),
        ("--ranks first", "numbers with commas"),
        ("--pull 1st", "names with commas"),
        ("--keep my-lab", "needs a name"),
        ("--memory-limit lots", "is not a size"),
    ],
)
def test_a_mistake_is_told_with_its_remedy(line, words):
    with pytest.raises(ConfigError) as caught:
        parse(line)
    assert words in str(caught.value)


def test_an_unclosed_quote_is_a_mistake_like_any_other():
    with pytest.raises(ConfigError):
        parse("--pull 'model")


def test_the_help_names_every_option_within_a_hundred_columns():
    lines = help_text().splitlines()
    for flag in flags():
        assert any(flag.usage in line for line in lines)
    assert all("  " in line for line in lines if line.startswith("  -"))
