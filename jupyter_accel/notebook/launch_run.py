"""One launch from the notebook: from the cell that was read to what comes back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from jupyter_accel.errors import ConfigError, Interrupted, ShippingError
from jupyter_accel.launcher import timeline
from jupyter_accel.launcher.events import Notice
from jupyter_accel.launcher.launching import Crew, Launcher, Work
from jupyter_accel.launcher.parcels.shipping import unpack
from jupyter_accel.launcher.stopping import Wishes
from jupyter_accel.notebook import cell as cells
from jupyter_accel.notebook.kept import Kept, KeptWorkers
from jupyter_accel.notebook.publishing import Publisher
from jupyter_accel.notebook.show import NotebookPresenter, whereabouts

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_UNFINISHED = "ended"


class LaunchRun:
    """Starts the ranks when entered, and lets go of them when left.

    Args:
        shell: the kernel's shell.
        launcher: starts ranks.
        workers: the kept ones of this kernel.
        cell: what to run.
    """

    def __init__(
        self, shell: InteractiveShell, launcher: Launcher, workers: KeptWorkers, cell: cells.Cell
    ) -> None:
        self._shell = shell
        self._launcher = launcher
        self._workers = workers
        self._cell = cell
        self._kept: Kept | None = None
        self._button: Any = None
        self._concluded = False
        self.wishes = Wishes()

    def __enter__(self) -> Self:
        """Start the ranks and give them their work.

        Raises:
            ConfigError: the options ask for what cannot be.
            ShippingError: a name cannot travel.
        """
        cell = self._cell
        self._timeline = timeline.begin()
        self._kept = self._find_kept()
        fresh = self._kept is None
        own = self._kept.names if self._kept else ()
        work = cells.work(self._shell, cell, own=own, seed=fresh)
        self._timeline.mark("names captured")
        self._crew = self._kept.crew if self._kept else self._start(work)
        self._timeline.mark("fork asked for")
        try:
            _check_ranks(cell.options.ranks, self._crew.pool.size)
            self.job = self._launcher.assign(
                self._crew,
                work,
                keep=self._kept is not None,
                timeout=cell.options.launch.timeout,
            )
            self._timeline.mark("work sent")
        except BaseException:
            self._let_go()
            raise
        if self._kept is not None:
            self._kept.names |= set(cell.names.written)
        options = cell.options
        self.presenter = NotebookPresenter(
            Publisher(self._shell),
            size=self._crew.pool.size,
            shown=options.ranks,
            ordered=options.ordered,
            headline=_headline(self._crew, cell),
        )
        self._crew.pool.show_at_once(self.presenter.at_once)
        self.presenter.begin()
        state = "kept" if self._kept else "running"
        name, kernel = options.keep, _kernel_id(self._shell)
        self._launcher.note(self._crew, state=state, name=name, kernel_id=kernel)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let go of the ranks, kept workers aside, and show how it ended."""
        del kind, traceback
        try:
            self._take_button_away()
            if not self._concluded:
                self._conclude(f"{_UNFINISHED}: {type(error).__name__}" if error else _UNFINISHED)
        finally:
            self._let_go()
            self._timeline.mark("all let go")

    def offer_button(self) -> None:
        """Show a Stop button: the job runs for a while."""
        if self._cell.options.ordered or not _watched(self._shell):
            return
        from jupyter_accel.notebook.stop_button import StopButton  # noqa: PLC0415 - slow import

        self._button = StopButton(_headline(self._crew, self._cell), self.wishes.stop)
        self.presenter.offer_controls(self._button.bundle())

    def result(self) -> Any:
        """Put the names that come back into the kernel; return the value of an expression.

        Raises:
            Interrupted: the job was stopped.
            WorkerError: a rank failed.
            ShippingError: a name that was asked for did not come; the others did.
        """
        self._timeline.mark("end seen")
        self._timeline.add_ranks(self._crew.pool)
        outcome = self.job.outcome()
        self._take_button_away()
        if self._kept is not None and (outcome.failures or outcome.reason):
            self._crew.broken = True
        if outcome.reason == "interrupt":
            self._conclude(outcome.sentence)
            raise Interrupted(outcome.sentence)
        if outcome.error is not None:
            self._conclude(outcome.sentence)
            raise outcome.error
        namespace = self._shell.user_ns
        values = [
            unpack(parcel, namespace=namespace) if parcel is not None else {}
            for parcel in outcome.parcels
        ]
        info = outcome.done[0].info if outcome.done[0] is not None else {}
        if self._cell.expression:
            self._conclude(outcome.sentence)
            results = [next(iter(value.values()), None) for value in values]
            return results if self._cell.options.all_ranks else results[0]
        namespace.update(values[0])
        self._conclude(outcome.sentence + whereabouts(info))
        self._account_for(info)
        return None

    def _account_for(self, info: Mapping[str, Any]) -> None:
        """Say why names stay behind; fail if they were asked for, once all others have come."""
        asked, skipped = self._cell.options.pull, info.get("skipped", {})
        lost = [skipped[name] for name in asked if name in skipped]
        if missing := info.get("missing"):
            lost.append(f"--pull asks for {', '.join(missing)}, which this cell did not set")
        for name, reason in skipped.items():
            if name not in asked:
                self.presenter.show(Notice(reason))
        self.presenter.tick(ended=True)
        if lost:
            raise ShippingError(" ".join(lost))

    def _find_kept(self) -> Kept | None:
        """Return the kept workers that the cell asks for, if they are there."""
        name, launch = self._cell.options.keep, self._cell.options.launch
        known = name in self._workers
        kept = self._workers.living(name) if name else None
        if known and kept is None:
            msg = (
                f"the kept workers {name!r} have ended since the last cell, and their variables "
                "with them; run this cell again to start new ones"
            )
            raise ConfigError(msg)
        if kept is not None and launch.num_processes not in {None, kept.crew.pool.size}:
            msg = (
                f"the kept workers {name!r} are {kept.crew.words}; leave -n out, "
                f"or run %accel_close {name} first"
            )
            raise ConfigError(msg)
        if kept is None and name and launch.start_method == "fork":
            msg = "kept workers cannot be forks of the kernel: later cells would not reach them"
            raise ConfigError(msg)
        return kept

    def _start(self, work: Work) -> Crew:
        """Start the ranks, and keep them if the cell asks for that."""
        name = self._cell.options.keep
        crew = self._launcher.open(self._cell.options.launch, work.parcel)
        if name:
            self._kept = self._workers.add(name, crew)
        return crew

    def _take_button_away(self) -> None:
        if self._button is not None:
            self._button.close()
            self._button = None

    def _conclude(self, words: str) -> None:
        self._concluded = True
        self.presenter.release()
        self.presenter.finish(words, timed=not self._cell.options.ordered)

    def _let_go(self) -> None:
        if self._kept is None:
            self._crew.close()
        else:
            self._workers.living(self._cell.options.keep)


def _check_ranks(shown: tuple[int, ...] | None, size: int) -> None:
    absent = [rank for rank in shown or () if not 0 <= rank < size]
    if absent:
        there = f"ranks 0 to {size - 1}" if size > 1 else "rank 0 only"
        msg = f"--ranks asks for {', '.join(map(str, absent))}, but there are {there}"
        raise ConfigError(msg if size > 1 else msg.replace("there are", "there is"))


def _watched(shell: InteractiveShell) -> bool:
    """Return whether this cell was sent by a notebook that somebody looks at.

    Programs that run notebooks, such as nbclient and papermill, send cells without metadata, and
    keep the state of every widget in the file.
    """
    get_parent = getattr(shell, "get_parent", None)
    return get_parent is not None and bool((get_parent() or {}).get("metadata"))


def _kernel_id(shell: InteractiveShell) -> str:
    """Return Jupyter's id of this kernel, which names its connection file; empty without one."""
    app = getattr(getattr(shell, "kernel", None), "parent", None)
    return Path(getattr(app, "connection_file", "")).stem.removeprefix("kernel-")


def _headline(crew: Crew, cell: cells.Cell) -> str:
    options = cell.options
    words = [f"{crew.words} on {crew.devices.kind}"]
    if options.launch.start_method != "forkserver":
        words.append(options.launch.start_method)
    if options.launch.precision:
        words.append(options.launch.precision)
    if options.keep:
        words.append(f"kept as {options.keep}")
    if options.launch.num_processes is None and not options.keep:
        words.append(crew.devices.reason)
    return " · ".join(words)
