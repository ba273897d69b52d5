"""The options of ``%%accel_launch`` and ``%accel_launch``: parsing, help, and kind mistakes."""

from __future__ import annotations

import difflib
import re
import shlex
from dataclasses import dataclass
from typing import Any

from jupyter_accel.errors import ConfigError
from jupyter_accel.settings import LaunchOptions

_CONVERT = {"num_processes": int, "timeout": float, "connect_timeout": float}
_NAME = re.compile(r"[^\W\d]\w*")


@dataclass(frozen=True, slots=True)
class Flag:
    """One option: its spellings, what it takes, and its help."""

    name: str
    help: str
    short: str = ""
    takes: str = ""

    @property
    def long(self) -> str:
        """The spelling with two dashes."""
        return "--" + self.name.replace("_", "-")

    @property
    def usage(self) -> str:
        """How it is written in the help."""
        spellings = f"{self.short}, {self.long}" if self.short else self.long
        return f"{spellings} {self.takes}".strip()


_OWN = (
    Flag("pull", "names to bring back from rank 0 into the kernel", takes="a,b"),
    Flag("pull_all", "bring back every name that the cell sets and that can travel"),
    Flag("ranks", "ranks whose output is shown in full; the others fold", takes="0,2|all"),
    Flag("ordered", "show each rank's output at the end, in order of rank, without times"),
    Flag("all_ranks", "%accel_launch only: return the list of all ranks' values"),
    Flag("keep", "run on kept workers of this name; they are started if need be", takes="NAME"),
    Flag("help", "show this help", short="-h"),
)


@dataclass(frozen=True, slots=True)
class MagicOptions:
    """What a magic's line asks for; ``ranks`` is None for all of them."""

    launch: LaunchOptions
    pull: tuple[str, ...] = ()
    pull_all: bool = False
    ranks: tuple[int, ...] | None = (0,)
    ordered: bool = False
    all_ranks: bool = False
    keep: str = ""
    help: bool = False


def flags() -> tuple[Flag, ...]:
    """Return every option, those of the launch first."""
    launch = []
    for name, setting in LaunchOptions.metadata().items():
        takes = "|".join(setting.get("choices", ())) or name.rpartition("_")[2].upper()
        takes = {"PROCESSES": "N", "TIMEOUT": "S", "LIMIT": "SIZE"}.get(takes, takes)
        launch.append(Flag(name, setting["help"], setting.get("short", ""), takes))
    return (*launch, *_OWN)


def help_text() -> str:
    """Return the help of both magics."""
    width = max(len(flag.usage) for flag in flags()) + 2
    lines = [
        "%%accel_launch [options]             run this cell on every rank",
        "%accel_launch [options] expression   evaluate on every rank; rank 0's value is returned",
        "",
        "In a cell, rank, world_size, local_rank and device are there.",
        "",
        *(f"  {flag.usage:<{width}}{flag.help}" for flag in flags()),
    ]
    return "\n".join(lines)


def parse(line: str) -> tuple[MagicOptions, str]:
    """Read a magic's line; return the options and what follows them.

    Raises:
        ConfigError: one sentence, with the nearest right spelling.
    """
    given: dict[str, Any] = {}
    rest = line.strip()
    while rest.startswith("-"):
        word, rest = _next_word(rest)
        if word == "--":
            break
        spelling, equals, value = word.partition("=")
        flag = _find(spelling)
        if flag.takes and not equals:
            value, rest = _next_word(rest)
            if not value:
                msg = f"{spelling} needs a value: {flag.usage}"
                raise ConfigError(msg)
        elif equals and not flag.takes:
            msg = f"{flag.long} takes no value, got {word!r}"
            raise ConfigError(msg)
        given[flag.name] = value if flag.takes else True
    return _build(given), rest


def _next_word(text: str) -> tuple[str, str]:
    """Split off one word as a shell would, leaving the rest as it was written."""
    match = re.match(r"(?:[^\s'\"]|'[^']*'|\"[^\"]*\")+", text)
    if match is None:
        return "", text
    return "".join(shlex.split(match[0])), text[match.end() :].lstrip()


def _find(spelling: str) -> Flag:
    known = flags()
    wanted = spelling.replace("_", "-")
    for flag in known:
        if wanted in {flag.long, flag.short or flag.long}:
            return flag
    short = re.fullmatch(r"-n(\d+)", spelling)
    if short:
        msg = f"unknown option {spelling}; write -n {short[1]}"
        raise ConfigError(msg)
    spellings = [flag.long for flag in known] + [flag.short for flag in known if flag.short]
    near = difflib.get_close_matches(wanted, spellings, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "--help shows them all"
    msg = f"unknown option {spelling}; {hint}"
    raise ConfigError(msg)


def _build(given: dict[str, Any]) -> MagicOptions:
    launch = {
        name: _launch_value(name, given.pop(name))
        for name in LaunchOptions.metadata()
        if name in given
    }
    if "pull" in given:
        given["pull"] = tuple(_names(given["pull"]))
    if "ranks" in given:
        given["ranks"] = _ranks(given["ranks"])
    if "keep" in given and not _NAME.fullmatch(given["keep"]):
        msg = f"--keep needs a name such as lab, got {given['keep']!r}"
        raise ConfigError(msg)
    return MagicOptions(launch=LaunchOptions(**launch), **given)


def _launch_value(name: str, text: str) -> Any:
    setting = LaunchOptions.metadata()[name]
    if "parse" in setting:
        return setting["parse"](text)
    choices = setting.get("choices")
    if choices and text not in choices:
        near = difflib.get_close_matches(text, choices, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(choices)}"
        msg = f"--{name.replace('_', '-')} cannot be {text!r}; {hint}"
        raise ConfigError(msg)
    try:
        return _CONVERT.get(name, str)(text)
    except ValueError:
        msg = f"--{name.replace('_', '-')} needs a number, got {text!r}"
        raise ConfigError(msg) from None


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if not _NAME.fullmatch(name):
            msg = f"--pull needs names with commas between, such as model,loss; got {text!r}"
            raise ConfigError(msg)
    return names


def _ranks(text: str) -> tuple[int, ...] | None:
    if text == "all":
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        msg = f"--ranks needs numbers with commas between, such as 0,2, or all; got {text!r}"
        raise ConfigError(msg) from None
