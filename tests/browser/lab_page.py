"""A real JupyterLab in a real Chromium: open a notebook, run cells, read what a person sees."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
from leftovers import MARK
from playwright.sync_api import Page, sync_playwright
from typing_extensions import Self

if TYPE_CHECKING:
    from types import TracebackType

REPOSITORY = Path(__file__).resolve().parent.parent.parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
START_SECONDS = 60
_CONFIG = """
from jupyterlab.galata import configure_jupyter_server
configure_jupyter_server(c)
c.ServerApp.ip = "127.0.0.1"
c.ServerApp.allow_root = True
c.ServerApp.root_dir = {root!r}
c.LabApp.news_url = None
c.LabApp.check_for_updates_class = "jupyterlab.NeverCheckForUpdate"
"""


class Lab:
    """A JupyterLab server and one page on it; everything is under ``folder``."""

    def __init__(self, folder: Path, mark: str) -> None:
        self.folder = folder
        self.root = folder / "root"
        self.root.mkdir(parents=True)
        self._mark = mark
        self._port = _free_port()
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        config = self.folder / "jupyter_server_config.py"
        config.write_text(_CONFIG.format(root=str(self.root)), encoding="utf-8")
        log = (self.folder / "server.log").open("wb")
        with log:
            self._server = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "jupyterlab",
                    "--no-browser",
                    f"--config={config}",
                    f"--port={self._port}",
                    "--ServerApp.port_retries=0",
                ],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._wait_for_server()
        self._playwright = sync_playwright().start()
        self._browser = self._playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        self.page: Page = self._browser.new_page(viewport={"width": 1000, "height": 900})
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._browser.close()
        self._playwright.stop()
        assert self._server is not None
        os.killpg(self._server.pid, signal.SIGTERM)
        try:
            self._server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait(5)

    def open(self, name: str, sources: list[str]) -> None:
        """Write a notebook of these code cells and open it, with its kernel ready."""
        notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(source) for source in sources],
            metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
        )
        nbformat.write(notebook, self.root / name)
        self.page.goto(f"http://127.0.0.1:{self._port}/lab/tree/{name}?reset")
        self.wait_for_kernel()

    def wait_for_kernel(self) -> None:
        """Wait until the notebook on the page has an idle kernel."""
        self.page.wait_for_function(
            """() => {
              const panel = window.jupyterapp?.shell?.currentWidget;
              return panel?.sessionContext?.session?.kernel?.status === 'idle'
                && panel.content.widgets.length > 0;
            }""",
            timeout=START_SECONDS * 1000,
        )

    def start_cell(self, index: int) -> None:
        """Run one cell as a person does, without waiting for its end."""
        self.page.evaluate(
            """index => {
              const panel = window.jupyterapp.shell.currentWidget;
              panel.content.activeCellIndex = index;
              void window.jupyterapp.commands.execute('notebook:run-cell');
            }""",
            index,
        )

    def run_cell(self, index: int, seconds: float = 60) -> list[dict[str, Any]]:
        """Run one cell and return its outputs."""
        self.start_cell(index)
        self.wait_for_end(index, seconds)
        return self.outputs(index)

    def wait_for_end(self, index: int, seconds: float = 60) -> None:
        """Wait until a cell shows its number."""
        self.page.wait_for_function(
            """index => {
              const cell = window.jupyterapp.shell.currentWidget.content.widgets[index];
              return cell.model.executionState !== 'running'
                && /\\[\\d+\\]/.test(cell.inputArea.promptNode.textContent);
            }""",
            arg=index,
            timeout=seconds * 1000,
        )

    def outputs(self, index: int) -> list[dict[str, Any]]:
        """Return a cell's outputs as the notebook would save them."""
        outputs: list[dict[str, Any]] = self.page.evaluate(
            """index => {
              const cell = window.jupyterapp.shell.currentWidget.content.widgets[index];
              return cell.model.outputs.toJSON();
            }""",
            index,
        )
        return outputs

    def output_area(self, index: int) -> Any:
        """Return the part of the page under a cell."""
        return (
            self.page.locator(".jp-Notebook .jp-CodeCell").nth(index).locator(".jp-Cell-outputArea")
        )

    def _environment(self) -> dict[str, str]:
        places = {
            name: str(self.folder / name.lower())
            for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "HOME")
        }
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("JUPYTER", "PYTEST"))}
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        return {**kept, **places, "PYTHONPATH": path, MARK: self._mark}

    def _wait_for_server(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self._port}/api", timeout=5)
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.2)
            else:
                return
        words = (self.folder / "server.log").read_text(errors="replace")[-2000:]
        msg = f"JupyterLab did not answer within {START_SECONDS} s; it said: {words}"
        raise RuntimeError(msg)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
