"""Starts jobs: decides how many ranks on which devices, and gives each its setup and its work."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jupyter_accel import control
from jupyter_accel.devices import Devices, cpu_threads_per_rank, usable_devices
from jupyter_accel.errors import ConfigError
from jupyter_accel.launcher import preflight, records
from jupyter_accel.launcher.job import Job
from jupyter_accel.launcher.messages import ForkRanks, Leave, Run, Setup
from jupyter_accel.launcher.parcels import inheritance, posting
from jupyter_accel.launcher.parcels.inheritance import Inherited
from jupyter_accel.launcher.parcels.segment import Loose, Segment, spans_of
from jupyter_accel.launcher.parcels.shipping import Parcel
from jupyter_accel.launcher.pool import Pool
from jupyter_accel.launcher.template import PRELOAD, WARM, Template, fork_kernel
from jupyter_accel.settings import LaunchOptions
from jupyter_accel.world import DEVICE_NAME, PRECISION_NAME

_CONNECT = "jupyter_accel.process_group:connect"
_DISCONNECT = "jupyter_accel.process_group:disconnect"
_SHARE_THREADS = "jupyter_accel.process_group:share_threads"
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Work:
    """What the ranks are to do: ``entry(task, parcel, side)``, the same on each."""

    entry: str
    task: Any
    parcel: Parcel = field(default_factory=lambda: Parcel(b""))


@dataclass(eq=False)
class Crew:
    """Ranks that have been started, and what belongs to them outside their processes.

    Attributes:
        id: random, unique; the name of their record.
        devices: what they run on, and why.
        folder: a private folder for their rendezvous; gone when they are.
        supervisor: a supervisor of their own (a forked kernel), or None.
        rounds: how many pieces of work they have been given.
        broken: their process group may be out of step, since a piece of work failed.
        inherits: they were born with the large data of the work that comes first.
    """

    id: str
    pool: Pool
    devices: Devices
    options: LaunchOptions
    folder: Path
    supervisor: Template | None = None
    on_close: Callable[[], None] | None = None
    rounds: int = 0
    broken: bool = False
    inherits: bool = False

    @property
    def words(self) -> str:
        """How many they are, such as ``2 ranks``."""
        return f"{self.pool.size} rank{'' if self.pool.size == 1 else 's'}"

    @property
    def alive(self) -> bool:
        """Whether every rank can be given work."""
        ranks = self.pool.ranks
        return not self.pool.closed and self.pool.supervised and not any(r.ended for r in ranks)

    def close(self) -> None:
        """End the ranks, and have all removed that belongs to them."""
        supervised = self.pool.supervised
        if not self.pool.closed:
            for rank in range(self.pool.size):
                self.pool.send(rank, Leave())
            self.pool.close()
        if self.supervisor is not None:
            self.supervisor.close()
        if not supervised:  # otherwise the supervisor does it, as it does when the kernel is killed
            shutil.rmtree(self.folder, ignore_errors=True)
            if self.on_close is not None:
                self.on_close()


class Launcher:
    """Keeps one template ready, and starts ranks.

    Args:
        preload: what the template imports, or calls, before it says that it is ready.
        warm: what it imports after that, while nothing else is to be done.
        records_folder: where to note running jobs; None for nowhere.
        watch: knows which cell opened a device in this process.
        prepare_fork: called in a fork of this process before it serves.
        template: one that has been started already.
    """

    def __init__(  # noqa: PLR0913 - what a kernel and a script set differently
        self,
        *,
        preload: Sequence[str] = PRELOAD,
        warm: Sequence[str] = WARM,
        records_folder: Path | None = None,
        watch: preflight.DeviceWatch | None = None,
        prepare_fork: Callable[[], None] | None = None,
        template: Template | None = None,
    ) -> None:
        self._preload = tuple(preload)
        self._warm = tuple(warm)
        self._records = records_folder
        self._watch = watch
        self._prepare_fork = prepare_fork
        self._template = template
        self._lock = threading.RLock()  # two threads may launch at the same time

    def template(self) -> Template:
        """Return the template, started now if there is none that lives."""
        with self._lock:
            if self._template is None or not self._template.alive:
                if self._template is not None:
                    self._template.close()
                self._template = Template.start(preload=self._preload, warm=self._warm)
            return self._template

    def get_ready(self, options: LaunchOptions) -> None:
        """Wait until ranks can be started: only this takes long, at first, and may be broken off.

        Raises:
            TemplateError: the template did not start.
        """
        if options.start_method != "fork":
            self._ready_template()

    def open(self, options: LaunchOptions, parcel: Parcel | None = None) -> Crew:
        """Start the ranks that these options ask for; they connect while the caller goes on.

        Args:
            options: how to start them.
            parcel: what they are going to work on; if it is large they are born with its data.

        Raises:
            ConfigError: the options ask for what this machine has not.
            PreflightError: this process cannot be forked.
            TemplateError: the template did not start.
        """
        if control.inside_launch():
            msg = "this code runs in a rank already; launch from the kernel instead"
            raise ConfigError(msg)
        supervisor = None
        template = None if options.start_method == "fork" else self._ready_template()
        devices = choose_devices(options, cuda_build=_has_cuda(template))
        size = options.num_processes or devices.count
        if template is None:
            preflight.check_fork(self._watch)
            template = supervisor = fork_kernel(prepare=self._prepare_fork)
        job, folder = secrets.token_hex(8), Path(tempfile.mkdtemp(prefix="jupyter-accel-"))
        large = _inheritable(parcel, options)
        request = ForkRanks(
            size,
            spawn=options.start_method == "spawn",
            memory_limit=options.memory_limit,
            folder=str(folder),
            room=spans_of(large)[1],
            record=str(self._records / f"{job}.json") if self._records else "",
        )
        try:
            with self._lock:
                pool = template.fork_ranks(request)
            inherits = bool(large) and pool.fill_room(large)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            if supervisor is not None:
                supervisor.close()
            raise
        crew = Crew(job, pool, devices, options, folder, supervisor, inherits=inherits)
        environ = dict(os.environ)
        for rank in range(size):
            pool.send(rank, _setup(crew, rank, environ))
        return crew

    def assign(
        self, crew: Crew, work: Work, *, keep: bool = False, timeout: float | None = None
    ) -> Job:
        """Give the ranks something to do, for so many seconds at most."""
        pool = crew.pool
        reconnect = str(crew.folder / str(crew.rounds)) if crew.broken else ""
        pool.board.clear()
        crew.rounds, crew.broken = crew.rounds + 1, False
        letter, files = posting.enclose(_settled(work.parcel, inherited=crew.inherits))
        crew.inherits = False
        for number, rank in enumerate(pool.ranks):
            rank.forget_work()
            run = Run(work.entry, work.task, letter, last=not keep, reconnect=reconnect)
            pool.send(number, run, files)  # a rank that is gone shows by its end
        posting.close(letter)
        # A rank that computes on the CPU holds nothing that the next cell could miss: when its work
        # is done its output has been read, and it ends by itself while the cell ends.
        return Job(pool, keep=keep, timeout=timeout, reap=crew.devices.kind != "cpu")

    def note(self, crew: Crew, *, state: str, kernel_id: str = "", name: str = "") -> None:
        """Write down that these ranks run, for the eyes of others, as soon as all of them do."""
        supervisor = crew.supervisor or self._template
        if self._records is None or supervisor is None:
            return
        folder = self._records
        record = records.JobRecord(
            id=crew.id,
            state=state,
            kernel=records.process(os.getpid()),
            supervisor=records.process(supervisor.pid),
            kernel_id=kernel_id,
            name=name,
        )

        def write() -> None:
            ranks = [(rank.pid, rank.born) for rank in crew.pool.ranks if rank.pid]
            with contextlib.suppress(OSError):  # a full disk must not keep a job from running
                records.write(folder, replace(record, ranks=ranks))

        crew.pool.when_started(write)
        crew.on_close = lambda: records.remove(folder, crew.id)

    def close(self) -> None:
        """End the template and every rank it still has."""
        if self._template is not None:
            self._template.close()
            self._template = None

    def _ready_template(self) -> Template:
        with self._lock:
            template = self.template()
            template.wait_ready()
            return template


def _inheritable(parcel: Parcel | None, options: LaunchOptions) -> Sequence[memoryview]:
    """Return the buffers that the ranks should be born with; none if they are small."""
    segment = None if parcel is None else parcel.segment
    if not isinstance(segment, Loose) or options.start_method != "forkserver":
        return ()
    large = segment.nbytes >= inheritance.SMALLEST and inheritance.possible()
    return segment.buffers if large else ()


def _settled(parcel: Parcel, *, inherited: bool) -> Parcel:
    """Return a parcel whose large buffers are where the ranks find them."""
    if not isinstance(parcel.segment, Loose):
        return parcel
    buffers = parcel.segment.buffers
    if inherited:
        return replace(parcel, segment=Inherited(tuple(spans_of(buffers)[0])))
    return replace(parcel, segment=Segment.write(buffers))


def choose_devices(options: LaunchOptions, *, cuda_build: bool) -> Devices:
    """Decide on which kind of device the ranks run.

    Raises:
        ConfigError: the device asked for is not there, or has too few for the ranks.
    """
    found = usable_devices(os.environ)
    if found.kind == "cuda" and not cuda_build:
        found = Devices("cpu", 1, "this PyTorch was built without CUDA, so one CPU process")
    if options.device == "cpu" and found.kind != "cpu":
        found = Devices("cpu", 1, "the CPU was asked for, so one process; -n N for more")
    elif options.device not in {None, found.kind}:
        msg = f"--device {options.device} was asked for, but: {found.reason}"
        raise ConfigError(msg)
    size = options.num_processes
    if found.kind != "cpu" and size is not None and size > found.count:
        msg = (
            f"{size} ranks need {size} devices, but there are {found.count}; "
            f"use -n {found.count}, or --device cpu"
        )
        raise ConfigError(msg)
    return found


def _setup(crew: Crew, rank: int, environ: Mapping[str, str]) -> Setup:
    size = crew.pool.size
    forked = crew.options.start_method == "fork"
    # Raising the number of threads in a fork of a process that has used them hangs it for ever.
    threads = 1 if forked else cpu_threads_per_rank(size, _cores())
    return Setup(
        rank=rank,
        size=size,
        device=crew.devices.name(rank),
        threads=threads,
        nonce=crew.pool.nonce,
        store_path=str(crew.folder / "start"),
        environ=_environment(crew, rank, threads, environ),
        cwd=_cwd(),
        path=tuple(sys.path),
        connect=_CONNECT,
        disconnect=_DISCONNECT,
        share_threads=_SHARE_THREADS,
        connect_timeout=crew.options.connect_timeout,
    )


def _environment(
    crew: Crew, rank: int, threads: int, environ: Mapping[str, str]
) -> Mapping[str, str]:
    size = str(crew.pool.size)
    own = {
        "OMP_NUM_THREADS": str(threads),
        **environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": _LOOPBACK,
        DEVICE_NAME: crew.devices.name(rank),
    }
    if crew.options.precision is not None:
        own[PRECISION_NAME] = crew.options.precision
    return own


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cwd() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "/"


def _has_cuda(template: Template | None) -> bool:
    """Return whether the ranks' PyTorch can use CUDA; without a template they are this process."""
    if template is not None and template.ready is not None:
        return template.ready.cuda
    torch = sys.modules.get("torch")
    return torch is None or bool(torch.version.cuda)
