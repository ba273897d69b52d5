"""Tables of results, printed aligned for a terminal or as Markdown, and kept as plain data."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(slots=True)
class Table:
    """One section of the report; ``samples`` holds the seconds behind it, by name."""

    title: str
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)

    def text(self) -> str:
        """Write it with aligned columns."""
        lines = [list(self.columns), *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        body = ["  ".join(_fit(line, widths)).rstrip() for line in lines]
        body.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([self.title, "", *body, *(f"  {note}" for note in self.notes)])

    def markdown(self) -> str:
        """Write it as Markdown."""
        lines = [list(self.columns), ["---"] * len(self.columns), *self.rows]
        body = [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]
        notes = [f"- {note}" for note in self.notes]
        return "\n".join([f"## {self.title}", "", *body, *([""] if notes else []), *notes])


def _fit(line: list[str], widths: list[int]) -> list[str]:
    first = line[0].ljust(widths[0])
    return [first, *(cell.ljust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]


def milliseconds(seconds: Sequence[float]) -> str:
    """Median and range, in milliseconds."""
    if not seconds:
        return "-"
    middle, low, high = (1000 * f(seconds) for f in (statistics.median, min, max))
    return f"{middle:.0f} ms ({low:.0f}-{high:.0f})"


def over(seconds: Sequence[float], base: Sequence[float]) -> list[float]:
    """Take the median of the plain cells away from each sample."""
    plain = statistics.median(base)
    return [sample - plain for sample in seconds]
