"""Turns a launching cell into an awaited one, so that buttons work while it runs.

On current kernels a button's click reaches Python during a cell only while the cell awaits.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from tokenize import COMMENT, DEDENT, INDENT, NEWLINE, NL
from types import FrameType

from IPython.core.inputtransformer2 import make_tokens_by_line
from IPython.core.interactiveshell import InteractiveShell

CELL_CALL = "await __import__('jupyter_accel.notebook.extension').notebook.extension.run_cell"
LINE_CALL = "await __import__('jupyter_accel.notebook.extension').notebook.extension.run_line"

_CELL = re.compile(r"%%accel_launch(?![\w.])(?P<line>.*)")
_LINE = re.compile(r"(?P<target>[^\W\d]\w*\s*=\s*)?%accel_launch(?![\w.])(?P<line>.*)")
_SPACE = {NEWLINE, NL, COMMENT, INDENT, DEDENT}
# What runs code itself, and awaits nothing while the kernel's own loop runs.
_CALLS = tuple(
    function.__code__
    for function in (
        InteractiveShell.run_cell,
        InteractiveShell.run_cell_magic,
        InteractiveShell.run_line_magic,
    )
)


class Transformer:
    """An input transformer for IPython.

    Args:
        active: tells whether cells may be awaited now.
        parse: reads a body, with IPython's syntax in it; raises SyntaxError.
    """

    # IPython leaves such transformers out when it asks whether a cell is complete. Turned into one
    # call, a magic's first line would be, and nobody could type its body in a terminal.
    has_side_effects = True

    def __init__(self, active: Callable[[], bool], parse: Callable[[str], object]) -> None:
        self._active = active
        self._parse = parse

    def __call__(self, lines: list[str]) -> list[str]:
        """Return the cell's lines, with each launching magic as an awaited call."""
        text = "".join(lines)
        if "%accel_launch" not in text or not self._active():
            return lines
        first = next((n for n, line in enumerate(lines) if line.strip()), 0)
        match = _CELL.fullmatch(lines[first].rstrip("\n")) if lines else None
        if match is not None:
            body = "".join(lines[first + 1 :])
            try:
                self._parse(body)
            except SyntaxError:
                # Without the magic's line IPython meets the same mistake, at the same line, and
                # shows it as it shows every other: without the frames of this package.
                return ["\n"] * (first + 1) + lines[first + 1 :]
            if _inside_call():
                return lines
            call = f"{CELL_CALL}({match['line'].strip()!r}, {body!r}, {first + 1})\n"
            return [call]
        # The body of another cell magic is that magic's to read.
        if lines[first].startswith("%%") or _inside_call():
            return lines
        return self._line_magics(lines)

    @staticmethod
    def _line_magics(lines: list[str]) -> list[str]:
        """Replace line magics at the margin, but for those inside strings."""
        changed = list(lines)
        for tokens in make_tokens_by_line(lines):
            own = [token for token in tokens if token.type not in _SPACE]
            if not own or own[0].start[1] != 0:
                continue
            row = own[0].start[0] - 1
            if row >= len(lines):
                continue
            match = _LINE.fullmatch(lines[row].rstrip("\n"))
            if match is not None:
                target = match["target"] or ""
                changed[row] = f"{target}{LINE_CALL}({match['line'].strip()!r})\n"
        return changed


def _inside_call() -> bool:
    """Whether a magic such as ``%%time``, or code, runs this text, and is not going to await."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - public but for its name
    while frame is not None:
        if frame.f_code in _CALLS:
            return True
        frame = frame.f_back
    return False
