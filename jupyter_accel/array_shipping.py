"""How arrays travel that NumPy would send as a copy of a whole file."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_accel.launcher.parcels.shipping import Packer

    Reducer = Callable[[Packer, Any], Any]


def reducers() -> dict[type, Reducer]:
    """Return the reducers for exactly these types; plain arrays need none."""
    return {np.memmap: _memmap}


def family_reducers() -> dict[type, Reducer]:
    """Return the reducers for these types and what is derived from them."""
    return {}


def _memmap(packer: Packer, array: np.memmap[Any, Any]) -> Any:
    """Open the same file again: both ends are on one machine."""
    del packer
    whole: Any = array
    while isinstance(whole.base, np.memmap):
        whole = whole.base
    if not isinstance(whole.base, mmap.mmap) or whole.filename is None or whole.mode == "c":
        return NotImplemented  # computed from a mapped array, or changed in memory only
    if not array.flags.c_contiguous:
        return NotImplemented
    # A part of a mapped array says the offset of the whole.
    offset = whole.offset + array.ctypes.data - whole.ctypes.data
    mode = "r" if whole.mode == "r" else "r+"  # opened as "w+", it would be emptied
    return np.memmap, (whole.filename, array.dtype, mode, offset, array.shape)
