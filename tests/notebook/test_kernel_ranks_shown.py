"""The choice of ranks that are shown, and their order, in a real kernel."""

from __future__ import annotations

import re

import pytest
from fold_text import fold
from kernel_session import KernelSession

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module")
def kernel():
    with KernelSession() as session:
        session.ok("%load_ext jupyter_accel")
        yield session
        session.shutdown()
        session.assert_nothing_left()


def test_lines_of_all_ranks_carry_their_labels(kernel):
    cell = kernel.ok("""%%accel_launch -n 2 --ranks all
for i in range(200):
    print("line", i, "x" * 50, flush=i % 3 == 0)
print("a\\nb", end="")
""")
    lines = cell.stdout.splitlines()
    assert all(re.match(r"\[rank [01]\] (line \d+ x{50}|a|b)$", line) for line in lines)
    for rank in (0, 1):
        own = [line for line in lines if line.startswith(f"[rank {rank}] line")]
        assert [int(line.split()[3]) for line in own] == list(range(200))
    assert not [d for d in cell.displays if d.text.startswith("rank ")]


def test_some_ranks_can_be_chosen(kernel):
    cell = kernel.ok("%%accel_launch -n 3 --ranks 0,2\nprint('I am', rank)")
    assert sorted(cell.stdout.splitlines()) == ["[rank 0] I am 0", "[rank 2] I am 2"]
    assert fold(cell, 1) == "I am 1\n"


def test_a_rank_that_does_not_exist_cannot_be_shown(kernel):
    cell = kernel.run("%%accel_launch -n 2 --ranks 0,5\nprint(1)")
    assert cell.status == "error"
    assert cell.ename == "UsageError" or "5" in cell.stderr
    assert "0 to 1" in cell.all_text
    assert not cell.stdout


ORDERED = """%%accel_launch -n 2 --ordered
import random, sys, time
from IPython.display import HTML
handle = display("x", display_id=True)
for i in range(20):
    print(rank, i)
    time.sleep(random.random() * 0.01)
    handle.update(i)
print("warned", file=sys.stderr)
HTML("<b>end</b>")
"""


def shown(cell):
    return [
        (o.name, o.text) if hasattr(o, "name") else sorted(o.data.items()) for o in cell.outputs
    ]


def test_ordered_output_is_the_same_each_time(kernel):
    first, second = kernel.ok(ORDERED), kernel.ok(ORDERED)
    assert shown(first) == shown(second)
    assert not re.search(r"\d\.\d+ s", first.all_text)
    assert first.stdout.index("[rank 0]") < first.stdout.index("[rank 1]")
