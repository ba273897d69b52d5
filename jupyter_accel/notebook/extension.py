"""What ``%load_ext jupyter_accel`` does, and the functions that awaited cells call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from jupyter_accel import control
from jupyter_accel.notebook.session import Session

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


class _Loaded:
    """The session of this process: a kernel has one shell."""

    session: Session | None = None


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics, and start the template in the background."""
    if control.inside_launch():
        return  # a cell that the ranks run may load its extensions itself
    unload_ipython_extension(shell)
    _Loaded.session = Session(shell)
    _Loaded.session.start()


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Undo the load: every process of ours ends."""
    del shell
    if _Loaded.session is not None:
        _Loaded.session.close()
        _Loaded.session = None


def session() -> Session:
    """Return the session.

    Raises:
        UsageError: the extension is not loaded, or this is a rank.
    """
    if control.inside_launch():
        msg = "this code runs in a rank already; launch from the kernel instead"
        raise UsageError(msg)
    if _Loaded.session is None:
        msg = "the extension is not loaded: run %load_ext jupyter_accel first"
        raise UsageError(msg)
    return _Loaded.session


async def run_cell(line: str, body: str, magic_row: int = 1) -> Any:
    """Run ``body`` on every rank, as ``%%accel_launch`` with this line."""
    return await session().run(line, body, skipped=magic_row)


async def run_line(line: str) -> Any:
    """Evaluate the expression in ``line`` on every rank, as ``%accel_launch``."""
    return await session().run(line, None)
