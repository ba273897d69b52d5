"""Puts a parcel into a message: what is large goes as open files, so that no send ever blocks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jupyter_accel.launcher.parcels.segment import Segment
from jupyter_accel.launcher.parcels.shipping import Parcel

_IN_MESSAGE = 64 * 1024  # fits into a socket's buffer together with everything around it


@dataclass(frozen=True, slots=True)
class Letter:
    """A parcel as a message carries it; a long stream is in shared memory of its own."""

    parcel: Parcel
    stream: Segment | None = None


def enclose(parcel: Parcel) -> tuple[Letter, list[int]]:
    """Return the letter and the open files to send with it, which ``close`` lets go of."""
    files = [parcel.segment.fd] if isinstance(parcel.segment, Segment) else []
    if len(parcel.stream) <= _IN_MESSAGE:
        return Letter(parcel), files
    stream = Segment.write([memoryview(parcel.stream)])
    return Letter(replace(parcel, stream=b""), stream), [*files, stream.fd]


def take_out(letter: Letter, files: Sequence[int]) -> Parcel:
    """Return the parcel of a letter that came with these open files; they are taken over."""
    left = list(files)
    parcel = letter.parcel
    if isinstance(parcel.segment, Segment):
        parcel.segment.attach(left.pop(0))
    if letter.stream is not None:
        letter.stream.attach(left.pop(0))
        parcel = replace(parcel, stream=bytes(letter.stream.map()[0]))
        letter.stream.close()
    for fd in left:
        os.close(fd)
    return parcel


def close(letter: Letter) -> None:
    """Let go of this process's files of a letter; those that were sent stay open elsewhere."""
    for segment in (letter.parcel.segment, letter.stream):
        if segment is not None:
            segment.close()
