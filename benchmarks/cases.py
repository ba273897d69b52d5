"""Sections beside the main table: loading, threads used before, the first error."""

from __future__ import annotations

import html
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import cells
from kernels import READY_LIMIT, CellFailedError, Kernel, Ran, opened
from tables import Table, milliseconds, over

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from contenders import Contender

KERNELS = 5
ERROR_ROUNDS = 3
ANSWERED = 4.0
# "rank 1", "[default0]: rank : 1", "engine=1", "[1:execute]": any name that leads to the rank.
_RANK_ONE = re.compile(r"(?i)\b(rank|engine)\W{0,12}1\b|\[1:")
# As a line of code of its own, with an arrow, a number or a rank before it; not inside a string.
_THE_LINE = re.compile(rf"(?im)^[^a-z'\"]*(rank)?[^a-z'\"]*{re.escape(cells.FAILING_LINE)}\s*$")


def prepare(kernel: Kernel, contender: Contender, ranks: int) -> float:
    """Make a contender ready in a kernel, in how many seconds."""
    begin = time.perf_counter()
    for cell in contender.ready(ranks):
        kernel.need(cell)
    time.sleep(contender.settle)
    while contender.probe and kernel.need(contender.probe).seconds > ANSWERED:
        if time.perf_counter() - begin > READY_LIMIT:
            msg = f"{contender.label}: workers did not answer in {READY_LIMIT:.0f} s"
            raise CellFailedError(msg)
    return time.perf_counter() - begin


@contextmanager
def reported(table: Table, contender: Contender) -> Iterator[None]:
    """Turn the failure of a contender into a row and a note, and go on with the others."""
    try:
        yield
    except (CellFailedError, RuntimeError) as error:
        table.rows.append([contender.label, "failed", *["-"] * (len(table.columns) - 2)])
        table.notes.append(f"{contender.label} failed: {' '.join(str(error).split())[-600:]}")


def succeeds(table: Table, contender: Contender, action: Callable[[], None]) -> bool:
    """Do one step of a contender; say whether it can go on."""
    with reported(table, contender):
        action()
        return True
    return False


def extension_load(contenders: Sequence[Contender], folder: Path) -> Table:
    """Time ``%load_ext`` in fresh kernels, and the first launch right after it."""
    table = Table("Loading the extension", ["what", "time"])
    ours = [contender for contender in contenders if contender.key == "ours"]
    if not ours:
        table.notes.append("ours was not asked for, or is not installed")
        return table
    load, first, torch_seen = [], [], False
    for _ in range(KERNELS):
        with opened(folder) as kernel:
            plain = [kernel.need(cells.PLAIN).seconds for _ in range(3)]
            load += over([prepare(kernel, ours[0], 2)], plain)
            seen = kernel.need("import sys; print('torch' in sys.modules)").shown
            torch_seen = torch_seen or "True" in seen
            cell = ours[0].cell(cells.REDUCE, 2)
            first.append(kernel.need(cell, expect=cells.CHECKED).seconds)
    imports = [_import_torch() for _ in range(KERNELS)]
    table.rows = [
        ["%load_ext jupyter_accel, over a plain cell", milliseconds(load)],
        ["torch in the kernel's sys.modules afterwards", "yes" if torch_seen else "no"],
        ["first launch, sent at once after it (template still starting)", milliseconds(first)],
        ["python -c 'import torch', whole process", milliseconds(imports)],
    ]
    table.notes.append(f"median (min-max) of {KERNELS} fresh kernels, or processes")
    table.samples = {"load": load, "first launch": first, "import torch": imports}
    return table


def _import_torch() -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, timeout=120)
    return time.perf_counter() - begin


def busy_kernel(contenders: Sequence[Contender], folder: Path, limit: float) -> Table:
    """Launch training steps after the kernel itself has used several threads."""
    columns = ["contender", "outcome", "time"]
    table = Table("Launch after a threaded matmul and backward in the kernel", columns)
    for contender in contenders:
        with reported(table, contender):
            ran = _after_threads(contender, folder, limit)
            trained = ran.status == "ok" and cells.TRAINED in ran.shown
            outcome = "finishes" if trained else ran.status
            table.rows.append([contender.label, outcome, f"{ran.seconds:.2f} s"])
            table.samples[contender.key] = [ran.seconds]
    table.notes += [
        "each rank runs a 1000 x 1000 matmul, its backward, and an all-reduce of the gradient",
        f"hangs: not finished after {limit:.0f} s, kernel killed; kept workers start before",
    ]
    return table


def _after_threads(contender: Contender, folder: Path, limit: float) -> Ran:
    with opened(folder) as kernel:
        prepare(kernel, contender, 2)
        kernel.need(contender.before_plain or cells.PLAIN)
        kernel.need(cells.BUSY_KERNEL)
        kernel.need(contender.before_launch or cells.PLAIN)
        return kernel.run(contender.cell(cells.BUSY_RANK, 2), limit=limit)


def first_error(contenders: Sequence[Contender], folder: Path, limit: float) -> Table:
    """Let rank 1 raise while rank 0 waits in an all-reduce."""
    columns = ["contender", "cell ends", "as an error", "shows the line", "names the rank"]
    table = Table("Time until the error of one rank is shown, others waiting", columns)
    for contender in contenders:
        with reported(table, contender):
            runs = _failures(contender, folder, limit)
            table.rows.append([contender.label, *_judge(runs, limit)])
            table.samples[contender.key] = [ran.seconds for ran in runs]
    table.notes.append(
        "after one launch that ended well; the line and the rank are looked for in all that the"
        f" cell shows; limit {limit:.0f} s, kernel killed then; kept workers are started anew"
        f" for each of up to {ERROR_ROUNDS} runs"
    )
    return table


def _failures(contender: Contender, folder: Path, limit: float) -> list[Ran]:
    runs: list[Ran] = []
    while len(runs) < ERROR_ROUNDS and (not runs or runs[-1].seconds < limit / 3):
        with opened(folder, contender.farewell) as kernel:
            prepare(kernel, contender, 2)
            kernel.need(contender.cell(cells.REDUCE, 2), expect=cells.CHECKED)
            runs.append(kernel.run(contender.cell(cells.FAILING, 2), limit=limit))
    return runs


def _judge(runs: Sequence[Ran], limit: float) -> list[str]:
    last = runs[-1]
    if last.status == "hangs":
        ends = f"not within {limit:.0f} s"
    else:
        ends = milliseconds([ran.seconds for ran in runs])
    errors = [ran.status == "error" for ran in runs]
    lines = [_THE_LINE.search(html.unescape(ran.shown)) is not None for ran in runs]
    ranks = [_RANK_ONE.search(ran.shown) is not None for ran in runs]
    return [ends, *(f"{sum(seen)} of {len(runs)}" for seen in (errors, lines, ranks))]
