"""One piece of work on a pool of ranks, from its start to the last rank's end.

The job never waits by itself: ``advance`` looks at what has happened and fires the timers that
are due. A plain loop can drive it, or an event loop that watches ``fileno``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from jupyter_accel.errors import WorkerError, WorkerTimeoutError
from jupyter_accel.launcher.events import Event, Notice, RankState
from jupyter_accel.launcher.failures import Failure, from_end, from_message, to_error
from jupyter_accel.launcher.messages import Done, Failed, StopRanks
from jupyter_accel.launcher.parcels.shipping import Parcel
from jupyter_accel.launcher.pool import Pool, Rank

SOFT_SECONDS = 10.0
"""How long a loop gets to end by itself at its next step once a stop is asked for."""
GRACE_SECONDS = 0.4
"""How long the other ranks get to fail by themselves after the first failure."""
_LOOPING_SECONDS = 30.0  # a loop whose last step began longer ago is not going to look
_HARD = StopRanks(interrupt=0.0, terminate=0.7, kill=1.2)
_END_NOW = StopRanks(interrupt=None, terminate=0.0, kill=0.4)
_STACKS_SECONDS = 0.3
_UNSUPERVISED_SECONDS = 0.05  # nobody tells the end of a rank whose supervisor has gone

Reason = Literal["", "failure", "interrupt", "timeout"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended.

    Attributes:
        done: for each rank its last word if it ended well, else None.
        parcels: for each rank what it gave back, or None.
        failures: how the others failed, in order of rank.
        reason: why the ranks were ended, if they were.
        timeout: the limit in seconds that the job had.
        stopped_softly: the ranks left their loops at a common step, as they were asked to.
        finished: the ranks that ended well, by ``sys.exit(0)`` too.
        living: the ranks are kept, and all of them can be given more work.
    """

    done: tuple[Done | None, ...]
    parcels: tuple[Parcel | None, ...]
    failures: tuple[Failure, ...]
    reason: Reason
    timeout: float | None
    stopped_softly: bool
    finished: tuple[int, ...]
    living: bool

    @property
    def error(self) -> WorkerError | None:
        """What to raise, or None if every rank ended well or the user stopped the job."""
        if self.reason == "timeout":
            msg = f"the ranks were not done after {self.timeout:g} s and have been ended"
            return WorkerTimeoutError(msg, rank=0)
        if self.reason == "interrupt" or not self.failures:
            return None
        return to_error(self.failures, self.finished)

    @property
    def sentence(self) -> str:
        """Say how it ended, in a line."""
        size = len(self.done)
        if self.reason == "interrupt":
            what = "interrupted; they are kept" if self.living else "ended"
            return f"stopped: {size} of {size} ranks {what}"
        if self.error is not None:
            return f"failed: {str(self.error).splitlines()[0]}"
        words = "stopped after a step, " if self.stopped_softly else ""
        return words + (f"{len(self.finished)} of {size} ranks done" if size > 1 else "done")


@dataclass
class Job:
    """Follows the ranks of a pool through one piece of work.

    Args:
        pool: the ranks, with their setup and work already sent.
        keep: the ranks go on after this work and wait for more.
        timeout: seconds until the ranks are ended, or None for no limit.
        reap: the job is finished when the ranks' processes are gone, not when their work is done;
            needed where a process holds a device until its end.
    """

    pool: Pool
    keep: bool = False
    timeout: float | None = None
    reap: bool = True
    began: float = field(default_factory=time.monotonic)
    reason: Reason = ""
    _timers: list[tuple[float, Callable[[], list[Event]]]] = field(default_factory=list)
    _soft: bool = False
    _noticed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.timeout is not None:
            self._after(self.timeout, self._time_is_up)

    @property
    def finished(self) -> bool:
        """Whether every rank has come to its end."""
        return all(self._through(rank) for rank in self.pool.ranks)

    def seconds_left(self) -> float | None:
        """Return the time until ``advance`` must be called even if nothing happens."""
        if not self._timers:
            return None
        return max(0.0, min(at for at, _action in self._timers) - time.monotonic())

    def advance(self, seconds: float | None = 0) -> list[Event]:
        """Wait at most this long for something to happen; return what the ranks did."""
        left = self.seconds_left()
        longest = None if self.pool.supervised else _UNSUPERVISED_SECONDS
        waits = [wait for wait in (seconds, left, longest) if wait is not None]
        events = self.pool.poll(min(waits) if waits else None)
        events += self._notice_ends()
        events += self._fire()
        return events

    def run(self) -> list[Event]:
        """Wait to the end; return all that the ranks did."""
        events: list[Event] = []
        while not self.finished:
            events += self.advance(None)
        return events

    # Stops

    def interrupt(self) -> list[Event]:
        """Stop at the next common step if there is a loop, else end the ranks; twice: end them."""
        since = self.pool.board.seconds_since_step()
        looping = since is not None and since < _LOOPING_SECONDS
        if self._soft or not looping or self.reason:
            return self.end("interrupt")
        self._soft = True
        self.pool.board.request_stop()
        self._after(SOFT_SECONDS, lambda: [] if self.reason else self.end("interrupt"))
        return [Notice("asked the ranks to stop after this step; interrupt again to end them now")]

    def end(self, reason: Reason) -> list[Event]:
        """End the ranks by signals: an interrupt first, then harder."""
        if not self.reason:
            self.reason = reason
        if self.keep:
            self.pool.stop(StopRanks(interrupt=0.0, terminate=None, kill=None))
            self._after(0.7, self._end_stuck)
        else:
            self.pool.stop(_HARD)
        return []

    def kill(self) -> None:
        """End the ranks at once."""
        self.pool.stop(StopRanks(interrupt=None, terminate=None, kill=0.0))

    # Ends

    def outcome(self) -> Outcome:
        """Return how each rank ended; to be asked once the job is finished."""
        done = tuple(_done(rank) for rank in self.pool.ranks)
        failures = [self._failure(rank) for rank in self.pool.ranks]
        softly = self._soft and not self.reason and all(word is not None for word in done)
        return Outcome(
            done,
            tuple(rank.parcel for rank in self.pool.ranks),
            tuple(failure for failure in failures if failure is not None),
            self.reason,
            self.timeout,
            softly,
            tuple(rank.reader.rank for rank in self.pool.ranks if _ended_well(rank)),
            self.keep and not any(rank.ended for rank in self.pool.ranks),
        )

    def _through(self, rank: Rank) -> bool:
        if rank.gone or not self._reachable(rank):
            return True
        if self.keep:
            return rank.last is not None
        return isinstance(rank.last, Done) and not self.reap

    def _reachable(self, rank: Rank) -> bool:
        """Whether more can still be heard of a rank: not after it and its supervisor have gone.

        What the rank has started may live on then, and hold its pipes open.
        """
        if self.pool.supervised:
            return True
        return bool(rank.reader.open) and (rank.pid is None or rank.running)

    def _failure(self, rank: Rank) -> Failure | None:
        number = rank.reader.rank
        if isinstance(rank.last, Failed):
            if rank.last.exit_code == 0:
                return None
            return from_message(number, rank.last)
        if rank.last is None and rank.gone and rank.ended and not rank.ended.ended_by_us:
            return from_end(rank.ended, rank.reader.stacks)
        if rank.last is None and rank.ended is None and not self.pool.supervised:
            words = "the process that supervises the ranks was ended, and the ranks with it"
            return Failure(number, "", words, (), "", time.monotonic_ns(), died=True)
        return None

    def _notice_ends(self) -> list[Event]:
        events: list[Event] = []
        for number, rank in enumerate(self.pool.ranks):
            if number in self._noticed or not self._through(rank):
                continue
            self._noticed.add(number)
            events += rank.reader.rest()
            events.append(RankState(number, "ended", rank.pid))
        if not self.reason and any(self._failure(rank) for rank in self.pool.ranks):
            self.reason = "failure"
            self._after(GRACE_SECONDS, self._end_rest)
        return events

    def _end_rest(self) -> list[Event]:
        if not self.finished:
            if self.keep:
                return self.end("failure")
            self.pool.stop(_END_NOW)
        return []

    def _end_stuck(self) -> list[Event]:
        """End kept ranks that an interrupt did not reach, such as those in a collective."""
        if self.finished:
            return []
        self.pool.stop(_END_NOW)
        return [Notice("some ranks did not answer, so these kept workers were ended")]

    def _time_is_up(self) -> list[Event]:
        if self.finished:
            return []
        self.reason = self.reason or "timeout"
        self.pool.show_stacks()
        self._after(_STACKS_SECONDS, lambda: self.end("timeout"))
        return [Notice(f"not done after {self.timeout:g} s; the stacks of the ranks follow")]

    def _after(self, seconds: float, action: Callable[[], list[Event]]) -> None:
        self._timers.append((time.monotonic() + seconds, action))

    def _fire(self) -> list[Event]:
        now = time.monotonic()
        due = [action for at, action in self._timers if at <= now]
        self._timers = [(at, action) for at, action in self._timers if at > now]
        return [event for action in due for event in action()]


def _ended_well(rank: Rank) -> bool:
    return isinstance(rank.last, Done) or getattr(rank.last, "exit_code", None) == 0


def _done(rank: Rank) -> Done | None:
    return rank.last if isinstance(rank.last, Done) else None
