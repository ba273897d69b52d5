"""``launch``: run a function on every rank and get its value back."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from typing_extensions import TypeVarTuple, Unpack

from jupyter_accel.errors import ConfigError, Interrupted, WorkerError
from jupyter_accel.launcher import provider
from jupyter_accel.launcher.job import Job, Outcome
from jupyter_accel.launcher.launching import Work
from jupyter_accel.launcher.parcels.shipping import Parcel, pack, unpack
from jupyter_accel.launcher.stopping import Wishes, interruptible, interrupts_to
from jupyter_accel.launcher.worker import RankSide, Returned
from jupyter_accel.settings import LaunchOptions, size_in_bytes

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_CALL = "__accel_call__"
_VALUE = "value"
_ENTRY = "jupyter_accel.launcher.calling:call"
_TICK = 0.05  # seconds between two looks for an interrupt


class _Process:
    """The calls that ranks inherit when this process is forked for them, by number."""

    numbers = itertools.count(1)
    inherited: ClassVar[dict[int, Any]] = {}


def _on_ranks(function: Callable[..., T], args: Sequence[Any], options: LaunchOptions) -> list[T]:
    call = (function, tuple(args))
    launcher = provider.launcher()
    number = next(_Process.numbers)
    namespace = _namespace()
    if options.start_method == "fork":
        work = Work(_ENTRY, number)
        _Process.inherited[number] = call
    else:
        parcel = pack({_CALL: call}, namespace=namespace, follow=True, loose=True)
        work = Work(_ENTRY, None, parcel)
    wishes = Wishes()
    launcher.get_ready(options)
    with interrupts_to(wishes):
        try:
            crew = launcher.open(options, work.parcel)
        finally:
            _Process.inherited.pop(number, None)
        try:
            job = launcher.assign(crew, work, timeout=options.timeout)
            launcher.note(crew, state="running")
            outcome = _follow(job, crew.pool.size, wishes)
            return [_value(parcel, namespace) for parcel in outcome.parcels]
        finally:
            crew.close()


def launch_all_ranks(  # noqa: PLR0913 - the options of a launch
    function: Callable[[Unpack[Ts]], T],
    *args: Unpack[Ts],
    num_processes: int | None = None,
    start_method: str = "forkserver",
    precision: str | None = None,
    device: str | None = None,
    timeout: float | None = None,
    memory_limit: int | str | None = None,
) -> list[T]:
    """Call ``function(*args)`` on every rank; return the values in order of rank.

    The arguments are those of ``launch``.

    Raises:
        ConfigError: the options ask for what this machine has not.
        ShippingError: the function needs something that cannot travel.
        WorkerError: a rank failed; it carries the first cause.
        KeyboardInterrupt: the caller interrupted, and the ranks have been ended.
    """
    limit = size_in_bytes(memory_limit) if isinstance(memory_limit, str) else memory_limit
    options = LaunchOptions(
        num_processes=num_processes,
        start_method=start_method,
        precision=precision,
        device=device,
        timeout=timeout,
        memory_limit=limit,
    )
    return _on_ranks(function, args, options)


def launch(  # noqa: PLR0913 - the options of a launch
    function: Callable[[Unpack[Ts]], T],
    *args: Unpack[Ts],
    num_processes: int | None = None,
    start_method: str = "forkserver",
    precision: str | None = None,
    device: str | None = None,
    timeout: float | None = None,
    memory_limit: int | str | None = None,
) -> T:
    """Call ``function(*args)`` on every rank and return rank 0's value.

    Args:
        function: may be defined anywhere, in a notebook cell too; what it refers to travels.
        args: its positional arguments; use ``functools.partial`` for others.
        num_processes: number of ranks; one for each usable device, or 1 on CPU.
        start_method: ``"forkserver"``, ``"fork"`` or ``"spawn"``.
        precision: what ``Accelerator()`` takes by default: ``"no"``, ``"fp16"``, ``"bf16"``.
        device: ``"cpu"`` or ``"cuda"``.
        timeout: seconds until the ranks are ended.
        memory_limit: most that one rank may allocate, in bytes or as text such as ``"4GB"``.

    Raises:
        ConfigError: the options ask for what this machine has not.
        ShippingError: the function needs something that cannot travel.
        WorkerError: a rank failed; it carries the first cause.
        KeyboardInterrupt: the caller interrupted, and the ranks have been ended.
    """
    return launch_all_ranks(
        function,
        *args,
        num_processes=num_processes,
        start_method=start_method,
        precision=precision,
        device=device,
        timeout=timeout,
        memory_limit=memory_limit,
    )[0]


def notebook_launcher(  # noqa: PLR0913, PLR0917 - the arguments that Accelerate's users know
    function: Callable[..., T],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | None = None,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    **elastic: Any,
) -> T:
    """Call ``function(*args)`` on every rank, with the arguments of Accelerate's launcher.

    Unlike there, rank 0's value is returned, the CPU's ranks form a group, and no port is used:
    ``use_port`` and ``master_addr`` are accepted and have no effect on one machine.

    Raises:
        ConfigError: more than one machine is asked for, or restarts.
    """
    del use_port, master_addr
    if num_nodes != 1 or node_rank != 0:
        msg = f"num_nodes={num_nodes}: a notebook launches on its own machine only"
        raise ConfigError(msg)
    asked = {name: value for name, value in elastic.items() if value not in (None, 0, "static")}
    if asked:
        msg = f"notebook_launcher does not know {', '.join(asked)}; leave it out"
        raise ConfigError(msg)
    return launch(function, *args, num_processes=num_processes, precision=mixed_precision)


def call(task: Any, parcel: Any, side: RankSide) -> Returned:
    """Be the rank's side of ``launch``."""
    del side
    namespace = _namespace()
    if task is not None:
        function, args = _Process.inherited[task]
    else:
        values = unpack(parcel, namespace=namespace)
        function, args = values.pop(_CALL)  # type: ignore[misc]
        namespace.update(values)
    value = function(*args)
    return Returned(pack({_VALUE: value}, namespace=namespace, follow=False), {})


def _follow(job: Job, size: int, wishes: Wishes) -> Outcome:
    presenter = provider.presenter(size)
    job.pool.show_at_once(presenter.at_once)
    verdict = "ended"
    try:
        while not job.finished:
            if presenter.full:
                time.sleep(_TICK)  # the ranks wait as well, once their pipes are full
            events = [] if presenter.full else job.advance(_TICK)
            for _ in range(wishes.take()):
                events += job.interrupt()
            for event in events:
                presenter.show(event)
            presenter.tick()
        outcome = job.outcome()
        verdict = outcome.sentence
    finally:
        with interruptible():
            presenter.close(verdict, stopped=job.reason == "interrupt")
    if outcome.reason == "interrupt":
        raise Interrupted(verdict)
    if outcome.error is not None:
        raise _with_lines(outcome.error)
    return outcome


def _with_lines(error: WorkerError) -> WorkerError:
    """Show the rank's own traceback below the error in a script; a notebook shows it by itself."""
    if error.traceback and hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note("\n".join((f"In rank {error.rank}:", *error.traceback)))
    return error


def _value(parcel: Parcel | None, namespace: dict[str, Any]) -> Any:
    if parcel is None:
        return None  # the rank called sys.exit(0): it ended well, without a value
    return unpack(parcel, namespace=namespace)[_VALUE]


def _namespace() -> dict[str, Any]:
    return sys.modules["__main__"].__dict__
