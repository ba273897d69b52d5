"""A real Jupyter kernel under test: run cells, read what a notebook would show, count what is left.

Example::

    with KernelSession() as kernel:
        cell = kernel.start("import time; print('on it', flush=True); time.sleep(60)")
        cell.wait_for_output("on it")
        kernel.interrupt()
        assert cell.wait(timeout=5).ename == "KeyboardInterrupt"
        kernel.shutdown()
        kernel.assert_nothing_left()
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import tempfile
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from cell_output import CellResult, Message, read_cell
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import KernelManager
from leftovers import MARK, Footprint, children_of, command_of, marked, new_mark, retried
from typing_extensions import Self

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    import psutil

REPOSITORY = Path(__file__).resolve().parent.parent
# What a launcher around pytest, or pytest itself, says to its children must not reach a kernel.
# PYTEST_CURRENT_TEST is the nasty one: with it ipykernel does not watch file descriptors 1 and 2.
NOT_FOR_KERNELS = ("PYTEST_", "COV_", "JPY_", "JUPYTER_", "MASTER_", "LOCAL_")
NOT_FOR_KERNELS_EXACTLY = ("RANK", "WORLD_SIZE", "GROUP_RANK", "MPLBACKEND")


class ThisPython(KernelSpecManager):
    """Knows one kernel, that of the Python which runs the tests, whatever else is installed."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:  # noqa: ARG002, there is but one
        return KernelSpec(**get_kernel_dict())


class KernelDiedError(Exception):
    """The kernel was gone before the cell ended."""


class RunningCell:
    """A cell that was sent to the kernel; it may still be running."""

    def __init__(self, session: KernelSession, msg_id: str, code: str) -> None:
        self.msg_id = msg_id
        self.code = code
        self.sent_at = time.monotonic()
        self._session = session

    @property
    def so_far(self) -> CellResult:
        """What a notebook shows of this cell now; later than its end, that includes latecomers."""
        reply = self._session.replies.get(self.msg_id)
        return read_cell(self.msg_id, self._session.messages, reply, self.sent_at)

    def wait(self, timeout: float = 60.0) -> CellResult:
        """Wait for the end of the cell: its reply and the idle status that follows its outputs."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self._session._read_replies(0.02)
            result = self.so_far
            if result.status != "running":
                return result
            if not self._session.alive:
                msg = f"the kernel died during the cell:\n{self.code}\n{self._session.log()}"
                raise KernelDiedError(msg)
        msg = f"the cell did not end within {timeout} s:\n{self.code}\nso far: {self.so_far}"
        raise TimeoutError(msg)

    def wait_for_output(self, text: str, timeout: float = 30.0) -> CellResult:
        """Wait until ``text`` has appeared in any of the cell's outputs."""
        deadline = time.monotonic() + timeout
        while text not in self.so_far.all_text:
            if time.monotonic() > deadline or not self._session.alive:
                msg = f"no {text!r} within {timeout} s; so far: {self.so_far}"
                raise TimeoutError(msg)
            time.sleep(0.01)
        return self.so_far


class KernelSession:
    """One kernel with folders, home and environment of its own; a context manager.

    Attributes:
        mark: value of an environment variable by which every process of this kernel is known,
            whoever its parent is by now: a forked child keeps it, an exec'd one inherits it.
        folder: holds everything below; gone after the session.
        work: the kernel's working directory.
        messages: everything that the kernel has published, in order.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self.mark = new_mark("kernel")
        # A short path: Unix sockets in it must stay under 108 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="ja-"))
        self.work = self._made("work")
        self.messages: list[Message] = []
        self.replies: dict[str, Message] = {}
        self._env = self._isolated(env or {})
        self._log = (self.folder / "kernel.log").open("wb")
        self._stop_listening = threading.Event()
        self._manager = KernelManager(
            connection_file=str(self.folder / "kernel.json"), kernel_spec_manager=ThisPython()
        )
        self._client: BlockingKernelClient
        self._listener: threading.Thread
        self._closed = False
        self._start()

    # ------------------------------------------------------------------------- running cells

    def start(self, code: str) -> RunningCell:
        """Send a cell and return at once."""
        content = {
            "code": code,
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": True,
        }
        # JupyterLab sends such metadata with each cell; programs that run notebooks send none.
        session = self._client.session
        message = session.msg("execute_request", content, metadata={"cellId": uuid.uuid4().hex})
        self._client.shell_channel.send(message)
        return RunningCell(self, message["header"]["msg_id"], code)

    def run(self, code: str, timeout: float = 60.0) -> CellResult:
        """Run a cell to its end; a cell that fails is a result as well."""
        return self.start(code).wait(timeout)

    def ok(self, code: str, timeout: float = 60.0) -> CellResult:
        """Run a cell that must not fail."""
        result = self.run(code, timeout)
        if result.status != "ok":
            msg = f"the cell ended as {result.status!r}:\n{code}\n{result.plain_traceback}"
            raise AssertionError(msg)
        return result

    def value(self, expression: str, timeout: float = 60.0) -> str:
        """Return the ``repr`` of an expression in the kernel."""
        return self.ok(f"print(repr({expression}))", timeout).stdout.rstrip("\n")

    # ------------------------------------------------------------------- what a user can do

    def interrupt(self) -> None:
        """Do what the interrupt button does: SIGINT to the kernel's process group."""
        self._manager.interrupt_kernel()

    def kill(self) -> None:
        """End the kernel's process alone by SIGKILL, as the out-of-memory killer would."""
        os.kill(self.pid, signal.SIGKILL)
        retried(lambda: None if not self.alive else f"kernel {self.pid} survives SIGKILL", 5.0)

    def restart(self) -> None:
        """Do what the restart button does; returns when the new kernel answers."""
        self._manager.restart_kernel(now=False)
        self._wait_until_ready()

    def shutdown(self) -> None:
        """End the kernel as closing its notebook does; returns when its process is gone."""
        if self.alive:
            self._manager.shutdown_kernel(now=False)

    # ---------------------------------------------------------------------- what a test sees

    @property
    def pid(self) -> int:
        """The kernel's process id, also when it is dead."""
        return self._pid

    @property
    def alive(self) -> bool:
        return bool(self._manager.is_alive())

    def descendants(self) -> list[psutil.Process]:
        """Every process of this kernel but itself: children, zombies, and those re-parented."""
        found = {p.pid: p for p in [*children_of(self.pid), *marked(self.mark)]}
        found.pop(self.pid, None)
        return list(found.values())

    def footprint(self) -> Footprint:
        """Count what the kernel and its processes hold now."""
        pids = [self.pid, *(p.pid for p in self.descendants())] if self.alive else []
        return Footprint.of(pids, folders=[self.folder / "tmp", self.folder / "runtime"])

    def assert_back_to(self, earlier: Footprint, within: float = 2.0) -> None:
        """Fail unless processes, descriptors, shared memory and files are back to ``earlier``."""
        retried(lambda: self.footprint().beyond(earlier), within)

    def assert_nothing_left(self, within: float = 2.0) -> None:
        """Fail unless the dead kernel left no process, shared memory or temporary file behind."""
        if self.alive:
            msg = "the kernel is alive: shut it down or kill it first, or use assert_back_to"
            raise AssertionError(msg)
        nothing = Footprint(shared_memory=self._at_start.shared_memory, files=self._at_start.files)

        def remains() -> str | None:
            processes = [f"{p.pid} {command_of(p.pid)}" for p in marked(self.mark)]
            return "\n".join(processes) or self.footprint().beyond(nothing)

        retried(remains, within)

    def log(self) -> str:
        """What the kernel's process wrote to its own stdout and stderr, outside of any cell."""
        return Path(self._log.name).read_text(errors="replace")

    # ------------------------------------------------------------------------------- inside

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the kernel and whatever it left, so that one failing test does not spoil others."""
        if self._closed:
            return
        self._closed = True
        if self.alive:
            self._manager.shutdown_kernel(now=True)
        for process in marked(self.mark):
            with suppress(Exception):  # it may end by itself in between
                process.kill()
        self._stop_listening.set()
        self._listener.join()
        self._client.stop_channels()
        self._client.context.destroy(linger=0)
        self._manager.cleanup_resources()
        self._manager.context.destroy(linger=0)
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        log = self._log  # stays open: a restart starts the next kernel with the same arguments
        self._manager.start_kernel(env=self._env, cwd=str(self.work), stdout=log, stderr=log)
        client = self._manager.client()
        assert isinstance(client, BlockingKernelClient)
        self._client = client
        self._client.start_channels(stdin=False, hb=False)
        self._listener = threading.Thread(target=self._listen, name="iopub of the tested kernel")
        self._listener.start()
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        self._at_start = self.footprint()

    def _wait_until_ready(self, timeout: float = 60.0) -> None:
        """Wait until a request is answered and its status arrives too: then nothing gets lost."""
        deadline = time.monotonic() + timeout
        asked: set[str] = set()
        while time.monotonic() < deadline:
            asked.add(self._client.kernel_info())
            self._read_replies(0.5)
            published = {m.parent for m in list(self.messages) if m.kind == "status"}
            if asked & published & self.replies.keys():
                self._pid = self._kernel_pid()
                return
        msg = f"the kernel did not answer within {timeout} s:\n{self.log()}"
        raise TimeoutError(msg)

    def _kernel_pid(self) -> int:
        provisioner = self._manager.provisioner
        assert provisioner is not None
        pid = getattr(provisioner, "pid", None)
        assert isinstance(pid, int)
        return pid

    def _listen(self) -> None:
        """Collect what is published all the time: a socket that nobody reads drops messages."""
        while not self._stop_listening.is_set():
            with suppress(queue.Empty):
                raw = self._client.iopub_channel.get_msg(timeout=0.1)
                self.messages.append(Message.received(raw))

    def _read_replies(self, timeout: float) -> None:
        with suppress(queue.Empty):
            raw = self._client.shell_channel.get_msg(timeout=timeout)
            reply = Message.received(raw)
            self.replies[reply.parent] = reply

    def _made(self, name: str) -> Path:
        path = self.folder / name
        path.mkdir(parents=True, mode=0o700)
        return path

    def _isolated(self, extra: Mapping[str, str]) -> dict[str, str]:
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(NOT_FOR_KERNELS) and name not in NOT_FOR_KERNELS_EXACTLY
        }
        caches = REPOSITORY / "build" / "test-cache"  # matplotlib's font list costs seconds
        env |= {
            MARK: self.mark,
            "HOME": str(self._made("home")),
            "IPYTHONDIR": str(self._made("ipython")),
            "JUPYTER_CONFIG_DIR": str(self._made("config")),
            "JUPYTER_DATA_DIR": str(self._made("data")),
            "JUPYTER_RUNTIME_DIR": str(self._made("runtime")),
            "MPLCONFIGDIR": str(caches / "matplotlib"),
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])
            ),
            "TMPDIR": str(self._made("tmp")),
            # The import of torch._dynamo makes this folder, in TMPDIR if not told otherwise.
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "torchinductor"),
        }
        return env | dict(extra)
