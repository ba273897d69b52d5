"""Interrupts that ask for a stop instead of breaking off whatever runs at that moment.

A KeyboardInterrupt may come between any two steps: half of a message would be sent, or output that
was read would be lost. While a job is followed an interrupt is only counted, and acted on between
two looks at the ranks.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Wishes:
    """Stops that were asked for and not yet acted on; may be set from any thread or signal."""

    def __init__(self) -> None:
        self._count = 0
        self._wake: Callable[[], None] = lambda: None

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Call this whenever a stop is asked for."""
        self._wake = wake

    def stop(self, *_ignored: Any) -> None:
        """Ask for a stop."""
        self._count += 1
        self._wake()

    def take(self) -> int:
        """Return how many were asked for since the last time."""
        count, self._count = self._count, 0
        return count


@contextlib.contextmanager
def interrupts_to(wishes: Wishes) -> Iterator[None]:
    """Have an interrupt of this process ask for a stop, each time it comes.

    Only the main thread can be interrupted; in another one this does nothing. Besides, a kernel's
    own handler cancels an awaited cell once and ignores what comes after.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    signal.signal(signal.SIGINT, wishes.stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let an interrupt break off what runs here, inside of ``interrupts_to``."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
