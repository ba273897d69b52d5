"""What travels between a kernel and the ranks, both ways: cells' own code, big data, results."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from kernel_session import KernelSession
from leftovers import retried

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(180)]

DEFINITIONS = """
import functools, os, threading
from dataclasses import dataclass
import numpy as np, torch
from torch.utils.data import DataLoader

FACTOR = 2

@dataclass
class Point:
    x: int
    def scaled(self):
        return self.x * FACTOR

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.tensor(float(index * FACTOR))

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)
    def forward(self, x):
        return self.linear(x) * FACTOR

def factor():
    return FACTOR

def counter(count):
    def step():
        nonlocal count
        count += 1
        return count
    return step

square = lambda value: value * value + FACTOR
step = counter(10)
shifted = functools.partial(square, 3)
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[KernelSession]:
    with KernelSession() as session:
        session.ok("%load_ext jupyter_accel")
        session.ok(DEFINITIONS)
        yield session
        session.shutdown()
        session.assert_nothing_left(within=5)


@pytest.fixture(autouse=True)
def _only_the_template_stays(lab: KernelSession) -> Iterator[None]:
    yield
    retried(lambda: str(lab.descendants()) if len(lab.descendants()) > 1 else None, within=3)


# What cells define


def test_code_of_cells_works_in_a_launched_cell(lab):
    lab.ok("net, data, point = Net(), Numbers(), Point(4)")
    cell = lab.ok(
        "%%accel_launch -n 2\n"
        "print(square(3), shifted(), step(), step(), point.scaled(), isinstance(point, Point))\n"
        "print(sum(x.sum().item() for x in DataLoader(data, num_workers=1)))\n"
        "print(net(torch.ones(2, 3)).shape, type(net) is Net)"
    )
    assert cell.stdout.splitlines() == [
        "11 11 11 12 8 True",
        "12.0",
        "torch.Size([2, 1]) True",
    ]
    assert lab.value("step()") == "11"  # the rank's count was its own


def test_code_of_cells_works_in_an_expression(lab):
    cell = lab.ok(
        "%accel_launch -n 2 (square(3), Point(rank).scaled(), Net()(torch.ones(3)).shape)"
    )
    assert cell.execute_result.text == "(11, 0, torch.Size([1]))"


def test_a_global_that_the_cell_rebinds_is_seen_by_functions_and_stays_in_the_rank(lab):
    cell = lab.ok(
        "%%accel_launch -n 2\nFACTOR = 100\nprint(factor(), square(0), Point(2).scaled())"
    )
    assert cell.stdout == "100 100 200\n"
    assert lab.value("(FACTOR, factor())") == "(2, 2)"


def test_objects_that_come_back_are_of_the_kernels_own_classes(lab):
    lab.ok("%%accel_launch -n 2 --pull point2,net2\npoint2, net2 = Point(9), Net()")
    checks = "(type(point2) is Point, point2 == Point(9), type(net2) is Net, point2.scaled())"
    assert lab.value(checks) == "(True, True, True, 18)"
    lab.ok("pair = %accel_launch -n 2 [Point(1), Net]")
    assert lab.value("(type(pair[0]) is Point, pair[1] is Net)") == "(True, True)"


def test_a_class_that_a_rank_defines_comes_back_whole(lab):
    lab.ok(
        "%%accel_launch -n 2 --pull made,Fresh\n"
        "class Fresh:\n"
        "    size = 3\n"
        "    def double(self):\n"
        "        return self.size * FACTOR\n"
        "made = Fresh()"
    )
    assert lab.value("(made.double(), type(made) is Fresh)") == "(6, True)"


# Data


def test_a_change_in_place_stays_in_its_rank(lab):
    lab.ok("tensor, array, small = torch.zeros(300_000), np.zeros(300_000), torch.zeros(2)")
    cell = lab.ok(
        "%%accel_launch -n 2 --ranks all --ordered\n"
        "import torch.distributed as dist\n"
        "for data in (tensor, array, small):\n    data += rank + 1\n"
        "dist.barrier()\n"
        "print([float(data.sum() / len(data)) for data in (tensor, array, small)])"
    )
    assert cell.stdout.splitlines() == [
        "[rank 0]",
        "[1.0, 1.0, 1.0]",
        "[rank 1]",
        "[2.0, 2.0, 2.0]",
    ]
    assert lab.value("float(tensor.sum() + array.sum() + small.sum())") == "0.0"


def proportional_memory(pids: list[int]) -> int:
    """Bytes in memory, each shared page counted once over all who share it."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def memory_while_running(session: KernelSession, body: str, ranks: int) -> int:
    """Memory of all ranks and their template at a moment when all have run ``body``."""
    flag = session.work / "measured"
    wait = f"import os, time\nwhile not os.path.exists({str(flag)!r}): time.sleep(0.01)"
    ready = "import torch.distributed as dist\ndist.barrier()\nprint('all here', flush=True)"
    cell = session.start(f"%%accel_launch -n {ranks}\n{body}\n{ready}\n{wait}")
    try:
        cell.wait_for_output("all here", timeout=90)
        return proportional_memory([process.pid for process in session.descendants()])
    finally:
        flag.touch()
        assert cell.wait(30).status == "ok"
        flag.unlink()


@pytest.mark.slow
def test_a_gigabyte_of_tensor_and_one_of_array_cost_one_copy_each_for_four_ranks(lab):
    gigabyte = 10**9
    base = memory_while_running(lab, "pass", ranks=4)
    lab.ok(f"big = torch.ones({gigabyte // 4}); wide = np.ones({gigabyte // 8})")
    read = "assert big.sum().item() > 1e8 and wide.sum() == wide.size"
    more = memory_while_running(lab, read, ranks=4) - base
    lab.ok("del big, wide")
    assert 1.8 * gigabyte < more < 2.5 * gigabyte, f"{more / gigabyte:.2f} GB"


# What cannot travel


def new_processes(session: KernelSession, before: set[int]) -> set[int]:
    return {process.pid for process in session.descendants()} - before


STUCK = [
    ("lock = threading.Lock()", "lock", "print(lock.acquire())", "a lock"),
    (
        "def guarded():\n    with lock:\n        return 1",
        "lock",
        "print(guarded())",
        "`guarded` reads",
    ),
    ("class Box: pass\nbox = Box(); box.inner = [threading.Lock()]", "box", "box", "box.inner[0]"),
    ("log = open('log.txt', 'w')", "log", "log.write('x')", "an open file"),
    (
        "batches = iter(DataLoader(list(range(8)), num_workers=1)); first = next(batches)",
        "batches",
        "print(next(batches))",
        "live iterator of a DataLoader",
    ),
]


@pytest.mark.parametrize(("setup", "name", "body", "word"), STUCK, ids=[s[3] for s in STUCK])
def test_what_cannot_travel_is_named_with_a_way_out(lab, setup, name, body, word):
    lab.ok(setup)
    before = {process.pid for process in lab.descendants()}
    try:
        cell = lab.run(f"%%accel_launch -n 2\n{body}")
        assert cell.ename == "UsageError"
        assert f"`{name}` cannot travel to the ranks" in cell.evalue
        assert word in cell.evalue
        assert "--start-method fork" in cell.evalue
        assert not cell.displays  # no state line: nothing was launched
        retried(lambda: str(new_processes(lab, before)) if new_processes(lab, before) else None, 3)
    finally:
        lab.ok("batches = box = None")


def test_locks_and_open_files_work_in_forks_of_the_kernel(lab):
    lab.ok("lock = threading.Lock(); log = open('log.txt', 'a')")
    body = "with lock:\n    _ = log.write(f'rank {rank}\\n'); log.flush()\nprint(lock.locked())"
    assert lab.ok(f"%%accel_launch -n 2 --start-method fork\n{body}").stdout == "False\n"
    assert sorted((lab.work / "log.txt").read_text().split("\n")) == ["", "rank 0", "rank 1"]
    lab.ok("log.close(); del lock, log")


def test_a_name_that_the_cell_sets_first_need_not_travel(lab):
    lab.ok("lock = threading.Lock()")
    assert lab.ok("%%accel_launch -n 2\nlock = 'mine'\nprint(lock)").stdout == "mine\n"


# The line magic


def test_a_line_can_be_assigned_and_all_ranks_asked(lab):
    lab.ok("value = %accel_launch -n 2 rank + FACTOR")
    assert lab.value("value") == "2"
    lab.ok("values = %accel_launch -n 3 --all-ranks (rank, world_size)")
    assert lab.value("values") == "[(0, 3), (1, 3), (2, 3)]"
    several = lab.ok("one = %accel_launch -n 1 1\ntwo = %accel_launch -n 1 one + 1\none + two")
    assert several.execute_result.text == "3"


def test_a_line_in_a_function_sees_its_variables(lab):
    lab.ok(
        "def run(amount):\n"
        "    scale = lambda v: v * amount\n"
        "    result = %accel_launch -n 2 scale(rank + amount) + FACTOR\n"
        "    return result"
    )
    assert lab.value("[run(3), run(5)]") == "[11, 27]"
    lab.ok(
        "def forked(amount):\n"
        "    result = %accel_launch -n 1 --start-method fork amount + FACTOR\n"
        "    return result"
    )
    assert lab.value("forked(7)") == "9"


def test_a_line_in_a_loop_runs_each_time(lab):
    cell = lab.ok("for turn in range(2):\n    %accel_launch -n 1 print('turn', turn)")
    assert cell.stdout == "turn 0\nturn 1\n"


@pytest.mark.parametrize(
    "cell",
    [
        "%%time\nspent = %accel_launch -n 2 rank + 40\n",
        "%time spent = %accel_launch -n 2 rank + 40",
    ],
)
def test_a_launch_can_be_timed(lab, cell):
    lab.ok("spent = None")
    assert "Wall time" in lab.ok(cell).stdout
    assert lab.value("spent") == "40"


def test_a_whole_cell_can_be_timed(lab):
    cell = lab.ok("%%time\n%%accel_launch -n 2\nprint('timed', rank)")
    assert cell.stdout.startswith("timed 0\n")
    assert "Wall time" in cell.stdout


def test_code_can_run_a_launching_cell(lab):
    lab.ok("done = get_ipython().run_cell('%%accel_launch -n 2 --pull inner\\ninner = rank + 7')")
    assert lab.value("(done.success, inner)") == "(True, 7)"


def test_an_expression_that_fails_shows_itself_and_nothing_of_ours(lab):
    cell = lab.run("%accel_launch -n 2 FACTOR / 0")
    assert cell.ename == "WorkerError"
    assert cell.evalue == "ranks 0, 1: ZeroDivisionError: division by zero"
    assert "----> 1 FACTOR / 0" in cell.plain_traceback
    assert "__accel" not in cell.plain_traceback
    assert "jupyter_accel" not in cell.plain_traceback


@pytest.mark.parametrize("text", ["1 +", "total = 3", "for i in []: pass"])
def test_what_is_no_expression_is_said_in_one_line(lab, text):
    cell = lab.run(f"%accel_launch -n 2 {text}")
    assert cell.ename == "UsageError"
    assert cell.evalue.startswith(f"{text!r} is not an expression")
    assert cell.stderr.count("\n") <= 2


def test_a_value_that_cannot_travel_is_named_as_it_was_written(lab):
    cell = lab.run("%accel_launch -n 2 {'files': [1, open('/dev/null')]}")
    assert cell.ename == "WorkerError"
    assert "['files'][1]` is an open file" in cell.evalue
    assert "cannot travel back to the kernel" in cell.evalue
    assert "__accel" not in cell.all_text
    assert "worker.py" not in cell.all_text


# What comes back


def test_a_missing_name_is_told_after_all_others_have_come(lab):
    cell = lab.run("%%accel_launch -n 2 --pull here,elsewhere\nhere = 1")
    assert cell.ename == "UsageError"
    assert cell.evalue == "--pull asks for elsewhere, which this cell did not set"
    assert lab.value("here") == "1"


def test_a_name_that_cannot_come_back_is_told_after_all_others_have_come(lab):
    cell = lab.run("%%accel_launch -n 2 --pull held,good\nheld = threading.Lock()\ngood = 5")
    assert cell.ename == "UsageError"
    assert "`held` cannot travel back to the kernel: it is a lock" in cell.evalue
    assert lab.value("(good, 'held' in globals())") == "(5, False)"


def test_pull_all_brings_what_can_and_says_what_stays_and_why(lab):
    body = "number, text = 1, 'two'\nheld = threading.Lock()\nstream = (i for i in [1])"
    cell = lab.ok(f"%%accel_launch -n 2 --pull-all\n{body}")
    assert lab.value("(number, text, 'held' in globals(), 'stream' in globals())") == (
        "(1, 'two', False, False)"
    )
    assert "`held` cannot travel back to the kernel: it is a lock" in cell.stderr
    assert "`stream` cannot travel back to the kernel: it is a generator" in cell.stderr
    state = cell.displays[0].text
    assert "in the kernel now: number, text" in state
    assert "cannot travel: held, stream" in state
    assert "stayed in the ranks" not in state


TRAIN = """
from jupyter_accel import Accelerator
accelerator = Accelerator()
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(torch.randn(16, 3), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    optimizer.zero_grad()
    accelerator.backward(model(batch).pow(2).sum())
    optimizer.step()
weights = [p.detach().clone() for p in model.parameters()]
wrapped = type(model).__name__
"""


def test_a_trained_model_comes_back_unwrapped_with_its_weights(lab):
    lab.ok(f"%%accel_launch -n 2 --pull model,weights,wrapped\n{TRAIN}")
    assert lab.value("wrapped") == "'DistributedDataParallel'"
    assert lab.value("type(model) is Net") == "True"
    assert lab.value("all(map(torch.equal, model.parameters(), weights))") == "True"
    lab.ok(  # and it is fit for more
        "import gc; gc.collect()\n"
        "again = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.ones(2, 3)).sum().backward()\n"
        "again.step()\n"
        "assert not torch.equal(model.linear.weight, weights[0])"
    )


def test_pulled_data_is_the_kernels_own_and_outlives_the_ranks(lab):
    body = "big, wide, tiny = torch.ones(400_000), np.ones(400_000), torch.ones(1)"
    lab.ok(f"%%accel_launch -n 2 --pull big,wide,tiny\n{body}")
    lab.ok("%accel_launch -n 2 1")
    lab.ok("big += 1; wide += 1; tiny += 1; big.resize_(10)")
    assert lab.value(
        "(float(big.sum()), float(wide.sum()), float(tiny), wide.flags.writeable)"
    ) == ("(20.0, 800000.0, 2.0, True)")
    lab.ok("del big, wide, tiny")


def test_a_misspelt_pull_is_refused_before_the_ranks_have_worked(lab):
    cell = lab.run("%%accel_launch -n 1 --pull modle\nmodel = 1\nprint('worked')")
    assert "--pull modle: the cell sets no such name; did you mean model?" in cell.stderr
    assert "worked" not in cell.stdout
