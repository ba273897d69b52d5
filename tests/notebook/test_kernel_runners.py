"""Notebooks with launches in them under the programs that run notebooks, and in a terminal."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import nbclient
import nbformat
import pytest
from kernel_session import REPOSITORY
from leftovers import MARK, marked, new_mark, retried
from nbformat.v4 import new_code_cell, new_notebook

pytestmark = [pytest.mark.kernel, pytest.mark.slow]

LESSONS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"

CELLS = (
    "%load_ext jupyter_accel",
    "factor = 3",
    """%%accel_launch -n 2 --pull total
import torch, torch.distributed as dist
value = torch.ones(1) * (rank + 1) * factor
dist.all_reduce(value)
total = value.item()
print("rank", rank, "has", total)""",
    "print('next', total)",
    "%%accel_launch -n 2\nimport time\ntime.sleep(1.2)\nprint('slept', rank)",
    "squared = %accel_launch -n 2 (rank + 2) ** 2\nsquared",
    "%%accel_launch -n 2\nfrom tqdm.notebook import tqdm\nfor _ in tqdm(range(5)):\n    pass",
)


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """Folders of our own, and a mark on every process that is started; none of them stays."""
    mark = new_mark("runner")
    values = {
        MARK: mark,
        "HOME": tmp_path / "home",
        "IPYTHONDIR": tmp_path / "ipython",
        "JUPYTER_CONFIG_DIR": tmp_path / "config",
        "JUPYTER_DATA_DIR": tmp_path / "data",
        "JUPYTER_RUNTIME_DIR": Path("/tmp") / f"ja-{secrets.token_hex(4)}",
        "PYTHONPATH": REPOSITORY,
    }
    for name, value in values.items():
        if isinstance(value, Path) and name != "PYTHONPATH":
            value.mkdir(mode=0o700, parents=True)
        monkeypatch.setenv(name, str(value))
    install = [sys.executable, "-m", "ipykernel", "install", "--user", "--name", "python3"]
    subprocess.run(install, check=True, capture_output=True)
    yield values
    retried(lambda: "\n".join(str(p) for p in marked(mark)) or None, within=5.0)
    for path in values["JUPYTER_RUNTIME_DIR"].glob("*"):
        assert path.is_file(), f"{path} is left in the runtime folder"
        path.unlink()
    values["JUPYTER_RUNTIME_DIR"].rmdir()


@pytest.fixture
def small(tmp_path):
    """A small notebook with launches of every kind, as a file."""
    spec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = new_notebook(
        cells=[new_code_cell(cell) for cell in CELLS], metadata={"kernelspec": spec}
    )
    path = tmp_path / "small.ipynb"
    nbformat.write(notebook, path)
    return path


def text_of(cell):
    return "".join(o["text"] for o in cell.outputs if o.output_type == "stream")


def states(cell):
    return [
        o["data"]["text/plain"]
        for o in cell.outputs
        if o.output_type == "display_data" and "ranks on" in o["data"].get("text/plain", "")
    ]


def check_small(notebook):
    """Fail unless the outputs stand in the right cells, and stay readable without a kernel."""
    nbformat.validate(notebook)
    code = [
        cell
        for cell in notebook.cells
        if cell.cell_type == "code" and "injected-parameters" not in cell.metadata.get("tags", ())
    ]
    reduce, after, slept, value, bar = code[2:7]
    assert "rank 0 has 9.0" in text_of(reduce)
    assert text_of(after) == "next 9.0\n"
    assert text_of(slept) == "slept 0\n"
    assert value.outputs[-1]["data"]["text/plain"] == "4"
    assert any(WIDGET_VIEW in o.get("data", {}) for o in bar.outputs)
    assert "5/5" in json.dumps(notebook.metadata["widgets"])
    for cell in (reduce, slept, value, bar):
        (state,) = states(cell)
        assert "2 of 2 ranks done" in state
    for cell in (reduce, slept, value):
        assert not any(WIDGET_VIEW in o.get("data", {}) for o in cell.outputs), "a dead widget"


@pytest.mark.usefixtures("environment")
def test_nbclient_runs_launches(small):
    notebook = nbformat.read(small, as_version=4)
    nbclient.NotebookClient(notebook, timeout=100).execute()
    check_small(notebook)
    nbformat.write(notebook, small)
    check_small(nbformat.read(small, as_version=4))


@pytest.mark.usefixtures("environment")
def test_the_stop_button_leaves_no_state_in_the_file(small):
    notebook = nbformat.read(small, as_version=4)
    del notebook.cells[6]  # its bar is a widget of the user's own
    nbclient.NotebookClient(notebook, timeout=100).execute()
    assert "widgets" not in notebook.metadata


@pytest.mark.usefixtures("environment")
def test_papermill_runs_launches(small, tmp_path):
    import papermill

    done = tmp_path / "done.ipynb"
    papermill.execute_notebook(small, done, progress_bar=False, log_output=False)
    check_small(nbformat.read(done, as_version=4))


@pytest.mark.usefixtures("environment")
def test_nbconvert_runs_launches_and_shows_them_without_a_kernel(small, tmp_path):
    command = [sys.executable, "-m", "jupyter", "nbconvert", "--execute", str(small)]
    for kind, name in (("notebook", "ran.ipynb"), ("html", "ran.html")):
        subprocess.run(
            [*command, "--to", kind, "--output", name], check=True, capture_output=True, timeout=150
        )
    check_small(nbformat.read(tmp_path / "ran.ipynb", as_version=4))
    page = (tmp_path / "ran.html").read_text()
    assert "2 of 2 ranks done" in page
    assert "<details><summary>rank 1 · 1 line</summary>" in page


@pytest.mark.usefixtures("environment")
def test_an_error_stops_the_notebook_with_the_ranks_own_words():
    notebook = new_notebook(
        cells=[
            new_code_cell("%load_ext jupyter_accel"),
            new_code_cell("%%accel_launch -n 2\nif rank == 1:\n    raise ValueError('no luck')"),
            new_code_cell("print('not reached')"),
        ]
    )
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="no luck"):
        nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    assert not notebook.cells[2].outputs
    assert "rank 1" in json.dumps(notebook.cells[1].outputs)


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
@pytest.mark.usefixtures("environment")
def test_the_lessons_run_unchanged(lesson):
    notebook = nbformat.read(lesson, as_version=4)
    source = [cell.source for cell in notebook.cells]
    resources = {"metadata": {"path": str(lesson.parent)}}
    nbclient.NotebookClient(notebook, timeout=100, resources=resources).execute()
    nbformat.validate(notebook)
    assert [cell.source for cell in notebook.cells] == source
    launches = [
        cell
        for cell in notebook.cells
        if cell.cell_type == "code" and cell.source.startswith("%%accel_launch")
    ]
    for cell in launches:
        assert not any(WIDGET_VIEW in o.get("data", {}) for o in cell.outputs)


TERMINAL = """
%load_ext jupyter_accel
get_ipython().run_cell_magic("accel_launch", "-n 2 --pull seven", '''
from IPython.display import HTML
print("hello from", rank)
display(HTML("<b>rich</b>"))
seven = 7
''')
print("seven is", seven)
value = get_ipython().run_line_magic("accel_launch", "-n 2 rank + 40")
print("value is", value)
"""


def in_terminal(script, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "--colors=NoColor", *arguments],
        input=script,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.stdout, done.stderr


@pytest.mark.usefixtures("environment")
def test_the_magics_work_in_a_script_for_a_terminal(tmp_path):
    script = tmp_path / "script.ipy"
    script.write_text(TERMINAL)
    out, err = in_terminal("", str(script))
    assert "hello from 0" in out, err
    assert "rank 1 · 2 lines" in out
    assert "hello from 1" in out
    assert "seven is 7" in out
    assert "value is 40" in out
    assert out.count("2 of 2 ranks done") == 2
    assert "in the kernel now: seven" in out
    assert "Traceback" not in out + err


@pytest.mark.usefixtures("environment")
def test_cells_work_in_an_interactive_terminal():
    out, err = in_terminal(
        "%load_ext jupyter_accel\n"
        "%accel_launch -n 2 rank + 40\n"
        "%%accel_launch -n 2\nprint('hello from', rank)\nraise ValueError('no luck')\n\n\n"
        "print('goes', 'on')\n",
        "--simple-prompt",
    )
    assert "40" in out, err
    assert "hello from 0" in out
    assert "no luck" in out
    assert "goes on" in out


# ------------------------------------------------------------------- through Jupyter's server


@pytest.fixture
def server(environment, tmp_path):
    """A real server with its default limits, and its token."""
    token = secrets.token_hex(16)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = (tmp_path / "server.log").open("wb")
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "jupyter_server",
            "--no-browser",
            f"--port={port}",
            "--ServerApp.ip=127.0.0.1",
            "--allow-root",
            f"--ServerApp.root_dir={tmp_path}",
            "--ServerApp.port_retries=0",
        ],
        env={**os.environ, MARK: environment[MARK], "JUPYTER_TOKEN": token},
        stdout=log,
        stderr=log,
    )
    yield f"127.0.0.1:{port}", token, tmp_path / "server.log"
    process.terminate()
    process.wait(20)
    log.close()


async def fetch(address, token, path, method="GET", body=None):
    from tornado.httpclient import AsyncHTTPClient

    deadline = time.monotonic() + 40
    while True:
        try:
            response = await AsyncHTTPClient().fetch(
                f"http://{address}{path}",
                method=method,
                body=body,
                request_timeout=40,
                headers={"Authorization": f"token {token}"},
            )
            return json.loads(response.body or b"null")
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.2)


async def run_through_server(address, token, cells):
    """Run cells as a browser does; return the messages of the last one."""
    from tornado.httpclient import HTTPRequest
    from tornado.websocket import websocket_connect

    kernel = await fetch(address, token, "/api/kernels", "POST", '{"name": "python3"}')
    request = HTTPRequest(
        f"ws://{address}/api/kernels/{kernel['id']}/channels",
        headers={"Authorization": f"token {token}"},
    )
    connection = await websocket_connect(request, max_message_size=1 << 30)
    messages = []
    for cell in cells:
        messages = []
        msg_id = uuid.uuid4().hex
        header = {
            "msg_id": msg_id,
            "msg_type": "execute_request",
            "username": "",
            "session": "test",
            "version": "5.4",
            "date": "",
        }
        content = {
            "code": cell,
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": True,
        }
        await connection.write_message(
            json.dumps(
                {
                    "header": header,
                    "parent_header": {},
                    "metadata": {},
                    "content": content,
                    "channel": "shell",
                    "buffers": [],
                }
            )
        )
        while True:
            raw = await asyncio.wait_for(connection.read_message(), 60)
            if isinstance(raw, bytes):
                continue  # widgets' binary messages
            message = json.loads(raw)
            if message["parent_header"].get("msg_id") != msg_id:
                continue
            messages.append(message)
            if message["msg_type"] == "status" and (
                message["content"]["execution_state"] == "idle"
            ):
                break
    connection.close()
    await fetch(address, token, f"/api/kernels/{kernel['id']}", "DELETE")
    return messages


def test_nothing_is_lost_on_the_way_through_the_server(server):
    address, token, log = server
    chatty = """%%accel_launch -n 2
for i in range(3000):
    print(i, flush=True)
for i in range(4000):
    print("x" * 1000)
"""
    messages = asyncio.run(run_through_server(address, token, ["%load_ext jupyter_accel", chatty]))
    out = "".join(
        m["content"]["text"]
        for m in messages
        if m["msg_type"] == "stream" and m["content"]["name"] == "stdout"
    )
    err = "".join(
        m["content"]["text"]
        for m in messages
        if m["msg_type"] == "stream" and m["content"]["name"] == "stderr"
    )
    assert not err
    assert out == "".join(f"{i}\n" for i in range(3000)) + ("x" * 1000 + "\n") * 4000
    assert not re.search("rate exceeded", log.read_text(errors="replace"))
