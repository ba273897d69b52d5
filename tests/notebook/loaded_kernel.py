"""Brings a kernel to where it can launch at once."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from kernel_session import KernelSession

LAUNCH = """%%accel_launch -n 2
import torch, torch.distributed
ones = torch.ones(1)
torch.distributed.all_reduce(ones)
print("sum", ones.item())
"""


def load(kernel: KernelSession) -> None:
    """Load the extension, launch once, and wait until the template has imported what it likes."""
    kernel.ok("%load_ext jupyter_accel")
    assert "sum 2.0" in kernel.ok(LAUNCH).stdout
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        before = _seconds_of_work(kernel)
        time.sleep(0.3)
        if _seconds_of_work(kernel) - before < 0.02:
            return
    msg = "the template does not come to rest"
    raise TimeoutError(msg)


def _seconds_of_work(kernel: KernelSession) -> float:
    total = 0.0
    for process in kernel.descendants():
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total
