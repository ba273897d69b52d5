"""Compare ways to run a notebook cell on several ranks, side by side, in real Jupyter kernels.

Run it as ``python benchmarks/launch.py``; the options are in README.md beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import cases
import cells
import large
import stages
from contenders import ALL, KEPT, ONE_SHOT, Contender
from kernels import REPOSITORY, Kernel, isolated, opened
from tables import Table, milliseconds, over

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WARM_UPS = 2
RANKS = 2


@dataclass(slots=True)
class Runner:
    """A contender in its own kernel, with the times it has collected."""

    contender: Contender
    kernel: Kernel
    ready: float
    first: float
    plain: list[float]
    launches: list[float]
    again: list[float]

    def round(self) -> None:
        """Time one plain cell and one launch."""
        self.plain.append(self._plain())
        self.launches.append(self._launch())

    def _plain(self) -> float:
        if self.contender.before_plain:
            self.kernel.need(self.contender.before_plain)
        return self.kernel.need(cells.PLAIN, expect="plain").seconds

    def _launch(self) -> float:
        if self.contender.before_launch:
            self.kernel.need(self.contender.before_launch)
        cell = self.contender.cell(cells.REDUCE, RANKS)
        return self.kernel.need(cell, expect=cells.CHECKED).seconds

    def repeat(self, times: int) -> None:
        """Time launches one right after the other."""
        self.again = [self._launch() for _ in range(times)]


def start(contender: Contender, folder: Path, stack: ExitStack) -> Runner:
    """Open a kernel, make the contender ready in it, and launch once."""
    kernel = stack.enter_context(opened(folder, contender.farewell))
    ready = cases.prepare(kernel, contender, RANKS)
    first = kernel.need(contender.cell(cells.REDUCE, RANKS), expect=cells.CHECKED).seconds
    kernel.need(contender.before_plain or cells.PLAIN)
    # A training notebook has imported torch itself, whatever the launcher needs.
    kernel.need("import torch")
    return Runner(contender, kernel, ready, first, [], [], [])


def compare_launches(contenders: Sequence[Contender], repeats: int, folder: Path) -> Table:
    """Time the same cell with each contender in turn, round after round."""
    columns = ["contender", "kind", "group", "over a plain cell", "back to back", "plain cell"]
    columns += ["made ready in", "first launch"]
    table = Table(f"Launch of a cell on {RANKS} ranks with one all-reduce", columns)
    with ExitStack() as stack:
        runners: list[Runner] = []
        for contender in contenders:
            with cases.reported(table, contender):
                runners.append(start(contender, folder, stack))
        runners = _take_turns(table, runners, repeats)
    for runner in runners:
        _add_row(table, runner)
    _add_ratio(table, runners)
    table.notes += [contender.note for contender in contenders if contender.note]
    table.notes += [
        f"median (min-max) of {repeats} rounds, contenders in turn in each round",
        "from sending the cell to seeing it idle, less the median plain cell of the same kernel",
        f'"{ONE_SHOT}": new processes for each cell; "{KEPT}": processes started once',
        "the group of ipyparallel's engines is made by the cell through a file store",
    ]
    return table


def _take_turns(table: Table, runners: list[Runner], repeats: int) -> list[Runner]:
    """Do the rounds; return those who finished them all."""
    for number in range(WARM_UPS + repeats):
        if number == WARM_UPS:
            for runner in runners:
                runner.plain.clear()
                runner.launches.clear()
        runners = [*runners[1:], *runners[:1]]  # nobody always comes after the same one
        runners = [one for one in runners if cases.succeeds(table, one.contender, one.round)]
    runners.sort(key=lambda one: ALL.index(one.contender))
    return [
        one for one in runners if cases.succeeds(table, one.contender, partial(one.repeat, repeats))
    ]


def _add_row(table: Table, runner: Runner) -> None:
    who = runner.contender
    net = over(runner.launches, runner.plain)
    again = over(runner.again, runner.plain)
    times = [milliseconds(net), milliseconds(again), milliseconds(runner.plain)]
    beginning = [f"{runner.ready:.2f} s", f"{runner.first:.2f} s"]
    table.rows.append([who.label, who.kind, who.group, *times, *beginning])
    table.samples[who.key] = net
    table.samples[f"{who.key}: back to back"] = again
    table.samples[f"{who.key}: plain"] = runner.plain


def _add_ratio(table: Table, runners: Sequence[Runner]) -> None:
    net = {r.contender.key: over(r.launches, r.plain) for r in runners}
    if "ours" not in net or "accelerate" not in net:
        return
    pairs = [a / b for a, b in zip(net["ours"], net["accelerate"], strict=True)]
    ratio = statistics.median(net["ours"]) / statistics.median(net["accelerate"])
    table.notes.append(
        f"ours / notebook_launcher: {ratio:.2f} (by round {min(pairs):.2f}-{max(pairs):.2f})"
    )


def choose(names: str | None) -> list[Contender]:
    """Pick the contenders that were asked for."""
    if names is None:
        return list(ALL)
    wanted = names.split(",")
    known = {contender.key: contender for contender in ALL}
    if unknown := [name for name in wanted if name not in known]:
        sys.exit(f"unknown contender {unknown[0]!r}; choose from {', '.join(known)}")
    return [known[name] for name in wanted]


def heading() -> list[str]:
    """Say on what the figures were taken."""
    packages = ["torch", "accelerate", "nbdistributed", "ipyparallel", "ipykernel", "ipython"]
    found = [f"{name} {_version(name)}" for name in packages]
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    return [f"{machine}; {', '.join(found)}", _load()]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _load() -> str:
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    return f"{time.strftime('%Y-%m-%d %H:%M')}, load {load}"


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10, help="rounds of the main table")
    parser.add_argument("--only", help=f"some of {','.join(c.key for c in ALL)}")
    parser.add_argument("--sections", default="launch,load,threads,error,memory,stages")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds until a cell hangs")
    parser.add_argument("--error-limit", type=float, default=45.0, help="the same, for errors")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", type=Path, help="write all samples here")
    return parser.parse_args()


def main() -> None:
    """Run the sections that were asked for and print a table for each."""
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that kernels are closed
    sys.path.insert(0, str(REPOSITORY))
    chosen = choose(options.only)
    present = [contender for contender in chosen if contender.installed]
    write(*heading())
    for contender in chosen:
        if contender not in present:
            write(f"{contender.label}: not installed")
    report: list[Table] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as name, isolated(Path(name)) as folder:
        sections: dict[str, Callable[[], Table]] = {
            "launch": lambda: compare_launches(present, options.repeats, folder),
            "load": lambda: cases.extension_load(present, folder),
            "threads": lambda: cases.busy_kernel(present, folder, options.limit),
            "error": lambda: cases.first_error(present, folder, options.error_limit),
            "memory": lambda: large.big_capture(present, folder),
            "stages": lambda: stages.stages(present, folder, options.repeats),
        }
        for section in options.sections.split(","):
            table = sections[section]()
            write("", table.markdown() if options.markdown else table.text())
            report.append(table)
    write("", _load())
    if options.json:
        options.json.write_text(json.dumps([asdict(table) for table in report], indent=1))


def write(*lines: str) -> None:
    """Print at once, so that a long run shows how far it is."""
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
