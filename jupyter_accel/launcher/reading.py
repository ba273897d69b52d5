"""Reads what one rank writes: two pipes and a channel become one ordered list of events."""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable
from typing import Literal

from jupyter_accel.launcher.channel import Channel
from jupyter_accel.launcher.events import Event, Rich, Text
from jupyter_accel.launcher.framing import Marks, Place, Plain
from jupyter_accel.launcher.messages import Connected, Done, Failed, Shown
from jupyter_accel.launcher.stacks import Stacks

_READ_BYTES = 1 << 18
_READS = 16  # reads of one pipe before the others get their turn
_MOST_HELD = 4_000_000  # characters of one line
_END = 0  # the place that marks the end of the work


class Lines:
    """Makes whole lines out of the bytes of one stream.

    Attributes:
        at_once: do not wait for the end of a line.
    """

    def __init__(
        self,
        rank: int,
        stream: Literal["stdout", "stderr"],
        tidy: Callable[[str], str] | None = None,
    ) -> None:
        self.at_once = False
        self._rank = rank
        self._tidy = tidy
        self._stream: Literal["stdout", "stderr"] = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: list[str] = []
        self._held_chars = 0

    def push(self, data: bytes, *, final: bool = False) -> list[Event]:
        """Add bytes; return the lines that are complete now."""
        text = self._decoder.decode(data, final=final)
        # A bar redraws its line by a carriage return and would never be seen if it were held.
        redraws = "\r" in text.rpartition("\n")[2]
        whole = redraws or self.at_once or self._held_chars > _MOST_HELD
        end = len(text) if whole else text.rfind("\n") + 1
        if end == 0:
            if text:
                self._held.append(text)
                self._held_chars += len(text)
            return self.release() if final else []
        ready = "".join((*self._held, text[:end]))
        self._held = [text[end:]] if end < len(text) else []
        self._held_chars = len(text) - end
        events = self._events(ready)
        return events + self.release() if final else events

    def release(self) -> list[Event]:
        """Return the unfinished line, if there is one."""
        text, self._held, self._held_chars = "".join(self._held), [], 0
        return self._events(text)

    def _events(self, text: str) -> list[Event]:
        if self._tidy is not None:
            text = self._tidy(text)
        return [Text(self._rank, self._stream, text)] if text else []


class Reader:
    """One rank's output and messages, as the kernel receives them.

    Attributes:
        message: the rank's last word on its work, once everything written before it was read.
        connected: set when the rank has joined its group.
        stacks: what Python itself wrote of the rank's stacks.
    """

    def __init__(self, rank: int, out: int, err: int, channel: Channel, marks: Marks) -> None:
        self.rank = rank
        self.out = out
        self.err = err
        self.channel = channel
        self.connected: Connected | None = None
        self._marks = marks
        self._buffers = {out: bytearray(), err: bytearray()}
        self._text = Lines(rank, "stdout")
        self._framed = Lines(rank, "stderr")
        self.stacks = Stacks()
        self._raw = Lines(rank, "stderr", self.stacks.tidy)
        self._shown: dict[int, Shown] = {}
        self._last: tuple[Done | Failed, list[int]] | None = None
        self._ends = 0
        self.open = {out, err}

    def read_pipe(self, fd: int) -> list[Event]:
        """Read what is in one of the pipes now; a pipe at its end leaves ``open``."""
        events: list[Event] = []
        for _ in range(_READS):
            try:
                data = os.read(fd, _READ_BYTES)
            except BlockingIOError:
                break
            self._buffers[fd] += data
            if not data:
                self.open.discard(fd)
            events += self._take(fd, final=not data)
            if len(data) < _READ_BYTES:
                break
        return events

    def show_at_once(self, at_once: bool) -> None:  # noqa: FBT001 - the value of a property
        """Return text as it comes from now on, or whole lines only."""
        self._text.at_once = self._framed.at_once = at_once

    def read_channel(self) -> None:
        """Take the messages that have come."""
        for message, files in self.channel.drain():
            if isinstance(message, Shown):
                self._shown[message.number] = message
            elif isinstance(message, Connected):
                self.connected = message
            elif isinstance(message, Done | Failed):
                self._last = (message, files)

    def finished(self) -> tuple[Done | Failed, list[int]] | None:
        """Return the rank's last word, once all the output before it has been returned."""
        if self._last is None or (self._ends < 2 and self.open):  # noqa: PLR2004 - two pipes
            return None
        last, self._last, self._ends = self._last, None, 0
        return last

    def rest(self) -> list[Event]:
        """Return unfinished lines: nothing more is going to come."""
        return self._text.release() + self._framed.release() + self._raw.release()

    def close(self) -> None:
        """Close the pipes and the channel."""
        os.close(self.out)
        os.close(self.err)
        if self._last is not None:
            for fd in self._last[1]:
                os.close(fd)
        self.channel.close()

    def _take(self, fd: int, *, final: bool) -> list[Event]:
        events: list[Event] = []
        plain = self._text if fd == self.out else self._raw
        for piece in self._marks.split(self._buffers[fd], final=final):
            if isinstance(piece, Plain):
                events += plain.push(piece.data)
            elif isinstance(piece, Place):
                events += self._at(piece.number, fd)
            else:
                events += self._framed.push(piece.data)
        if final:
            events += plain.push(b"", final=True)
        return events

    def _at(self, number: int, fd: int) -> list[Event]:
        """Return what belongs at a mark, behind the unfinished line before it."""
        lines = [self._text, self._framed] if fd == self.out else [self._raw]
        events = [event for line in lines for event in line.release()]
        if number == _END:
            self._ends += 1
            return events
        if number not in self._shown:
            self.read_channel()  # sent before its mark was written, so it is here
        shown = self._shown.pop(number, None)
        if shown is not None:
            events.append(Rich(self.rank, shown.kind, shown.content, shown.buffers))
        return events
