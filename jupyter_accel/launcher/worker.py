"""The life of one rank: cut loose from its parent, join the group, run what comes, end."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import gc
import io
import mmap
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import process, util
from typing import Any, NoReturn

from jupyter_accel import control
from jupyter_accel.errors import AccelError, NoInputError
from jupyter_accel.launcher import processes
from jupyter_accel.launcher.channel import Channel
from jupyter_accel.launcher.framing import FramedStderr, Marks
from jupyter_accel.launcher.messages import Connected, Done, Failed, Leave, Run, Setup, Shown
from jupyter_accel.launcher.parcels import inheritance, posting
from jupyter_accel.launcher.parcels.shipping import Parcel
from jupyter_accel.world import World

STACKS_SIGNAL = int(getattr(signal, "SIGRTMIN", signal.SIGUSR2)) + 7
"""A rank that gets this signal writes the Python stacks of its threads to file descriptor 2."""

_LINE_BUFFERED = 1  # C's _IOLBF
_FAILED = 1  # the exit code of a rank whose code raised


@dataclass(frozen=True, slots=True)
class Place:
    """What a rank is born with: its number and its open files."""

    rank: int
    size: int
    parent: int
    out: int
    err: int
    channel: int
    board: int
    memory_limit: int | None = None
    room: mmap.mmap | None = None
    keep_files: bool = False


@dataclass(frozen=True, slots=True)
class Returned:
    """What a piece of work gives back: a parcel of values, and facts about them."""

    parcel: Parcel
    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Pipes:
    """The pipes to the kernel, wherever the running code points descriptors 1 and 2."""

    out: int
    err: int

    @classmethod
    def keep(cls) -> _Pipes:
        """Take copies that no exec'd child inherits."""
        return cls(os.dup(1), os.dup(2))


class TracedFailure(Exception):  # noqa: N818 - a carrier, not an error of its own
    """Carries a failure whose traceback the piece of work has already formatted itself."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed


class RankSide:
    """What a running piece of work can ask of its rank."""

    def __init__(self, channel: Channel, setup: Setup, marks: Marks, pipes: _Pipes) -> None:
        self.setup = setup
        self.world = World.from_env(os.environ)
        self._channel = channel
        self._marks = marks
        self._pipes = pipes
        self._shown = 0
        self._pid = os.getpid()
        self._one_at_a_time = threading.RLock()

    def show(self, kind: str, content: Mapping[str, Any], buffers: tuple[bytes, ...] = ()) -> None:
        """Display something rich where the output stands now; any thread may."""
        if os.getpid() != self._pid:
            return  # a copy of this rank: its messages would mix with the rank's own
        with self._one_at_a_time, _undisturbed():
            self.flush()
            self._shown += 1
            self._channel.send(Shown(self._shown, kind, content, buffers))
            os.write(self._pipes.out, self._marks.place(self._shown))

    def finish(self, message: Done | Failed, files: tuple[int, ...] = ()) -> None:
        """Report the end of the work, behind all of its output on both pipes."""
        with self._one_at_a_time, _undisturbed():
            self.flush()
            self._channel.send(message, files)
            for fd in (self._pipes.out, self._pipes.err):
                os.write(fd, self._marks.place(0))

    @staticmethod
    def flush() -> None:
        """Empty Python's and C's buffers into the pipes."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # a user may have put anything there
                stream.flush()
        with contextlib.suppress(OSError):
            ctypes.CDLL(None).fflush(None)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Put an interrupt off until the end: half a message would spoil all that follow it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append(1))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        signal.raise_signal(signal.SIGINT)


def rank_main(place: Place) -> NoReturn:
    """Be a rank until its work is done; never return into the code that forked it."""
    code = _FAILED
    try:
        _cut_loose(place)
        inheritance.receive(place.room)
        channel = Channel.adopt(place.channel)
        first = channel.receive()
        if first is not None and isinstance(first[0], Setup):
            code = _live(first[0], channel, place)
    except BaseException:  # noqa: BLE001 - nothing may escape into the forking code
        os.write(2, traceback.format_exc().encode())
    finally:
        RankSide.flush()
        os._exit(code)


def _cut_loose(place: Place) -> None:
    """Leave the parent's session, signals and files behind."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    # Until there is work an interrupt just ends the rank: there is nothing of the user's to tell.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.setsid()
    processes.die_with_parent(place.parent)
    processes.adopt_orphans()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (place.out, 1), (place.err, 2)):
        os.dup2(source, target)
    keep = {0, 1, 2, place.channel, place.board}
    if place.keep_files:
        # A forked kernel's data files may be used by the code; its sockets and selectors never.
        spent = {place.out, place.err, nothing}
        found = processes.open_files().items()
        keep |= {fd for fd, name in found if fd not in spent and name.startswith("/")}
    processes.close_all_but(keep)
    if place.memory_limit is not None:
        processes.limit_memory(place.memory_limit)


def _live(setup: Setup, channel: Channel, place: Place) -> int:
    """Prepare this process as rank ``setup.rank``, and run what comes."""
    marks = Marks(setup.nonce)
    pipes = _Pipes.keep()
    _take_streams(marks, pipes)
    _take_environment(setup)
    board = control.Board(place.board, place.size)
    side = RankSide(channel, setup, marks, pipes)
    try:
        _resolve(setup.share_threads)(setup.threads)
        _connect(setup, setup.store_path)
    except BaseException as error:  # noqa: BLE001 - every end of a rank is reported
        side.finish(_describe(error, "", phase="connect"))
        return _FAILED
    channel.send(Connected(time.monotonic_ns()))
    while (received := channel.receive()) is not None:
        message, files = received
        if isinstance(message, Leave):
            break
        if isinstance(message, Run) and not _run(message, files, side, board):
            _run_exit_functions()
            return _FAILED
        if isinstance(message, Run) and message.last:
            return 0
    _run_exit_functions()
    return 0


def _run(run: Run, files: list[int], side: RankSide, board: control.Board) -> bool:
    """Run one piece of work and report its end; return whether this rank can run another."""
    seat = control.take_seat(board, side.setup.rank)
    began, pid = time.monotonic_ns(), os.getpid()
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if run.reconnect:
            _resolve(side.setup.disconnect)()
            _connect(side.setup, run.reconnect)
        parcel = posting.take_out(run.letter, files)
        returned: Returned = _resolve(run.entry)(run.task, parcel, side)
        _leave_if_copy(pid)
        if run.last:
            _run_exit_functions()
        # From here on an interrupt is not for this rank: its report must be whole, and a kept
        # rank waits for more.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except TracedFailure as carrier:
        return _fail(run, carrier.failed, side, pid)
    except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt as well
        return _fail(run, _describe(error, run.entry), side, pid)
    finally:
        seat.finish()
    _leave_if_copy(pid)
    letter, sent = posting.enclose(returned.parcel)
    side.finish(Done(letter, returned.info, began, time.monotonic_ns()), tuple(sent))
    posting.close(letter)
    return True


def _fail(run: Run, failed: Failed, side: RankSide, pid: int) -> bool:
    """Report a failure; return whether this rank can run another piece of work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _leave_if_copy(pid)
    side.finish(failed)
    if run.last:
        return False
    with contextlib.suppress(Exception):
        # Ranks that wait for this one in a collective are told so, and need not be ended.
        _resolve(side.setup.disconnect)()
    return True


def _leave_if_copy(pid: int) -> None:
    """End this process if the code that ran has forked: a copy must not speak for its rank."""
    if os.getpid() != pid:
        RankSide.flush()
        os._exit(0)


def _connect(setup: Setup, store_path: str) -> None:
    world = World.from_env(os.environ)
    _resolve(setup.connect)(world, store_path, timeout=setup.connect_timeout)


def _take_streams(marks: Marks, pipes: _Pipes) -> None:
    """Point Python's and C's streams at this rank's pipes."""
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stdout = open(  # noqa: SIM115
        1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
    )
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(FramedStderr(marks, pipes.out)),
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))
    builtins.input = _no_input
    faulthandler.enable(file=2)
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
    # C buffers a pipe by blocks: its lines would come late, and never if the rank is killed.
    symbol = "stdout" if sys.platform.startswith("linux") else "__stdoutp"
    with contextlib.suppress(ValueError, OSError):
        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, symbol), None, _LINE_BUFFERED, 0)


def _take_environment(setup: Setup) -> None:
    """Stand where the kernel stands: variables, working folder, import path."""
    # Most variables are the same already, and each change costs a copy of a page after a fork.
    for name in [name for name in os.environ if name not in setup.environ]:
        del os.environ[name]
    os.environ.update((k, v) for k, v in setup.environ.items() if os.environ.get(k) != v)
    sys.path[:] = setup.path
    with contextlib.suppress(OSError):  # the kernel may stand in a folder that is gone
        os.chdir(setup.cwd)
    processes.prefer_as_victim(setup.nice_to_kernel)
    # Queues between processes have their sockets in a folder, which must go if the rank is killed.
    process.current_process()._config["tempdir"] = os.path.dirname(setup.store_path)  # type: ignore[attr-defined] # noqa: PTH120, SLF001
    atexit._clear()  # noqa: SLF001 - what the parent registered is the parent's to run
    gc.enable()


def _run_exit_functions() -> None:
    """Run what the rank's code registered with ``atexit``: trackers flush their data there."""
    atexit._run_exitfuncs()  # noqa: SLF001 - the interpreter is not going to end by itself
    # Those of negative priority wait for other processes, perhaps for ever.
    util._run_finalizers(0)  # type: ignore[attr-defined] # noqa: SLF001 - as above


def _no_input(prompt: object = "", /) -> str:
    msg = (
        f"input({prompt!r}) was called in a rank, where nobody can answer; "
        "ask in an ordinary cell and use the variable in the launched one"
    )
    raise NoInputError(msg)


def _resolve(entry: str) -> Any:
    module, _, name = entry.partition(":")
    return getattr(import_module(module), name)


def text_of(error: BaseException) -> str:
    """Return an exception's text, also if its class makes a mistake in it."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the user's code; the words are Python's own for this
        return "<exception str() failed>"


def _describe(error: BaseException, entry: str, phase: str = "run") -> Failed:
    """Turn an exception into a message: its text always, the object where it can travel."""
    at = time.monotonic_ns()
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)]
    lines: list[str] = []
    if own or not isinstance(error, AccelError):  # the text of our own errors says all
        own = own or list(frames)
        lines = ["Traceback (most recent call last):\n", *traceback.format_list(own)]
        lines += traceback.format_exception_only(error)
    exit_code = None
    if isinstance(error, SystemExit):
        exit_code = error.code if isinstance(error.code, int) else int(bool(error.code))
    return Failed(
        ename=type(error).__name__,
        message=text_of(error),
        traceback=tuple(line.rstrip("\n") for line in lines),
        where=f"{own[-1].filename}:{own[-1].lineno}" if own else entry,
        at_ns=at,
        exit_code=exit_code,
        phase=phase,
    )


_PACKAGE = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120 - a prefix of file names
