"""One small file for each running job, so that others can list and stop jobs of a busy kernel."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from jupyter_accel.launcher.processes import start_time


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A running job; a pid counts only together with the start time of its process.

    Attributes:
        id: random, unique.
        state: ``"running"``, or ``"kept"`` for workers that wait for work.
        kernel: pid of the kernel's process and its start time.
        supervisor: the same of the process that ends the ranks when it is ended.
        ranks: the same of each rank, in order.
        kernel_id: Jupyter's id of the kernel, where there is one.
        name: the name of kept workers.
    """

    id: str
    state: str
    kernel: tuple[int, int | None]
    supervisor: tuple[int, int | None]
    ranks: Sequence[tuple[int, int | None]] = field(default_factory=tuple)
    kernel_id: str = ""
    name: str = ""


def default_folder(environ: Mapping[str, str]) -> Path:
    """Return where Jupyter keeps its runtime files, and in it our folder."""
    if "JUPYTER_RUNTIME_DIR" in environ:
        return Path(environ["JUPYTER_RUNTIME_DIR"]) / "jupyter-accel"
    home = Path(environ.get("HOME", "~")).expanduser()
    if "JUPYTER_DATA_DIR" in environ:
        data = Path(environ["JUPYTER_DATA_DIR"])
    elif sys.platform == "darwin":
        data = home / "Library" / "Jupyter"
    else:
        data = Path(environ.get("XDG_DATA_HOME") or home / ".local" / "share") / "jupyter"
    return data / "runtime" / "jupyter-accel"


def process(pid: int) -> tuple[int, int | None]:
    """Return a process as a record names it."""
    return pid, start_time(pid)


def write(folder: Path, record: JobRecord) -> None:
    """Write or replace a job's record; only this user can read it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = folder / f".{record.id}.{os.getpid()}"
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123 - an open descriptor
        json.dump(asdict(record), file)
    aside.rename(folder / f"{record.id}.json")


def remove(folder: Path, job: str) -> None:
    """Remove a job's record, which may be gone already, and the folder with the last one."""
    (folder / f"{job}.json").unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _runs(named: tuple[int, int | None]) -> bool:
    pid, started = named
    return started is not None and start_time(pid) == started


def read_all(folder: Path) -> list[JobRecord]:
    """Return the running jobs; the records of jobs whose processes are gone are removed."""
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            pairs = {key: tuple(data[key]) for key in ("kernel", "supervisor")}
            ranks = tuple(tuple(rank) for rank in data["ranks"])
            record = JobRecord(**{**data, **pairs, "ranks": ranks})
        except (OSError, ValueError, TypeError, KeyError):
            continue  # being replaced, or not ours
        ranks_gone = record.ranks and not any(_runs(rank) for rank in record.ranks)
        if ranks_gone or not _runs(record.supervisor):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            continue
        records.append(record)
    return records
