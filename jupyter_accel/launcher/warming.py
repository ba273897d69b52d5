"""What the template does while nobody asks for ranks: it gets faster at making them.

It imports what most ranks need, and gathers its memory into huge pages: a fork copies the page
table, which is then a hundredth of the size. (300 MB of torch and IPython: a fork takes 1.3 ms
instead of 5.7 ms and its end 1.9 ms instead of 7.3 ms; what a rank writes to is still copied by
small pages.)
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

_HUGE_PAGE = 2 << 20
_CHUNK = 16 * _HUGE_PAGE  # gathered in one go; a request for ranks waits for it
_MADV_COLLAPSE = 25  # Linux 6.1; older ones refuse it, and nothing is lost


class Warming:
    """A list of things to do, one at a time, so that a request for ranks never waits long.

    Args:
        entries: modules to import, or functions to call as ``module:function``.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self._tasks: deque[Callable[[], object]] = deque(partial(load, name) for name in entries)
        if entries:
            self._tasks.append(self._gather)

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def step(self) -> None:
        """Do the next thing."""
        try:
            self._tasks.popleft()()
        except Exception:  # noqa: BLE001 - ranks do without; the words go to the template's log
            traceback.print_exc()

    def _gather(self) -> None:
        settle()
        if sys.platform.startswith("linux"):
            self._tasks.extend(partial(_collapse, start, size) for start, size in _chunks())


def load(entry: str) -> None:
    """Import ``module``, or import it and call ``module:function``."""
    module, _, function = entry.partition(":")
    loaded = import_module(module)
    if function:
        getattr(loaded, function)()


def settle() -> None:
    """Move every object out of the collector's sight, so that ranks share its pages longer."""
    gc.collect()
    gc.freeze()


def _chunks() -> Iterator[tuple[int, int]]:
    """Yield pieces (address, size) of this process's own memory that whole huge pages cover."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        bounds, rights, _offset, _device, _inode, *name = line.split(maxsplit=5)
        if rights != "rw-p" or (name and name[0] != "[heap]"):
            continue
        low, high = (int(bound, 16) for bound in bounds.split("-"))
        start = -(-low // _HUGE_PAGE) * _HUGE_PAGE
        end = high // _HUGE_PAGE * _HUGE_PAGE
        for piece in range(start, end, _CHUNK):
            yield piece, min(_CHUNK, end - piece)


def _collapse(start: int, size: int) -> None:
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    # Both only advise: where the system will not, the pages stay as they are.
    advise(start, size, mmap.MADV_HUGEPAGE)
    advise(start, size, _MADV_COLLAPSE)
