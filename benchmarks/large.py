"""Section: a launch whose cell reads one gigabyte that lives in the kernel."""

from __future__ import annotations

import statistics
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import cells
import numpy as np
from cases import prepare, reported, succeeds
from contenders import ONE_SHOT, Contender
from kernels import Kernel, Memory, opened
from tables import Table, milliseconds

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ROUNDS = 5
RANKS = 4
STAY = 1.5
SAMPLE_EVERY = 0.1
LIMIT = 60.0


@dataclass(slots=True)
class Reader:
    """One contender with the tensor in its kernel, and the times of its launches."""

    contender: Contender
    kernel: Kernel
    plain: list[float] = field(default_factory=list)
    reading: list[float] = field(default_factory=list)
    grown: str = "-"
    taken: str = "-"

    def launch(self, body: str) -> float:
        """Run a body on the ranks."""
        cell = self.contender.cell(body, RANKS)
        return self.kernel.need(cell, expect=cells.READ, limit=LIMIT).seconds

    def round(self, number: int) -> None:
        """Time a launch without the tensor, and one that reads it with a new number in it."""
        self.plain.append(self.launch(cells.read_big(None)))
        self.kernel.need(cells.change_big(number))
        self.reading.append(self.launch(cells.read_big(number)))

    def weigh(self, number: int) -> None:
        """Find what a launch with the tensor takes beyond a launch without it."""
        without = self._growth(cells.read_big(None, stay=STAY))
        self.kernel.need(cells.change_big(number))
        with_it = self._growth(cells.read_big(number, stay=STAY))
        self.grown = f"{(with_it.share - without.share) / 1e6:.0f} MB"
        self.taken = f"{(with_it.available - without.available) / 1e6:.0f} MB"

    def _growth(self, body: str) -> Memory:
        """Sample the memory while a launch runs: how far the use rises over the start."""
        start, seen, over = self.kernel.memory(), [], threading.Event()

        def watch() -> None:
            while not over.wait(SAMPLE_EVERY):
                seen.append(self.kernel.memory())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            self.launch(body)
        finally:
            over.set()
            watcher.join()
        share = max(sample.share for sample in seen) - start.share
        return Memory(share, start.available - min(sample.available for sample in seen))


def big_capture(contenders: Sequence[Contender], folder: Path) -> Table:
    """Compare a launch that captures a gigabyte with one memory copy and a plain launch."""
    columns = ["contender", "plain launch", "reads 1 GB, first", "reads 1 GB", "copy + plain"]
    columns += ["ratio", "processes grow by", "MemAvailable falls by"]
    table = Table(f"A 1 GB float32 tensor of the kernel, read by {RANKS} ranks", columns)
    copies: list[float] = []
    with ExitStack() as stack:
        readers = []
        for contender in (one for one in contenders if one.kind == ONE_SHOT):
            with reported(table, contender):
                readers.append(_reader(contender, folder, stack))
        _copy()
        for number in range(2, ROUNDS + 2):
            copies += [_copy(), _copy()]
            readers = [
                reader
                for reader in readers
                if succeeds(table, reader.contender, partial(reader.round, number))
            ]
        readers = [
            reader
            for reader in readers
            if succeeds(table, reader.contender, partial(reader.weigh, ROUNDS + 2))
        ]
    for reader in readers:
        _add_row(table, reader, statistics.median(copies))
    table.samples["copy"] = copies
    table.notes += [
        f"one numpy copy into fresh memory: {milliseconds(copies)}; {ROUNDS} rounds in turn",
        "the tensor changes before each launch, and each rank checks the new number",
        "growth: Pss of the kernel and all its processes, and MemAvailable of the machine, at the",
        "peak of a launch with the tensor, less the same for a launch without it",
        "launches by notebook_launcher fork the kernel, so they share its pages and copy nothing",
    ]
    return table


def _reader(contender: Contender, folder: Path, stack: ExitStack) -> Reader:
    kernel = stack.enter_context(opened(folder, contender.farewell))
    prepare(kernel, contender, RANKS)
    kernel.need(cells.BIG_IN_KERNEL, limit=LIMIT)
    reader = Reader(contender, kernel)
    reader.launch(cells.read_big(None))
    return reader


def _copy() -> float:
    source = np.ones(cells.GIGABYTE // 4, dtype=np.float32)
    begin = time.perf_counter()
    fresh = np.empty_like(source)
    np.copyto(fresh, source)
    return time.perf_counter() - begin


def _add_row(table: Table, reader: Reader, copy: float) -> None:
    plain, reading = statistics.median(reader.plain), statistics.median(reader.reading)
    table.rows.append(
        [
            reader.contender.label,
            milliseconds(reader.plain),
            milliseconds(reader.reading[:1]),
            milliseconds(reader.reading),
            f"{1000 * (copy + plain):.0f} ms",
            f"{reading / (copy + plain):.2f}",
            reader.grown,
            reader.taken,
        ]
    )
    table.samples[reader.contender.key] = reader.reading
    table.samples[f"{reader.contender.key}: plain"] = reader.plain
