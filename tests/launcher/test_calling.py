"""``launch`` and its relatives, called from a plain process: values, types, errors, interrupts."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from traceback import format_exception
from typing import TYPE_CHECKING

import pytest
from leftovers import MARK, marked, new_mark, retried

from jupyter_accel import launch, launch_all_ranks, notebook_launcher
from jupyter_accel.errors import (
    ConfigError,
    ShippingError,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
)
from jupyter_accel.launcher import provider
from jupyter_accel.launcher.launching import Launcher
from jupyter_accel.launcher.presenting import PlainPresenter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from leftovers import NoLeftovers

METHODS = pytest.mark.parametrize("method", ["forkserver", "fork", "spawn"])


@pytest.fixture(scope="module")
def launcher(tmp_path_factory) -> Iterator[Launcher]:
    """One launcher for all tests here, with its template ready."""
    launcher = Launcher(warm=(), records_folder=tmp_path_factory.mktemp("runtime") / "jobs")
    launcher.template().wait_ready()
    provider.use(lambda: launcher, lambda _size: PlainPresenter())
    yield launcher
    provider.forget()
    launcher.close()


@pytest.fixture(autouse=True)
def _nothing_is_left(launcher: Launcher, no_leftovers: NoLeftovers):
    no_leftovers.keep(launcher.template().pid)
    folder = launcher._records
    yield
    # The supervisor removes it when the ranks are gone, which may be a little later.
    retried(lambda: str([*folder.glob("*")] or "") or None, within=2)


def place() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def add(a: int, b: int = 1) -> int:
    return a + b


# ---------------------------------------------------------------------------------- values


def test_launch_returns_the_value_of_rank_0():
    assert launch(place, num_processes=2) == (0, 2)


def test_all_ranks_values_come_in_order_of_rank():
    assert launch_all_ranks(place, num_processes=4) == [(rank, 4) for rank in range(4)]


def test_arguments_reach_every_rank():
    assert launch_all_ranks(add, 3, 4, num_processes=2) == [7, 7]


def test_one_rank_is_the_default_on_a_cpu():
    assert launch(place, device="cpu") == (0, 1)


@METHODS
def test_functions_that_cannot_be_imported_travel(method):
    table = {"factor": 3}

    class Scale:
        def __init__(self, factor):
            self.factor = factor

        def __call__(self, value):
            return value * self.factor

    def scaled(value):
        return Scale(table["factor"])(value)

    values = [
        launch(scaled, 5, num_processes=2, start_method=method),
        launch(lambda value: scaled(value) + 1, 5, num_processes=1, start_method=method),
        launch(functools.partial(add, b=10), 5, num_processes=1, start_method=method),
        launch(Scale(2), 5, num_processes=1, start_method=method),
    ]
    assert values == [15, 16, 15, 10]


@METHODS
def test_ranks_form_a_group(method):
    def total():
        import torch
        import torch.distributed as dist

        value = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(value)
        return value.item(), dist.get_backend()

    assert launch(total, num_processes=2, start_method=method) == (3.0, "gloo")


def test_tensors_travel_both_ways():
    import torch

    given = torch.arange(100_000, dtype=torch.float32)
    found = launch(lambda tensor: {"twice": tensor * 2, "shape": tensor.shape}, given)
    assert torch.equal(found["twice"], given * 2)
    assert found["shape"] == given.shape


@pytest.mark.parametrize("size", [10, 10_000_000])
def test_large_values_come_back_whole(size):
    assert launch(bytes, size, num_processes=2) == bytes(size)


def test_a_rank_that_exits_with_0_has_no_value():
    assert launch(lambda: sys.exit(0), num_processes=2) is None


def test_output_of_ranks_is_labelled_but_for_rank_0(capsys):
    def speak():
        print("hello", os.environ["RANK"])
        print("a warning", file=sys.stderr)

    launch(speak, num_processes=2)
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == ["[rank 1] hello 1", "hello 0"]
    assert sorted(shown.err.splitlines()) == ["[rank 1] a warning", "a warning"]


# ---------------------------------------------------------------------------------- errors


@METHODS
def test_an_error_names_its_rank_and_carries_its_traceback(method):
    def fail():
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 1:
            msg = "broken here"
            raise ValueError(msg)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(WorkerError, match="rank 1: ValueError: broken here") as caught:
        launch(fail, num_processes=2, start_method=method)
    error = caught.value
    assert (error.rank, error.ename) == (1, "ValueError")
    assert "raise ValueError(msg)" in "\n".join(error.traceback)
    assert "jupyter_accel/launcher" not in "\n".join(error.traceback)
    assert launch(place, num_processes=2) == (0, 2)


def test_a_killed_rank_is_said_to_have_died():
    def die():
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    began = time.monotonic()
    with pytest.raises(WorkerDiedError, match="rank 1: the process was killed by signal 9"):
        launch(die, num_processes=2)
    assert time.monotonic() - began < 5


def test_a_time_limit_ends_the_ranks(capsys):
    began = time.monotonic()
    with pytest.raises(WorkerTimeoutError, match=r"not done after 0.5 s"):
        launch(time.sleep, 60, num_processes=2, timeout=0.5)
    assert time.monotonic() - began < 5
    assert "the stacks of the ranks follow" in capsys.readouterr().err


def test_a_memory_limit_is_an_error_at_the_line_that_asks_for_too_much():
    def greedy():
        return len(bytearray(2_000_000_000))

    with pytest.raises(WorkerError, match="rank 0: MemoryError") as caught:
        launch(greedy, num_processes=1, memory_limit=1_000_000_000)
    assert "return len(bytearray(2_000_000_000))" in "\n".join(caught.value.traceback)


def test_what_cannot_travel_is_named_before_anything_starts():
    lock = threading.Lock()
    with pytest.raises(ShippingError, match="lock"):
        launch(lock.acquire, num_processes=2)


def test_a_value_that_cannot_come_back_is_named():
    with pytest.raises(WorkerError, match="lock"):
        launch(threading.Lock, num_processes=1)


def test_a_rank_cannot_launch():
    with pytest.raises(WorkerError, match="launch from the kernel instead"):
        launch(lambda: launch(place, num_processes=2), num_processes=1)


@pytest.mark.parametrize("number", [0, -1])
def test_a_number_of_ranks_that_cannot_be_is_refused(number):
    with pytest.raises(ConfigError, match="at least 1"):
        launch(place, num_processes=number)


# ------------------------------------------------------------------------------ interrupts


@METHODS
@pytest.mark.parametrize("times", [1, 4])
def test_an_interrupt_ends_the_ranks(method, times):
    def deaf():
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(60)

    def impatient():
        for _ in range(times):
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=impatient)
    began = time.monotonic()
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        launch(deaf, num_processes=2, start_method=method)
    elapsed = time.monotonic() - began
    assert signal.getsignal(signal.SIGINT) is handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    thread.join()  # what comes after the launch is not for the launch
    signal.signal(signal.SIGINT, handler)
    assert elapsed < 10


# ------------------------------------------------------------------------ notebook_launcher


def test_notebook_launcher_takes_the_arguments_that_its_users_know():
    def told(a, b):
        from jupyter_accel.world import PRECISION_NAME

        return a + b, os.environ["WORLD_SIZE"], os.environ[PRECISION_NAME]

    found = notebook_launcher(
        told, (1, 2), num_processes=2, mixed_precision="bf16", use_port="29500"
    )
    assert found == (3, "2", "bf16")


def test_notebook_launcher_refuses_what_one_machine_cannot_do():
    with pytest.raises(ConfigError, match="its own machine only"):
        notebook_launcher(place, num_nodes=2)
    with pytest.raises(ConfigError, match="max_restarts"):
        notebook_launcher(place, num_processes=1, max_restarts=3)
    assert notebook_launcher(place, num_processes=1, max_restarts=0, rdzv_backend="static")


# ---------------------------------------------------------------------------------- scripts

SCRIPT = """
import time
from jupyter_accel import launch

TABLE = {"factor": 3}

class Scale:
    def __init__(self, factor):
        self.factor = factor
    def __call__(self, value):
        return value * self.factor

def scaled(value):
    return Scale(TABLE["factor"])(value)

if __name__ == "__main__":
    print([launch(scaled, 5, num_processes=2, start_method=METHOD)
           for METHOD in ("forkserver", "spawn", "fork")])
    LAST
"""


def run_script(tmp_path, last: str, **how):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace("LAST", last))
    mark = new_mark("script")
    environ = {**os.environ, MARK: mark, "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime")}
    process = subprocess.Popen(
        [sys.executable, str(path)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **how,
    )
    return process, mark


def nothing_left(tmp_path, mark: str) -> None:
    retried(lambda: ", ".join(map(str, marked(mark))) or None, within=3)
    assert not list((tmp_path / "runtime").rglob("*.json"))


def test_a_script_launches_its_own_functions_and_leaves_nothing(tmp_path):
    process, mark = run_script(tmp_path, "")
    out, err = process.communicate(timeout=100)
    assert (out, err, process.returncode) == ("[15, 15, 15]\n", "", 0)
    nothing_left(tmp_path, mark)


def test_a_script_that_is_interrupted_ends_as_scripts_do(tmp_path):
    last = "launch(lambda: print('go', flush=True) or time.sleep(60), num_processes=2)"
    process, mark = run_script(tmp_path, last, start_new_session=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "go" in line:
            break
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
    _, err = process.communicate(timeout=20)
    assert process.returncode not in {0, None}
    assert err.splitlines()[-1].endswith("Interrupted: stopped: 2 of 2 ranks ended")
    nothing_left(tmp_path, mark)


def test_a_script_that_is_killed_leaves_nothing(tmp_path):
    last = "launch(lambda: print('go', flush=True) or time.sleep(60), num_processes=2)"
    process, mark = run_script(tmp_path, last)
    assert process.stdout is not None
    for line in process.stdout:
        if "go" in line:
            break
    process.kill()
    process.communicate(timeout=20)
    nothing_left(tmp_path, mark)


# ------------------------------------------------------------------------------------ types

SAMPLE = """
from functools import partial
from typing import Optional
from jupyter_accel import launch, launch_all_ranks, notebook_launcher

def train(rate: float, steps: int) -> str:
    return f"{rate} {steps}"

reveal_type(launch(train, 0.1, 3, num_processes=2))
reveal_type(launch(lambda: 3.5))
reveal_type(launch(partial(train, steps=3), 0.1))
reveal_type(launch_all_ranks(train, 0.1, 3))
reveal_type(notebook_launcher(train, (0.1, 3), num_processes=2))
launch(train, "fast", 3)  # wrong
launch(train, 0.1)  # wrong
launch(train, 0.1, 3, processes=2)  # wrong
"""


@pytest.mark.slow
def test_a_type_checker_knows_what_comes_back_and_what_is_wrong(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "sample.py").write_text(SAMPLE)
    root = os.path.dirname(os.path.dirname(sys.modules["jupyter_accel"].__file__))  # noqa: PTH120
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "sample.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("sample.py:")]
    revealed = [line.partition('"')[2].rstrip('"') for line in lines if "Revealed" in line]
    assert [name.replace("builtins.", "") for name in revealed] == [
        "str",
        "float",
        "str",
        "list[str]",
        "str",
    ]
    wrong = {int(line.split(":")[1]) for line in lines if ": error:" in line}
    text = SAMPLE.splitlines()
    assert wrong == {n for n, line in enumerate(text, 1) if line.endswith("# wrong")}


def test_an_error_in_a_script_shows_the_line_that_raised():
    with pytest.raises(WorkerError) as caught:
        launch(divide, num_processes=2)
    shown = "".join(format_exception(caught.value))
    assert "return 1 // 0" in shown
    assert "In rank" in shown


def divide() -> int:
    return 1 // 0


def test_a_memory_limit_may_be_text():
    assert launch(place, num_processes=1, memory_limit="8GB") == (0, 1)
