"""Count the devices that a launch could use, without touching a driver.

A process that has opened CUDA cannot be forked into ranks that use it, so the count comes from
the files that the driver shows, not from the driver.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DRIVER_LIST = Path("/proc/driver/nvidia/gpus")
DEVICE_FILES = Path("/dev")


@dataclass(frozen=True, slots=True)
class Devices:
    """How many devices of which kind a launch would use, and the reason as a sentence."""

    kind: str
    count: int
    reason: str

    def name(self, local_rank: int) -> str:
        """Give the device of one rank, such as ``cuda:1``."""
        return "cpu" if self.kind == "cpu" else f"{self.kind}:{local_rank}"


def usable_devices(
    env: Mapping[str, str],
    *,
    driver_list: Path = DRIVER_LIST,
    device_files: Path = DEVICE_FILES,
) -> Devices:
    """Count the NVIDIA GPUs that this user's processes would see; else one CPU process."""
    listed = _listed(driver_list)
    nodes = _nodes(device_files)
    # Containers may show the host's driver without its device files, or hand in only some.
    present = nodes if listed is None else min(nodes, listed)
    if not present:
        why = "no accelerator found"
        if listed:
            why = f"the NVIDIA driver lists {_gpus(listed)}, but /dev/nvidia* is not there"
        return _cpu(why)
    wanted = env.get("CUDA_VISIBLE_DEVICES")
    count = present if wanted is None else _visible(wanted, present)
    if not count:
        return _cpu(f"CUDA_VISIBLE_DEVICES={wanted!r} hides {_gpus(present)}")
    hidden = f" of {present} (CUDA_VISIBLE_DEVICES={wanted!r})" if count != present else ""
    processes = "one process" if count == 1 else f"{count} processes"
    return Devices("cuda", count, f"{_gpus(count)} visible{hidden}, so {processes}; -n N to change")


def cpu_threads_per_rank(size: int, cores: int) -> int:
    """Share the cores of one machine among its ranks, at least one each."""
    return max(1, cores // size)


def _cpu(why: str) -> Devices:
    return Devices("cpu", 1, f"{why}, so one CPU process; -n N for more")


def _gpus(count: int) -> str:
    return "1 NVIDIA GPU" if count == 1 else f"{count} NVIDIA GPUs"


def _listed(folder: Path) -> int | None:
    try:
        return sum(1 for _ in folder.iterdir())
    except OSError:
        return None


def _nodes(folder: Path) -> int:
    return sum(1 for path in folder.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))


def _visible(value: str, present: int) -> int:
    """Read CUDA_VISIBLE_DEVICES as CUDA does: the list ends before its first unknown entry."""
    entries = [entry.strip() for entry in value.split(",")]
    for prefix in ("GPU-", "MIG-"):
        if entries[0].startswith(prefix):
            named = _leading(entries, prefix)
            # One GPU holds several MIG slices, so only whole GPUs are bounded by their number.
            return min(named, present) if prefix == "GPU-" else named
    numbers: list[int] = []
    for entry in entries:
        if not entry.isdecimal() or int(entry) >= present:
            break
        numbers.append(int(entry))
    # CUDA shows no device at all when one is named twice.
    return len(numbers) if len(set(numbers)) == len(numbers) else 0


def _leading(entries: Sequence[str], prefix: str) -> int:
    taken: set[str] = set()
    for entry in entries:
        if not entry.startswith(prefix):
            break
        if entry in taken:
            return 0
        taken.add(entry)
    return len(taken)
