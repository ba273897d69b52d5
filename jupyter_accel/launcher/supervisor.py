"""The supervisor process: forks the ranks, watches them, ends them, and reaps what they leave.

It is single-threaded and computes nothing, so a fork of it is always safe. It holds one control
channel to the kernel and one channel for each pool of ranks; when either closes, or the kernel's
process ends, the ranks concerned are killed with everything that they had started.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import selectors
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

from jupyter_accel.launcher import processes, records, worker
from jupyter_accel.launcher.channel import Channel
from jupyter_accel.launcher.messages import (
    ForkRanks,
    RankEnded,
    RankStarted,
    Ready,
    RoomFilled,
    RoomReady,
    ShowStacks,
    StopRanks,
)
from jupyter_accel.launcher.parcels import inheritance
from jupyter_accel.launcher.warming import Warming, load, settle

_TRACKER_SECONDS = 2.0  # Python's resource trackers get that long to remove shared memory
_QUIET_SECONDS = 0.2  # a launch that has waited for the template comes at once; then it is idle
_SWEEPS = 20  # rounds of killing what killed processes leave; each round goes one generation down


@dataclass(eq=False)
class _PoolSide:
    """One pool as the supervisor sees it."""

    channel: Channel
    pids: dict[int, int] = field(default_factory=dict)
    alarms: list[tuple[float, int]] = field(default_factory=list)
    sent: set[int] = field(default_factory=set)
    memory_kills: int = 0
    folder: str = ""
    expected: tuple[ForkRanks, list[int]] | None = None
    room: mmap.mmap | None = None
    record: str = ""


class Supervisor:
    """Serves one kernel.

    Args:
        control: the channel to the kernel.
        kernel: the kernel's pid.
        warm: modules to import while nothing else is to be done; each makes later ranks faster.
        keep_files: ranks keep the open files of this process, which is a fork of the kernel.
    """

    def __init__(
        self,
        control: Channel,
        *,
        kernel: int,
        warm: Sequence[str] = (),
        keep_files: bool = False,
    ) -> None:
        self._control = control
        self._kernel = kernel
        self._warming = Warming(warm)
        self._keep_files = keep_files
        self._pools: list[_PoolSide] = []
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._pidfd: int | None = None
        self._terminated = False

    def serve(self) -> None:
        """Work until the kernel is gone."""
        self._listen()
        heard = time.monotonic()
        while True:
            ready = self._selector.select(self._timeout(heard))
            if ready:
                heard = time.monotonic()
            for key, _events in ready:
                handler: Callable[[], bool] = key.data
                if not handler() or self._terminated:
                    self._end()
                    return
            self._ring()
            if self._idle and time.monotonic() - heard >= _QUIET_SECONDS:
                self._warming.step()

    # What is waited for

    def _listen(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_terminate)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        processes.adopt_orphans()
        self._selector.register(self._control, selectors.EVENT_READ, self._on_control)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._on_signal)
        if hasattr(os, "pidfd_open"):
            # The channel alone is not enough: a child of the kernel may have inherited its end.
            with contextlib.suppress(OSError):
                self._pidfd = os.pidfd_open(self._kernel)
                self._selector.register(self._pidfd, selectors.EVENT_READ, lambda: False)

    @property
    def _idle(self) -> bool:
        """Whether there is time to warm up in."""
        return bool(self._warming) and not self._pools

    def _timeout(self, heard: float) -> float | None:
        if self._idle:
            return max(0.0, heard + _QUIET_SECONDS - time.monotonic())
        alarms = [at for pool in self._pools for at, _signal in pool.alarms]
        return max(0.0, min(alarms) - time.monotonic()) if alarms else None

    def _on_control(self) -> bool:
        for message, files in self._control.drain():
            if isinstance(message, ForkRanks):
                self._fork_ranks(message, files)
        return not self._control.ended

    def _on_signal(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        self._reap()
        return True

    def _on_terminate(self, _number: int, _frame: FrameType | None) -> None:
        self._terminated = True  # the loop sees it: the signal wakes it as well

    def _on_pool(self, pool: _PoolSide) -> bool:
        for message, _files in pool.channel.drain():
            if isinstance(message, StopRanks):
                self._schedule(pool, message)
            elif isinstance(message, RoomFilled):
                if not message.used and pool.room is not None:
                    pool.room.close()
                    pool.room = None
                self._bear(pool)
            elif isinstance(message, ShowStacks):
                self._signal(pool, worker.STACKS_SIGNAL)
        if pool.channel.ended:
            self._selector.unregister(pool.channel)
            if pool.expected is not None:
                self._let_go(pool, pool.expected[1])
                pool.expected = None
            pool.alarms = [(time.monotonic(), signal.SIGKILL)]
        return True

    # Ranks begin

    def _fork_ranks(self, request: ForkRanks, files: list[int]) -> None:
        pool = _PoolSide(
            Channel.adopt(files[0]),
            memory_kills=processes.out_of_memory_kills(),
            folder=request.folder,
            record=request.record,
        )
        self._pools.append(pool)
        self._selector.register(pool.channel, selectors.EVENT_READ, lambda: self._on_pool(pool))
        pool.expected = request, files
        if request.room:
            pool.room, address = inheritance.reserve(request.room)
            self._tell(pool, RoomReady(os.getpid(), address))
        else:
            self._bear(pool)

    def _bear(self, pool: _PoolSide) -> None:
        """Fork the ranks that were asked for, with the memory that they inherit."""
        if pool.expected is None:
            return
        request, files = pool.expected
        pool.expected = None
        board = files[1]
        start = _spawn if request.spawn else _fork
        for rank in range(request.size):
            out, err, channel = files[2 + 3 * rank : 5 + 3 * rank]
            place = worker.Place(
                rank=rank,
                size=request.size,
                parent=os.getpid(),
                out=out,
                err=err,
                channel=channel,
                board=board,
                memory_limit=request.memory_limit,
                room=pool.room,
                keep_files=self._keep_files,
            )
            pid = start(place)
            pool.pids[pid] = rank
            self._tell(pool, RankStarted(rank, pid, time.monotonic_ns()))
        self._let_go(pool, files)

    @staticmethod
    def _let_go(pool: _PoolSide, files: list[int]) -> None:
        """Drop this process's hold on what its ranks have now."""
        for fd in files[1:]:
            os.close(fd)
        if pool.room is not None:
            pool.room.close()
            pool.room = None

    # Ranks end

    def _schedule(self, pool: _PoolSide, stop: StopRanks) -> None:
        now = time.monotonic()
        wanted = (
            (stop.interrupt, signal.SIGINT),
            (stop.terminate, signal.SIGTERM),
            (stop.kill, signal.SIGKILL),
        )
        alarms = [(now + after, number) for after, number in wanted if after is not None]
        pool.alarms = sorted([*pool.alarms, *alarms])
        self._ring()

    def _ring(self) -> None:
        """Send the signals whose time has come."""
        now = time.monotonic()
        for pool in list(self._pools):
            due = [sig for at, sig in pool.alarms if at <= now]
            pool.alarms = [(at, sig) for at, sig in pool.alarms if at > now]
            for number in due:
                self._signal(pool, number)
            if not pool.pids and pool.expected is None:
                self._forget(pool)

    def _signal(self, pool: _PoolSide, number: int) -> None:
        if number != worker.STACKS_SIGNAL:
            pool.sent.add(number)
        for pid in pool.pids:
            # An interrupt is for the rank's own code; an end is for its data loaders as well.
            # Whatever a killed rank leaves is killed once the rank is gone.
            send = os.killpg if number == signal.SIGTERM else os.kill
            try:
                send(pid, number)
            except ProcessLookupError:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)  # so young that it leads no group yet

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for pool in list(self._pools):
                if pid in pool.pids:
                    self._ended(pool, pid, status, usage.ru_maxrss * 1024)

    def _ended(self, pool: _PoolSide, pid: int, status: int, peak: int) -> None:
        at = time.monotonic_ns()
        rank = pool.pids.pop(pid)
        self._kill_group(pid)
        self._kill_orphans()
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        killed = number == signal.SIGKILL and signal.SIGKILL not in pool.sent
        ended = RankEnded(
            rank=rank,
            exit_code=None if number is not None else os.waitstatus_to_exitcode(status),
            signal=number,
            peak_bytes=peak,
            ended_by_us=number in pool.sent and not self._terminated,
            with_supervisor=self._terminated,
            out_of_memory=killed and processes.out_of_memory_kills() > pool.memory_kills,
            at_ns=at,
        )
        self._tell(pool, ended)

    @staticmethod
    def _kill_group(pid: int) -> None:
        """Kill what a dead rank has left in its process group, unless it has to tidy up first."""
        if any(map(processes.is_resource_tracker, processes.children(os.getpid()))):
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)

    def _kill_orphans(self) -> None:
        """Kill the offspring of dead ranks that had left their group: it has come to us."""
        for _ in range(_SWEEPS):
            known = {pid for pool in self._pools for pid in pool.pids}
            found = [child for child in processes.children(os.getpid()) if child not in known]
            trackers = [child for child in found if processes.is_resource_tracker(child)]
            orphans = [child for child in found if child not in trackers]
            if not orphans:
                self._await(trackers)
                return
            for orphan in orphans:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(orphan, signal.SIGKILL)
            for orphan in orphans:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(orphan, 0)

    @staticmethod
    def _await(trackers: Sequence[int]) -> None:
        """Wait until these are done: they end by themselves when all whom they serve are gone."""
        deadline = time.monotonic() + _TRACKER_SECONDS
        for tracker in trackers:
            with contextlib.suppress(ChildProcessError, ProcessLookupError):
                while os.waitpid(tracker, os.WNOHANG)[0] == 0:
                    if time.monotonic() > deadline:
                        os.kill(tracker, signal.SIGKILL)
                    time.sleep(0.002)

    def _forget(self, pool: _PoolSide) -> None:
        self._pools.remove(pool)
        with contextlib.suppress(KeyError):
            self._selector.unregister(pool.channel)
        pool.channel.close()
        if pool.folder:
            shutil.rmtree(pool.folder, ignore_errors=True)
        if pool.record:
            records.remove(Path(pool.record).parent, Path(pool.record).stem)

    def _end(self) -> None:
        """Kill every rank, and wait until each is gone."""
        self._selector.unregister(self._control)
        self._control.close()  # first of all, so that no new ranks are asked of this process
        for pool in self._pools:
            self._signal(pool, signal.SIGKILL)
        while any(pool.pids for pool in self._pools):
            self._reap()
            time.sleep(0.001)
        self._kill_orphans()
        for pool in list(self._pools):
            self._forget(pool)

    # Small things

    def _tell(self, pool: _PoolSide, message: object) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            pool.channel.send(message)  # if nobody listens any more the pool is being killed


def _fork(place: worker.Place) -> int:
    pid = os.fork()
    if pid == 0:
        worker.rank_main(place)
    return pid


def _spawn(place: worker.Place) -> int:
    """Start a rank as a fresh interpreter, where a fork is not wanted or not to be had."""
    for fd in (place.out, place.err, place.channel, place.board):
        os.set_inheritable(fd, True)  # noqa: FBT003 - positional in the standard library
    code = f"import sys; sys.path[:] = {sys.path!r}\n"
    code += f"from jupyter_accel.launcher import worker\nworker.rank_main(worker.{place!r})\n"
    return os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ)


def main(fd: int, *, kernel: int, preload: Sequence[str], warm: Sequence[str]) -> NoReturn:
    """Be the template: load, say so, and serve the kernel until it is gone."""
    began = time.monotonic()
    control = Channel.adopt(fd)
    for entry in preload:
        load(entry)
    settle()
    torch = sys.modules.get("torch")
    cuda = bool(torch is not None and torch.version.cuda)
    try:
        control.send(Ready(os.getpid(), processes.thread_count(), cuda, time.monotonic() - began))
        Supervisor(control, kernel=kernel, warm=warm).serve()
    except (BrokenPipeError, ConnectionError):
        pass  # the kernel is gone already
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)  # to take all that was imported apart would cost a second
