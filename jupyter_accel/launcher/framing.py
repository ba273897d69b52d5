"""Marks in a rank's standard output, so that text, errors and figures keep their order.

File descriptor 1 of a rank is one pipe that carries plain bytes: whatever Python, C code or a
child process writes. What Python writes to ``sys.stderr``, and the places where figures belong,
travel in the same pipe as short frames, each written by one call that the kernel never splits
(at most PIPE_BUF bytes). A frame starts with a random number that only this job knows.
"""

from __future__ import annotations

import io
import os
import select
from dataclasses import dataclass

FRAME_BYTES = select.PIPE_BUF if hasattr(select, "PIPE_BUF") else 512


@dataclass(frozen=True, slots=True)
class Plain:
    """Bytes of standard output."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Stderr:
    """Bytes that Python code wrote to ``sys.stderr``."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Place:
    """Where the message of this number belongs."""

    number: int


Piece = Plain | Stderr | Place

_STDERR, _PLACE = b"E", b"P"
_FIELD = 4  # hexadecimal digits of a frame's length


class Marks:
    """Writes and finds the frames of one job.

    Args:
        nonce: the job's random number, as text.
    """

    def __init__(self, nonce: str) -> None:
        self._start = b"\0accel:" + nonce.encode() + b":"
        self._head = len(self._start) + 1 + _FIELD
        self.most = FRAME_BYTES - self._head

    def place(self, number: int) -> bytes:
        """Return the frame that says: message ``number`` belongs here."""
        return self._frame(_PLACE, b"%d" % number)

    def stderr(self, data: bytes) -> bytes:
        """Return the frame of at most ``most`` bytes of standard error."""
        return self._frame(_STDERR, data)

    def _frame(self, kind: bytes, data: bytes) -> bytes:
        return self._start + kind + b"%04x" % len(data) + data

    def split(self, buffer: bytearray, *, final: bool = False) -> list[Piece]:
        """Take the complete pieces out of ``buffer``; what may be half a frame stays in it."""
        pieces: list[Piece] = []
        while buffer:
            at = buffer.find(self._start)
            if at < 0:
                keep = 0 if final else self._half_start(buffer)
                self._take_plain(buffer, len(buffer) - keep, pieces)
                break
            self._take_plain(buffer, at, pieces)
            end = self._frame_end(buffer)
            if end is None:
                if final:
                    self._take_plain(buffer, len(buffer), pieces)
                break
            pieces.append(self._read(bytes(buffer[:end])))
            del buffer[:end]
        return pieces

    def _frame_end(self, buffer: bytearray) -> int | None:
        if len(buffer) < self._head:
            return None
        end = self._head + int(buffer[self._head - _FIELD : self._head], 16)
        return end if len(buffer) >= end else None

    def _read(self, frame: bytes) -> Piece:
        kind = frame[len(self._start) : len(self._start) + 1]
        data = frame[self._head :]
        return Place(int(data)) if kind == _PLACE else Stderr(data)

    def _half_start(self, buffer: bytearray) -> int:
        """Return how many bytes at the end could be the beginning of a frame."""
        for length in range(min(len(self._start) - 1, len(buffer)), 0, -1):
            if buffer.endswith(self._start[:length]):
                return length
        return 0

    @staticmethod
    def _take_plain(buffer: bytearray, count: int, pieces: list[Piece]) -> None:
        if count:
            pieces.append(Plain(bytes(buffer[:count])))
            del buffer[:count]


class FramedStderr(io.RawIOBase):
    """The raw layer of a rank's ``sys.stderr``: frames in the pipe of standard output.

    Args:
        marks: makes the frames.
        fd: the pipe; not 1 itself, which code may point at a file of its own.
    """

    def __init__(self, marks: Marks, fd: int) -> None:
        self._marks = marks
        self._fd = fd

    def writable(self) -> bool:
        """Return True: this end only writes."""
        return True

    def fileno(self) -> int:
        """Return 2, where a child process that is given this stream writes."""
        return 2

    def write(self, data: bytes | bytearray | memoryview, /) -> int:  # type: ignore[override]
        """Write all of ``data``, in as many frames as it takes."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), self._marks.most):
            os.write(self._fd, self._marks.stderr(bytes(view[start : start + self._marks.most])))
        return len(view)
