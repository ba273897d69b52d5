"""How much output may be sent now, so that Jupyter's server drops none of it.

The server drops what comes above 1 MB of text a second or 1000 messages a second, both averaged
over three seconds. It counts a message as it travels: with its headers, and with every line end
and quote escaped.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable

_WINDOW = 3.2  # seconds; the server's is 3.0
_BYTES = 2_300_000  # in one window; the server's limit is 3,000,000, reached if it stalls a second
_MESSAGES = 2300  # in one window; the server's limit is 3000
_HEADERS = 1000  # bytes of a message besides its text


class Pace:
    """Remembers what was sent, as the server does.

    Args:
        clock: tells the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sent: deque[tuple[float, int, int]] = deque()
        self._bytes = 0
        self._messages = 0

    def room(self) -> int:
        """Return how many bytes of text may be sent now; 0 if no message may."""
        now = self._clock()
        while self._sent and now - self._sent[0][0] > _WINDOW:
            _at, size, count = self._sent.popleft()
            self._bytes -= size
            self._messages -= count
        if self._messages >= _MESSAGES:
            return 0
        return max(0, _BYTES - self._bytes)

    def note_message(self) -> None:
        """Note that a message is sent."""
        self._note(_HEADERS, 1)

    def note_text(self, size: int) -> None:
        """Note that a message carries text of this size."""
        self._note(size, 0)

    def _note(self, size: int, count: int) -> None:
        self._sent.append((self._clock(), size, count))
        self._bytes += size
        self._messages += count


def wire_bytes(text: str) -> int:
    """Return how many bytes a text takes in a message."""
    return len(json.dumps(text, ensure_ascii=False).encode(errors="replace"))


def fitting(text: str, room: int) -> str:
    """Return as much of the beginning of a text as fits into this many bytes."""
    piece = text[:room]
    while piece and (size := wire_bytes(piece)) > room:
        piece = piece[: len(piece) * room // (size + 1)]
    return piece
