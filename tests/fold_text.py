"""Finds in a cell's outputs what a test looks for: a rank's fold, and numbered lines."""

from __future__ import annotations

import re


def fold(cell, rank):
    """The folded output of a rank, without its title."""
    (found,) = [d for d in cell.displays if d.text.startswith(f"rank {rank} · ")]
    assert "<details>" in found.html
    return found.text.partition("\n")[2]


def numbered(text, word):
    return [int(n) for n in re.findall(rf"^{word} (\d+)", text, re.MULTILINE)]
