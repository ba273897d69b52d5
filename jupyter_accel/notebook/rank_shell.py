"""The IPython shell of one rank: runs a cell there as the kernel would, and sends displays home."""

from __future__ import annotations

import ast
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from IPython.core.async_helpers import _pseudo_sync_runner
from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from jupyter_accel.errors import ShippingError
from jupyter_accel.launcher.messages import Failed
from jupyter_accel.launcher.parcels.shipping import Parcel, pack, unpack
from jupyter_accel.launcher.worker import RankSide, Returned, TracedFailure, text_of
from jupyter_accel.notebook import relay_comm

VALUE = "__accel_value__"
_SHELL_FILE = InteractiveShell.run_code.__code__.co_filename
_HELPERS = ("rank", "world_size", "local_rank", "device")


@dataclass(frozen=True, slots=True)
class CellTask:
    """One cell for the ranks.

    Attributes:
        raw: the body as the user wrote it, below the magic's line.
        code: the same with IPython's syntax turned into Python, lines where they were.
        expression: the body is one expression whose value goes back.
        number: the cell's prompt number, for tracebacks.
        written: names that the body sets.
        pull: names that go back to the kernel.
        pull_all: all that the body set and that can travel goes back.
        all_ranks: every rank sends its value back, not only rank 0.
        seeds: states of the kernel's random generators, by library.
        colors: IPython's colour scheme.
        cells: numbers of the cells that shipped functions come from, by file name.
    """

    raw: str
    code: str
    expression: bool
    number: int
    written: tuple[str, ...] = ()
    pull: tuple[str, ...] = ()
    pull_all: bool = False
    all_ranks: bool = False
    seeds: Mapping[str, Any] = field(default_factory=dict)
    colors: str = "neutral"
    cells: Mapping[str, int] = field(default_factory=dict)


class _Publisher(DisplayPublisher):
    """Sends what is displayed in a rank to the kernel, in order with the rank's text."""

    side: RankSide | None = None

    def publish(  # type: ignore[override]
        self,
        data: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        *,
        transient: Mapping[str, Any] | None = None,
        update: bool = False,
        **_more: Any,
    ) -> None:
        """Send one bundle of representations."""
        content = {"data": data, "metadata": metadata or {}, "transient": transient or {}}
        if self.side is not None:
            self.side.show("update" if update else "display", content)

    def clear_output(self, wait: bool = False) -> None:  # noqa: FBT001, FBT002 - IPython's own
        """Clear the launching cell's output."""
        if self.side is not None:
            self.side.show("clear", {"wait": wait})


class _Hook(DisplayHook):
    """Sends the value of a cell's last expression, formatted here."""

    side: RankSide | None = None

    def write_output_prompt(self) -> None:
        """Leave the prompt to the kernel."""

    def write_format_data(
        self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None
    ) -> None:
        """Send the representations of the value."""
        if self.side is not None:
            self.side.show("result", {"data": format_dict, "metadata": md_dict or {}})

    def finish_displayhook(self) -> None:
        """Write no end of line: the kernel's output has none either."""


class _Compiler(CachingCompiler):
    """Names code by its cell: stacks that Python itself writes show no other name."""

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        """Return the name that a notebook shows."""
        del raw_code, transformed_code
        return f"Cell In[{number}]"

    def name_cells(self, numbers: Mapping[str, int]) -> None:
        """Call the kernel's files of these names by the numbers of their cells."""
        self._filename_map.update(numbers)


class _KeepValue(ast.NodeTransformer):
    """Gives the value of an expression a name, so that tracebacks show just the expression."""

    def visit_Module(self, node: ast.Module) -> ast.Module:
        """Turn the last expression into an assignment."""
        last = node.body[-1]
        assert isinstance(last, ast.Expr)  # noqa: S101 - the kernel has looked
        target = ast.copy_location(ast.Name(VALUE, ast.Store()), last)
        node.body[-1] = ast.copy_location(ast.Assign([target], last.value), last)
        return node


class RankShell(InteractiveShell):
    """An IPython shell without terminal and history, whose errors are kept and not printed."""

    compile: _Compiler
    kept: BaseException | None = None
    kept_lines: tuple[str, ...] = ()

    def showtraceback(
        self,
        exc_tuple: Any = None,
        filename: str | None = None,
        tb_offset: int | None = None,
        exception_only: bool = False,  # noqa: FBT001, FBT002
        running_compiled_code: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        """Keep the lines also of what IPython shows without them: exits, and groups."""
        del exception_only
        kind, error, trace = self._get_exc_info(exc_tuple)
        if _with_group(error):
            while trace is not None and trace.tb_frame.f_code.co_filename == _SHELL_FILE:
                trace = trace.tb_next
            lines = "".join(traceback.format_exception(kind, error, trace)).splitlines()
            self._showtraceback(kind, error, lines)
            return
        super().showtraceback(
            exc_tuple, filename, tb_offset, running_compiled_code=running_compiled_code
        )

    def _showtraceback(
        self, etype: type[BaseException], evalue: BaseException, stb: list[str]
    ) -> None:
        """Keep a formatted traceback instead of printing it."""
        del etype
        self.kept = evalue
        self.kept_lines = tuple("\n".join(stb).split("\n"))

    def show_usage_error(self, exc: BaseException) -> None:
        """Leave it to the kernel to show the message of a misused magic, once."""

    def enable_gui(self, gui: str | None = None) -> None:
        """Start no event loop: ``%matplotlib inline`` asks for none, and a rank has no screen."""

    def ask_exit(self) -> None:
        """Do what ``exit()`` and ``quit()`` mean in a rank: end its work here, and well."""
        raise SystemExit(0)

    def bind(self, side: RankSide, task: CellTask) -> None:
        """Connect displays to this rank, and number the cell as in the notebook."""
        _Publisher.side = _Hook.side = side
        self.execution_count = task.number
        self.colors = task.colors
        self.compile.name_cells(task.cells)
        self.kept, self.kept_lines = None, ()

    def execute(self, task: CellTask) -> None:
        """Run a cell; raise its failure with the traceback as this shell formats it.

        ``sys.exit(0)`` is an end like any other: what has been set until then can go back.
        """
        self.ast_transformers = [_KeepValue()] if task.expression else []
        coroutine = self.run_cell_async(
            task.raw, store_history=False, transformed_cell=task.code, silent=task.expression
        )
        waits = self.should_run_async(task.raw, transformed_cell=task.code)
        run: Callable[[Any], Any] = self.loop_runner if waits else _pseudo_sync_runner
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="To exit: use")
            try:
                result = run(coroutine)
            finally:
                self.events.trigger("post_execute")  # figures that are still open are shown now
        if not task.expression:
            self.events.trigger("post_run_cell", result)
        error = result.error_before_exec or result.error_in_exec
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            raise TracedFailure(self._failed(error))

    def _failed(self, error: BaseException) -> Failed:
        frames = traceback.extract_tb(error.__traceback__)
        code = error.code if isinstance(error, SystemExit) else None
        exit_code = code if isinstance(code, int) else int(bool(code))
        return Failed(
            ename=type(error).__name__,
            message=text_of(error),
            traceback=self.kept_lines,
            where=f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "",
            at_ns=time.monotonic_ns(),
            exit_code=exit_code if isinstance(error, SystemExit) else None,
        )


def prepare() -> None:
    """Make the shell that ranks inherit; called in the template before any rank exists."""
    InteractiveShell.clear_instance()
    _new_shell()


def rehearse() -> None:
    """Format one traceback: the first of a process loads what colours code, for half a second."""
    shell = _current_shell()
    shell.run_cell("raise RuntimeError", store_history=False, silent=True)
    shell.kept, shell.kept_lines = None, ()


def adopt_kernel() -> None:
    """Make a shell around the names of a forked kernel."""
    main = sys.modules["__main__"]
    kernel = InteractiveShell.instance()
    type(kernel).clear_instance()
    shell = _new_shell(user_module=main, user_ns=main.__dict__)
    shell.compile.name_cells(kernel.compile._filename_map)  # noqa: SLF001 - has no other way out


def run_cell(task: CellTask, parcel: Parcel, side: RankSide) -> Returned:
    """Run one cell on this rank: the entry that the launcher calls."""
    shell = _current_shell()
    names: dict[str, Any] = shell.user_ns
    shell.bind(side, task)
    relay_comm.use(side)
    names.update(unpack(parcel, namespace=names))
    _restore(task.seeds)
    names.update(_helpers(side))
    shell.execute(task)
    shell.displayhook.flush()
    return _give_back(task, names, side)


def _give_back(task: CellTask, names: dict[str, Any], side: RankSide) -> Returned:
    """Pack what goes back to the kernel, and say what stays."""
    first = side.world.rank == 0
    if task.expression:
        value = {task.raw: names.pop(VALUE, None)} if first or task.all_ranks else {}
        return Returned(pack(value, namespace=names, follow=False), {})
    if not first:
        return Returned(Parcel(b""), {})
    set_here = [name for name in task.written if name in names and name not in _HELPERS]
    wanted = dict.fromkeys([*task.pull, *(set_here if task.pull_all else ())])
    missing = [name for name in wanted if name not in names]
    parcel, skipped = _pack_what_can([name for name in wanted if name in names], names)
    gone = {*parcel.names, *skipped}
    stayed = [name for name in set_here if name not in gone and not _trivial(names[name])]
    info = {"pulled": parcel.names, "stayed": stayed, "skipped": skipped, "missing": missing}
    return Returned(parcel, info)


def _pack_what_can(wanted: list[str], names: dict[str, Any]) -> tuple[Parcel, dict[str, str]]:
    """Pack names; those that cannot travel are left out, with the reason."""
    skipped: dict[str, str] = {}
    if not wanted:  # most cells; the first use of the pickling takes some milliseconds in a fork
        return Parcel(b""), skipped
    while True:
        values = {name: names[name] for name in wanted if name not in skipped}
        try:
            return pack(values, namespace=names, follow=False), skipped
        except ShippingError as error:
            skipped[error.name] = str(error)


def _trivial(value: object) -> bool:
    """Whether nobody would look for a name in the kernel: modules, functions and classes."""
    return (callable(value) and hasattr(value, "__qualname__")) or isinstance(value, ModuleType)


def _helpers(side: RankSide) -> dict[str, Any]:
    world = side.world
    torch = sys.modules.get("torch")
    device = world.device if torch is None else torch.device(world.device)
    values = (world.rank, world.size, world.local_rank, device)
    return dict(zip(_HELPERS, values, strict=True))


def _restore(seeds: Mapping[str, Any]) -> None:
    """Set the random generators as they are in the kernel, so that seeds set there count."""
    if "random" in seeds:
        random.setstate(seeds["random"])
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if "numpy" in seeds and numpy is not None:
        numpy.random.set_state(seeds["numpy"])
    if "torch" in seeds and torch is not None:
        state = torch.frombuffer(bytearray(seeds["torch"]), dtype=torch.uint8)
        torch.set_rng_state(state)


def _with_group(error: BaseException | None) -> bool:
    """Whether a group of exceptions is among an error and what it came from."""
    if error is None:
        return False
    return hasattr(error, "exceptions") or _with_group(error.__cause__ or error.__context__)


def _current_shell() -> RankShell:
    return RankShell.instance() if RankShell.initialized() else _new_shell()


def _new_shell(**more: Any) -> RankShell:
    config = Config()
    config.HistoryManager.enabled = False
    shell: RankShell = RankShell.instance(
        config=config,
        display_pub_class=_Publisher,
        displayhook_class=_Hook,
        compiler_class=_Compiler,
        **more,
    )
    shell.builtin_trap.activate()
    shell.register_magic_function(_refuse, "line_cell", "accel_launch")  # type: ignore[arg-type] # IPython declares it for no arguments
    return shell


def _refuse(line: str, cell: str | None = None) -> None:
    """Stand in for the launching magics where they make no sense."""
    del line, cell
    msg = "this code runs in a rank already; launch from the kernel instead"
    raise UsageError(msg)
