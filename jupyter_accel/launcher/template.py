"""The kernel's hold on a supervisor: the template that ranks are forked from, or a forked kernel.

The template is started with exec, in the background, before the user's code has run: it never
inherits a thread, a device context or a socket of the kernel. ``fork_kernel`` is the explicit
other choice, for state that cannot be shipped.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jupyter_accel.control import Board, anonymous_file
from jupyter_accel.errors import TemplateError
from jupyter_accel.launcher import processes
from jupyter_accel.launcher.channel import Channel
from jupyter_accel.launcher.messages import ForkRanks, Ready

if TYPE_CHECKING:  # loading the extension starts a template, and must be quick
    from jupyter_accel.launcher.pool import Pool

PRELOAD = ("torch", "torch.distributed", "jupyter_accel.process_group")
"""What every rank needs; the template says it is ready when these are imported."""

WARM = (
    # The first optimizer of a process imports torch._dynamo, which takes about a second.
    "torch._dynamo",
    "torch.nn.parallel",
    "torch.utils.data",
    "jupyter_accel.accelerator",
    "jupyter_accel.strategies.ddp",
)
"""What most ranks need; imported in the template while nothing else is to be done."""

_START_SECONDS = 120.0
_CLOSE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Files:
    """The open files that a pool hands to its ranks, and the ends that stay with it."""

    ours: tuple[tuple[int, int, Channel], ...]
    theirs: tuple[int, ...]


class Template:
    """A supervisor process, seen from the kernel.

    Args:
        control: the channel to it.
        pid: its pid.
        wait: reaps it; called with the number of seconds to wait at most.
        log: an open file with what it wrote, to explain a start that failed.
        ready: what it said of itself; None while it is loading.
    """

    def __init__(
        self,
        control: Channel,
        *,
        pid: int,
        wait: Callable[[float], bool],
        log: int | None = None,
        ready: Ready | None = None,
    ) -> None:
        self._control = control
        self._wait = wait
        self._log = log
        self.pid = pid
        self.ready = ready
        self.owner = os.getpid()

    @classmethod
    def start(
        cls,
        *,
        preload: Sequence[str] = PRELOAD,
        warm: Sequence[str] = WARM,
        environ: Mapping[str, str] | None = None,
    ) -> Template:
        """Start a template process; returns at once, while it is still loading."""
        control, theirs = Channel.pair()
        log = anonymous_file("accel-template-log")
        code = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            "from jupyter_accel.launcher.supervisor import main\n"
            f"main({theirs.fileno()}, kernel={os.getpid()}, "
            f"preload={tuple(preload)!r}, warm={tuple(warm)!r})\n"
        )
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and code
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env=_template_environment(os.environ if environ is None else environ),
        )
        theirs.close()

        def wait(seconds: float) -> bool:
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                return False
            return True

        return cls(control, pid=process.pid, wait=wait, log=log)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the template is ready."""
        return self._control.fileno()

    @property
    def alive(self) -> bool:
        """Whether the process runs and this process is the one that started it."""
        if self.owner != os.getpid():
            return False
        if self.ready is not None:
            self._control.drain()  # one that is ending has closed it; nothing else is said here now
        return not self._control.ended and not self._wait(0)

    def poll_ready(self) -> bool:
        """Return whether the template can fork now.

        Raises:
            TemplateError: it ended before it was ready; says what it wrote.
        """
        if self.ready is None:
            for message, _files in self._control.drain():
                if isinstance(message, Ready):
                    self.ready = message
            if self.ready is None and self._control.ended:
                msg = f"the process that forks the ranks could not start: {self._words()}"
                raise TemplateError(msg)
        return self.ready is not None

    def wait_ready(self, seconds: float = _START_SECONDS) -> Ready:
        """Wait until the template can fork.

        Raises:
            TemplateError: it ended, or took longer than that.
        """
        deadline = time.monotonic() + seconds
        while not self.poll_ready():
            left = deadline - time.monotonic()
            if left <= 0:
                msg = f"the process that forks the ranks is not ready after {seconds:.0f} s"
                raise TemplateError(msg)
            self._control.wait(left)
        assert self.ready is not None  # noqa: S101 - poll_ready has just said so
        return self.ready

    def fork_ranks(self, request: ForkRanks) -> Pool:
        """Start ranks and return at once; each waits for its setup.

        Raises:
            TemplateError: the template is gone.
        """
        from jupyter_accel.launcher.pool import Pool  # noqa: PLC0415 - see the top of the file

        size = request.size
        board = Board.create(size)
        supervisor, their_supervisor = Channel.pair()
        files = _open_files(size)
        try:
            self._control.send(request, [their_supervisor.fileno(), board.fd, *files.theirs])
        except (BrokenPipeError, ConnectionError) as error:
            Pool(supervisor, board, files.ours).close()
            msg = f"the process that forks the ranks is gone: {self._words()}"
            raise TemplateError(msg) from error
        finally:
            their_supervisor.close()
            for fd in files.theirs:
                os.close(fd)
        return Pool(supervisor, board, files.ours)

    def close(self) -> None:
        """End the process and every rank it still has."""
        if self.owner != os.getpid():
            return  # a fork of the kernel holds a copy of this object, not the process
        self._control.close()
        if not self._wait(_CLOSE_SECONDS):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._wait(_CLOSE_SECONDS)
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def _words(self) -> str:
        if self._log is None:
            return "it said nothing"
        size = os.fstat(self._log).st_size
        text = os.pread(self._log, size, 0).decode(errors="replace").strip()
        return text.splitlines()[-1] if text else "it said nothing"


def fork_kernel(*, prepare: Callable[[], None] | None = None) -> Template:
    """Fork this process into a supervisor whose ranks have everything that this process has.

    Args:
        prepare: called in the fork before it serves.
    """
    control, theirs = Channel.pair()
    kernel = os.getpid()
    with warnings.catch_warnings():
        # Python warns of forks with threads; what makes them safe here is in preflight.py.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _serve_as_fork(control, theirs.detach(), kernel, prepare)
    theirs.close()

    def wait(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while True:
            try:
                if os.waitpid(pid, os.WNOHANG)[0] == pid:
                    return True
            except ChildProcessError:
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.001)

    ready = Ready(pid, threads=1, cuda=False, seconds=0.0)
    return Template(control, pid=pid, wait=wait, ready=ready)


def _serve_as_fork(
    control: Channel, fd: int, kernel: int, prepare: Callable[[], None] | None
) -> None:
    """Be the supervisor in a fork of the kernel; never return into the kernel's code."""
    from jupyter_accel.launcher.supervisor import Supervisor  # noqa: PLC0415 - only here

    try:
        gc.disable()  # nothing of the kernel's may be finalised here, its sockets least of all
        gc.freeze()
        os.setsid()
        signal.set_wakeup_fd(-1)
        control.close()
        for other, target in processes.open_files().items():
            if other > 2 and other != fd and not target.startswith("/"):  # noqa: PLR2004 - stderr
                with contextlib.suppress(OSError):
                    os.close(other)
        if prepare is not None:
            prepare()
        Supervisor(Channel.adopt(fd), kernel=kernel, keep_files=True).serve()
    except BaseException:  # noqa: BLE001 - nobody would see it; the kernel sees the channel close
        os._exit(1)
    os._exit(0)


def _open_files(size: int) -> Files:
    ours, theirs = [], []
    for _ in range(size):
        out, their_out = os.pipe()
        err, their_err = os.pipe()
        channel, their_channel = Channel.pair()
        for fd in (out, err):
            os.set_blocking(fd, False)
        ours.append((out, err, channel))
        theirs += [their_out, their_err, their_channel.detach()]
    return Files(tuple(ours), tuple(theirs))


def _template_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the template, and so of the libraries that ranks inherit."""
    return {
        # Threads that wait for their next piece of work by spinning make a job on a busy machine
        # fifty times slower, and sleeping ones are hardly slower on an idle one.
        "OMP_WAIT_POLICY": "PASSIVE",
        **environ,
        "OPENBLAS_NUM_THREADS": "1",  # it starts its threads at import; the template has none
    }
