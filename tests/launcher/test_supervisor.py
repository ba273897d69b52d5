"""The supervisor: it forks ranks, ends them as asked, and leaves nothing of them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import rank_work
from leftovers import open_descriptors, retried

from jupyter_accel.launcher.job import Job
from jupyter_accel.launcher.messages import ForkRanks, Run, Setup, StopRanks
from jupyter_accel.launcher.parcels import posting
from jupyter_accel.launcher.parcels.shipping import Parcel
from jupyter_accel.launcher.template import Template

NOW = StopRanks(interrupt=0.0, terminate=None, kill=None)


class Ranks:
    """Ranks of a template that has not imported torch."""

    def __init__(self, template: Template, *, size: int = 2, spawn: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.record = self.folder.with_suffix(".json")
        self.record.write_text("{}")
        request = ForkRanks(size, spawn=spawn, folder=str(self.folder), record=str(self.record))
        self.pool = template.fork_ranks(request)
        for rank in range(size):
            self.pool.send(rank, self._setup(rank, size))

    def work(self, *tasks: str) -> Job:
        """Give each rank its task."""
        letter, files = posting.enclose(Parcel(b""))
        for rank, task in enumerate(tasks):
            self.pool.send(rank, Run(f"{rank_work.HERE}:run", task, letter), files)
        return Job(self.pool)

    def wait_there(self) -> list[int]:
        """Wait until every rank is at its work; return the processes that they have noted."""
        size = self.pool.size
        retried(
            lambda: None if len([*self.folder.glob("there-*")]) == size else "not there", within=20
        )
        return [int(path.name.rpartition("-")[2]) for path in self.folder.glob("pid-*")]

    def close(self) -> None:
        self.pool.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.record.unlink(missing_ok=True)

    def _setup(self, rank: int, size: int) -> Setup:
        environ = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        return Setup(
            rank=rank,
            size=size,
            device="cpu",
            threads=1,
            nonce=self.pool.nonce,
            store_path=str(self.folder / "start"),
            environ=environ,
            cwd=os.getcwd(),  # noqa: PTH109
            path=tuple(sys.path),
            connect=f"{rank_work.HERE}:connect",
            disconnect=f"{rank_work.HERE}:disconnect",
            share_threads=f"{rank_work.HERE}:share_threads",
            connect_timeout=10.0,
        )


@pytest.fixture
def template(no_leftovers):
    template = Template.start(preload=("json",), warm=())
    template.wait_ready()
    no_leftovers.keep(template.pid)
    yield template
    template.close()


@pytest.fixture
def ranks(template):
    ranks = Ranks(template)
    yield ranks
    ranks.close()


def gone(pids) -> None:
    """Wait until these processes are gone, and reaped."""
    retried(lambda: ", ".join(str(p) for p in pids if psutil.pid_exists(p)) or None, within=3)


def pids_of(job: Job) -> list[int]:
    while not all(rank.pid for rank in job.pool.ranks):
        job.advance(0.1)
    return [rank.pid or 0 for rank in job.pool.ranks]


def test_ranks_lead_sessions_of_their_own_and_hold_no_other_ranks_files(ranks):
    job = ranks.work("sleep", "sleep")
    ranks.wait_there()
    pids = pids_of(job)
    targets = [{t for t in open_descriptors(pid).values() if "[" in t} for pid in pids]
    assert [os.getsid(pid) for pid in pids] == pids
    assert targets[0] & targets[1] == set()


def test_how_each_rank_ended_is_told(ranks):
    job = ranks.work("nothing", "raise")
    job.run()
    outcome = job.outcome()
    assert outcome.finished == (0,)
    assert [(f.rank, f.ename) for f in outcome.failures] == [(1, "ZeroDivisionError")]
    assert [rank.ended.exit_code for rank in ranks.pool.ranks] == [0, 1]


@pytest.mark.parametrize(
    ("task", "code", "number"), [("exit 3", 3, None), ("kill", None, signal.SIGKILL)]
)
def test_a_rank_that_ends_without_a_word_has_its_end_told(ranks, task, code, number):
    job = ranks.work("sleep", task)
    job.run()
    ended = ranks.pool.ranks[1].ended
    assert (ended.exit_code, ended.signal, ended.ended_by_us) == (code, number, False)
    assert ended.peak_bytes > 1_000_000
    other = ranks.pool.ranks[0].ended
    assert other.ended_by_us  # the job has failed: nobody waits for the rest of it


def test_an_interrupt_reaches_the_ranks_code(ranks):
    job = ranks.work("sleep", "sleep")
    ranks.wait_there()
    ranks.pool.stop(NOW)
    job.run()
    assert [f.ename for f in job.outcome().failures] == ["KeyboardInterrupt"] * 2


@pytest.mark.parametrize("task", ["deaf", "stop"])
def test_ranks_that_do_not_answer_are_killed_in_the_end(ranks, task):
    job = ranks.work(task, task)
    ranks.wait_there()
    time.sleep(0.1)
    began = time.monotonic()
    job.end("interrupt")
    job.run()
    assert 1.0 < time.monotonic() - began < 4.0
    assert [rank.ended.signal for rank in ranks.pool.ranks] == [signal.SIGKILL] * 2
    assert all(rank.ended.ended_by_us for rank in ranks.pool.ranks)


def test_nothing_that_a_rank_has_started_outlives_it(ranks):
    job = ranks.work("offspring", "sleep")
    noted = ranks.wait_there()
    assert len(noted) == 3
    gone(noted)  # the other rank still runs
    job.kill()
    job.run()


def test_nothing_that_a_killed_rank_has_started_outlives_it(ranks):
    job = ranks.work("offspring and sleep", "offspring and sleep")
    noted = ranks.wait_there()
    assert len(noted) == 6
    assert all(psutil.pid_exists(pid) for pid in noted)
    job.kill()
    job.run()
    gone(noted)


def test_a_rank_keeps_what_it_has_started_when_another_one_ends(ranks):
    job = ranks.work("offspring and sleep", "nothing")
    while ranks.pool.ranks[1].ended is None:
        job.advance(0.1)
    there = ranks.folder / "there-0"
    retried(lambda: None if there.exists() else "not there", within=10)
    noted = [int(path.name.rpartition("-")[2]) for path in ranks.folder.glob("pid-0-*")]
    time.sleep(0.3)
    assert all(psutil.pid_exists(pid) for pid in noted)
    job.kill()
    job.run()
    gone(noted)


def test_the_folder_and_the_record_go_with_the_last_rank(ranks):
    job = ranks.work("nothing", "sleep")
    while ranks.pool.ranks[0].ended is None:
        job.advance(0.1)
    assert ranks.folder.exists()
    job.kill()
    job.run()
    retried(lambda: "there" if ranks.folder.exists() or ranks.record.exists() else None, within=2)


def test_closing_the_pool_ends_its_ranks_and_no_others(template, ranks):
    others = Ranks(template)
    jobs = [ranks.work("deaf", "deaf"), others.work("sleep", "sleep")]
    pids = [pids_of(job) for job in jobs]
    ranks.wait_there()
    others.wait_there()
    ranks.pool.close()
    gone(pids[0])
    assert all(psutil.pid_exists(pid) for pid in pids[1])
    others.close()
    gone(pids[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_supervisor_is_the_end_of_its_ranks(template, ranks, number):
    job = ranks.work("deaf", "offspring and sleep")
    pids, offspring = pids_of(job), ranks.wait_there()
    os.kill(template.pid, number)
    job.run()
    said = {failure.message for failure in job.outcome().failures}
    assert said == {"the process that supervises the ranks was ended, and the ranks with it"}
    if number == signal.SIGTERM:
        gone([*pids, *offspring])
        return
    # Now those that have left their rank's group have nobody who knows of them.
    retried(lambda: ", ".join(map(str, filter(_lives, pids))) or None, within=3)
    for pid in filter(_lives, offspring):
        os.kill(pid, signal.SIGKILL)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != "zombie"
    except psutil.NoSuchProcess:
        return False


def test_ranks_can_be_spawned(template):
    ranks = Ranks(template, spawn=True)
    job = ranks.work("nothing", "raise")
    job.run()
    assert [rank.ended.exit_code for rank in ranks.pool.ranks] == [0, 1]
    ranks.close()


KERNEL = """
import sys
sys.path[:] = {path!r}
from test_supervisor import Ranks, Template
template = Template.start(preload=("json",), warm=())
template.wait_ready()
ranks = Ranks(template)
job = ranks.work("deaf", "offspring and sleep")
while not all(rank.pid for rank in job.pool.ranks):
    job.advance(0.1)
noted = ranks.wait_there()
print(template.pid, *[rank.pid for rank in ranks.pool.ranks], *noted, ranks.folder, flush=True)
{after}
"""


@pytest.mark.parametrize(
    "after",
    [
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.fork() or os._exit(0)\nimport time\ntime.sleep(1.5)",
    ],
    ids=["killed", "with a child that holds its files"],
)
def test_the_death_of_the_kernel_is_the_end_of_everything(after):
    code = KERNEL.format(path=[*sys.path, str(Path(__file__).parent)], after=after)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    *pids, folder = process.stdout.readline().split()
    process.wait(20)
    assert len(pids) == 6
    gone(map(int, pids))
    retried(lambda: folder if Path(folder).exists() else None, within=2)
    process.stdout.close()
