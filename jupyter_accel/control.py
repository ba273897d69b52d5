"""The control board: one shared page through which a job's ranks agree where to stop.

A soft stop must end the training loop at the same step on every rank, or the ranks that go on
would wait in a collective for those that left. So a rank that sees the request writes down the
step it stands before and waits for the others to do the same; all then stop at the largest step
written. Nothing is exchanged while no stop is asked for: a check is one read of shared memory.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time

_CELL = 8  # bytes of one counter: an aligned 64-bit write is never seen half done
_SLOT = 8  # counters of one slot, so that two ranks never write to one cache line
_REQUESTED = 0  # header: a stop has been asked for
_STEP, _PLEDGE, _TICK, _DONE = range(4)  # a rank's slot

AGREE_SECONDS = 2.0
"""How long a rank waits for the others to name their step, before it goes on and asks again."""


class Board:
    """The shared page of one job.

    Args:
        fd: an open file that every process of the job shares; stays open as long as the board.
        size: number of ranks.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self._map = mmap.mmap(fd, self.bytes_for(size))
        self._cells = memoryview(self._map).cast("q")

    @staticmethod
    def bytes_for(size: int) -> int:
        """Return the size of a board for this many ranks, in bytes."""
        return _CELL * _SLOT * (size + 1)

    @classmethod
    def create(cls, size: int) -> Board:
        """Make an empty board in anonymous memory: it has no name, so nothing can be left over."""
        fd = anonymous_file("accel-board")
        os.ftruncate(fd, cls.bytes_for(size))
        return cls(fd, size)

    def request_stop(self) -> None:
        """Ask the ranks to leave their loops at the next common step."""
        self._cells[_REQUESTED] = 1

    def clear(self) -> None:
        """Forget every request and step: the next cell of kept workers starts anew."""
        for index in range(len(self._cells)):
            self._cells[index] = 0

    @property
    def stop_requested(self) -> bool:
        """Whether a soft stop was asked for."""
        return bool(self._cells[_REQUESTED])

    def steps(self) -> list[int]:
        """Return how many steps each rank has begun; 0 where no prepared loader ran yet."""
        return [self.read(rank, _STEP) for rank in range(self.size)]

    def seconds_since_step(self) -> float | None:
        """Return the time since any rank last began a step; None if none ever did."""
        ticks = [self.read(rank, _TICK) for rank in range(self.size)]
        newest = max(ticks)
        return None if newest == 0 else (time.monotonic_ns() - newest) / 1e9

    def read(self, rank: int, field: int) -> int:
        """Return one counter of one rank's slot."""
        return self._cells[(rank + 1) * _SLOT + field]

    def write(self, rank: int, field: int, value: int) -> None:
        """Set one counter of one rank's slot."""
        self._cells[(rank + 1) * _SLOT + field] = value

    def close(self) -> None:
        """Unmap the page and close its file."""
        self._cells.release()
        self._map.close()
        os.close(self.fd)


class Seat:
    """One rank's place at the board."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board = board
        self._rank = rank
        self._step = 0
        self._stop_at: int | None = None

    def should_stop(self) -> bool:
        """Note that a step begins; return whether every rank stops before this step."""
        self._step += 1
        board, rank = self._board, self._rank
        board.write(rank, _STEP, self._step)
        board.write(rank, _TICK, time.monotonic_ns())
        if not board.stop_requested:
            return False
        if self._stop_at is None:
            self._stop_at = self._agree()
        return self._stop_at is not None and self._step >= self._stop_at

    @property
    def stopped(self) -> bool:
        """Whether every rank has agreed to stop, and this one has come to that step."""
        return self._stop_at is not None and self._step >= self._stop_at

    def finish(self) -> None:
        """Tell the others not to wait for this rank: it has left its code."""
        self._board.write(self._rank, _DONE, 1)

    def _agree(self) -> int | None:
        """Name the own step, wait for the others, and return the step at which all stop."""
        board = self._board
        board.write(self._rank, _PLEDGE, self._step)
        deadline = time.monotonic() + AGREE_SECONDS
        while True:
            running = [r for r in range(board.size) if not board.read(r, _DONE)]
            pledges = [board.read(r, _PLEDGE) for r in range(board.size)]
            if all(pledges[r] for r in running):
                # A rank that agreed and has left already counts: it may have been ahead.
                return max(pledges)
            if time.monotonic() > deadline:
                # A rank that waits in a collective for this one cannot answer: go on, ask later.
                board.write(self._rank, _PLEDGE, 0)
                return None
            time.sleep(0.0005)


class _Here:
    """The seat of this process: a process is one rank of at most one job."""

    seat: Seat | None = None


def take_seat(board: Board, rank: int) -> Seat:
    """Make this process the given rank of the board's job."""
    _Here.seat = Seat(board, rank)
    return _Here.seat


def should_stop() -> bool:
    """Return whether the loop must end before this step; always False outside a launch.

    The prepared loader asks before every batch and once more at its end, so that every rank asks
    equally often.
    """
    seat = _Here.seat
    return seat is not None and seat.should_stop()


def stopped() -> bool:
    """Return whether this rank's loop was ended by a stop; the same on all ranks."""
    seat = _Here.seat
    return seat is not None and seat.stopped


def inside_launch() -> bool:
    """Return whether this process is a rank that the launcher started."""
    return _Here.seat is not None


def anonymous_file(name: str) -> int:
    """Open a file that has no name in the file system and lives in memory where possible."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix=name) as file:
        return os.dup(file.fileno())
