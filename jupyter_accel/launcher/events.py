"""What a front end sees of a job: plain values, in the order in which each rank made them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Text:
    """Text of one rank: whole lines, but for progress bars and the very last piece."""

    rank: int
    stream: Literal["stdout", "stderr"]
    text: str


@dataclass(frozen=True, slots=True)
class Rich:
    """Something rich that one rank displays.

    ``kind`` is ``"display"``, ``"update"``, ``"clear"``, ``"result"``, or a comm message.
    """

    rank: int
    kind: str
    content: Mapping[str, Any]
    buffers: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class RankState:
    """A rank has come to a new state."""

    rank: int
    state: Literal["started", "running", "done", "failed", "ended"]
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class Notice:
    """The launcher itself has something to say, such as that the ranks were asked to stop."""

    text: str


Event = Text | Rich | RankState | Notice
