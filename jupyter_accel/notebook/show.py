"""Shows a job in the notebook: rank 0 plainly, the other ranks folded, one line of state."""

from __future__ import annotations

import html
import secrets
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jupyter_accel.launcher.events import Event, Notice, Rich, Text
from jupyter_accel.notebook.publishing import Publisher

_FOLD_SECONDS = 0.5  # between two pictures of the same folded rank
_PACE_SECONDS = 0.05  # between two tries to send what waits
_TAIL_CHARS = 4000  # a folded rank that is still running shows its end only
BACKLOG_CHARS = 8_000_000
"""Above this much unsent output the ranks are not read: their writes wait."""


@dataclass
class _Fold:
    """The output of one rank that is not shown plainly."""

    rank: int
    parts: list[str] = field(default_factory=list)
    chars: int = 0
    lines: int = 0
    drawn: float = 0.0
    changed: bool = False

    def add(self, text: str) -> None:
        """Append text."""
        self.parts.append(text)
        self.chars += len(text)
        self.lines += text.count("\n")
        self.changed = True

    def text(self, *, whole: bool) -> str:
        """Return all of it, or only its end."""
        if whole:
            return "".join(self.parts)
        tail: list[str] = []
        size = 0
        for part in reversed(self.parts):
            tail.append(part[-(_TAIL_CHARS - size) :])
            size += len(tail[-1])
            if size >= _TAIL_CHARS:
                break
        return "".join(reversed(tail))


class NotebookPresenter:
    """Shows one job.

    Args:
        publisher: sends messages to the front end.
        size: number of ranks.
        shown: ranks whose output is shown plainly, or None for all of them.
        ordered: hold everything back and show it rank by rank at the end.
        headline: what the state line says of the job.
    """

    def __init__(
        self,
        publisher: Publisher,
        *,
        size: int,
        shown: Collection[int] | None,
        ordered: bool,
        headline: str,
    ) -> None:
        self._publisher = publisher
        self._shown = frozenset(range(size)) if shown is None else frozenset(shown)
        self._ordered = ordered
        self._headline = headline
        self._id = f"accel-{secrets.token_hex(6)}"
        self._folds: dict[int, _Fold] = {}
        self._held: dict[int, list[Event]] = {rank: [] for rank in range(size)}
        self._waiting: deque[Event] = deque()
        self._waiting_chars = 0
        self._began = time.monotonic()
        self.controls: Mapping[str, Any] = {}

    # While the job runs

    def begin(self) -> None:
        """Show the state line."""
        self._state(self._headline, update=False)

    def show(self, event: Event) -> None:
        """Take one event; it is sent when its turn and the front end's limits allow."""
        if self._ordered and isinstance(event, Text | Rich):
            self._held[event.rank].append(event)
            return
        self._waiting.append(event)
        if isinstance(event, Text):
            self._waiting_chars += len(event.text)

    @property
    def full(self) -> bool:
        """Whether so much waits to be sent that the ranks should wait as well."""
        return self._waiting_chars > BACKLOG_CHARS

    @property
    def idle(self) -> bool:
        """Whether everything has been sent."""
        return not self._waiting

    def tick(self) -> None:
        """Send what may be sent now."""
        while self._waiting:
            event = self._waiting[0]
            if isinstance(event, Text) and self._is_plain(event.rank):
                if not self._send_text(event):
                    break
            else:
                self._waiting.popleft()
                self._other(event)
        self._publisher.flush()
        now = time.monotonic()
        for fold in self._folds.values():
            if fold.changed and now - fold.drawn > _FOLD_SECONDS:
                self._draw(fold, whole=False)

    def offer_controls(self, controls: Mapping[str, Any]) -> None:
        """Show a widget in the state line, for as long as the job runs."""
        self.controls = controls
        self._state(self._headline, update=True)

    # When it has ended

    def release(self) -> None:
        """Queue what was held back for the end."""
        if not self._ordered:
            return
        self._ordered = False
        for rank, events in self._held.items():
            if len(self._held) > 1 and events:
                self.show(Text(0, "stdout", f"[rank {rank}]\n"))
            for event in events:
                self.show(_as_rank_0(event))
            events.clear()
        self._shown = frozenset((0,))

    def finish(self, verdict: str, *, timed: bool = True) -> None:
        """Show each folded rank whole, and how the job ended."""
        for fold in self._folds.values():
            self._draw(fold, whole=True)
        self.controls = {}
        seconds = f" · {time.monotonic() - self._began:.2f} s" if timed else ""
        self._state(f"{self._headline}{seconds} · {verdict}", update=True)
        self._publisher.flush()

    # Inside

    def _is_plain(self, rank: int) -> bool:
        return rank in self._shown

    def _send_text(self, event: Text) -> bool:
        """Send as much of the text as the limits allow; return whether all of it went."""
        text = event.text
        if len(self._shown) > 1:
            text = _labelled(event)
        sent = self._publisher.text(event.stream, text)
        self._waiting.popleft()
        self._waiting_chars -= len(event.text)
        if sent < len(text):
            rest = text[sent:]
            # Labelled already: what is left must not get a second label.
            self._waiting.appendleft(_Raw(event.rank, event.stream, rest))
            self._waiting_chars += len(rest)
            return False
        return True

    def _other(self, event: Event) -> None:
        if isinstance(event, Notice):
            self._publisher.text("stderr", event.text + "\n", free=True)
        elif isinstance(event, Rich):
            if self._is_plain(event.rank) or not event.kind.startswith(("display", "result")):
                self._publisher.rich(event)
            else:
                plain = event.content["data"].get("text/plain", "")
                self._fold(event.rank).add(f"{plain}\n")
        elif isinstance(event, Text):
            self._waiting_chars -= len(event.text)
            self._fold(event.rank).add(event.text)

    def _fold(self, rank: int) -> _Fold:
        return self._folds.setdefault(rank, _Fold(rank))

    def _draw(self, fold: _Fold, *, whole: bool) -> None:
        text = fold.text(whole=whole)
        count = f"{fold.lines} line{'' if fold.lines == 1 else 's'}"
        title = f"rank {fold.rank} · {count}"
        bundle = {
            "text/plain": f"{title}\n{text}",
            "text/html": (
                f"<details><summary>{title}</summary>"
                f'<pre style="margin:0 0 0 1em">{html.escape(text)}</pre></details>'
            ),
        }
        update = fold.drawn > 0
        self._publisher.display(bundle, f"{self._id}-{fold.rank}", update=update)
        fold.drawn, fold.changed = time.monotonic(), False

    def _state(self, text: str, *, update: bool) -> None:
        bundle = {
            "text/plain": text,
            "text/html": (
                '<div style="color:var(--jp-ui-font-color2, #6b7280);'
                f'font-size:var(--jp-ui-font-size1, 13px)">{html.escape(text)}</div>'
            ),
            **self.controls,
        }
        self._publisher.display(bundle, self._id, update=update)


class _Raw(Text):
    """Text that has its label already."""

    __slots__ = ()


def _labelled(event: Text) -> str:
    if isinstance(event, _Raw):
        return event.text
    lines = event.text.splitlines(keepends=True)
    return "".join(f"[rank {event.rank}] {line}" for line in lines)


def _as_rank_0(event: Event) -> Event:
    if isinstance(event, Text):
        return Text(0, event.stream, event.text)
    if isinstance(event, Rich):
        return Rich(0, event.kind, event.content, event.buffers)
    return event


def whereabouts(info: Mapping[str, Any]) -> str:
    """Say where the names are that a cell has set; starts with a separator, or is empty."""
    pulled: Sequence[str] = info.get("pulled", ())
    stayed: Sequence[str] = info.get("stayed", ())
    skipped: Mapping[str, str] = info.get("skipped", {})
    text = ""
    if pulled:
        text += f" · in the kernel now: {', '.join(pulled)}"
    if stayed:
        text += f" · stayed in the ranks: {_some(stayed)} (--pull brings them back)"
    if skipped:
        text += f" · cannot travel: {', '.join(skipped)}"
    return text


def _some(names: Sequence[str], most: int = 6) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


class CallPresenter:
    """Shows the ranks of ``launch`` called in a cell: as the magic does, without its button."""

    def __init__(self, publisher: Publisher, size: int) -> None:
        headline = f"{size} rank{'' if size == 1 else 's'}"
        self._inner = NotebookPresenter(
            publisher, size=size, shown=(0,), ordered=False, headline=headline
        )
        self._inner.begin()

    def show(self, event: Event) -> None:
        """Show one event."""
        self._inner.show(event)
        self._inner.tick()

    def close(self, verdict: str) -> None:
        """Show what was held back, and how the job ended."""
        self._inner.release()
        while True:
            self._inner.tick()
            if self._inner.idle:
                break
            time.sleep(_PACE_SECONDS)
        self._inner.finish(verdict)
