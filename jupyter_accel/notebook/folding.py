"""The output of a rank that is not shown plainly: kept here, and shown folded."""

from __future__ import annotations

import html
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

MOST_CHARS = 4_000_000
"""A fold keeps this much; what was written between its beginning and its end is left out."""

_GLIMPSE_CHARS = 120  # while the rank runs, so much of its last line is shown
_HEAD_CHARS = MOST_CHARS // 4
_END_CHARS = 4000
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f]")  # means nothing to a browser


@dataclass
class Fold:
    """What one rank has written, in parts that can be replaced."""

    rank: int
    drawn: float = 0.0
    changed: bool = False
    _head: list[list[str]] = field(default_factory=list)
    _tail: deque[list[str]] = field(default_factory=deque)
    _head_chars: int = 0
    _tail_chars: int = 0
    _left_out: int = 0
    _lines_left_out: int = 0
    _by_id: dict[str, list[str]] = field(default_factory=dict)
    _clear_at_next: bool = False
    _stream: str = ""

    def add(self, text: str, stream: str = "") -> None:
        """Append text; that of another stream than before begins on a line of its own."""
        if stream != self._stream and self._unfinished:
            self._append(["\n"])
        self._stream = stream
        self._append([text])

    def add_display(self, text: str, display_id: str) -> None:
        """Append the text of a display on lines of its own; ``replace`` can change it later."""
        self._append(["\n" * self._unfinished])
        part = [f"{text}\n"]
        self._append(part)
        self._by_id[display_id] = part

    def replace(self, text: str, display_id: str) -> None:
        """Change the display with this id, if there is one."""
        if display_id in self._by_id:
            self._by_id[display_id][0] = f"{text}\n"
            self.changed = True

    def clear(self, *, wait: bool) -> None:
        """Forget everything, now or once something new comes."""
        if wait:
            self._clear_at_next = True
        else:
            self._empty()
            self.changed = True

    def glimpse(self) -> Mapping[str, str]:
        """Return what to display while the rank runs: its last line."""
        title, lines = self._title, _as_seen(self._end()).split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")[:_GLIMPSE_CHARS]
        # Not folded yet: each new picture would close what the user has opened.
        return {
            "text/plain": f"{title} · {last}",
            "text/html": f"<div>{title} · <code>{_escaped(last)}</code></div>",
        }

    def bundle(self) -> Mapping[str, str]:
        """Return what to display in the end: everything."""
        title, text = self._title, self._text()
        return {
            "text/plain": f"{title}\n{text}",
            "text/html": (
                f"<details><summary>{title}</summary>"
                f'<pre style="margin:0 0 0 1em">{_escaped(text)}</pre></details>'
            ),
        }

    @property
    def _title(self) -> str:
        lines = self._lines()
        return f"rank {self.rank} · {lines} line{'' if lines == 1 else 's'}"

    def _append(self, part: list[str]) -> None:
        if self._clear_at_next:
            self._empty()
        text = part[0]
        if self._head_chars < _HEAD_CHARS:
            self._head.append(part)
            self._head_chars += len(text)
        else:
            self._tail.append(part)
            self._tail_chars += len(text)
        while self._tail_chars > MOST_CHARS - _HEAD_CHARS and len(self._tail) > 1:
            dropped = self._tail.popleft()[0]
            self._tail_chars -= len(dropped)
            self._left_out += len(dropped)
            self._lines_left_out += dropped.count("\n")
        self.changed = True

    def _text(self) -> str:
        head, tail = ("".join(part[0] for part in parts) for parts in (self._head, self._tail))
        if self._left_out:
            size = f"{self._left_out / 1e6:.1f} MB"
            head += f"\n[{size} left out here; --ranks {self.rank} shows this rank in full]\n"
        return _as_seen(head + tail)

    def _end(self) -> str:
        parts: list[str] = []
        left = _END_CHARS
        for part in chain(reversed(self._tail), reversed(self._head)):
            parts.append(part[0][-left:])
            left -= len(parts[-1])
            if left <= 0:
                break
        return "".join(reversed(parts))

    def _lines(self) -> int:
        ends = sum(part[0].count("\n") for part in chain(self._head, self._tail))
        return self._lines_left_out + ends + self._unfinished

    @property
    def _unfinished(self) -> bool:
        return self._end()[-1:] not in {"", "\n"}

    def _empty(self) -> None:
        self._head.clear()
        self._tail.clear()
        self._by_id.clear()
        self._head_chars = self._tail_chars = self._left_out = self._lines_left_out = 0
        self._clear_at_next = False


def _escaped(text: str) -> str:
    return html.escape(_CONTROL.sub("", text))


def _as_seen(text: str) -> str:
    """Return a text as a terminal leaves it: of a bar that was redrawn, its last state."""
    if "\r" not in text:
        return text
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)
