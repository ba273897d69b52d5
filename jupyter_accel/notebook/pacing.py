"""How much output may be sent now, so that Jupyter's server drops none of it.

The server drops what comes above 1 MB of text a second or 1000 messages a second, both averaged
over three seconds. It counts a message as it travels: with its headers, and with every line end
and quote escaped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

# In any three seconds no more passes than a burst and three times the rate: 2.6 MB, 2600 messages.
# The limits are 3 MB and 3000, so that output may also be held up on its way for half a second.
_BYTES_BURST, _BYTES_PER_SECOND = 650_000, 650_000
_MESSAGES_BURST, _MESSAGES_PER_SECOND = 650, 650
_HEADERS = 1000  # bytes of a message besides its text


class Pace:
    """Keeps count of what may be sent.

    Args:
        clock: tells the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._bytes: float = _BYTES_BURST
        self._messages: float = _MESSAGES_BURST

    def room(self) -> int:
        """Return how many bytes of text may be sent now; 0 if no message may."""
        now = self._clock()
        passed, self._at = now - self._at, now
        self._bytes = min(_BYTES_BURST, self._bytes + passed * _BYTES_PER_SECOND)
        self._messages = min(_MESSAGES_BURST, self._messages + passed * _MESSAGES_PER_SECOND)
        return 0 if self._messages < 1 else max(0, int(self._bytes) - _HEADERS)

    def note_message(self) -> int:
        """Note that a message is sent; return its size without its text."""
        self._messages -= 1
        self._bytes -= _HEADERS
        return _HEADERS

    def note_text(self, text: str) -> int:
        """Note that a message carries this text; return its size."""
        size = wire_bytes(text)
        self._bytes -= size
        return size


def wire_bytes(text: str) -> int:
    """Return how many bytes a text takes in a message."""
    return len(json.dumps(text, ensure_ascii=False).encode(errors="replace"))


def fitting(text: str, room: int) -> str:
    """Return as much of the beginning of a text as fits into this many bytes."""
    piece = text[:room]
    while piece and (size := wire_bytes(piece)) > room:
        piece = piece[: len(piece) * room // (size + 1)]
    return piece
