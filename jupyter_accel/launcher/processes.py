"""What the operating system knows of processes: parents, children, ends, memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

_SET_PARENT_DEATH_SIGNAL = 1
_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")


def _prctl(option: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    return bool(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0)


def die_with_parent(parent: int) -> None:
    """End this process when its parent ends, whatever the parent's end was.

    Args:
        parent: the parent's pid as it was before the fork, since it may be gone already.
    """
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends first."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def children(pid: int) -> list[int]:
    """Return the pids of a process's children, zombies included."""
    found: list[int] = []
    for task in (_PROC / str(pid) / "task").glob("*"):
        try:
            found += map(int, (task / "children").read_text().split())
        except OSError:
            continue  # the thread ended while we looked
    return found


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if there is none.

    A pid is used again after its process ended: pid and start time together name one process.
    """
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def is_resource_tracker(pid: int) -> bool:
    """Whether a process is a helper that removes the shared memory that nobody has removed.

    Python has one, and PyTorch another for its ``file_system`` way of sharing tensors.
    """
    try:
        command = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False
    return b"multiprocessing.resource_tracker" in command or b"torch_shm_manager" in command


def thread_count() -> int:
    """Return how many threads this process has, native ones included."""
    try:
        return sum(1 for _ in (_PROC / "self" / "task").iterdir())
    except OSError:
        return 1


def out_of_memory_kills() -> int:
    """Return how many processes this machine's or container's memory limit has killed so far."""
    total = 0
    for path in (_PROC / "vmstat", Path("/sys/fs/cgroup/memory.events")):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.split()[0] == "oom_kill")
    return total


def open_files() -> dict[int, str]:
    """Return this process's open descriptors and what each one refers to."""
    found = {}
    for path in (_PROC / "self" / "fd").iterdir():
        try:
            found[int(path.name)] = str(path.readlink())
        except OSError:
            continue  # the descriptor of the listing itself
    return found


def close_all_but(keep: set[int]) -> None:
    """Close every descriptor of this process that is not in ``keep``."""
    for name in os.listdir("/proc/self/fd" if _PROC.exists() else "/dev/fd"):  # noqa: PTH208
        # Not by pathlib: this runs in every rank, whose first use of any code costs page copies.
        if int(name) not in keep:
            with contextlib.suppress(OSError):  # such as the listing's own descriptor
                os.close(int(name))


def prefer_as_victim(score: int) -> None:
    """Have the system end this process before its kernel when memory runs out."""
    try:
        (_PROC / "self" / "oom_score_adj").write_text(str(score))
    except OSError:
        return  # a courtesy: where it is not allowed the job runs all the same


def limit_memory(size: int) -> None:
    """Refuse allocations of this process beyond ``size`` bytes of its own data."""
    import resource  # noqa: PLC0415 - not on every system

    resource.setrlimit(resource.RLIMIT_DATA, (size, size))
