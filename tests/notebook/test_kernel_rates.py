"""Much output, in a real kernel: nothing is lost, nobody waits for what he does not want to see."""

from __future__ import annotations

import re
import time

import psutil
import pytest
from fold_text import fold, numbered
from kernel_session import KernelSession
from server_limits import ServerLimits

pytestmark = [pytest.mark.kernel, pytest.mark.slow]


@pytest.fixture(scope="module")
def kernel():
    with KernelSession() as session:
        session.ok("%load_ext jupyter_accel")
        yield session
        session.shutdown()
        session.assert_nothing_left()


def test_a_launched_function_that_writes_much_loses_nothing_and_can_be_stopped(kernel):
    kernel.ok(
        "import jupyter_accel\ndef talk(n):\n    for i in range(n):\n        print(i, 'w' * 99)"
    )
    cell = kernel.ok("jupyter_accel.launch(talk, 20_000, num_processes=2)")
    assert numbered(re.sub(r"(?m)^", "line ", cell.stdout), "line") == list(range(20_000))
    assert ServerLimits().dropped(cell.messages) == 0
    endless = kernel.start("jupyter_accel.launch(talk, 10**9, num_processes=2)")
    endless.wait_for_output("www")
    time.sleep(2)
    kernel.interrupt()
    stopped = endless.wait(15)
    assert stopped.ename == "Interrupted"
    assert "left out" in stopped.stderr


def test_a_chatty_job_loses_nothing_and_stays_below_the_limits(kernel):
    cell = kernel.ok("""%%accel_launch -n 2
for i in range(5000):
    print(i, flush=True)
if rank == 0:
    import sys
    for i in range(400_000):
        sys.stdout.write('a"\\n')
    for i in range(2000):
        print("out", i)
        print("err", i, file=sys.stderr)
""")
    assert cell.stdout.startswith("".join(f"{i}\n" for i in range(5000)) + 'a"\n')
    assert cell.stdout.count('a"\n') == 400_000
    assert numbered(cell.stdout, "out") == list(range(2000))
    assert numbered(cell.stderr, "err") == list(range(2000))
    assert ServerLimits().dropped(cell.messages) == 0
    assert fold(cell, 1).count("\n") == 5000


def test_a_rank_that_writes_100_megabytes_waits_and_the_kernel_stays_small(kernel):
    process = psutil.Process(kernel.pid)
    before = process.memory_info().rss
    cell = kernel.start("""%%accel_launch -n 2
line = "y" * 99
for i in range(1_000_000):
    print(line)
""")
    cell.wait_for_output("yyyy", timeout=20)
    peak = 0
    for _ in range(60):
        time.sleep(0.1)
        peak = max(peak, process.memory_info().rss)
    began = time.monotonic()
    kernel.interrupt()
    ended = cell.wait(15)
    assert "Interrupt" in ended.ename
    assert time.monotonic() - began < 5, "who stops a job does not wait for its output"
    assert "left out" in ended.stderr
    assert (peak - before) / 1e6 < 100
    assert ServerLimits().dropped(ended.messages) == 0
    assert len(fold(ended, 1)) < 5_000_000


def test_output_of_a_job_that_has_ended_can_be_left_out_and_its_values_stay(kernel):
    cell = kernel.start("%%accel_launch -n 2 --pull answer\nprint('z' * 7_000_000)\nanswer = 42")
    cell.wait_for_output("have ended")
    kernel.interrupt()
    ended = cell.wait(20)
    assert ended.status == "ok"
    assert "left out" in ended.stderr
    assert len(ended.stdout) < 7_000_000
    assert kernel.value("answer") == "42"
