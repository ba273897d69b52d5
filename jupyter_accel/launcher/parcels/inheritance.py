"""Large data that ranks are born with: one copy, made before they are forked.

The supervisor reserves private memory, the kernel writes into it, and the ranks that are then
forked have it, shared until written. It costs what a copy of the data costs in the kernel itself:
unlike shared-memory files, private memory comes in huge pages nearly everywhere. (1 GiB on two
cores: 0.53 s, beside 0.48 s for a copy by NumPy and 1.27 s for a shared-memory file.)
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

from jupyter_accel.launcher.parcels.segment import spans_of

SMALLEST = 32 << 20
"""Below this many bytes a shared-memory file is as fast, and lets the ranks start earlier."""

_CHUNK = 64 << 20  # one system call: long enough to pay, short enough to notice an interrupt


class _Span(ctypes.Structure):
    """A piece of memory, as ``process_vm_writev`` takes it."""

    _fields_ = (("start", ctypes.c_void_p), ("size", ctypes.c_size_t))


class Inherited:
    """The large buffers of a parcel, where the receiver has been born with them."""

    __slots__ = ("spans",)

    def __init__(self, spans: tuple[tuple[int, int], ...]) -> None:
        self.spans = spans

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers together."""
        return sum(size for _, size in self.spans)

    def map(self) -> list[memoryview]:
        """View every buffer without a copy; a view may be written to, and only here."""
        if _Here.memory is None:
            msg = "this process was not born with the data of this parcel"
            raise ValueError(msg)
        whole = memoryview(_Here.memory)
        return [whole[start : start + size] for start, size in self.spans]

    def close(self) -> None:
        """Do nothing: the memory goes with its last view."""


class _Here:
    """What this process was born with."""

    memory: mmap.mmap | None = None


def receive(memory: mmap.mmap | None) -> None:
    """Note, in a new rank, the memory that it was born with."""
    _Here.memory = memory


def reserve(size: int) -> tuple[mmap.mmap, int]:
    """Reserve private memory in the supervisor; return it and its address."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def possible() -> bool:
    """Whether this system can write into the memory of another process."""
    return hasattr(ctypes.CDLL(None), "process_vm_writev")


def fill(pid: int, address: int, buffers: Sequence[memoryview]) -> bool:
    """Write buffers into the memory of another process; return False where that is forbidden."""
    write = ctypes.CDLL(None, use_errno=True).process_vm_writev
    write.restype = ctypes.c_ssize_t
    spans, _end = spans_of(buffers)
    for buffer, (start, size) in zip(buffers, spans, strict=True):
        source = _address_of(buffer)
        for offset in range(0, size, _CHUNK):
            count = min(_CHUNK, size - offset)
            ours = _Span(source + offset, count)
            theirs = _Span(address + start + offset, count)
            # ctypes lets other threads run meanwhile.
            done = write(pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
            if done != count:
                return False  # a container's rules, say; the caller knows another way
    return True


def _address_of(buffer: memoryview) -> int:
    """Return where a buffer lies; it may be read-only, as an array on a file is."""
    view = _Buffer()
    pythonapi = ctypes.pythonapi
    pythonapi.PyObject_GetBuffer.argtypes = (
        ctypes.py_object,
        ctypes.POINTER(_Buffer),
        ctypes.c_int,
    )
    pythonapi.PyBuffer_Release.argtypes = (ctypes.POINTER(_Buffer),)
    pythonapi.PyObject_GetBuffer(buffer, ctypes.byref(view), 0)
    try:
        return int(view.buf or 0)
    finally:
        pythonapi.PyBuffer_Release(ctypes.byref(view))


class _Buffer(ctypes.Structure):
    """CPython's ``Py_buffer``; its layout is part of the stable ABI."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )
