"""Where the time of a launch goes: when it reached which stage."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jupyter_accel.launcher.messages import Done

if TYPE_CHECKING:
    from jupyter_accel.launcher.pool import Pool


@dataclass
class Timeline:
    """The stages of one launch.

    Times are of the monotonic clock, which all processes of a machine share, in nanoseconds.
    """

    asked_ns: int = field(default_factory=time.monotonic_ns)
    _stages: dict[str, int] = field(default_factory=dict)

    def mark(self, stage: str) -> None:
        """Note that a stage of the kernel's own is reached now."""
        self._stages[stage] = time.monotonic_ns()

    def add_ranks(self, pool: Pool) -> None:
        """Note when the last rank reached each stage, from what the ranks have said."""
        ranks = pool.ranks
        self._note("ranks forked", [rank.started_ns for rank in ranks])
        connected = [rank.reader.connected for rank in ranks]
        self._note("ranks connected", [said.at_ns for said in connected if said is not None])
        done = [rank.last for rank in ranks if isinstance(rank.last, Done)]
        self._note("work begun", [said.began_ns for said in done])
        self._note("work done", [said.at_ns for said in done])
        self._note("ranks reaped", [rank.ended.at_ns for rank in ranks if rank.ended is not None])

    def stages(self) -> Mapping[str, float]:
        """Return each stage and the seconds from the request to it, in order of time."""
        ordered = sorted(self._stages.items(), key=lambda item: item[1])
        return {stage: (at - self.asked_ns) / 1e9 for stage, at in ordered}

    def _note(self, stage: str, times: list[int]) -> None:
        if times and all(times):
            self._stages[stage] = max(times)


class _Process:
    """The newest launch of this process."""

    newest: Timeline | None = None


def begin() -> Timeline:
    """Start the timeline of a launch."""
    _Process.newest = Timeline()
    return _Process.newest


def last() -> Mapping[str, float]:
    """Return the stages of the newest launch; empty if there was none."""
    return {} if _Process.newest is None else _Process.newest.stages()
