"""Puts the output of several ranks in order: by label, or rank by rank."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from jupyter_accel.launcher.events import Event, Rich, Text

# Where a line begins; a bar that redraws its line begins it again.
_LINE_START = re.compile(r"(?:\A|(?<=\n)|\r(?!\n))(?![\r]|\Z)")


class Labels:
    """Writes the rank before each line, where several ranks are shown in one place."""

    def __init__(self) -> None:
        self._unfinished: tuple[int, str] | None = None

    def put(self, event: Event) -> Event:
        """Return the event with its label."""
        if not isinstance(event, Text):
            return event
        label, text = f"[rank {event.rank}] ", event.text
        labelled = _LINE_START.sub(lambda match: match[0] + label, text)
        before, here = self._unfinished, (event.rank, event.stream)
        if before == here:
            labelled = labelled.removeprefix(label)
        elif before is not None and not text.startswith("\r"):
            labelled = "\n" + labelled
        self._unfinished = None if text.endswith("\n") else here
        return replace(event, text=labelled)


class Held:
    """Output that is held back, to be shown rank by rank: the same each time it is run.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._events: list[list[Text | Rich]] = [[] for _ in range(size)]

    def add(self, event: Text | Rich) -> None:
        """Hold one event; what a rank updates or clears is changed here."""
        events = self._events[event.rank]
        if isinstance(event, Rich) and event.kind == "clear":
            events.clear()
        elif isinstance(event, Rich) and event.kind == "update":
            for number, earlier in enumerate(events):
                if isinstance(earlier, Rich) and _id(earlier) == _id(event):
                    events[number] = replace(event, kind="display")
        else:
            events.append(event)

    def release(self) -> Iterator[Event]:
        """Return everything, with a heading for each rank; as rank 0's, which is shown plainly."""
        unfinished = False
        for rank, events in enumerate(self._events):
            if len(self._events) > 1 and events:
                yield Text(0, "stdout", "\n" * unfinished + f"[rank {rank}]\n")
            for event in events:
                yield replace(event, rank=0)
                unfinished = isinstance(event, Text) and not event.text.endswith("\n")
            events.clear()


def _id(event: Rich) -> Any:
    return event.content.get("transient", {}).get("display_id", event)
