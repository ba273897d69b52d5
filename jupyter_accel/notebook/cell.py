"""Turns a magic's line and body into work for the ranks."""

from __future__ import annotations

import ast
import difflib
import random
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jupyter_accel.errors import ConfigError
from jupyter_accel.launcher.launching import Work
from jupyter_accel.launcher.parcels.capture import CellNames, capture, names_in
from jupyter_accel.notebook.options import MagicOptions, parse

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

ENTRY = "jupyter_accel.notebook.rank_shell:run_cell"
_HIDDEN = frozenset(
    ("In", "get_ipython", "exit", "quit", "open", "rank", "world_size", "local_rank", "device")
)


@dataclass(frozen=True, slots=True)
class Cell:
    """A launching cell that has been read, and whose syntax is sound."""

    options: MagicOptions
    raw: str
    code: str
    names: CellNames
    expression: bool
    number: int
    local: Mapping[str, Any] = field(default_factory=dict)


def read(
    shell: InteractiveShell, line: str, body: str | None, *, skipped: int = 1
) -> Cell | MagicOptions:
    """Read a cell, or an expression where ``body`` is None; for ``--help`` only the options.

    Args:
        shell: the kernel's shell.
        line: what follows the magic on its line.
        body: the cell below the magic.
        skipped: rows of the cell above the body, so that line numbers match what is seen.

    Raises:
        ConfigError: a mistake in the line.
        SyntaxError: a mistake in the body, at its line of the cell.
    """
    options, rest = parse(line)
    if options.help:
        return options
    expression = body is None
    _check_form(options, rest, expression=expression)
    raw = rest if body is None else body
    code = _python(shell, raw, skipped=0 if expression else skipped)
    number = _prompt_number(shell)
    name = shell.compile.cache(code, number, raw_code=code)
    tree = _expression(code, name) if expression else _parsed(code, name, "exec")
    names = names_in(tree)
    for wanted in options.pull:
        _check_pull(wanted, names.written, shell.user_ns)
    return Cell(options, raw, code, names, expression, number)


def _check_form(options: MagicOptions, rest: str, *, expression: bool) -> None:
    """Refuse options that do not go with a cell, or with an expression."""
    if expression and not rest:
        msg = "nothing to run: write %accel_launch train(), or %%accel_launch above a cell"
        raise ConfigError(msg)
    if not expression and rest:
        msg = f"{rest!r} after the options is not understood; the code goes below this line"
        raise ConfigError(msg)
    if options.all_ranks and not expression:
        msg = "--all-ranks is for %accel_launch with an expression; in a cell use --pull"
        raise ConfigError(msg)
    if expression and (options.pull or options.pull_all):
        msg = "--pull is for cells; %accel_launch returns the value of its expression"
        raise ConfigError(msg)


def _check_pull(wanted: str, written: Collection[str], namespace: Mapping[str, Any]) -> None:
    """Refuse a name that is misspelt before the ranks have worked for it."""
    near = difflib.get_close_matches(wanted, written, n=1, cutoff=0.75)
    if near and wanted not in written and wanted not in namespace:
        msg = f"--pull {wanted}: the cell sets no such name; did you mean {near[0]}?"
        raise ConfigError(msg)


def _parsed(code: str, name: str, mode: str) -> Any:
    return compile(code, name, mode, ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def _expression(code: str, name: str) -> ast.Module:
    try:
        value: ast.expr = _parsed(code, name, "eval").body
    except SyntaxError as error:
        msg = f"{code!r} is not an expression ({error.msg}); statements go below %%accel_launch"
        raise ConfigError(msg) from None
    return ast.Module([ast.copy_location(ast.Expr(value), value)], [])


def work(
    shell: InteractiveShell, cell: Cell, *, own: Collection[str] = (), seed: bool = True
) -> Work:
    """Make the work: what the ranks need of the kernel's names, and what they are to do.

    Args:
        shell: the kernel's shell.
        cell: what to run.
        own: names that kept workers have set themselves and go on with.
        seed: also send the states of the random generators.

    Raises:
        ShippingError: a name that the cell needs cannot travel.
    """
    # Needed on the ranks' side only: this module must not pull a second shell into the kernel.
    from jupyter_accel.notebook.rank_shell import CellTask  # noqa: PLC0415

    options = cell.options
    forked = options.launch.start_method == "fork"
    task = CellTask(
        raw=cell.raw,
        code=cell.code,
        expression=cell.expression,
        number=cell.number,
        written=() if cell.expression else cell.names.written,
        pull=options.pull,
        pull_all=options.pull_all,
        all_ranks=options.all_ranks,
        # Python reseeds `random` in a fork, so forks of the kernel need the states as well.
        seeds=_seeds() if seed else {},
        colors=shell.colors,
    )
    names = cell.names
    if forked:  # the ranks have every global already, but not the variables of a function
        names = CellNames(read=names.read & cell.local.keys(), written=())
    ignore = _HIDDEN | frozenset(own)
    parcel = capture(names, shell.user_ns, local=cell.local, ignore=ignore, loose=True)
    return Work(ENTRY, replace(task, cells=_cells_of(shell, parcel.sources)), parcel)


def _cells_of(shell: InteractiveShell, files: Iterable[str]) -> dict[str, int]:
    """Return the number of the cell that each of these files stands for."""
    numbers = shell.compile._filename_map  # noqa: SLF001 - IPython only gives it out formatted
    return {name: numbers[name] for name in files if name in numbers}


def _python(shell: InteractiveShell, raw: str, *, skipped: int) -> str:
    """Turn IPython's syntax into Python, with as many empty rows above as the cell has."""
    code: str = shell.transform_cell(raw)
    return "\n" * skipped + code if skipped else code.strip()


def _prompt_number(shell: InteractiveShell) -> int:
    """Return the number in the prompt of the cell that is running."""
    history = shell.history_manager
    return max(1, len(history.input_hist_parsed) - 1) if history else shell.execution_count


def _seeds() -> dict[str, Any]:
    """Return the states of the random generators that this process has loaded."""
    seeds: dict[str, Any] = {"random": random.getstate()}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and "numpy.random" in sys.modules:
        seeds["numpy"] = numpy.random.get_state()
    if torch is not None and hasattr(torch, "get_rng_state"):
        seeds["torch"] = torch.get_rng_state().numpy().tobytes()
    return seeds
