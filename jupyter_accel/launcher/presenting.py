"""Shows what ranks do, where there is no notebook: as plain text."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Protocol

from jupyter_accel.launcher.events import Event, Notice, Text


class Presenter(Protocol):
    """Shows what the ranks do while they do it."""

    @property
    def at_once(self) -> Collection[int]:
        """The ranks whose lines are shown before they are whole."""

    @property
    def full(self) -> bool:
        """Whether so much waits to be shown that nothing more should come now."""

    def show(self, event: Event) -> None:
        """Show one event, now or at a later ``tick``."""

    def tick(self) -> None:
        """Show what may be shown by now; to be called a few times a second."""

    def close(self, verdict: str, *, stopped: bool) -> None:
        """Show what was held back, and how the job ended: nothing more is going to come.

        Args:
            verdict: how it ended.
            stopped: the user has stopped it, and does not want to wait for more output.
        """


class PlainPresenter:
    """Writes rank 0's output as it is, and the others' with their rank before each line."""

    at_once: Collection[int] = ()
    full = False

    def show(self, event: Event) -> None:
        """Write one event."""
        if isinstance(event, Text):
            stream = sys.stdout if event.stream == "stdout" else sys.stderr
            stream.write(event.text if event.rank == 0 else _labelled(event))
            stream.flush()
        elif isinstance(event, Notice):
            sys.stderr.write(event.text + "\n")

    def tick(self) -> None:
        """Nothing ever waits."""

    def close(self, verdict: str, *, stopped: bool) -> None:
        """Hold nothing back, and leave the verdict to the error or the value."""


def _labelled(event: Text) -> str:
    lines = event.text.splitlines(keepends=True)
    return "".join(f"[rank {event.rank}] {line}" for line in lines)
