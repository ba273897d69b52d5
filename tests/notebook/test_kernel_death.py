"""Deaths: of the kernel, of the process that forks the ranks, and of kept ranks."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from leftovers import marked, retried
from loaded_kernel import LAUNCH

if TYPE_CHECKING:
    from kernel_session import KernelSession, RunningCell

pytestmark = pytest.mark.kernel

GO = "print('go', os.getpid(), flush=True)\n"
COMPUTE = f"import os, torch\n{GO}x = torch.ones(200, 200)\nwhile True:\n    x = (x @ x) * 0 + 1\n"
DEAF = f"""import os, signal, time
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
{GO}while True:
    time.sleep(60)
"""
OFFSPRING = f"""import os, subprocess, sys, time, torch
from torch.utils.data import DataLoader
subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(100)"])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        time.sleep(100)
    os._exit(0)
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 10000
    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.ones(1) * index
for step, batch in enumerate(DataLoader(Slow(), batch_size=4, num_workers=2)):
    if step == 3:
        {GO}"""
BODIES = pytest.mark.parametrize(
    "body", [COMPUTE, DEAF, OFFSPRING], ids=["computing", "deaf", "with offspring"]
)


def running(kernel: KernelSession, body: str, options: str = "-n 2") -> RunningCell:
    """Start a job and wait until rank 0 is at work."""
    cell = kernel.start(f"%%accel_launch {options}\n{body}")
    retried(lambda: None if "go" in cell.so_far.stdout else f"{cell.so_far}", within=30)
    return cell


def template_pid(kernel: KernelSession) -> int:
    """The process that forks the ranks: the only child that a kernel at rest has."""
    (child,) = psutil.Process(kernel.pid).children()
    return int(child.pid)


@BODIES
def test_a_killed_kernel_leaves_nothing(fresh_lab: KernelSession, body):
    running(fresh_lab, body)
    assert len(fresh_lab.descendants()) >= 3
    fresh_lab.kill()
    fresh_lab.assert_nothing_left()


@BODIES
def test_a_kernel_that_is_shut_down_during_a_job_leaves_nothing(fresh_lab: KernelSession, body):
    running(fresh_lab, body)
    fresh_lab.shutdown()
    fresh_lab.assert_nothing_left()


@BODIES
def test_a_kernel_that_is_restarted_during_a_job_can_launch(fresh_lab: KernelSession, body):
    running(fresh_lab, body)
    before = [p.pid for p in marked(fresh_lab.mark)]
    fresh_lab.restart()
    left = [p.pid for p in marked(fresh_lab.mark) if p.pid in before and p.pid != fresh_lab.pid]
    assert left == []
    fresh_lab.ok("%load_ext jupyter_accel")
    assert "sum 2.0" in fresh_lab.ok(LAUNCH).stdout
    fresh_lab.shutdown()
    fresh_lab.assert_nothing_left()


def test_a_kernel_killed_while_its_template_loads_leaves_nothing(fresh_kernel: KernelSession):
    fresh_kernel.ok("%load_ext jupyter_accel")
    fresh_kernel.kill()
    # It notices once it has imported torch.
    fresh_kernel.assert_nothing_left(within=20)


def test_kept_workers_end_with_their_kernel(fresh_lab: KernelSession):
    fresh_lab.ok("%%accel_launch -n 2 --keep lab\nx = 1")
    fresh_lab.kill()
    fresh_lab.assert_nothing_left()


def test_unloading_the_extension_ends_its_processes(fresh_lab: KernelSession):
    fresh_lab.ok("%%accel_launch -n 2 --keep lab\nx = 1")
    fresh_lab.ok("%unload_ext jupyter_accel")
    retried(lambda: ", ".join(map(str, fresh_lab.descendants())) or None, within=2)
    assert fresh_lab.run(LAUNCH).status == "error"


# ------------------------------------------------------- the process that forks the ranks


def test_a_launch_after_the_death_of_the_template_works(fresh_lab: KernelSession):
    template = template_pid(fresh_lab)
    os.kill(template, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(template)], timeout=1)
    assert "sum 2.0" in fresh_lab.ok(LAUNCH).stdout


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_death_of_the_template_during_a_job_is_a_clear_error(fresh_lab, number):
    template = template_pid(fresh_lab)
    cell = running(fresh_lab, OFFSPRING if number == signal.SIGTERM else COMPUTE)
    os.kill(template, number)
    shown = cell.wait(5)
    assert shown.ename == "WorkerDiedError"
    assert "rank" in shown.plain_traceback
    ours = {fresh_lab.pid}
    retried(lambda: _living(fresh_lab, ours), within=3)
    assert "sum 2.0" in fresh_lab.ok(LAUNCH).stdout
    fresh_lab.shutdown()
    fresh_lab.assert_nothing_left()


def _living(kernel: KernelSession, ours: set[int]) -> str | None:
    living = [p for p in marked(kernel.mark) if p.pid not in ours and p.status() != "zombie"]
    return ", ".join(map(str, living)) or None


def test_a_stopped_rank_is_ended_by_an_interrupt(fresh_lab: KernelSession):
    cell = running(fresh_lab, COMPUTE)
    os.kill(int(cell.so_far.stdout.split()[1]), signal.SIGSTOP)
    began = time.monotonic()
    fresh_lab.interrupt()
    assert cell.wait(10).plain_traceback == "KeyboardInterrupt: stopped: 2 of 2 ranks ended"
    assert time.monotonic() - began < 4


def test_a_job_has_a_record_as_long_as_it_runs(fresh_lab: KernelSession):
    folder = fresh_lab.folder / "runtime" / "jupyter-accel"
    cell = running(fresh_lab, COMPUTE)
    (path,) = folder.glob("*.json")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600
    record = json.loads(path.read_text())
    assert record["state"] == "running"
    assert record["kernel"][0] == fresh_lab.pid
    assert record["supervisor"][0] == template_pid(fresh_lab)
    assert record["ranks"][0][0] == int(cell.so_far.stdout.split()[1])
    assert len(record["ranks"]) == 2
    for pid, started in (record["kernel"], record["supervisor"], *record["ranks"]):
        stat = Path(f"/proc/{pid}/stat").read_text()
        assert int(stat.rpartition(")")[2].split()[19]) == started
    fresh_lab.interrupt()
    cell.wait(10)
    assert not folder.exists()


# ------------------------------------------------------------------------------ kept workers


@pytest.fixture
def kept(lab: KernelSession):
    """A kernel with two kept workers that hold a variable, each its own."""
    lab.run("%accel_close --all")
    lab.ok(
        "%%accel_launch -n 2 --keep lab\nimport os, time, torch\nimport torch.distributed as dist\n"
        "own = rank * 10\ndef reduced():\n    t = torch.ones(1)\n    dist.all_reduce(t)\n"
        "    return t.item()"
    )
    yield lab
    lab.run("%accel_close --all")


def pids(lab: KernelSession) -> list[int]:
    """The processes of the kept workers, as the magic lists them."""
    text = lab.ok("%accel_workers").stdout
    return [int(pid) for pid in text.partition("pids ")[2].partition(")")[0].split(", ")]


ALL = "%%accel_launch --keep lab --ordered\nprint(own, reduced())"
AS_BEFORE = "[rank 0]\n0 2.0\n[rank 1]\n10 2.0\n"


def test_kept_workers_remember_between_cells(kept: KernelSession):
    before = pids(kept)
    assert kept.ok(ALL).stdout == AS_BEFORE
    assert kept.ok(ALL).stdout == AS_BEFORE
    assert pids(kept) == before
    assert "own" in kept.ok("%accel_workers").stdout


@pytest.mark.parametrize("rest", ["", "reduced()"], ids=["alone", "while the other waits for it"])
def test_kept_workers_survive_an_error_in_one_of_them(kept: KernelSession, rest):
    before = pids(kept)
    cell = kept.run(f"%%accel_launch --keep lab\nif rank == 1:\n    1 / 0\n{rest}")
    assert cell.plain_traceback.startswith("rank 1: ZeroDivisionError")
    assert kept.ok(ALL).stdout == AS_BEFORE
    assert pids(kept) == before


def test_kept_workers_survive_an_interrupt(kept: KernelSession):
    before = pids(kept)
    cell = kept.start("%%accel_launch --keep lab\nprint('go', flush=True)\ntime.sleep(60)")
    cell.wait_for_output("go")
    kept.interrupt()
    said = "KeyboardInterrupt: stopped: 2 of 2 ranks interrupted; they are kept"
    assert cell.wait(10).plain_traceback == said
    assert kept.ok(ALL).stdout == AS_BEFORE
    assert pids(kept) == before


def test_kept_workers_that_an_interrupt_cannot_reach_are_ended(kept: KernelSession):
    body = "print('go', flush=True)\ndist.recv(torch.ones(1), 1 - rank)"  # each waits for the other
    cell = kept.start(f"%%accel_launch --keep lab --ranks all\n{body}")
    cell.wait_for_output("[rank 0] go")
    cell.wait_for_output("[rank 1] go")
    time.sleep(0.2)
    kept.interrupt()
    shown = cell.wait(10)
    assert shown.plain_traceback == "KeyboardInterrupt: stopped: 2 of 2 ranks ended"
    assert "these kept workers were ended" in shown.stderr
    assert "no kept workers" in kept.ok("%accel_workers").stdout
    fresh = kept.ok("%%accel_launch --keep lab -n 2\nprint('own' in globals())")
    assert fresh.stdout == "False\n"


def test_a_kept_worker_that_dies_between_cells_is_missed_at_the_next(kept: KernelSession):
    os.kill(pids(kept)[1], signal.SIGKILL)
    cell = kept.run("%%accel_launch --keep lab\nprint(own)")
    assert cell.ename == "WorkerDiedError"
    assert cell.plain_traceback.startswith("rank 1: the process was killed by signal 9")
    assert "no kept workers" in kept.ok("%accel_workers").stdout
    assert kept.ok("%%accel_launch --keep lab -n 2\nprint('new')").stdout == "new\n"


def test_kept_workers_cannot_change_their_number(kept: KernelSession):
    cell = kept.run("%%accel_launch --keep lab -n 3\nprint(1)")
    assert "the kept workers 'lab' are 2 ranks; leave -n out" in cell.stderr
    assert kept.ok("%%accel_launch --keep lab -n 2\nprint(own)").stdout == "0\n"


def test_kept_workers_have_a_time_limit_for_each_cell(kept: KernelSession):
    before = pids(kept)
    cell = kept.run("%%accel_launch --keep lab --timeout 0.5\ntime.sleep(60)")
    assert cell.ename == "WorkerTimeoutError"
    assert cell.elapsed < 5
    assert kept.ok(ALL).stdout == AS_BEFORE
    assert pids(kept) == before


def test_closed_workers_are_gone(kept: KernelSession):
    before = pids(kept)
    kept.ok("%accel_close lab")
    retried(lambda: next((str(p) for p in before if psutil.pid_exists(p)), None), within=2)
    assert "no kept workers" in kept.ok("%accel_workers").stdout


def test_closing_an_unknown_name_says_which_there_are(kept: KernelSession):
    cell = kept.run("%accel_close lob")
    assert "no kept workers are called 'lob'; there are: lab" in cell.stderr


def test_a_time_limit_shows_the_stack_of_each_rank_up_to_its_cell(lab: KernelSession):
    body = "def slow():\n    import time\n    time.sleep(60)\nslow()"
    cell = lab.run(f"%%accel_launch -n 2 --timeout 1 --ranks all\n{body}")
    assert cell.ename == "WorkerTimeoutError"
    assert cell.elapsed < 6
    assert cell.stderr.count(f'File "Cell In[{cell.execution_count}]", line 4 in slow') == 2
    assert cell.stderr.count(f'File "Cell In[{cell.execution_count}]", line 5 in <module>') == 2
    assert "jupyter_accel" not in cell.stderr
    assert "interactiveshell" not in cell.stderr
