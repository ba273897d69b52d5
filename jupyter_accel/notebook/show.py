"""Shows a job in the notebook: rank 0 plainly, the other ranks folded, one line of state."""

from __future__ import annotations

import html
import secrets
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jupyter_accel.launcher.events import Event, Notice, RankState, Rich, Text
from jupyter_accel.notebook.arranging import Held, Labels
from jupyter_accel.notebook.folding import Fold
from jupyter_accel.notebook.publishing import Publisher

_FOLD_SECONDS = 0.5  # between two pictures of the same folded rank
_GLIMPSE_AFTER = 1.0  # a short job shows its folds at its end only, always in the same place
_PACE_SECONDS = 0.05  # between two tries to send what waits
_TEXT_SECONDS = 0.03  # between two messages of text, while the ranks run
_SHOWING_SECONDS = 2.0  # between two words on how much is still to be shown
_REST_CHARS = 100_000  # of what is left out at a stop, this much of the end is shown
_EVENT_COST = 200  # what an event takes besides its text
BACKLOG_CHARS = 4_000_000
"""Above this much unsent output the ranks are not read: their writes wait."""


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
        self._folds: dict[int, Fold] = {}
        self._held = Held(size)
        self._waiting: deque[Event] = deque()
        self._waiting_cost = 0
        self._updates: Counter[str] = Counter()
        self._labels = Labels()
        self._clear_at_next = False
        self._free = False
        self._sent_at = self._told_at = 0.0
        self._began = time.monotonic()
        self.controls: Mapping[str, Any] = {}

    # While the job runs

    @property
    def at_once(self) -> Collection[int]:
        """The ranks whose lines are shown before they are whole: nobody else's come between."""
        return self._shown if len(self._shown) == 1 and not self._ordered else ()

    def begin(self) -> None:
        """Show the state line."""
        if self._publisher.in_kernel:
            self._state(self._headline, update=False)

    def show(self, event: Event) -> None:
        """Take one event; it is sent when its turn and the front end's limits allow."""
        if self._ordered and isinstance(event, Text | Rich):
            self._held.add(event)
        elif isinstance(event, RankState):
            return
        elif isinstance(event, Text | Rich) and event.rank not in self._shown:
            self._fold(event)
        else:
            if len(self._shown) > 1:
                event = self._labels.put(event)
            if isinstance(event, Rich) and event.kind == "update":
                self._updates[_display_id(event)] += 1
            self._waiting.append(event)
            self._waiting_cost += _cost(event)

    @property
    def full(self) -> bool:
        """Whether so much waits to be sent that the ranks should wait as well."""
        return self._waiting_cost > BACKLOG_CHARS

    @property
    def idle(self) -> bool:
        """Whether everything has been sent."""
        return not self._waiting and not self._publisher.pending

    def tick(self, *, ended: bool = False) -> None:
        """Send what may be sent now; ``ended``: the ranks have ended, so nothing is gathered."""
        while self._waiting and self._send(self._waiting[0]):
            pass
        now = time.monotonic()
        if ended or now - self._sent_at > _TEXT_SECONDS:
            self._publisher.flush()
            self._sent_at = now
        if self._publisher.in_kernel and now - self._began > _GLIMPSE_AFTER:
            for fold in self._folds.values():
                if fold.changed and now - fold.drawn > _FOLD_SECONDS:
                    self._draw(fold, fold.glimpse())
        if ended and self._waiting and now - self._told_at > _SHOWING_SECONDS:
            self._told_at = now
            self.controls = {}
            size = f"{self._waiting_cost / 1e6:.1f} MB"
            words = f"the ranks have ended; {size} of output to show, interrupt to leave it out"
            self._state(f"{self._headline} · {words}", update=True)

    def cut(self) -> None:
        """Leave out what waits, but for its end: nobody wants to wait for it."""
        rest: deque[Event] = deque()
        kept, left_out = 0, 0
        for event in reversed(self._waiting):
            if not isinstance(event, Text):
                rest.appendleft(event)
                continue
            end = event.text[max(0, len(event.text) - (_REST_CHARS - kept)) :]
            kept += len(end)
            left_out += len(event.text) - len(end)
            if end:
                rest.appendleft(replace(event, text=end))
        if left_out:
            rest.appendleft(Notice(f"[{left_out / 1e6:.1f} MB of output left out]"))
            self._waiting, self._free = rest, True
            self._waiting_cost = sum(map(_cost, rest))

    def offer_controls(self, controls: Mapping[str, Any]) -> None:
        """Show a widget in the state line, for as long as the job runs."""
        self.controls = controls
        self._state(self._headline, update=True)

    # When it has ended

    def release(self) -> None:
        """Queue what was held back for the end."""
        if self._ordered:
            self._ordered, self._shown = False, frozenset((0,))
            for event in self._held.release():
                self.show(event)

    def finish(self, verdict: str, *, timed: bool = True) -> None:
        """Show each folded rank whole, and how the job ended."""
        self._publisher.flush()
        for rank in sorted(self._folds):
            self._draw(self._folds[rank], self._folds[rank].bundle())
        self.controls = {}
        seconds = f" · {time.monotonic() - self._began:.2f} s" if timed else ""
        words = f"{self._headline}{seconds} · {verdict}"
        self._state(words, update=self._publisher.in_kernel)

    # Inside

    def _send(self, event: Event) -> bool:
        """Send the first event that waits, as far as the limits allow; return whether it went."""
        if isinstance(event, Notice):
            self._publisher.text("stderr", event.text + "\n", free=True)
        elif not self._publisher.ready and not self._free:
            return False
        elif isinstance(event, Text):
            self._clear_if_due()
            sent = self._publisher.text(event.stream, event.text, free=self._free)
            if sent < len(event.text):
                self._waiting[0] = replace(event, text=event.text[sent:])
                self._waiting_cost -= sent
                return False
        elif isinstance(event, Rich):
            self._send_rich(event)
        self._waiting_cost -= _cost(self._waiting.popleft())
        return True

    def _send_rich(self, event: Rich) -> None:
        if event.kind == "clear":
            self._clear_at_next = len(self._shown) == 1
            if not event.content["wait"]:
                self._clear_if_due()
            return
        if event.kind == "update":
            name = _display_id(event)
            self._updates[name] -= 1
            if self._updates[name] > 0:
                return  # a newer state of the same display waits
        elif event.kind in {"display", "result"}:
            self._clear_if_due()
        self._publisher.rich(event)

    def _clear_if_due(self) -> None:
        """Clear the cell's output as a rank has asked, and show again what is not the rank's."""
        if not self._clear_at_next:
            return
        self._clear_at_next = False
        self._publisher.clear()
        if self._publisher.in_kernel:
            self._state(self._headline, update=False)
        for fold in self._folds.values():
            fold.drawn, fold.changed = 0.0, True

    def _fold(self, event: Text | Rich) -> None:
        fold = self._folds.setdefault(event.rank, Fold(event.rank))
        if isinstance(event, Text):
            fold.add(event.text, event.stream)
        elif event.kind in {"display", "result", "update"}:
            text = event.content["data"].get("text/plain", "")
            put = fold.replace if event.kind == "update" else fold.add_display
            put(text, _display_id(event))
        elif event.kind == "clear":
            fold.clear(wait=event.content["wait"])

    def _draw(self, fold: Fold, bundle: Mapping[str, str]) -> None:
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


def _display_id(event: Rich) -> str:
    return str(event.content.get("transient", {}).get("display_id", ""))


def _cost(event: Event) -> int:
    """Return about how many bytes an event holds in memory and in a message."""
    if isinstance(event, Text):
        return _EVENT_COST + len(event.text)
    if isinstance(event, Rich):
        values = event.content.get("data", {}).values()
        size = sum(len(value) for value in values if isinstance(value, str | bytes))
        return _EVENT_COST + size + sum(map(len, event.buffers))
    return _EVENT_COST


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

    @property
    def at_once(self) -> Collection[int]:
        """The ranks whose lines are shown before they are whole."""
        return self._inner.at_once

    @property
    def full(self) -> bool:
        """Whether so much waits to be sent that the ranks should wait as well."""
        return self._inner.full

    def show(self, event: Event) -> None:
        """Take one event."""
        self._inner.show(event)

    def tick(self) -> None:
        """Send what may be sent now."""
        self._inner.tick()

    def close(self, verdict: str, *, stopped: bool) -> None:
        """Show what was held back, and how the job ended."""
        self._inner.release()
        if stopped:
            self._inner.cut()
        try:
            self._inner.tick(ended=True)
            while not self._inner.idle:
                time.sleep(_PACE_SECONDS)
                self._inner.tick(ended=True)
        except KeyboardInterrupt:
            self._inner.cut()
            self._inner.tick(ended=True)
        self._inner.finish(verdict)
