"""What the kernel, the supervisor and the ranks say to one another.

kernel -> supervisor   ForkRanks                        on the control channel
supervisor -> kernel   Ready                            on the control channel
kernel -> supervisor   RoomFilled, StopRanks, ShowStacks  on the pool's channel
supervisor -> kernel   RoomReady, RankStarted, RankEnded  on the pool's channel
kernel -> rank         Setup, Run, Leave                on the rank's channel
rank -> kernel         Connected, Shown, Done, Failed   on the rank's channel
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # so that a kernel that has launched nothing yet need not load the pickling
    from jupyter_accel.launcher.parcels.posting import Letter


@dataclass(frozen=True, slots=True)
class Ready:
    """The template can fork now."""

    pid: int
    threads: int
    cuda: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class ForkRanks:
    """Start this many ranks; the files are the pool's channel, the board, three for each rank.

    ``room`` bytes of memory are reserved first, for the kernel to fill; the ranks inherit them.
    ``folder`` and the file ``record`` are removed when the ranks are gone, even if the kernel is
    gone as well.
    """

    size: int
    spawn: bool = False
    memory_limit: int | None = None
    folder: str = ""
    room: int = 0
    record: str = ""


@dataclass(frozen=True, slots=True)
class StopRanks:
    """End the ranks: SIGINT, SIGTERM and SIGKILL, each so many seconds from now, or not at all."""

    interrupt: float | None
    terminate: float | None
    kill: float | None


@dataclass(frozen=True, slots=True)
class RoomFilled:
    """The reserved memory holds the data, or is not wanted: the ranks can be forked."""

    used: bool


@dataclass(frozen=True, slots=True)
class RoomReady:
    """Memory is reserved at this address of the supervisor."""

    pid: int
    address: int


@dataclass(frozen=True, slots=True)
class ShowStacks:
    """Have every rank write its Python stacks to its standard error."""


@dataclass(frozen=True, slots=True)
class RankStarted:
    """A rank has a process."""

    rank: int
    pid: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class RankEnded:
    """A rank's process is gone and reaped, and everything that it had started with it.

    ``ended_by_us``: by a signal that the kernel asked for; ``with_supervisor``: because the
    supervisor itself was told to end.
    """

    rank: int
    exit_code: int | None
    signal: int | None
    peak_bytes: int
    ended_by_us: bool
    out_of_memory: bool
    at_ns: int
    with_supervisor: bool = False


@dataclass(frozen=True, slots=True)
class Setup:
    """What a rank must know before it can run anything."""

    rank: int
    size: int
    device: str
    threads: int
    nonce: str
    store_path: str
    environ: Mapping[str, str]
    cwd: str
    path: tuple[str, ...]
    connect: str
    disconnect: str
    share_threads: str
    connect_timeout: float
    nice_to_kernel: int = 500


@dataclass(frozen=True, slots=True)
class Run:
    """One piece of work: ``entry(task, parcel, side)`` is called; the letter's files come along.

    ``reconnect`` is a folder for a new process group, where the old one may be out of step.
    """

    entry: str
    task: Any
    letter: Letter
    last: bool = True
    reconnect: str = ""


@dataclass(frozen=True, slots=True)
class Leave:
    """No more work: end."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The rank has joined its process group."""

    at_ns: int


@dataclass(frozen=True, slots=True)
class Shown:
    """Something rich to display; a mark in the rank's output says where it belongs."""

    number: int
    kind: str
    content: Mapping[str, Any]
    buffers: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """The work ended well; the files of its letter come along."""

    letter: Letter
    info: Mapping[str, Any]
    began_ns: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The work raised."""

    ename: str
    message: str
    traceback: tuple[str, ...]
    where: str
    at_ns: int
    exit_code: int | None = None
    phase: str = "run"
