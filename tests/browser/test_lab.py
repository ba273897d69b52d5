"""What a person sees and clicks in JupyterLab."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from lab_page import CHROMIUM, Lab
from leftovers import marked, new_mark, retried

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
]

LOOP = """
import time
import torch
from torch.utils.data import DataLoader, TensorDataset
from jupyter_accel import Accelerator

def train():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(4000, 4), torch.randn(4000, 1)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(((model(x) - y) ** 2).mean())
        optimizer.step()
        steps += 1
        if steps == 1:
            print("training", flush=True)
        time.sleep(0.02)
    return steps
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    mark = new_mark("lab")
    with Lab(tmp_path_factory.mktemp("lab"), mark) as lab:
        yield lab
    retried(lambda: ", ".join(map(str, marked(mark))) or None, 10)


def text_of(outputs: list) -> str:
    return "".join("".join(o["text"]) for o in outputs if o["output_type"] == "stream")


def picture(lab: Lab, name: str) -> None:
    folder = os.environ.get("ACCEL_PICTURES")
    if folder:
        lab.page.screenshot(path=str(Path(folder) / f"{name}.png"))


def test_a_launched_cell_shows_rank_0_plainly_and_folds_the_others(lab):
    lab.open("first.ipynb", ["%load_ext jupyter_accel", "%%accel_launch -n 2\nprint('rank', rank)"])
    lab.run_cell(0)
    outputs = lab.run_cell(1)
    assert text_of(outputs) == "rank 0\n"
    fold = lab.output_area(1).locator("details")
    assert fold.locator("summary").inner_text() == "rank 1 · 1 line"
    fold.locator("summary").click()
    assert fold.locator("pre").inner_text().strip() == "rank 1"
    picture(lab, "folded")


def test_the_stop_button_ends_the_loop_and_keeps_what_was_trained(lab):
    launch = "%%accel_launch -n 2 --pull steps\nsteps = train()"
    lab.open("stop.ipynb", ["%load_ext jupyter_accel", LOOP, launch, "print(steps)"])
    lab.run_cell(0)
    lab.run_cell(1)
    lab.start_cell(2)
    button = lab.output_area(2).locator("button", has_text="Stop")
    button.wait_for(timeout=30_000)
    lab.output_area(2).get_by_text("training").first.wait_for(timeout=60_000)
    picture(lab, "running")
    button.click()
    lab.wait_for_end(2, 30)
    assert lab.output_area(2).locator("button").count() == 0
    assert "stopped after a step, 2 of 2 ranks done" in lab.output_area(2).inner_text()
    steps = int(text_of(lab.run_cell(3)))
    assert 0 < steps < 1000


def test_a_second_click_ends_ranks_that_do_not_listen(lab):
    deaf = (
        "%%accel_launch -n 2\nimport time\nprint('deaf', flush=True)\nwhile True:\n"
        "    try:\n        time.sleep(60)\n    except KeyboardInterrupt:\n        pass"
    )
    lab.open("deaf.ipynb", ["%load_ext jupyter_accel", deaf, "1 + 1"])
    lab.run_cell(0)
    lab.start_cell(1)
    button = lab.output_area(1).locator("button", has_text="Stop")
    button.wait_for(timeout=30_000)
    lab.output_area(1).get_by_text("deaf").first.wait_for(timeout=30_000)
    button.click()
    lab.wait_for_end(1, 15)
    assert "stopped: 2 of 2 ranks ended" in lab.output_area(1).inner_text()
    assert lab.run_cell(2)[0]["data"]["text/plain"] == "2"


def test_what_was_shown_is_still_there_after_the_page_is_loaded_again(lab):
    launch = "%%accel_launch -n 2\nimport time\nprint('rank', rank)\ntime.sleep(1.5)"
    lab.open("again.ipynb", ["%load_ext jupyter_accel", launch, "2 + 2"])
    lab.run_cell(0)
    lab.run_cell(1)
    lab.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    lab.page.reload()
    lab.wait_for_kernel()
    area = lab.output_area(1)
    area.wait_for(timeout=30_000)
    assert "2 of 2 ranks done" in area.inner_text()
    assert area.locator("button").count() == 0
    assert lab.run_cell(2)[0]["data"]["text/plain"] == "4"


def test_an_error_of_a_rank_shows_the_line_of_the_cell(lab):
    wrong = "%%accel_launch -n 2\nx = 1\nif rank == 1:\n    raise ValueError('bad batch')"
    lab.open("wrong.ipynb", ["%load_ext jupyter_accel", wrong])
    lab.run_cell(0)
    lab.run_cell(1)
    text = lab.output_area(1).inner_text()
    assert "rank 1: ValueError: bad batch" in text
    assert "Cell In[2], line 4" in text
    picture(lab, "error")
