"""Stopping a job from the notebook: interrupts, impatient ones, and the Stop button."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from kernel_session import KernelSession

if TYPE_CHECKING:
    from cell_output import CellResult
    from kernel_session import RunningCell

pytestmark = pytest.mark.kernel

# The last signal comes 1.2 s after the interrupt; the rest is for a machine with much to do.
HARD = 4.0
TWO = "%%accel_launch -n 2\n"
GROUP = "import time, torch\nimport torch.distributed as dist\n"
GO = "print('go', flush=True)\n"
COMPUTE = "x = torch.ones(200, 200)\nwhile True:\n    x = (x @ x) * 0 + 1\n"
WAIT = "if rank == 0:\n    dist.all_reduce(torch.ones(1))\ntime.sleep(60)\n"
DEAF = (
    "while True:\n    try:\n        time.sleep(60)\n    except KeyboardInterrupt:\n        pass\n"
)
SIGNALS = "import signal\nfor n in (2, 15):\n    signal.signal(n, signal.SIG_IGN)\n"
LOADER = """
from torch.utils.data import DataLoader
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 10000
    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.ones(1) * index
for step, batch in enumerate(DataLoader(Slow(), batch_size=4, num_workers=2)):
    if step == 3:
        print('go', flush=True)
"""
# Both leave names in /dev/shm that a helper process removes, if it is given the time.
SHARE = "torch.multiprocessing.set_sharing_strategy('file_system')\n"
NAMED = (
    "from multiprocessing import shared_memory\n"
    f"mine = shared_memory.SharedMemory(create=True, size=1000)\n{GO}{DEAF}"
)
TRAIN = """%%accel_launch -n 2 --pull model,steps,seen
import torch, time
from torch.utils.data import DataLoader, TensorDataset
from jupyter_accel import Accelerator
accelerator = Accelerator()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = DataLoader(TensorDataset(torch.randn(40000, 4), torch.randn(40000, 1)), batch_size=4)
wrapped, optimizer, data = accelerator.prepare(model, optimizer, data)
def train():
    steps = 0
    for x, y in data:
        loss = torch.nn.functional.mse_loss(wrapped(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        time.sleep(0.01 * (1 + rank))
        if steps == 5:
            print('go', flush=True)
    return steps
steps = train()
counts = [torch.zeros(1, dtype=torch.long) for _ in range(world_size)]
torch.distributed.all_gather(counts, torch.tensor([steps]))
seen = [int(count) for count in counts]
"""


@pytest.fixture(autouse=True)
def _the_kernel_goes_on(lab: KernelSession):
    lab.ok("%autoawait on")
    before = lab.footprint()
    yield
    assert lab.value("1 + 1") == "2"
    cell = lab.ok(f"{TWO}{GROUP}dist.all_reduce(torch.ones(1))\nprint('works')")
    assert "works" in cell.stdout
    lab.assert_back_to(before)


def interrupted(lab: KernelSession, cell: RunningCell, times: int = 1) -> CellResult:
    """Interrupt so many times within a second, and check that all ended as they should."""
    began = time.monotonic()
    for _ in range(times):
        lab.interrupt()
        time.sleep(0.15 if times > 1 else 0)
    after = lab.start("x = 1")  # what is queued must run as if nothing had been
    shown = cell.wait(20)
    assert time.monotonic() - began < HARD
    assert shown.status == "error"
    assert shown.plain_traceback == "KeyboardInterrupt: stopped: 2 of 2 ranks ended"
    assert after.wait(20).status in {"ok", "aborted"}  # Jupyter drops what follows an error
    assert lab.run("x = 1").status == "ok"
    return shown


@pytest.mark.parametrize("times", [1, 5], ids=["one interrupt", "five interrupts"])
@pytest.mark.parametrize(
    "body",
    [GO + COMPUTE, GO + WAIT, GO + DEAF, SIGNALS + GO + DEAF, LOADER, SHARE + LOADER, NAMED],
    ids=[
        "computing",
        "in a collective",
        "deaf",
        "ignoring signals",
        "with loaders",
        "with loaders that share by name",
        "with shared memory",
    ],
)
def test_an_interrupt_ends_all_ranks(lab: KernelSession, body, times):
    cell = lab.start(TWO + GROUP + body)
    cell.wait_for_output("go")
    shown = interrupted(lab, cell, times)
    assert "stopped: 2 of 2 ranks ended" in shown.displays[0].text


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.1])
def test_an_interrupt_while_the_ranks_start_ends_them(lab: KernelSession, delay):
    cell = lab.start(f"{TWO}{GROUP}time.sleep(60)")
    cell.wait_for_output("2 ranks on cpu")
    time.sleep(delay)
    lab.interrupt()
    shown = cell.wait(20)
    assert shown.plain_traceback == "KeyboardInterrupt: stopped: 2 of 2 ranks ended"


@pytest.mark.parametrize("times", [1, 5], ids=["one interrupt", "five interrupts"])
@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_an_interrupt_ends_a_launch_that_is_not_awaited(lab: KernelSession, method, times):
    lab.ok("import torch")
    cell = lab.start(f"%%time\n%%accel_launch -n 2 --start-method {method}\n{GROUP}{GO}{DEAF}")
    cell.wait_for_output("go")
    shown = interrupted(lab, cell, times)
    assert "Wall time" in shown.stdout


def test_an_interrupt_ends_a_line_below_a_magic(lab: KernelSession):
    lab.ok("import time\ndef work():\n    print('go', flush=True)\n    time.sleep(60)")
    cell = lab.start("%%time\n%accel_launch -n 2 work()")
    cell.wait_for_output("go")
    interrupted(lab, cell)


def test_an_interrupt_ends_a_cell_with_autoawait_off(lab: KernelSession):
    lab.ok("%autoawait off")
    cell = lab.start(TWO + GROUP + GO + DEAF)
    cell.wait_for_output("go")
    interrupted(lab, cell, times=3)


@pytest.mark.parametrize("times", [1, 5], ids=["one interrupt", "five interrupts"])
def test_an_interrupt_ends_launch(lab: KernelSession, times):
    cell = lab.start(
        "from jupyter_accel import launch\nimport time\ndef work():\n    print('go', flush=True)\n"
        "    while True:\n        try:\n            time.sleep(60)\n"
        "        except KeyboardInterrupt:\n            pass\nlaunch(work, num_processes=2)"
    )
    cell.wait_for_output("go")
    began = time.monotonic()
    for _ in range(times):
        lab.interrupt()
        time.sleep(0.15)
    said = "KeyboardInterrupt: stopped: 2 of 2 ranks ended"
    assert cell.wait(20).plain_traceback == said
    assert time.monotonic() - began < HARD


def test_an_interrupt_while_the_template_loads_starts_no_rank():
    with KernelSession() as kernel:
        kernel.ok("%load_ext jupyter_accel")
        cell = kernel.start(f"{TWO}print('ran')")
        time.sleep(0.2)
        kernel.interrupt()
        shown = cell.wait(20)
        assert shown.plain_traceback == "KeyboardInterrupt: stopped before any rank was started"
        assert "ran" in kernel.ok(f"{TWO}print('ran')").stdout
        kernel.shutdown()
        kernel.assert_nothing_left()


# ------------------------------------------------------------------------------ soft stops


def test_a_soft_stop_ends_all_ranks_at_one_step_and_keeps_the_model(lab: KernelSession):
    lab.run("del model, steps, seen")
    cell = lab.start(TRAIN)
    cell.wait_for_output("go")
    lab.interrupt()
    shown = cell.wait(20)
    assert shown.status == "ok"
    assert "stopped after a step, 2 of 2 ranks done" in shown.displays[0].text
    assert "asked the ranks to stop after this step" in shown.stderr
    steps = int(lab.value("steps"))
    assert 5 <= steps < 5000
    assert lab.value("seen") == f"[{steps}, {steps}]"
    assert lab.value("(type(model).__name__, model.weight.shape[1])") == "('Linear', 4)"


EPOCHS = TRAIN.replace("model,steps,seen", "epochs,judged,steps").replace(
    "steps = train()",
    """for epochs in range(1, 50):
    steps = train()
    with torch.no_grad():
        judged = sum(1 for batch in data)
    if accelerator.stopped:
        break""",
)


def test_a_stop_tells_the_loop_over_epochs_and_leaves_evaluations_whole(lab: KernelSession):
    cell = lab.start(EPOCHS)
    cell.wait_for_output("go")
    lab.interrupt()
    assert cell.wait(30).status == "ok"
    assert lab.value("epochs") == "1"
    assert int(lab.value("steps")) < 5000
    assert lab.value("judged") == "5000"


def test_two_quick_interrupts_of_a_training_loop_end_it_hard(lab: KernelSession):
    cell = lab.start(TRAIN + "while True:\n    time.sleep(0.1)\n")
    cell.wait_for_output("go")
    interrupted(lab, cell, times=2)


def test_a_loop_that_does_not_answer_a_soft_stop_is_ended_by_the_second_interrupt(
    lab: KernelSession,
):
    stuck = TRAIN.replace("print('go', flush=True)", "print('go', flush=True); time.sleep(60)")
    cell = lab.start(stuck)
    cell.wait_for_output("go")
    lab.interrupt()
    cell.wait_for_output("asked the ranks to stop")
    time.sleep(0.5)
    assert cell.so_far.status == "running"
    interrupted(lab, cell)


def test_an_error_after_a_soft_stop_is_an_error(lab: KernelSession):
    cell = lab.start(TRAIN.replace("steps = train()", "steps = train()\nraise ValueError('late')"))
    cell.wait_for_output("go")
    lab.interrupt()
    shown = cell.wait(20)
    assert shown.ename == "WorkerError"
    assert shown.plain_traceback.startswith("ranks 0, 1: ValueError: late")


# -------------------------------------------------------------------------- the Stop button


def button(cell: RunningCell, timeout: float = 20.0) -> str:
    """Wait for the Stop button of a running cell; return the id of its comm."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for message in list(cell.so_far.messages):
            state = message.content.get("data", {}).get("state", {})
            if message.kind == "comm_open" and state.get("_model_name") == "ButtonModel":
                return str(message.content["comm_id"])
        time.sleep(0.02)
    msg = "no button"
    raise TimeoutError(msg)


def click(lab: KernelSession, comm: str) -> None:
    """Do what a browser does when the button is pressed."""
    data = {"method": "custom", "content": {"event": "click"}}
    message = lab._client.session.msg("comm_msg", {"comm_id": comm, "data": data})
    lab._client.shell_channel.send(message)


def test_the_button_stops_softly_at_the_first_click(lab: KernelSession):
    cell = lab.start(TRAIN)
    cell.wait_for_output("go")
    click(lab, button(cell))
    shown = cell.wait(20)
    assert shown.status == "ok"
    assert "stopped after a step, 2 of 2 ranks done" in shown.displays[0].text
    assert "application/vnd.jupyter.widget-view+json" not in shown.displays[0].data


def test_the_button_ends_the_ranks_at_the_second_click(lab: KernelSession):
    cell = lab.start(TRAIN + "print('after', flush=True)\n" + DEAF)
    cell.wait_for_output("go")
    comm = button(cell)
    click(lab, comm)
    cell.wait_for_output("after")  # the loop has ended, the cell has not
    click(lab, comm)
    shown = cell.wait(20)
    assert shown.plain_traceback == "KeyboardInterrupt: stopped: 2 of 2 ranks ended"


def test_the_button_ends_ranks_without_a_training_loop_at_the_first_click(lab: KernelSession):
    cell = lab.start(TWO + GROUP + GO + "time.sleep(60)")
    cell.wait_for_output("go")
    began = time.monotonic()
    click(lab, button(cell))
    shown = cell.wait(20)
    assert shown.plain_traceback == "KeyboardInterrupt: stopped: 2 of 2 ranks ended"
    assert time.monotonic() - began < HARD


def test_a_short_job_has_no_button(lab: KernelSession):
    shown = lab.ok(f"{TWO}print(1)")
    assert [m for m in shown.messages if m.kind == "comm_open"] == []
