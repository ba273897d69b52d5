"""Reads the stacks that Python itself writes to a rank's file descriptor 2.

It writes them when the process crashes, and when the launcher asks for them. They end in frames of
this package and of the shell that runs a cell, which nobody wants to see.
"""

from __future__ import annotations

import re
from pathlib import Path

_HEADER = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):")
_CRASH = "Fatal Python error: "
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in ')
_MODULES = "Extension modules: "
_SHELL = re.compile(r"[/\\]IPython[/\\]core[/\\]interactiveshell\.py$")
_OWN = str(Path(__file__).parent)


class Stacks:
    """Cuts the stacks in a text where the user's code ends, and keeps those of a crash.

    Attributes:
        crash: the lines about a crash, from its name on.
    """

    def __init__(self) -> None:
        self.crash: list[str] = []
        self._inside = False
        self._below = False

    def tidy(self, text: str) -> str:
        """Return what is to be shown of these lines."""
        return "".join(line for line in text.splitlines(keepends=True) if self._wanted(line))

    @property
    def where(self) -> str:
        """The innermost place of a crash as file and line; empty if there was none."""
        frames = filter(None, map(_FRAME.match, self.crash))
        first = next(frames, None)
        return f"{first['file']}:{first['line']}" if first else ""

    def _wanted(self, line: str) -> bool:
        frame = _FRAME.match(line) if self._inside else None
        if _HEADER.match(line):
            self._inside, self._below = True, False
        elif frame is not None:
            file = frame["file"]
            self._below |= file.startswith(_OWN) or bool(_SHELL.search(file))
        else:
            self._inside = False
        hidden = (frame is not None and self._below) or (
            bool(self.crash) and line.startswith(_MODULES)
        )
        if not hidden and (self.crash or line.startswith(_CRASH)):
            self.crash.append(line.rstrip("\n"))
        return not hidden
