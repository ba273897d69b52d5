"""Finds what a launch left behind: processes, descriptors, shared memory, temporary files."""

from __future__ import annotations

import os
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

MARK = "JUPYTER_ACCEL_TEST_MARK"
SESSION = uuid.uuid4().hex
SHARED_MEMORY = Path("/dev/shm")


def new_mark(kind: str) -> str:
    """A value for the variable MARK that no other process on this machine has."""
    return f"{SESSION}.{kind}.{uuid.uuid4().hex[:8]}"


def marked(prefix: str = SESSION) -> list[psutil.Process]:
    """Every process that was started with a mark that begins so, whoever its parent is now.

    The environment is read as it was at exec, and a forked child keeps that.
    """
    wanted = f"{MARK}={prefix}".encode()
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            raw = Path(f"/proc/{process.pid}/environ").read_bytes()
            if any(variable.startswith(wanted) for variable in raw.split(b"\0")):
                found.append(process)
    return found


def children_of(pid: int) -> list[psutil.Process]:
    """Children of children included, and zombies, which have no environment to read."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def open_descriptors(pid: int) -> dict[int, str]:
    """Number and target of each file descriptor of a process."""
    found = {}
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found[int(entry.name)] = str(entry.readlink())
    return found


def shared_memory_entries() -> frozenset[str]:
    """Names in /dev/shm."""
    return frozenset(p.name for p in SHARED_MEMORY.glob("*"))


def _paths_below(folder: Path) -> Iterator[str]:
    """Every file and folder in a folder; unlike ``rglob`` it bears with those that go meanwhile."""
    for inside, folders, files in os.walk(folder):
        yield from (os.path.join(inside, name) for name in (*folders, *files))  # noqa: PTH118


def _held_by_others(entries: Iterable[str], ours: Sequence[int]) -> frozenset[str]:
    """Those entries of /dev/shm that a living process which is not ours has mapped.

    They are known by their inode: a semaphore is mapped under the name of a draft, now deleted.
    """
    wanted = {}
    for name in entries:
        with suppress(OSError):
            wanted[str((SHARED_MEMORY / name).stat().st_ino)] = name
    held = set()
    for process in psutil.process_iter() if wanted else ():
        if process.pid not in ours:
            with suppress(psutil.Error, OSError):
                lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
                inodes = {line.split()[4] for line in lines if f"{SHARED_MEMORY}/" in line}
                held |= {name for inode, name in wanted.items() if inode in inodes}
    return frozenset(held)


@dataclass(frozen=True)
class Footprint:
    """What some processes hold at one moment.

    Attributes:
        processes: pid and command line of each.
        descriptors: how many descriptors each has open.
        memfds: how many of those are anonymous memory files.
        shared_memory: names in /dev/shm, other programs' included.
        files: files below the watched folders.
    """

    processes: dict[int, str] = field(default_factory=dict)
    descriptors: dict[int, int] = field(default_factory=dict)
    memfds: int = 0
    shared_memory: frozenset[str] = frozenset()
    files: frozenset[str] = frozenset()

    @classmethod
    def of(cls, pids: Sequence[int], folders: Sequence[Path] = ()) -> Footprint:
        targets = {pid: open_descriptors(pid) for pid in pids}
        return cls(
            processes={pid: command_of(pid) for pid in pids},
            descriptors={pid: len(fds) for pid, fds in targets.items()},
            memfds=sum(t.startswith("/memfd:") for fds in targets.values() for t in fds.values()),
            shared_memory=shared_memory_entries(),
            files=frozenset(path for folder in folders for path in _paths_below(folder)),
        )

    def beyond(self, earlier: Footprint) -> str | None:
        """Say what is here that was not there earlier; None if nothing is."""
        remarks = [
            f"process {pid} is new: {command}"
            for pid, command in self.processes.items()
            if pid not in earlier.processes
        ]
        remarks += [
            f"process {pid} has {count} descriptors open, {earlier.descriptors[pid]} before"
            for pid, count in self.descriptors.items()
            if count > earlier.descriptors.get(pid, count)
        ]
        if self.memfds > earlier.memfds:
            remarks.append(f"{self.memfds} descriptors of memfds, {earlier.memfds} before")
        shared = self.shared_memory - earlier.shared_memory
        shared -= _held_by_others(shared, [*self.processes])
        remarks += [f"{SHARED_MEMORY}/{name} is new" for name in sorted(shared)]
        remarks += [f"{path} is new" for path in sorted(self.files - earlier.files)]
        return "\n".join(remarks) or None


def command_of(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"{process.status()} {' '.join(process.cmdline())[:90]}"
    except psutil.Error:
        return "gone"


def retried(remark: Callable[[], str | None], within: float) -> None:
    """Fail with the last remark unless there is none any more before the time is up."""
    deadline = time.monotonic() + within
    while (text := remark()) is not None:
        if time.monotonic() > deadline:
            msg = f"after {within} s:\n{text}"
            raise AssertionError(msg)
        time.sleep(0.02)


def _is_resource_tracker(process: psutil.Process) -> bool:
    """Python's own helper for shared memory: one for each process, alive until that ends."""
    with suppress(psutil.Error):
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    return False


class NoLeftovers:
    """Processes and shared memory that this process has made since the start of a test."""

    def __init__(self) -> None:
        self._kept: set[int] = set()
        self._before = {p.pid for p in self._ours()}
        self._shared_memory = shared_memory_entries()

    def keep(self, *pids: int) -> None:
        """Name processes that are meant to live on, such as a template for the next launch."""
        self._kept.update(pids)

    def processes(self) -> list[psutil.Process]:
        return [p for p in self._ours() if p.pid not in self._before | self._kept]

    def check(self, within: float = 2.0) -> None:
        """Fail unless all of them are gone."""
        before = Footprint(shared_memory=self._shared_memory)
        retried(
            lambda: Footprint.of([p.pid for p in self.processes()]).beyond(before),
            within,
        )

    @staticmethod
    def _ours() -> list[psutil.Process]:
        """Children, marked processes, and orphans forked from here: those have our command line."""
        me = psutil.Process()
        mine = me.cmdline()
        found = {p.pid: p for p in [*me.children(recursive=True), *marked(f"{SESSION}.tests")]}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.ppid() == 1 and process.cmdline() == mine:
                    found[process.pid] = process
        found.pop(os.getpid(), None)
        return [p for p in found.values() if not _is_resource_tracker(p)]
