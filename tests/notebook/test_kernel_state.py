"""What a kernel has done before a launch: threads, devices, folders, seeds, environment."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from kernel_session import KernelSession
from leftovers import retried

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(180)]

THREADED = """
import os, random, sys
import numpy as np, torch
torch.set_num_threads(2)
a = torch.randn(2000, 2000, requires_grad=True)
(a @ a).sum().backward()
"""

TRAINING = """
from torch.utils.data import DataLoader
b = torch.randn(1500, 1500, requires_grad=True)
(b @ b).sum().backward()
seen = sum(x.sum().item() for x in DataLoader(list(range(8)), batch_size=2, num_workers=2))
print("trained", seen, bool(torch.isfinite(b.grad).all()))
"""

# Works in one process only, as CUDA does: the file is open under a name like a driver's.
DEVICE = """
import os

_file = _owner = None

def use():
    global _file, _owner
    if _owner is None:
        _file, _owner = open({path!r}), os.getpid()
    if _owner != os.getpid():
        raise RuntimeError("the device was opened by another process")
    return "device works"
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[KernelSession]:
    """A kernel that has computed with several threads before the extension came."""
    with KernelSession() as session:
        session.ok(THREADED)
        session.ok("%load_ext jupyter_accel")
        yield session
        session.shutdown()
        session.assert_nothing_left(within=5)


@pytest.fixture(autouse=True)
def _only_the_template_stays(lab: KernelSession) -> Iterator[None]:
    yield
    retried(lambda: str(lab.descendants()) if len(lab.descendants()) > 1 else None, within=3)


def add_device(session: KernelSession, module: str = "standin") -> None:
    """Put a module with a device of its own into the kernel's working folder."""
    driver: Path = session.work / "dev" / "nvidia0"
    driver.parent.mkdir()
    driver.touch()
    (session.work / f"{module}.py").write_text(DEVICE.format(path=str(driver)))


def facts(session: KernelSession, code: str, options: str = "-n 2", setup: str = "") -> list[dict]:
    """Evaluate an expression with a dictionary on each rank; through JSON, to see it as it was."""
    session.ok(f"{setup}\nimport json")
    cell = f"%%accel_launch {options} --ranks all --ordered\nprint('FACT', json.dumps({code}))"
    lines = session.ok(cell).stdout.splitlines()
    return [json.loads(line.removeprefix("FACT ")) for line in lines if line.startswith("FACT")]


# Threads


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_a_kernel_that_used_threads_launches_again_and_again(lab, method):
    for _ in range(3):
        cell = lab.ok(f"%%accel_launch -n 2 --start-method {method}\n{TRAINING}", timeout=40)
        assert "trained 28 True" in cell.stdout
        assert "trained 28 True" in cell.displays[1].text  # rank 1, folded
        lab.ok("(a @ a).sum().backward()")  # and the kernel goes on


def test_each_rank_gets_its_share_of_the_cores(lab):
    cores = int(lab.value("len(os.sched_getaffinity(0))"))
    for size in (1, 2, 3):
        fact = "{'torch': torch.get_num_threads(), 'omp': os.environ['OMP_NUM_THREADS']}"
        share = max(1, cores // size)
        expected = {"torch": share, "omp": str(share)}
        assert facts(lab, fact, f"-n {size}") == [expected] * size


def test_a_fork_computes_with_one_thread_since_more_would_hang(lab):
    assert facts(lab, "torch.get_num_threads()", "-n 1 --start-method fork") == [1]


# Devices


def test_a_device_that_a_cell_opened_does_not_reach_the_ranks_but_stops_a_fork():
    with KernelSession() as kernel:
        kernel.ok("%load_ext jupyter_accel")
        add_device(kernel)
        kernel.ok("import standin")
        opened = kernel.ok("standin.use()  # opens it\nprint('more')")
        works = kernel.ok("%%accel_launch -n 2\nprint(standin.use(), rank)")
        assert works.stdout == "device works 0\n"

        refused = kernel.run("%%accel_launch -n 2 --start-method fork\nprint(standin.use())")
        assert refused.ename == "UsageError"
        assert f"In [{opened.execution_count}] (standin.use()  # opens it)" in refused.evalue
        assert "dev/nvidia0 is open" in refused.evalue
        assert "forkserver" in refused.evalue
        assert "\n" not in refused.evalue
        assert kernel.ok("print(standin.use())").stdout == "device works\n"
        kernel.shutdown()
        kernel.assert_nothing_left()


def test_a_refused_fork_names_the_module_whose_import_opened_the_device():
    with KernelSession() as kernel:
        kernel.ok("%load_ext jupyter_accel")
        add_device(kernel)
        (kernel.work / "greedy.py").write_text("import standin\nstandin.use()\n")
        kernel.ok("import greedy")
        refused = kernel.run("%accel_launch --start-method fork 1")
        assert "In [2] (import greedy), which imported greedy, standin" in refused.evalue
        kernel.shutdown()
        kernel.assert_nothing_left()


def test_a_fork_is_refused_also_if_the_device_was_opened_before_the_extension_was_loaded():
    with KernelSession() as kernel:
        add_device(kernel)
        kernel.ok("import standin; standin.use()")
        kernel.ok("%load_ext jupyter_accel")
        refused = kernel.run("%%accel_launch -n 2 --start-method fork\n1")
        assert refused.ename == "UsageError"
        assert "before the extension was loaded" in refused.evalue
        kernel.shutdown()
        kernel.assert_nothing_left()


# Where the ranks stand


def test_ranks_have_the_variables_that_torchrun_sets_and_no_port(lab):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = facts(lab, f"{{n: os.environ.get(n) for n in {names}}}")
    address = "127.0.0.1"
    assert [list(rank.values()) for rank in found] == [
        ["0", "2", "0", "2", address, None],
        ["1", "2", "1", "2", address, None],
    ]
    assert lab.value("'RANK' in os.environ") == "False"


def test_ranks_stand_where_the_kernel_stands_now(lab):
    setup = (
        "os.makedirs('deeper', exist_ok=True); os.chdir('deeper')\n"
        "sys.path.insert(0, '/somewhere'); os.environ['MINE'] = 'yes'"
    )
    fact = "[os.getcwd(), sys.path[0], os.environ.get('MINE'), os.environ.get('HOME')]"
    home = str(lab.folder / "home")
    for method in ("forkserver", "fork"):
        found = facts(lab, fact, f"-n 2 --start-method {method}", setup)
        assert found[1] == [str(lab.work / "deeper"), "/somewhere", "yes", home]
        lab.ok("os.chdir('..'); sys.path.remove('/somewhere'); del os.environ['MINE']")
        again = facts(lab, fact, f"-n 2 --start-method {method}")
        assert again[1][0] == str(lab.work)
        assert again[1][1:] != ["/somewhere", "yes", home]
        assert again[1][2] is None


def test_what_a_rank_changes_does_not_reach_the_kernel(lab):
    lab.ok("%%accel_launch -n 2\nos.environ['MINE'] = 'rank'\nos.chdir('/')\nsys.path.clear()")
    assert lab.value("os.getcwd()") == repr(str(lab.work))
    assert lab.value("(os.environ.get('MINE'), bool(sys.path))") == "(None, True)"


def test_the_number_asked_for_wins_over_what_a_host_says_of_itself(lab):
    hosted = {
        "KAGGLE_KERNEL_RUN_TYPE": "Interactive",
        "COLAB_TPU_ADDR": "10.0.0.2:8470",
        "COLAB_GPU": "1",
        "TPU_NAME": "local",
        "WORLD_SIZE": "8",
    }
    lab.ok(f"os.environ.update({hosted})")
    for size in (3, 2, 1):
        cell = lab.ok(f"%accel_launch -n {size} --all-ranks (rank, world_size)")
        expected = [(rank, size) for rank in range(size)]
        assert cell.execute_result.text == repr(expected)
    lab.ok(f"for name in {list(hosted)}: del os.environ[name]")


LISTENING = """
import os, torch.distributed as dist
dist.barrier()
links = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
mine = {os.readlink(link) for link in links if os.path.islink(link)}
found = []
for family in ("tcp", "tcp6"):
    for row in open(f"/proc/self/net/{family}").read().splitlines()[1:]:
        field = row.split()
        if f"socket:[{field[9]}]" in mine:
            found.append(field[1].partition(":")[0])
print(dist.get_backend(), dist.get_world_size(), sorted(set(found)))
"""


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_ranks_talk_through_gloo_on_the_loopback_address_only(lab, method):
    cell = lab.ok(f"%%accel_launch -n 2 --start-method {method}\n{LISTENING}")
    assert cell.stdout == "gloo 2 ['0100007F']\n"  # 127.0.0.1


# Seeds

DRAWS = "[torch.rand(2).tolist(), np.random.rand(2).tolist(), [random.random() for _ in 'ab']]"
SEED = "torch.manual_seed(3); np.random.seed(3); random.seed(3)"


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_seeds_set_in_the_kernel_hold_in_the_ranks_as_in_a_plain_cell(lab, method):
    found = facts(lab, DRAWS, f"-n 2 --start-method {method}", SEED)
    plain = json.loads(lab.ok(f"{SEED}\nprint(json.dumps({DRAWS}))").stdout)
    assert found == [plain, plain]
    later = facts(lab, DRAWS, f"-n 2 --start-method {method}")  # the generators have moved on
    assert later[0] != plain
    assert later == [json.loads(lab.ok(f"print(json.dumps({DRAWS}))").stdout)] * 2
