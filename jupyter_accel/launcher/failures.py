"""Finds the first cause among the failures of several ranks, and words it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from jupyter_accel.errors import WorkerDiedError, WorkerError
from jupyter_accel.launcher.messages import Failed, RankEnded
from jupyter_accel.launcher.stacks import Stacks

_PEER_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "socket closed",
    "failed to recv",
    "failed to send",
    "remote process exited",
    "nccl communicator was aborted",
    "socket timeout",
    "wait timeout",
)
_PEER_LOST_TYPES = {
    "RuntimeError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "ConnectionError",
    "ConnectionResetError",
    "BrokenPipeError",
}
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank failed."""

    rank: int
    ename: str
    message: str
    traceback: tuple[str, ...]
    where: str
    at_ns: int
    died: bool = False

    @property
    def follows(self) -> bool:
        """Whether it is only the echo of another rank's end: a lost connection, or our signal."""
        return self.lost or self.ename == "KeyboardInterrupt"

    @property
    def lost(self) -> bool:
        """Whether the connection to another rank broke."""
        text = self.message.lower()
        lost = self.ename in _PEER_LOST_TYPES and any(words in text for words in _PEER_LOST)
        return lost and not self.died

    @property
    def sentence(self) -> str:
        """Say what happened in one line."""
        if self.died or not self.ename:
            return self.message
        return f"{self.ename}: {self.message}" if self.message else self.ename


def from_message(rank: int, failed: Failed) -> Failure:
    """Describe a rank whose code raised."""
    ename, message = failed.ename, failed.message
    if failed.exit_code is not None:
        message = f"called sys.exit({message}) before the work was done"
        ename = "SystemExit"
    elif failed.phase == "connect":
        message = f"could not join the process group: {message}"
    return Failure(rank, ename, message, failed.traceback, failed.where, failed.at_ns)


def from_end(ended: RankEnded, stacks: Stacks) -> Failure:
    """Describe a rank whose process ended without a word, but perhaps with a stack."""
    if ended.with_supervisor:
        message = "the process that supervises the ranks was ended, and the ranks with it"
    elif ended.signal is None:
        message = (
            f"the process ended by itself with exit code {ended.exit_code} before its work was "
            "done, as os._exit() or a crashing library does"
        )
    else:
        message = _signal_words(ended)
    lines, where = tuple(stacks.crash), stacks.where
    return Failure(ended.rank, "", message, lines, where, ended.at_ns, died=True)


def first_cause(failures: Sequence[Failure]) -> list[Failure]:
    """Order failures: what began it first, echoes of it last."""
    return sorted(failures, key=lambda failure: (failure.follows, failure.at_ns))


def folded(failures: Sequence[Failure]) -> list[tuple[list[int], Failure]]:
    """Join failures that are the same on several ranks, in the order of the first of each."""
    groups: dict[tuple[str, str, str], tuple[list[int], Failure]] = {}
    for failure in failures:
        key = (failure.ename, failure.message, failure.where)
        if failure.lost:
            key = ("", "", "")  # the words hold a port, which is another one for each rank
        groups.setdefault(key, ([], failure))[0].append(failure.rank)
    return [(sorted(ranks), failure) for ranks, failure in groups.values()]


def to_error(failures: Sequence[Failure], finished: Sequence[int] = ()) -> WorkerError:
    """Make the exception to raise in the kernel.

    Args:
        failures: one for each rank that failed; at least one.
        finished: the ranks that had ended their work well.
    """
    ordered = folded(first_cause(failures))
    ranks, cause = ordered[0]
    lines = [f"{_ranks(ranks)}: {cause.sentence}"]
    if cause.lost and finished:
        # The lost connection is no cause: nobody failed before, and somebody simply was not there.
        words = "which had already ended; every rank must reach each collective equally often"
        lines = [f"{_ranks(ranks)} waited in a collective for {_ranks(finished)}, {words}"]
    lines += [f"  {_ranks(others)}: {_echo(failure)}" for others, failure in ordered[1:]]
    kind = WorkerDiedError if cause.died else WorkerError
    return kind("\n".join(lines), rank=cause.rank, ename=cause.ename, traceback=cause.traceback)


def _echo(failure: Failure) -> str:
    if failure.ename == "KeyboardInterrupt":
        return "interrupted as a result"
    first_line = failure.sentence.splitlines()[0]
    return f"lost its peers as a result ({first_line[:100]})" if failure.lost else first_line


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _signal_words(ended: RankEnded) -> str:
    assert ended.signal is not None  # noqa: S101 - the caller has looked
    try:
        name = signal.Signals(ended.signal).name
    except ValueError:
        name = f"signal {ended.signal}"
    peak = f"it used {ended.peak_bytes / _GIB:.1f} GiB at most"
    if ended.out_of_memory:
        return (
            f"the system killed the process because memory ran out (signal {ended.signal}, "
            f"{name}; {peak}); use fewer ranks, a smaller batch, or --memory-limit to get an "
            "error at the line that asks for too much"
        )
    if ended.signal == signal.SIGKILL:
        return (
            f"the process was killed by signal 9 (SIGKILL; {peak}): somebody ended it, or "
            "memory ran out"
        )
    return f"the process was killed by signal {ended.signal} ({name}; {peak})"
