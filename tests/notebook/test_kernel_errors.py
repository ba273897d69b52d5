"""What the notebook shows when ranks fail: the first cause, with its rank and the cell's line."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from cell_output import Display

if TYPE_CHECKING:
    from cell_output import CellResult
    from kernel_session import KernelSession

pytestmark = pytest.mark.kernel

# About a second on a machine that has nothing else to do.
SOON = 6.0
GROUP = "import os, signal, sys, time, torch\nimport torch.distributed as dist\n"
REDUCE = "dist.all_reduce(torch.ones(1))\n"


@pytest.fixture(autouse=True)
def _the_next_launch_works(lab: KernelSession):
    before = lab.footprint()
    yield
    cell = lab.ok(f"%%accel_launch -n 2\n{GROUP}{REDUCE}print('works')")
    assert "works" in cell.stdout
    lab.assert_back_to(before)


def failed(lab: KernelSession, body: str, line: str = "-n 2") -> CellResult:
    """Run a cell in which ranks fail, and return what it shows; it must fail soon."""
    cell = lab.run(f"%%accel_launch {line}\n{body}")
    assert cell.status == "error"
    assert cell.elapsed < SOON
    return cell


def state_line(cell: CellResult) -> str:
    """The line above the output, as it stands at the end."""
    shown = [o for o in cell.outputs if isinstance(o, Display)]
    return shown[0].text


@pytest.mark.parametrize(
    "body",
    [
        "if rank == 1:\n    raise ValueError('broken')\n" + REDUCE,
        "if rank == 1:\n    time.sleep(0.3); raise ValueError('broken')\n" + REDUCE,
        REDUCE + "if rank == 1:\n    raise ValueError('broken')\ntime.sleep(60)",
    ],
    ids=["before a collective", "while the other is in it", "after it"],
)
def test_the_rank_that_raised_is_shown_with_its_line(lab, body):
    cell = failed(lab, GROUP + body)
    lines = cell.plain_traceback.splitlines()
    assert cell.ename == "WorkerError"
    assert lines[0] == "rank 1: ValueError: broken"
    number = 2 + next(n for n, text in enumerate((GROUP + body).splitlines()) if "raise" in text)
    arrow = next(text for text in lines if text.startswith("---->"))
    assert arrow.split()[1] == str(number)
    assert "raise ValueError('broken')" in arrow
    assert f"Cell In[{cell.execution_count}], line {number}" in cell.plain_traceback
    assert "failed: rank 1: ValueError: broken" in state_line(cell)


def test_the_echo_in_other_ranks_is_one_folded_line(lab):
    cell = failed(lab, f"{GROUP}if rank == 1:\n    raise ValueError('broken')\n{REDUCE}", "-n 3")
    text = cell.plain_traceback
    assert text.startswith("rank 1: ValueError: broken")
    assert text.count("Traceback (most recent call last)") == 1
    assert "gloo" not in text.splitlines()[0]
    echoes = [line for line in text.splitlines() if "lost its peers as a result" in line]
    assert all(line.startswith("  rank") for line in echoes)


def test_sys_exit_with_an_error_code_is_an_error_at_its_line(lab):
    cell = failed(lab, f"{GROUP}if rank == 1:\n    sys.exit(3)\n{REDUCE}")
    assert cell.plain_traceback.startswith("rank 1: SystemExit: called sys.exit(3)")
    assert "----> 5     sys.exit(3)" in cell.plain_traceback


def test_sys_exit_with_words_shows_the_words(lab):
    cell = failed(lab, "import sys\nsys.exit('no data today')", "-n 1")
    assert "called sys.exit(no data today)" in cell.plain_traceback


def test_a_rank_that_ends_its_process_is_said_to_have_died(lab):
    cell = failed(lab, f"{GROUP}if rank == 1:\n    os._exit(3)\n{REDUCE}")
    assert cell.ename == "WorkerDiedError"
    assert cell.plain_traceback.startswith(
        "rank 1: the process ended by itself with exit code 3 before its work was done"
    )


def test_a_rank_that_is_killed_is_said_to_be(lab):
    cell = failed(lab, f"{GROUP}if rank == 1:\n    os.kill(os.getpid(), 9)\n{REDUCE}")
    assert cell.ename == "WorkerDiedError"
    assert cell.plain_traceback.startswith("rank 1: the process was killed by signal 9 (SIGKILL")


def test_a_segmentation_fault_shows_the_line_of_the_cell(lab):
    cell = failed(lab, f"{GROUP}import ctypes\nif rank == 1:\n    ctypes.string_at(0)\n{REDUCE}")
    text = cell.plain_traceback
    assert cell.ename == "WorkerDiedError"
    assert text.startswith("rank 1: the process was killed by signal 11 (SIGSEGV")
    assert f'File "Cell In[{cell.execution_count}]", line 6 in <module>' in text
    assert "jupyter_accel" not in text
    assert "interactiveshell.py" not in text


@pytest.mark.parametrize(
    "greedy", ["torch.ones(500_000_000)", "bytearray(2_000_000_000)"], ids=["torch", "Python"]
)
def test_a_memory_limit_gives_an_error_at_the_line_that_asks_for_too_much(lab, greedy):
    body = f"{GROUP}small = torch.ones(1_000_000)\nif rank == 1:\n    big = {greedy}\n{REDUCE}"
    cell = failed(lab, body, "-n 2 --memory-limit 1GB")
    assert f"----> 6     big = {greedy}" in cell.plain_traceback
    assert "emory" in cell.plain_traceback.splitlines()[0]


def test_a_limit_that_a_rank_sets_itself_gives_an_error_at_the_line(lab):
    body = (
        f"{GROUP}import resource\nif rank == 1:\n"
        "    resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))\n"
        f"    big = bytearray(2_000_000_000)\n{REDUCE}"
    )
    cell = failed(lab, body)
    assert cell.plain_traceback.startswith("rank 1: MemoryError")
    assert "----> 7     big = bytearray" in cell.plain_traceback


def test_an_exception_that_cannot_be_pickled_is_shown_all_the_same(lab):
    body = (
        "import threading\nclass Odd(Exception):\n    def __init__(self, first, second):\n"
        "        super().__init__('odd')\n        self.lock = threading.Lock()\n"
        "if rank == 1:\n    raise Odd(1, 2)"
    )
    cell = failed(lab, body)
    assert cell.plain_traceback.startswith("rank 1: Odd: odd")
    assert "----> 8     raise Odd(1, 2)" in cell.plain_traceback


def test_an_exception_whose_text_raises_is_named_by_its_type(lab):
    body = (
        "class Odd(Exception):\n    def __str__(self):\n        raise RuntimeError('no text')\n"
        "if rank == 1:\n    raise Odd"
    )
    cell = failed(lab, body)
    assert cell.plain_traceback.startswith("rank 1: Odd: <exception str() failed>")
    assert "----> 6     raise Odd" in cell.plain_traceback


def test_a_syntax_error_starts_no_rank_and_points_at_the_line_of_the_cell(lab):
    cell = lab.run("%%accel_launch -n 2\nx = 1\ny = = 2\n")
    assert cell.ename == "SyntaxError"
    assert f"Cell In[{cell.execution_count}], line 3" in cell.plain_traceback
    assert "y = = 2" in cell.plain_traceback
    assert cell.displays == []  # not even a state line
    assert "jupyter_accel" not in cell.plain_traceback


def test_an_error_in_a_function_of_an_earlier_cell_shows_the_lines_of_both(lab):
    earlier = lab.ok("def half(x):\n    return x / 0\n\ndef outer(x):\n    return half(x)")
    cell = failed(lab, "value = 1\nif rank == 1:\n    outer(value)")
    text = cell.plain_traceback
    assert text.startswith("rank 1: ZeroDivisionError: division by zero")
    assert f"Cell In[{cell.execution_count}], line 4" in text
    assert "----> 4     outer(value)" in text
    assert f"Cell In[{earlier.execution_count}], line 5, in outer(x)" in text
    assert "----> 2     return x / 0" in text


def test_an_error_in_an_imported_module_shows_its_line_and_that_of_the_cell(lab):
    (lab.work / "broken_module.py").write_text("def look(x):\n    return x['missing']\n")
    lab.ok("import broken_module")
    text = failed(lab, "if rank == 1:\n    broken_module.look({})").plain_traceback
    assert text.startswith("rank 1: KeyError: 'missing'")
    assert "----> 3     broken_module.look({})" in text
    assert "broken_module.py:2, in look(x)" in text
    assert "----> 2     return x['missing']" in text


def test_the_same_error_on_all_ranks_is_shown_once(lab):
    text = failed(lab, "raise ValueError('same')", "-n 4").plain_traceback
    assert text.startswith("ranks 0, 1, 2, 3: ValueError: same")
    assert text.count("raise ValueError('same')") == 1


def test_a_different_error_is_told_apart_from_the_same_one_of_the_others(lab):
    body = "import time\nif rank == 2:\n    raise KeyError('mine')\ntime.sleep(0.2)\n"
    text = failed(lab, body + "raise ValueError('same')", "-n 4").plain_traceback
    assert text.startswith("rank 2: KeyError: 'mine'")
    assert text.count("Traceback (most recent call last)") == 1
    assert "\n  ranks 0, 1, 3: ValueError: same" in text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups came with Python 3.11")
def test_a_group_of_exceptions_is_shown_with_its_members(lab):
    body = (
        "if rank == 1:\n    raise ExceptionGroup('several', [ValueError('one'), KeyError('two')])"
    )
    text = failed(lab, body).plain_traceback
    assert text.startswith("rank 1: ExceptionGroup: several (2 sub-exceptions)")
    assert "ValueError: one" in text
    assert "KeyError: 'two'" in text
    assert "line 3, in <module>" in text
    assert "interactiveshell" not in text


def test_a_cause_is_shown_above_what_it_led_to(lab):
    body = "try:\n    1 / 0\nexcept ZeroDivisionError as old:\n    raise ValueError('new') from old"
    text = failed(lab, body).plain_traceback
    assert text.startswith("ranks 0, 1: ValueError: new")
    assert text.index("----> 3     1 / 0") < text.index("----> 5     raise ValueError('new')")


@pytest.mark.parametrize("end", ["pass", "sys.exit(0)"], ids=["its end", "sys.exit(0)"])
def test_a_rank_left_alone_in_a_collective_is_told_who_was_not_there(lab, end):
    cell = failed(lab, f"{GROUP}if rank == 1:\n    {end}\nelse:\n    {REDUCE}")
    text = cell.plain_traceback
    assert text.startswith(
        "rank 0 waited in a collective for rank 1, which had already ended; every rank must reach "
        "each collective equally often"
    )
    assert "----> 7     dist.all_reduce(torch.ones(1))" in text


def test_the_output_before_an_error_is_complete(lab):
    body = "print('some text\\nand half a line', end='')\nif rank == 0:\n    raise ValueError"
    cell = failed(lab, body)
    assert cell.stdout == "some text\nand half a line"
    assert "and half a line" in cell.displays[1].text  # rank 1


def test_an_error_in_launch_is_shown_with_its_line(lab):
    train = (
        "from jupyter_accel import launch\ndef train(n):\n    import torch.distributed as dist\n"
        "    import torch\n    if dist.get_rank() == 1:\n        raise ValueError(f'broken {n}')\n"
        "    dist.all_reduce(torch.ones(1))\nlaunch(train, 3, num_processes=2)"
    )
    cell = lab.run(train)
    text = cell.plain_traceback
    assert cell.ename == "WorkerError"
    assert cell.elapsed < SOON
    assert text.startswith("rank 1: ValueError: broken 3")
    assert "line 6, in train" in text
    assert "raise ValueError(f'broken {n}')" in text
    assert "jupyter_accel" not in text


def test_an_error_in_a_launched_expression_is_shown_with_its_line(lab):
    code = "def train(n):\n    return n / 0\nn = 1\n%accel_launch -n 2 train(n)"
    text = lab.run(code).plain_traceback
    assert text.startswith("ranks 0, 1: ZeroDivisionError: division by zero")
    assert "----> 2     return n / 0" in text
    assert "train(n)" in text
    assert "__accel" not in text


def test_ranks_that_fail_together_with_many_lines_are_shown_once(lab):
    body = "def deep(n):\n    return deep(n - 1) if n else 1 / 0\ndeep(40)"
    text = failed(lab, body, "-n 2").plain_traceback
    assert text.startswith("ranks 0, 1: ZeroDivisionError")
    assert text.count("----> 4 deep(40)") == 1
