"""One anonymous piece of shared memory that holds the large buffers of a parcel."""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MIB = 1024 * 1024
_CHUNK = 8 * _MIB  # one system call: long enough to pay, short enough to notice an interrupt
_OWN_MAPPING = 64 * _MIB  # a larger buffer can be given back to the system by itself
_MOST_MAPPINGS = 32  # each mapping holds a file descriptor


class Segment:
    """A file without a name, and the spans (offset, size) of the buffers in it.

    Nothing is left in the file system: the memory goes when the last process that holds
    the descriptor or a mapping is gone. A pickled segment carries its spans only; the
    descriptor travels beside it, and ``attach`` joins the two again.
    """

    __slots__ = ("fd", "spans")

    def __init__(self, fd: int, spans: tuple[tuple[int, int], ...]) -> None:
        self.fd = fd
        self.spans = spans

    @classmethod
    def write(cls, buffers: Sequence[memoryview]) -> Segment:
        """Copy buffers, each of contiguous bytes, into fresh shared memory: one copy, once."""
        spans, end = spans_of(buffers)
        fd = _anonymous_file()
        try:
            os.ftruncate(fd, end)
            _copy(fd, buffers, spans)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, tuple(spans))

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers together."""
        return sum(size for _, size in self.spans)

    def attach(self, fd: int) -> None:
        """Take the descriptor that came beside this description; it is closed by ``close``."""
        self.fd = fd

    def map(self) -> list[memoryview]:
        """View every buffer without a copy; a view may be written to, and only here.

        The mapping is private: pages are shared until written, so that a change stays in
        the process that made it. It lives as long as its views do.
        """
        if self.fd < 0:
            msg = "this segment has no descriptor; attach the one that was sent beside it"
            raise ValueError(msg)
        views: list[memoryview] = []
        for start, count in self._regions():
            spans = self.spans[start : start + count]
            base = spans[0][0]
            length = spans[-1][0] + spans[-1][1] - base
            if length == 0:
                views.extend(memoryview(bytearray()) for _ in spans)
                continue
            region = memoryview(mmap.mmap(self.fd, length, mmap.MAP_PRIVATE, offset=base))
            views.extend(region[offset - base : offset - base + size] for offset, size in spans)
        return views

    def _regions(self) -> Iterator[tuple[int, int]]:
        """Group spans for mapping: each big one alone, the small ones with their neighbours."""
        big = max(_OWN_MAPPING, 2 * self.nbytes // _MOST_MAPPINGS)
        start = 0
        for index, (_, size) in enumerate(self.spans):
            if size < big:
                continue
            if index > start:
                yield start, index - start
            yield index, 1
            start = index + 1
        if start < len(self.spans):
            yield start, len(self.spans) - start

    def close(self) -> None:
        """Let go of the descriptor; views that were made stay valid."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __reduce__(self) -> tuple[type[Segment], tuple[int, tuple[tuple[int, int], ...]]]:
        # A descriptor means nothing in another process: it goes through the socket.
        return Segment, (-1, self.spans)


class Loose:
    """Buffers that have not been copied yet: they still are the sender's own memory."""

    __slots__ = ("buffers",)

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self.buffers = buffers

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers together."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def map(self) -> list[memoryview]:
        """Return the sender's own memory."""
        return list(self.buffers)

    def close(self) -> None:
        """Do nothing: the memory is the sender's."""


def spans_of(buffers: Sequence[memoryview]) -> tuple[list[tuple[int, int]], int]:
    """Return where each buffer goes in one piece of memory (offset, size), and its whole size."""
    spans: list[tuple[int, int]] = []
    end = 0
    for buffer in buffers:
        start = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        end = start + buffer.nbytes
        spans.append((start, buffer.nbytes))
    return spans, end


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("jupyter-accel", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _copy(fd: int, buffers: Sequence[memoryview], spans: Sequence[tuple[int, int]]) -> None:
    # One thread: writers to one file wait for each other in the kernel, and giving the file
    # its pages, not copying, is what takes the time. Writing to a mapping takes twice as long.
    for buffer, (start, size) in zip(buffers, spans, strict=True):
        octets = buffer.cast("B")
        done = 0
        while done < size:
            done += os.pwrite(fd, octets[done : done + _CHUNK], start + done)
