"""The harness itself, on a plain kernel: what it reports is what a notebook would show."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from kernel_session import KernelDiedError
from leftovers import NoLeftovers, marked, retried

if TYPE_CHECKING:
    from kernel_session import KernelSession

pytestmark = pytest.mark.kernel

SLEEP = "import time; print('on it', flush=True); time.sleep(60)"
ORPHAN = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
os.wait()
"""


def test_text_and_value_of_a_cell(kernel: KernelSession):
    cell = kernel.run("import sys; print('out'); print('err', file=sys.stderr); 6 * 7")
    assert (cell.status, cell.stdout, cell.stderr) == ("ok", "out\n", "err\n")
    assert cell.execute_result is not None
    assert cell.execute_result.text == "42"
    assert cell.displays == []
    assert kernel.value("'a' * 3") == "'aaa'"


def test_text_written_to_the_descriptor_itself_is_seen(kernel: KernelSession):
    cell = kernel.run("import os; os.write(1, b'raw'); import time; time.sleep(0.3)")
    assert cell.stdout == "raw"


def test_an_update_replaces_the_display_it_names(kernel: KernelSession):
    first = kernel.start(
        "from IPython.display import *; h = display(HTML('<b>1</b>'), display_id=True)"
    )
    assert first.wait().displays[0].html == "<b>1</b>"
    later = kernel.run("h.update(HTML('<b>2</b>'))")
    assert later.displays == []
    assert [(d.html, d.updates) for d in first.so_far.displays] == [("<b>2</b>", 1)]


def test_cleared_output_is_gone(kernel: KernelSession):
    cell = kernel.run("from IPython.display import *; print(1); clear_output(wait=True); print(2)")
    assert cell.stdout == "2\n"


def test_an_error_is_a_result(kernel: KernelSession):
    cell = kernel.run("def f():\n    raise ValueError('no')\nf()")
    assert (cell.status, cell.ename, cell.evalue) == ("error", "ValueError", "no")
    assert "raise ValueError('no')" in cell.plain_traceback
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        kernel.ok("1 / 0")


def test_output_after_the_end_of_a_cell_is_late(kernel: KernelSession):
    cell = kernel.start(
        "import threading, time\n"
        "def later():\n    time.sleep(0.3); print('late')\n"
        "threading.Thread(target=later).start()"
    )
    assert cell.wait().late == []
    cell.wait_for_output("late")
    assert [m.kind for m in cell.so_far.late] == ["stream"]


def test_interrupt_ends_a_running_cell(kernel: KernelSession):
    cell = kernel.start(SLEEP)
    cell.wait_for_output("on it")
    assert cell.so_far.status == "running"
    kernel.interrupt()
    assert cell.wait(timeout=5).ename == "KeyboardInterrupt"
    assert kernel.run("1").status == "ok"


def test_a_cell_that_takes_too_long_is_an_error_of_the_test(kernel: KernelSession):
    cell = kernel.start(SLEEP)
    with pytest.raises(TimeoutError, match="on it"):
        cell.wait(timeout=1.0)
    kernel.interrupt()
    assert cell.wait(timeout=5).status == "error"


def test_the_kernel_is_isolated(kernel: KernelSession):
    home = kernel.value("__import__('os').path.expanduser('~')")
    assert str(kernel.folder) in home
    assert kernel.value("'PYTEST_CURRENT_TEST' in __import__('os').environ") == "False"
    assert kernel.value("__import__('sys').executable") == repr(sys.executable)


def test_a_killed_kernel_is_told_from_a_slow_one(fresh_kernel: KernelSession):
    cell = fresh_kernel.start(SLEEP)
    cell.wait_for_output("on it")
    fresh_kernel.kill()
    with pytest.raises(KernelDiedError, match="on it"):
        cell.wait()
    fresh_kernel.assert_nothing_left()


def test_a_restarted_kernel_is_a_new_one(fresh_kernel: KernelSession):
    fresh_kernel.ok("x = 1")
    before = fresh_kernel.pid
    fresh_kernel.restart()
    assert fresh_kernel.pid != before
    assert fresh_kernel.run("x").ename == "NameError"


def test_an_orphan_in_its_own_session_is_found(fresh_kernel: KernelSession):
    empty = fresh_kernel.footprint()
    fresh_kernel.ok(ORPHAN)
    assert len(fresh_kernel.descendants()) == 1
    with pytest.raises(AssertionError, match="is new"):
        fresh_kernel.assert_back_to(empty, within=0.1)
    fresh_kernel.shutdown()
    assert not fresh_kernel.alive
    with pytest.raises(AssertionError, match="ipykernel"):
        fresh_kernel.assert_nothing_left(within=0.1)
    mark = fresh_kernel.mark
    fresh_kernel.close()
    retried(lambda: str(marked(mark)) if marked(mark) else None, within=1.0)


def test_open_files_shared_memory_and_temporary_files_are_counted(fresh_kernel: KernelSession):
    empty = fresh_kernel.footprint()
    fresh_kernel.ok(
        "import os, tempfile\n"
        "from multiprocessing import resource_tracker, shared_memory\n"
        "anonymous = os.memfd_create('x')\n"
        "name = tempfile.mkstemp()[1]\n"
        "shared = shared_memory.SharedMemory(create=True, size=10)"
    )
    remark = fresh_kernel.footprint().beyond(empty) or ""
    for word in ("descriptors open", "memfds", "/dev/shm/psm_", "/tmp/", "resource_tracker"):
        assert word in remark
    fresh_kernel.ok(
        "os.close(anonymous); os.unlink(name); shared.close(); shared.unlink()\n"
        "resource_tracker._resource_tracker._stop()"
    )
    after = fresh_kernel.footprint()
    assert (after.memfds, after.files, after.processes.keys()) == (
        empty.memfds,
        empty.files,
        empty.processes.keys(),
    )


def test_children_of_the_test_itself_are_found():
    leftovers = NoLeftovers()
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    with pytest.raises(AssertionError, match="sleep"):
        leftovers.check(within=0.1)
    child.kill()
    child.wait()
    leftovers.check()


def test_an_orphan_forked_from_the_test_itself_is_found():
    leftovers = NoLeftovers()
    read, write = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.setsid()
        orphan = os.fork()
        if orphan == 0:
            time.sleep(60)
        os.write(write, str(orphan).encode())
        os._exit(0)
    os.waitpid(middle, 0)
    orphan = int(os.read(read, 20))
    os.close(read)
    os.close(write)
    try:
        assert orphan in [p.pid for p in leftovers.processes()]
    finally:
        os.kill(orphan, 9)
    leftovers.check()
