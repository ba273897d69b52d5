"""Cells that do what a launcher does not expect: exits, threads, children, odd magics, mistakes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from kernel_session import KernelSession
from leftovers import retried

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def lab() -> Iterator[KernelSession]:
    with KernelSession() as session:
        session.ok("%load_ext jupyter_accel\nimport os, sys, threading, time, torch")
        yield session
        session.shutdown()
        session.assert_nothing_left(within=5)


@pytest.fixture(autouse=True)
def _only_the_template_stays(lab: KernelSession) -> Iterator[None]:
    yield
    retried(lambda: str(lab.descendants()) if len(lab.descendants()) > 1 else None, within=3)


def launched(session: KernelSession, body: str, options: str = "-n 2"):
    """Run a cell on the ranks; the time limit is what tells a hang from a slow machine."""
    return session.run(f"%%accel_launch {options}\n{body}", timeout=40)


# Ends


def test_input_is_refused_with_the_line_that_asks(lab):
    cell = launched(lab, "first = 1\n\nname = input('name? ')")
    assert cell.ename == "WorkerError"
    assert "NoInputError: input('name? ') was called in a rank" in cell.evalue
    assert "----> 4 name = input('name? ')" in cell.plain_traceback


@pytest.mark.parametrize(
    "end", ["sys.exit(0)", "sys.exit()", "raise SystemExit", "exit()", "quit()"]
)
def test_a_clean_exit_is_a_good_end_and_what_was_set_comes_back(lab, end):
    cell = launched(
        lab, f"made = {end!r}\nprint('before')\n{end}\nprint('after')", "-n 2 --pull made"
    )
    assert cell.status == "ok"
    assert cell.stdout == "before\n"
    assert "2 of 2 ranks done" in cell.displays[0].text
    assert lab.value("made") == repr(end)


def test_one_rank_may_exit_early(lab):
    cell = launched(lab, "if rank == 1:\n    sys.exit(0)\nprint('went on')")
    assert (cell.status, cell.stdout) == ("ok", "went on\n")


@pytest.mark.parametrize(
    ("end", "words"), [("sys.exit(3)", "sys.exit(3)"), ("sys.exit('no data')", "no data")]
)
def test_an_exit_with_a_code_is_an_error_at_its_line(lab, end, words):
    cell = launched(lab, f"x = 1\n{end}")
    assert cell.ename == "WorkerError"
    assert cell.evalue.startswith("ranks 0, 1: SystemExit: called sys.exit(")
    assert words in cell.evalue
    assert f"----> 3 {end}" in cell.plain_traceback
    assert "use %tb" not in cell.all_text


@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_that_vanishes_is_an_error_with_its_exit_code(lab, code):
    cell = launched(lab, f"if rank == 1:\n    os._exit({code})")
    assert cell.ename == "WorkerDiedError"
    assert f"rank 1: the process ended by itself with exit code {code}" in cell.evalue


# What is left running


@pytest.mark.parametrize("daemon", [True, False])
def test_threads_that_run_on_do_not_hold_the_cell_up(lab, daemon):
    body = (
        f"threading.Thread(target=time.sleep, args=(60,), daemon={daemon}).start()\nprint('done')"
    )
    cell = launched(lab, body)
    assert (cell.status, cell.stdout) == ("ok", "done\n")
    assert cell.elapsed < 20


def test_a_copy_that_runs_the_cell_on_reports_nothing(lab):
    lab.ok("from IPython.display import display")
    body = (
        "child = os.fork() == 0\n"
        "if not child:\n    os.wait()\n"
        "print('child' if child else 'rank')\n"
        "display('shown')\n5"
    )
    cell = launched(lab, body, "-n 2 --pull child")
    assert cell.status == "ok"
    assert sorted(cell.stdout.split()) == ["child", "rank"]
    assert [d.text for d in cell.displays if "shown" in d.text and "rank" not in d.text] == [
        "'shown'"
    ]
    assert lab.value("child") == "False"
    body = (
        "if os.fork() == 0:\n    raise ValueError('in the child')\nos.wait()\nprint('rank goes on')"
    )
    cell = launched(lab, body)
    assert (cell.status, cell.stdout) == ("ok", "rank goes on\n")


SPAWNED = """
import subprocess
sleeper = subprocess.Popen(["sleep", "300"], start_new_session=True)
deeper = subprocess.Popen(["sh", "-c", "setsid sleep 300 & wait"])
print("started")
"""
POOL = """
import multiprocessing
def double(x): return x * 2
pool = multiprocessing.get_context({method!r}).Pool(2)
print(pool.map({function}, [1, -2]))
"""
LOADER = """
import torch
from torch.utils.data import DataLoader
loader = DataLoader(torch.arange(8.0), batch_size=2, num_workers=2, persistent_workers=True)
print([sum(float(batch.sum()) for batch in loader) for epoch in range(2)])
"""
MIDWAY = """
import torch
from torch.utils.data import DataLoader
for batch in DataLoader(torch.arange(800.0), num_workers=2):
    break
print("half")
"""
CHILDREN = [
    pytest.param(SPAWNED, "started", id="programs in sessions of their own"),
    pytest.param(POOL.format(method="fork", function="double"), "[2, -4]", id="a pool of forks"),
    pytest.param(POOL.format(method="spawn", function="abs"), "[1, 2]", id="a pool of spawned"),
    pytest.param(LOADER, "[28.0, 28.0]", id="persistent workers of a loader"),
    pytest.param(MIDWAY, "half", id="workers of a loader that is not at its end"),
]


@pytest.mark.parametrize(("body", "printed"), CHILDREN)
def test_child_processes_work_and_are_gone_after_the_cell(lab, body, printed):
    before = lab.footprint()
    cell = launched(lab, body)
    assert (cell.status, cell.stdout) == ("ok", f"{printed}\n"), cell.plain_traceback
    retried(lambda: str(lab.descendants()) if len(lab.descendants()) > 1 else None, within=3)
    assert lab.footprint().files - before.files == set()


@pytest.mark.parametrize("end", ["", "1 / 0", "os.kill(os.getpid(), 9)"])
def test_shared_memory_that_nobody_removed_is_removed_after_the_rank(lab, end):
    body = (
        "from multiprocessing.shared_memory import SharedMemory\n"
        "block = SharedMemory(create=True, size=1000)\n"
        "print(block.name, flush=True)\n"
        f"{end}"
    )
    name = launched(lab, body, "-n 1").stdout.strip()
    assert name
    retried(lambda: name if name in lab.footprint().shared_memory else None, within=2)


def test_exit_functions_run_once_and_before_the_cell_ends(lab):
    body = "import atexit\natexit.register(print, 'bye')\nos.fork()\n{end}"
    assert launched(lab, body.format(end=""), "-n 1").stdout == "bye\n"
    assert launched(lab, body.format(end="1 / 0"), "-n 1").stdout == "bye\n"


# Awaiting, and magics


def test_asynchronous_code_runs_in_both_ways(lab):
    body = (
        "import asyncio\nasync def later():\n    await asyncio.sleep(0.01)\n    return rank + 5\n"
    )
    assert launched(lab, f"{body}print(asyncio.run(later()))").stdout == "5\n"
    assert launched(lab, f"{body}print(await later())").stdout == "5\n"


def test_magics_and_shell_commands_work_in_the_body(lab):
    cell = launched(lab, "%time total = sum(range(10))\n!echo rank {rank} of {world_size}\ntotal")
    assert "Wall time" in cell.stdout
    assert "rank 0 of 2" in cell.stdout
    assert "45" in [display.text for display in cell.displays]
    below = launched(lab, "%%time\nprint('timed', rank)")
    assert below.stdout.startswith("timed 0\n")
    assert "Wall time" in below.stdout
    assert launched(lab, "%load_ext jupyter_accel\nprint('loaded')").stdout == "loaded\n"


@pytest.mark.parametrize(
    ("body", "method"),
    [
        ("%%accel_launch -n 2\nprint(rank)", "forkserver"),
        ("%accel_launch -n 2 rank", "forkserver"),
        ("value = %accel_launch rank", "fork"),
        ("import jupyter_accel\njupyter_accel.launch(print, 1, num_processes=2)", "forkserver"),
        ("import jupyter_accel\njupyter_accel.launch(print, 1, num_processes=2)", "fork"),
    ],
)
def test_a_launch_inside_a_rank_is_refused(lab, body, method):
    cell = launched(lab, body, f"-n 2 --start-method {method}")
    assert cell.ename == "WorkerError"
    assert "this code runs in a rank already; launch from the kernel instead" in cell.evalue
    assert "rank" not in cell.stdout


@pytest.mark.parametrize("body", ["", "\n", "# only a comment", "\n\n# another\n\n", "pass"])
def test_a_cell_with_nothing_to_do_ends_well(lab, body):
    cell = launched(lab, body)
    assert (cell.status, cell.stdout) == ("ok", "")
    assert "2 of 2 ranks done" in cell.displays[0].text


def test_a_cell_without_a_line_below_the_magic_ends_well(lab):
    assert lab.ok("%%accel_launch -n 2").displays[0].text.endswith("2 of 2 ranks done")


def test_one_rank_is_a_world_of_its_own(lab):
    lab.ok("import torch.distributed as dist, torch")
    cell = launched(
        lab, "t = torch.ones(1); dist.all_reduce(t)\nprint(rank, world_size, t.item())", "-n 1"
    )
    assert cell.stdout == "0 1 1.0\n"
    assert cell.displays[0].text.startswith("1 rank on cpu")


def test_a_mistake_in_the_body_is_shown_at_its_line_and_starts_nothing(lab):
    cell = lab.run("%%accel_launch -n 2\nx = 1\ny = = 2")
    assert cell.ename == "SyntaxError"
    assert "line 3" in cell.plain_traceback
    assert "jupyter_accel" not in cell.plain_traceback
    assert not cell.displays


# Mistakes in the line

MISTAKES = [
    ("-n two", "--num-processes needs a number, got 'two'"),
    ("-n 1.5", "--num-processes needs a number, got '1.5'"),
    ("-n 0", "the number of ranks must be at least 1, got 0"),
    ("-n -3", "the number of ranks must be at least 1, got -3"),
    ("-n", "-n needs a value: -n, --num-processes N"),
    ("-n4", "unknown option -n4; write -n 4"),
    ("--pul a", "unknown option --pul; did you mean --pull?"),
    ("--pull", "--pull needs a value: --pull a,b"),
    ("--pull 'a b'", "--pull needs names with commas between, such as model,loss; got 'a b'"),
    ("--nproc 2", "unknown option --nproc; did you mean --num-processes?"),
    ("--zzz", "unknown option --zzz; --help shows them all"),
    ("--start-method frok", "--start-method cannot be 'frok'; did you mean fork?"),
    ("--precision bf61", "--precision cannot be 'bf61'; did you mean bf16?"),
    ("--rank 0", "unknown option --rank; did you mean --ranks?"),
    ("--ranks x", "--ranks needs numbers with commas between, such as 0,2, or all; got 'x'"),
    ("-n 2 --ranks 1,2", "--ranks asks for 2, but there are ranks 0 to 1"),
    ("-n 1 --ranks 7", "--ranks asks for 7, but there is rank 0 only"),
    ("--keep 1a", "--keep needs a name such as lab, got '1a'"),
    ("--all-ranks", "--all-ranks is for %accel_launch with an expression; in a cell use --pull"),
    ("-n 2 words", "'words' after the options is not understood; the code goes below this line"),
    ("--timeout soon", "--timeout needs a number, got 'soon'"),
    ("--timeout 0", "timeout must be more than 0, got 0"),
    (
        "--memory-limit lots",
        "'lots' is not a size; write a number and a unit, such as 2GB or 512MiB",
    ),
    ("--ordered=yes", "--ordered takes no value, got '--ordered=yes'"),
]


@pytest.mark.parametrize(("line", "message"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_in_the_line_is_one_sentence_and_nothing_runs(lab, line, message):
    cell = lab.run(f"%%accel_launch {line}\nprint('ran')")
    assert (cell.ename, cell.evalue) == ("UsageError", message)
    assert cell.stderr.strip() == f"UsageError: {message}"
    assert "ran" not in cell.stdout
    assert not cell.displays


def test_a_line_without_an_expression_says_what_to_write(lab):
    assert "nothing to run" in lab.run("%accel_launch").evalue
    assert "nothing to run" in lab.run("%accel_launch -n 2").evalue
    assert "--pull is for cells" in lab.run("%accel_launch --pull a a").evalue


def test_help_lists_every_option_and_runs_nothing(lab):
    from dataclasses import fields

    from jupyter_accel.notebook.options import MagicOptions
    from jupyter_accel.settings import LaunchOptions

    names = [f.name for f in (*fields(LaunchOptions), *fields(MagicOptions)) if f.name != "launch"]
    for code in ("%accel_launch --help", "%%accel_launch -h\nprint('ran')"):
        cell = lab.ok(code)
        assert "ran\n" not in cell.stdout
        for name in names:
            assert f"--{name.replace('_', '-')} " in cell.stdout


# The life of the extension; these change the kernel, so they come last and in order


def test_a_launch_works_after_the_kernels_names_were_reset(lab):
    lab.ok("value = 1")
    lab.ok("%reset -f")
    assert lab.ok("%accel_launch -n 2 rank + 1").execute_result.text == "1"
    cell = lab.run("%%accel_launch -n 2\nprint(value)")
    assert "NameError: name 'value' is not defined" in cell.evalue


def test_a_reload_ends_the_old_processes_and_works(lab):
    old = {process.pid for process in lab.descendants()}
    lab.ok("%reload_ext jupyter_accel")
    retried(lambda: "still there" if old & {p.pid for p in lab.descendants()} else None, within=3)
    assert lab.ok("%accel_launch -n 2 rank + 2").execute_result.text == "2"
    retried(lambda: str(lab.descendants()) if len(lab.descendants()) != 1 else None, within=3)


def test_an_unload_ends_every_process_and_takes_the_magics_away(lab):
    lab.ok("%%accel_launch -n 2 --keep stay\nheld = 1")
    assert len(lab.descendants()) == 3
    lab.ok("%unload_ext jupyter_accel")
    retried(lambda: str(lab.descendants()) if lab.descendants() else None, within=3)
    assert "not found" in lab.run("%accel_launch 1").evalue
    assert "not found" in lab.run("%%accel_launch\n1").evalue
    assert "not found" in lab.run("%accel_workers").evalue
    assert not lab.descendants()
    lab.ok("%load_ext jupyter_accel")
    assert lab.ok("%accel_launch -n 2 rank + 3").execute_result.text == "3"
