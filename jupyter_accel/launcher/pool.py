"""The ranks of one job, seen from the kernel: their output, their messages, their ends."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from jupyter_accel.control import Board
from jupyter_accel.launcher import processes
from jupyter_accel.launcher.channel import Channel
from jupyter_accel.launcher.events import Event, RankState
from jupyter_accel.launcher.framing import Marks
from jupyter_accel.launcher.messages import (
    Done,
    Failed,
    RankEnded,
    RankStarted,
    RoomFilled,
    RoomReady,
    ShowStacks,
    StopRanks,
)
from jupyter_accel.launcher.parcels import inheritance, posting
from jupyter_accel.launcher.parcels.shipping import Parcel
from jupyter_accel.launcher.reading import Reader


@dataclass(eq=False)
class Rank:
    """What the kernel knows of one rank."""

    reader: Reader
    pid: int | None = None
    born: int | None = None
    started_ns: int = 0
    last: Done | Failed | None = None
    parcel: Parcel | None = None
    ended: RankEnded | None = None

    @property
    def gone(self) -> bool:
        """Whether its process is reaped and all of its output read."""
        reader = self.reader
        return self.ended is not None and not reader.open and reader.channel.ended

    @property
    def running(self) -> bool:
        """Whether its process is there, as this process sees it."""
        return self.pid is not None and processes.start_time(self.pid) == self.born is not None

    def forget_work(self) -> None:
        """Let go of what the last piece of work gave back."""
        if self.parcel is not None and self.parcel.segment is not None:
            self.parcel.segment.close()
        self.last = self.parcel = None


class Pool:
    """Talks with ``len(ranks)`` processes and their supervisor; waits for none of them.

    Args:
        supervisor: the pool's own channel to the supervisor; closing it ends the ranks.
        board: the control board that the ranks share.
        files: for each rank, its two pipes and its channel.
    """

    def __init__(
        self, supervisor: Channel, board: Board, files: Sequence[tuple[int, int, Channel]]
    ) -> None:
        self.nonce = secrets.token_hex(8)
        self.board = board
        self._supervisor = supervisor
        self._poller = select.epoll() if hasattr(select, "epoll") else select.poll()
        self._owner: dict[int, Rank] = {}
        marks = Marks(self.nonce)
        self.ranks = [
            Rank(Reader(number, out, err, channel, marks))
            for number, (out, err, channel) in enumerate(files)
        ]
        for rank in self.ranks:
            for fd in (rank.reader.out, rank.reader.err, rank.reader.channel.fileno()):
                self._owner[fd] = rank
                self._poller.register(fd, select.POLLIN)
        self._poller.register(supervisor.fileno(), select.POLLIN)
        self.closed = False
        self._when_started: Callable[[], None] | None = None

    def fileno(self) -> int | None:
        """Return the descriptor that is readable when there is something to read.

        None on systems whose poller has none: there, call ``poll`` with a short time.
        """
        return self._poller.fileno() if isinstance(self._poller, select.epoll) else None

    @property
    def size(self) -> int:
        """The number of ranks, living or not."""
        return len(self.ranks)

    @property
    def supervised(self) -> bool:
        """Whether the supervisor still answers for these ranks."""
        return not self._supervisor.ended

    def send(self, rank: int, message: object, files: Sequence[int] = ()) -> bool:
        """Send a message to one rank; return False if it is gone."""
        try:
            self.ranks[rank].reader.channel.send(message, files)
        except (BrokenPipeError, ConnectionError):
            return False
        return True

    def show_at_once(self, ranks: Collection[int]) -> None:
        """Have these ranks' text come before its lines are whole, such as dots of progress."""
        for number, rank in enumerate(self.ranks):
            rank.reader.show_at_once(number in ranks)

    def fill_room(self, buffers: Sequence[memoryview]) -> bool:
        """Write the data that the ranks inherit; they are forked then, with it or without.

        Returns False where this process may not write there.
        """
        received = self._supervisor.receive()
        ready = received[0] if received else None
        used = isinstance(ready, RoomReady) and inheritance.fill(ready.pid, ready.address, buffers)
        self._ask(RoomFilled(used))
        return used

    def stop(self, how: StopRanks) -> None:
        """Have the supervisor end the ranks."""
        self._ask(how)

    def show_stacks(self) -> None:
        """Have every rank write its stacks to its standard error."""
        self._ask(ShowStacks())

    def when_started(self, action: Callable[[], None]) -> None:
        """Call this once every rank has a process, unless one has ended by then."""
        self._when_started = action
        self._check_started()

    def poll(self, seconds: float | None = 0) -> list[Event]:
        """Wait at most this long for something to happen; return what the ranks did."""
        events: list[Event] = []
        for fd, _mask in self._wait(seconds):
            rank = self._owner.get(fd)
            if rank is None:
                events += self._hear_supervisor()
            elif fd == rank.reader.channel.fileno():
                rank.reader.read_channel()
                if rank.reader.channel.ended:
                    self._ignore(fd)
            else:
                events += rank.reader.read_pipe(fd)
                if fd not in rank.reader.open:
                    self._ignore(fd)
        for rank in self.ranks:
            events += self._settle(rank)
        return events

    def close(self) -> None:
        """Let go of everything: the supervisor kills what is still running."""
        if self.closed:
            return
        self.closed = True
        if isinstance(self._poller, select.epoll):
            self._poller.close()
        self._supervisor.close()
        for rank in self.ranks:
            rank.reader.close()
            rank.forget_work()
        self.board.close()

    def _wait(self, seconds: float | None) -> list[tuple[int, int]]:
        if isinstance(self._poller, select.epoll):
            return self._poller.poll(-1 if seconds is None else seconds)
        return self._poller.poll(None if seconds is None else seconds * 1000)

    def _ask(self, message: object) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            self._supervisor.send(message)  # a supervisor that is gone has taken its ranks along

    def _ignore(self, fd: int) -> None:
        with contextlib.suppress(KeyError, FileNotFoundError):
            self._poller.unregister(fd)

    def _hear_supervisor(self) -> list[Event]:
        events: list[Event] = []
        for message, _files in self._supervisor.drain():
            if isinstance(message, RankStarted):
                self.ranks[message.rank].pid = message.pid
                self.ranks[message.rank].born = processes.start_time(message.pid)
                self.ranks[message.rank].started_ns = message.at_ns
                events.append(RankState(message.rank, "started", message.pid))
            elif isinstance(message, RankEnded):
                self.ranks[message.rank].ended = message
        self._check_started()
        if self._supervisor.ended:
            self._ignore(self._supervisor.fileno())
            self._kill_unsupervised()
        return events

    def _check_started(self) -> None:
        if self._when_started is not None and all(rank.pid for rank in self.ranks):
            action, self._when_started = self._when_started, None
            if not any(rank.ended for rank in self.ranks):
                action()

    def _kill_unsupervised(self) -> None:
        """Kill what ranks have left in their process groups: they died with their supervisor."""
        for rank in self.ranks:
            # Another process may have got a rank's pid by now, but then it started later.
            if rank.pid is not None and processes.start_time(rank.pid) in {None, rank.born}:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(rank.pid, signal.SIGKILL)

    def _settle(self, rank: Rank) -> list[Event]:
        """Notice a rank's last word, once its output before it has been read."""
        number = rank.reader.rank
        finished = rank.reader.finished()
        if finished is not None:
            rank.last, files = finished
            if isinstance(rank.last, Done):
                rank.parcel = posting.take_out(rank.last.letter, files)
            state = RankState(number, "done" if isinstance(rank.last, Done) else "failed")
            return [*rank.reader.rest(), state]
        return []
