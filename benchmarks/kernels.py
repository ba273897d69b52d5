"""Drive a real Jupyter kernel: run a cell, time it as a front end sees it, leave nothing behind."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import time
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Any

from jupyter_client.manager import KernelManager

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jupyter_client.blocking.client import BlockingKernelClient

MARK = "JUPYTER_ACCEL_BENCHMARK"
REPOSITORY = Path(__file__).resolve().parents[1]
READY_LIMIT = 60.0
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_BECOME_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of one cell: "ok", "error" or "hangs", after how long, and all that it showed."""

    seconds: float
    status: str
    shown: str = ""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes in use: proportional share of the kernel's processes, and the machine's free memory."""

    share: int
    available: int


class CellFailedError(RuntimeError):
    """A cell that the benchmark needs did not end well."""


class Kernel:
    """One kernel process with everything that it starts."""

    def __init__(self, folder: Path) -> None:
        """Start the kernel and wait until it answers."""
        self.mark = uuid.uuid4().hex
        self._hangs = False
        self._manager = KernelManager(kernel_name="python3")
        # What it writes past its own streams must not end up among the tables.
        with (folder / f"{self.mark}.log").open("wb") as log:
            self._manager.start_kernel(
                env=self._environment(), cwd=str(folder), stdout=log, stderr=log
            )
        self._client: BlockingKernelClient = self._manager.blocking_client()
        try:
            self._client.start_channels()
            self._client.wait_for_ready(timeout=READY_LIMIT)
        except BaseException:
            self.close()
            raise

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(":")
        # A worker started as plain "python" must be the same interpreter.
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        return {**os.environ, "PYTHONPATH": path, "PATH": programs, MARK: self.mark}

    def run(self, cell: str, *, limit: float = READY_LIMIT) -> Ran:
        """Execute a cell; the time runs from sending it to seeing its idle status."""
        shown: list[str] = []
        status = "ok"
        begin = time.perf_counter()
        message = self._client.execute(cell, store_history=True)
        while True:
            left = begin + limit - time.perf_counter()
            try:
                answer = self._client.get_iopub_msg(timeout=max(left, 0.001))
            except Empty:
                self._hangs = True
                return Ran(time.perf_counter() - begin, "hangs", "".join(shown))
            if answer["parent_header"].get("msg_id") != message:
                continue
            kind, content = answer["msg_type"], answer["content"]
            if kind == "status" and content["execution_state"] == "idle":
                break
            if kind == "error":
                status = "error"
            shown.append(_text(kind, content))
        return Ran(time.perf_counter() - begin, status, "".join(shown))

    def need(self, cell: str, *, expect: str = "", limit: float = READY_LIMIT) -> Ran:
        """Execute a cell that has to end well and to show ``expect``."""
        ran = self.run(cell, limit=limit)
        if ran.status != "ok" or expect not in ran.shown:
            msg = f"cell ended with {ran.status!r} after {ran.seconds:.1f} s: {ran.shown[-1500:]}"
            raise CellFailedError(msg)
        return ran

    def memory(self) -> Memory:
        """Read the memory of all processes that belong to this kernel."""
        shares = [_proportional_share(pid) for pid in processes(self.mark)]
        return Memory(share=sum(shares), available=_available())

    def close(self, farewell: str = "") -> None:
        """Say goodbye, then end this kernel and whatever it left running, each by its id."""
        with suppress(Exception):
            if farewell and not self._hangs:
                self.run(farewell, limit=20.0)
        with suppress(Exception):
            self._client.stop_channels()
        with suppress(Exception):
            self._manager.shutdown_kernel(now=self._hangs)
        end(self.mark)


def _text(kind: str, content: dict[str, Any]) -> str:
    if kind == "stream":
        text = content["text"]
    elif kind == "error":
        text = "\n".join([*content["traceback"], f"{content['ename']}: {content['evalue']}"])
    elif kind in {"display_data", "update_display_data", "execute_result"}:
        # Not what a front end would run as a script: nbdistributed sends the cell's source there.
        data = content["data"]
        text = "\n".join(str(data[kind]) for kind in ("text/plain", "text/html") if kind in data)
    else:
        text = ""
    return _ESCAPES.sub("", text)


def processes(mark: str) -> list[int]:
    """Ids of the live processes that carry a kernel's mark in their environment."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def end(mark: str, *, grace: float = 2.0, patience: float = 5.0) -> None:
    """Wait for the processes that carry this mark to tidy up; then kill those that are left."""
    begin = time.monotonic()
    while (alive := processes(mark)) and time.monotonic() < begin + grace + patience:
        if time.monotonic() > begin + grace:
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        _collect(alive)


def _collect(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _proportional_share(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


@contextmanager
def isolated(folder: Path) -> Iterator[Path]:
    """Point Jupyter and IPython at a folder of our own, and adopt what a killed kernel leaves."""
    places = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "IPYTHONDIR": "ipython",
    }
    before = dict(os.environ)
    for name, place in places.items():
        (folder / place).mkdir(mode=0o700)
        os.environ[name] = str(folder / place)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_BECOME_SUBREAPER, 1, 0, 0, 0)
    try:
        yield folder
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def opened(folder: Path, farewell: str = "") -> Iterator[Kernel]:
    """Open a kernel for a block; it is gone afterwards, whatever happened."""
    kernel = Kernel(folder)
    try:
        yield kernel
    finally:
        kernel.close(farewell)
