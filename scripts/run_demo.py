"""Run a notebook cell by cell, say how it goes, and leave it as a notebook and as a page.

Usage: run_demo.py NOTEBOOK FOLDER
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert.exporters import HTMLExporter

ANSI = re.compile(r"\x1b\[[0-9;]*m")


class Progress:
    """Prints one line for each cell that runs: which one, how it begins, how long it took."""

    def __init__(self, notebook: nbformat.NotebookNode) -> None:
        self._code = [c["id"] for c in notebook.cells if c.cell_type == "code"]
        self._started = 0.0

    def start(self, cell: nbformat.NotebookNode, **_: object) -> None:
        if cell.cell_type != "code":
            return
        self._started = time.monotonic()
        number = self._code.index(cell["id"]) + 1
        first = next((line for line in cell.source.splitlines() if line.strip()), "")
        print(f"  [{number}/{len(self._code)}] {first[:60]:<60}", end=" ", flush=True)

    def end(self, **_: object) -> None:
        print(f"{time.monotonic() - self._started:5.1f} s", flush=True)


def run(source: Path, folder: Path) -> int:
    """Run the notebook; return the exit status of the script."""
    notebook = nbformat.read(source, as_version=4)
    progress = Progress(notebook)
    client = NotebookClient(
        notebook,
        timeout=300,
        coalesce_streams=True,  # lines that follow one another are one output, as in JupyterLab
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],  # 7.4 warns that it talks TCP, to this machine only
        resources={"metadata": {"path": str(source.parent)}},
        on_cell_start=progress.start,
        on_cell_executed=progress.end,
    )
    print(f"Running {source}", flush=True)
    started = time.monotonic()
    try:
        client.execute()
    except CellExecutionError as error:
        # nbclient's text holds the cell's source and its traceback.
        print(f"\n\nThis cell failed:\n\n{ANSI.sub('', str(error))}", flush=True)
        return 1
    finally:
        written = _write(notebook, source, folder)
    print(f"Done in {time.monotonic() - started:.0f} s. Look at:")
    for path in written:
        print(f"  {path}")
    return 0


def _write(notebook: nbformat.NotebookNode, source: Path, folder: Path) -> list[Path]:
    """Write what has been run so far; after a failure that shows where it ended."""
    folder.mkdir(parents=True, exist_ok=True)
    executed = folder / source.name
    nbformat.write(notebook, executed)
    page = executed.with_suffix(".html")
    body: tuple[str, dict[str, Any]] = HTMLExporter().from_notebook_node(notebook)
    page.write_text(body[0], encoding="utf-8")
    return [executed, page]


if __name__ == "__main__":
    if len(sys.argv) != 3:  # noqa: PLR2004, the program's name and two arguments
        sys.exit(__doc__)
    sys.exit(run(Path(sys.argv[1]), Path(sys.argv[2])))
