"""Many launches: one after the other, at the same time, from threads; nothing grows or breaks."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import psutil
import pytest
from kernel_session import KernelSession
from loaded_kernel import LAUNCH, load

pytestmark = [pytest.mark.kernel, pytest.mark.slow]

MIB = 1 << 20
# Collectives of odd sizes as the last thing that each rank does: no rank may end so early that
# another one, which still reads, loses the connection.
COLLECTIVES = """import torch
import torch.distributed as dist
for size in (1, 3, 17, 1000, 65537, 7):
    dist.all_reduce(torch.ones(size))
dist.all_gather([torch.zeros(33333) for _ in range(world_size)], torch.ones(33333))
gathered = [torch.zeros(77777) for _ in range(world_size)] if rank == 0 else None
dist.gather(torch.ones(77777), gathered, dst=0)
dist.all_gather_object([None] * world_size, {"rank": rank})
if rank == 1:
    dist.send(torch.ones(100001), 0)
if rank == 0:
    dist.recv(torch.zeros(100001), 1)
print("done")
dist.broadcast(torch.ones(2_000_003), world_size - 1)
"""


class Holdings:
    """What the kernel and the process that forks the ranks hold, to be compared later."""

    def __init__(self, kernel: KernelSession) -> None:
        self._kernel = kernel
        time.sleep(0.5)  # the ranks of the last job may still be ending
        self._footprint = kernel.footprint()
        self._threads = self._count_threads()
        self._memory = self._resident()

    def check(self, more: int) -> None:
        """Fail if anything is more now, or the kernel's memory by so many bytes."""
        self._kernel.assert_back_to(self._footprint)
        assert self._count_threads() == self._threads
        assert self._resident() - self._memory < more

    def _count_threads(self) -> list[int]:
        process = psutil.Process(self._kernel.pid)
        return [p.num_threads() for p in (process, *process.children())]

    def _resident(self) -> int:
        return int(psutil.Process(self._kernel.pid).memory_info().rss)


def test_fifty_launches_in_a_row_leave_the_kernel_as_it_was(lab: KernelSession):
    for ranks in (2, 4):
        lab.ok(f"%%accel_launch -n {ranks}\n{COLLECTIVES}")
    before = Holdings(lab)
    seconds = []
    for number in range(50):
        cell = lab.ok(f"%%accel_launch -n {4 if number % 3 == 0 else 2}\n{COLLECTIVES}")
        assert cell.stdout == "done\n"
        if number % 3:
            seconds.append(cell.elapsed)
    before.check(more=24 * MIB)
    first, last = statistics.median(seconds[:10]), statistics.median(seconds[-10:])
    assert last < 2 * first + 0.1


def test_launches_that_fail_leave_no_more_than_those_that_do_not(lab: KernelSession):
    lab.run("%%accel_launch -n 2\n1 / 0")
    before = Holdings(lab)
    for number in range(20):
        end = ["1 / 0", "import os; os._exit(1)", "import os; os.kill(os.getpid(), 9)"][number % 3]
        assert lab.run(f"%%accel_launch -n 2\nif rank == 1:\n    {end}").status == "error"
    before.check(more=24 * MIB)


def test_values_and_state_that_travel_are_let_go_of(lab: KernelSession):
    lab.ok("import torch\nbig = torch.ones(2_000_000)")  # 8 MB
    body = "%%accel_launch -n 2 --pull bigger\nbigger = big + 1\nassert big.sum() == 2_000_000"
    for _ in range(3):
        lab.ok(body)
    before = Holdings(lab)
    for _ in range(15):
        lab.ok(body)
    before.check(more=48 * MIB)
    lab.ok("del big, bigger")


def test_two_kernels_that_launch_at_the_same_time_do_not_meet(lab: KernelSession):
    with KernelSession() as other:
        load(other)
        for kernel, word in ((lab, "first"), (other, "second")):
            kernel.ok(f"word = {word!r}")
        body = f"%%accel_launch -n 2\n{COLLECTIVES}print(word)"
        for _ in range(12):
            cells = [kernel.start(body) for kernel in (lab, other)]
            shown = [cell.wait(30).stdout for cell in cells]
            assert shown == ["done\nfirst\n", "done\nsecond\n"]
        other.shutdown()
        other.assert_nothing_left()


THREADS = """
import threading
from jupyter_accel import launch
def work(n):
    import torch
    import torch.distributed as dist
    total = torch.tensor([float(n)])
    dist.all_reduce(total)
    return total.item()
found, errors = {}, []
def call(n):
    try:
        for _ in range(REPEATS):
            found[n] = launch(work, n, num_processes=2)
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=call, args=(n,)) for n in NUMBERS]
for thread in threads: thread.start()
"""
JOIN = "for thread in threads: thread.join(60)\nprint(sorted(found.items()), errors)"


def test_launch_works_in_a_thread_of_the_kernel(lab: KernelSession):
    lab.ok("REPEATS, NUMBERS = 2, [7]")
    assert lab.ok(THREADS + JOIN).stdout.endswith("[(7, 14.0)] []\n")


def test_two_threads_can_launch_at_the_same_time(lab: KernelSession):
    before = lab.footprint()
    lab.ok("REPEATS, NUMBERS = 10, [1, 2, 3]")
    assert lab.ok(THREADS + JOIN).stdout.endswith("[(1, 2.0), (2, 4.0), (3, 6.0)] []\n")
    # Not the descriptors: ipykernel keeps one for each thread that ever printed.
    lab.assert_back_to(replace(before, descriptors={}))


def test_a_thread_can_launch_while_a_cell_does(lab: KernelSession):
    lab.ok("REPEATS, NUMBERS = 5, [5]")
    lab.ok(THREADS)
    for _ in range(3):
        assert "sum 2.0" in lab.ok(LAUNCH).stdout
    assert lab.ok(JOIN).stdout.endswith("[(5, 10.0)] []\n")
