"""What ranks do in the tests of their supervisor: without torch, so that they start at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from jupyter_accel.launcher.parcels.shipping import Parcel
from jupyter_accel.launcher.worker import Returned

HERE = "rank_work"


def connect(world, store_path, *, timeout):
    """Join no group."""


def disconnect():
    """Leave no group."""


def share_threads(count):
    """Have one thread."""


def run(task, _parcel, side):
    """Do what the task names."""
    WORKS[task](side)
    return Returned(Parcel(b""), {})


def note(side, *pids):
    """Tell the test which processes there are: it reads the folder of the job."""
    folder = os.path.dirname(side.setup.store_path)  # noqa: PTH120
    for pid in pids:
        with open(f"{folder}/pid-{side.world.rank}-{pid}", "w"):  # noqa: PTH123
            pass
    with open(f"{folder}/there-{side.world.rank}", "w"):  # noqa: PTH123
        pass


def sleep(side):
    """Sleep until somebody ends it."""
    note(side)
    time.sleep(60)


def deaf(side):
    """Ignore every signal that can be ignored."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    note(side)
    while True:
        time.sleep(60)


def offspring(side):
    """Leave children behind: one in the rank's group, and some that left it."""
    plain = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    apart = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
    )
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            os.write(write, b"%d" % os.getpid())
            time.sleep(60)
        os._exit(0)
    orphan = int(os.read(read, 20))
    note(side, plain.pid, apart.pid, orphan)


def offspring_and_sleep(side):
    """The same, and go on."""
    offspring(side)
    time.sleep(60)


def stop_self(side):
    """Be stopped, as by a debugger."""
    note(side)
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)


WORKS = {
    "nothing": lambda _side: None,
    "sleep": sleep,
    "deaf": deaf,
    "offspring": offspring,
    "offspring and sleep": offspring_and_sleep,
    "stop": stop_self,
    "raise": lambda _side: 1 / 0,
    "exit 3": lambda _side: os._exit(3),
    "kill": lambda _side: os.kill(os.getpid(), signal.SIGKILL),
}
