"""Section: where the milliseconds of one launch go, by the library's own account."""

from __future__ import annotations

import json
import statistics
import time
from typing import TYPE_CHECKING

import cells
from cases import prepare, reported
from kernels import Kernel, opened
from tables import Table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from contenders import Contender

BEGIN = "stages: "
SETTLE_SECONDS = 8.0  # what the template imports and tidies in the background after it is ready

# Prints {stage: seconds since the launch began}; the only place that knows the library's insides.
ASK = f"""
import json as _json
try:
    from jupyter_accel.launcher import timeline as _timeline
    print({BEGIN!r} + _json.dumps(dict(_timeline.last())))
except (ImportError, AttributeError, TypeError, ValueError):
    print({BEGIN!r} + "{{}}")
""".strip()


def stages(contenders: Sequence[Contender], folder: Path, repeats: int) -> Table:
    """Ask the library, after each of several launches, when it reached which stage."""
    columns = ["stage", "reached after", "of which since the stage before"]
    table = Table("Stages of a launch with jupyter-accel", columns)
    for contender in (one for one in contenders if one.key == "ours"):
        with reported(table, contender), opened(folder) as kernel:
            prepare(kernel, contender, 2)
            time.sleep(SETTLE_SECONDS)
            _add_rows(table, [_once(kernel, contender) for _ in range(repeats + 2)][2:])
    if not table.rows:
        table.notes.append("no timeline: ours is absent, or this version keeps none")
    return table


def _once(kernel: Kernel, contender: Contender) -> dict[str, float]:
    kernel.need(contender.cell(cells.REDUCE, 2), expect=cells.CHECKED)
    shown = kernel.need(ASK, expect=BEGIN).shown
    answer = json.loads(shown.partition(BEGIN)[2].splitlines()[0])
    return {str(stage): float(seconds) for stage, seconds in answer.items()}


def _add_rows(table: Table, seen: Sequence[dict[str, float]]) -> None:
    before = 0.0
    for stage in seen[-1]:
        values = [one[stage] for one in seen if stage in one]
        after = statistics.median(values)
        table.rows.append([stage, f"{1000 * after:.1f} ms", f"{1000 * (after - before):.1f} ms"])
        table.samples[stage] = values
        before = after
    if seen[-1]:
        table.notes.append(f"medians of {len(seen)} launches")
