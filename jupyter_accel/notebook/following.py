"""Drives a job to its end, either awaited in the kernel's event loop or in a plain loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from jupyter_accel.errors import Interrupted
from jupyter_accel.launcher.job import Job
from jupyter_accel.launcher.stopping import Wishes, interrupts_to
from jupyter_accel.launcher.template import Template
from jupyter_accel.notebook.show import NotebookPresenter

_TICK = 0.05  # seconds between two looks at what may be sent, while something waits
_LONGEST = 0.5  # between two looks if nothing happens: folded output is redrawn then
BUTTON_SECONDS = 0.5
"""A job that runs longer than this gets its Stop button."""


async def wait_ready(template: Template) -> None:
    """Wait until the template can fork, with the event loop running.

    Raises:
        Interrupted: the user did not want to wait.
    """
    while not template.poll_ready():
        try:
            await _readable(template.fileno(), _LONGEST, asyncio.Event())
        except asyncio.CancelledError:
            _uncancel()
            msg = "stopped before any rank was started"
            raise Interrupted(msg) from None


async def follow(
    job: Job,
    presenter: NotebookPresenter,
    wishes: Wishes,
    offer_button: Callable[[], None] | None,
) -> None:
    """Await the end of a job; an interrupt or a click stops it in steps."""
    loop = asyncio.get_running_loop()
    woken = asyncio.Event()
    wishes.wake_by(lambda: _wake(loop, woken))
    offer_at = time.monotonic() + BUTTON_SECONDS
    with interrupts_to(wishes):
        while not (job.finished and presenter.idle):
            if offer_button is not None and time.monotonic() > offer_at:
                offer_button()
                offer_button = None
            try:
                await _pause(job, presenter, woken)
            except asyncio.CancelledError:
                wishes.stop()
                _uncancel()
            woken.clear()
            _step(job, presenter, wishes)


def follow_blocking(job: Job, presenter: NotebookPresenter, wishes: Wishes) -> None:
    """Wait for the end of a job in this thread; interrupts are to be wishes already."""
    while not (job.finished and presenter.idle):
        if presenter.full or job.finished:
            time.sleep(_TICK)
        else:
            for event in job.advance(_TICK):
                presenter.show(event)
        _step(job, presenter, wishes)


def _step(job: Job, presenter: NotebookPresenter, wishes: Wishes) -> None:
    wished = wishes.take()
    for _ in range(0 if job.finished else wished):
        for event in job.interrupt():
            presenter.show(event)
    if not presenter.full and not job.finished:
        for event in job.advance(0):
            presenter.show(event)
    if job.finished:
        presenter.release()
    if job.reason == "interrupt" or (job.finished and wished):
        presenter.cut()  # who stops a job, or its output, does not want to wait for more of it
    presenter.tick(ended=job.finished)


async def _pause(job: Job, presenter: NotebookPresenter, woken: asyncio.Event) -> None:
    """Wait until there is something to do."""
    left = job.seconds_left()
    longest = _LONGEST if presenter.idle else _TICK
    seconds = longest if left is None else min(left, longest)
    fd = job.pool.fileno()
    if fd is None or presenter.full or job.finished:
        await asyncio.sleep(min(seconds, _TICK))
    else:
        await _readable(fd, seconds, woken)


async def _readable(fd: int, seconds: float, woken: asyncio.Event) -> None:
    """Wait at most this long until a descriptor can be read, or until ``woken`` is set."""
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, woken.set)
    try:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(woken.wait(), seconds)
    finally:
        loop.remove_reader(fd)


def _wake(loop: asyncio.AbstractEventLoop, woken: asyncio.Event) -> None:
    loop.call_soon_threadsafe(woken.set)


def _uncancel() -> None:
    task = asyncio.current_task()
    if task is not None and hasattr(task, "uncancel"):
        task.uncancel()
