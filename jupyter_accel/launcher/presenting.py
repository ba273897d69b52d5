"""Shows what ranks do, where there is no notebook: as plain text."""

from __future__ import annotations

import sys
from typing import Protocol

from jupyter_accel.launcher.events import Event, Notice, Text


class Presenter(Protocol):
    """Shows what the ranks do while they do it."""

    def show(self, event: Event) -> None:
        """Show one event."""

    def close(self, verdict: str) -> None:
        """Show what was held back, and how the job ended: nothing more is going to come."""


class PlainPresenter:
    """Writes rank 0's output as it is, and the others' with their rank before each line."""

    def show(self, event: Event) -> None:
        """Write one event."""
        if isinstance(event, Text):
            stream = sys.stdout if event.stream == "stdout" else sys.stderr
            stream.write(event.text if event.rank == 0 else _labelled(event))
            stream.flush()
        elif isinstance(event, Notice):
            sys.stderr.write(event.text + "\n")

    def close(self, verdict: str) -> None:
        """Hold nothing back, and leave the verdict to the error or the value."""


def _labelled(event: Text) -> str:
    lines = event.text.splitlines(keepends=True)
    return "".join(f"[rank {event.rank}] {line}" for line in lines)
