"""The magics as IPython knows them: the way in where a cell is not awaited."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import (
    Magics,
    cell_magic,
    line_magic,
    magics_class,
    needs_local_scope,
    no_var_expand,
)

from jupyter_accel.errors import AccelError, ConfigError, WorkerError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from jupyter_accel.notebook.session import Session


@contextmanager
def worded() -> Iterator[None]:
    """Turn mistakes in a launch into IPython's own errors, which are shown as one line."""
    try:
        yield
    except WorkerError:
        raise
    except AccelError as error:
        _let_go(error)
        raise UsageError(str(error)) from None


def _let_go(error: BaseException | None) -> None:
    """Empty the frames of an error that is shown without them.

    They hold what was to travel, and IPython keeps the last error: data that the user deletes
    after it would stay in memory.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


@magics_class
class AccelMagics(Magics):
    """The magics of one session."""

    def __init__(self, shell: InteractiveShell, session: Session) -> None:
        super().__init__(shell)
        self._session = session

    @cell_magic("accel_launch")  # type: ignore[arg-type] # IPython declares it for no arguments
    @no_var_expand
    def launch_cell(self, line: str, cell: str) -> Any:
        """Run this cell on every rank; ``%accel_launch --help`` shows the options."""
        return self._session.run_blocking(line, cell)

    @line_magic("accel_launch")  # type: ignore[arg-type] # as above
    @no_var_expand
    @needs_local_scope
    def launch_line(self, line: str, local_ns: Mapping[str, Any] | None = None) -> Any:
        """Evaluate an expression on every rank; ``--help`` shows the options."""
        return self._session.run_blocking(line, None, local_ns)

    @line_magic
    def accel_workers(self, line: str) -> None:
        """List the kept workers."""
        del line
        if not self._session.kept:
            print("no kept workers; %%accel_launch --keep NAME starts some")  # noqa: T201
        for name, kept in self._session.kept:
            pids = ", ".join(str(rank.pid) for rank in kept.crew.pool.ranks)
            names = ", ".join(sorted(kept.names)) or "nothing yet"
            print(f"{name}: {kept.crew.words} (pids {pids}); they hold {names}")  # noqa: T201

    @line_magic
    def accel_close(self, line: str) -> None:
        """End the kept workers of a name, or all of them."""
        with worded():
            if line.strip() not in {"", "--all"}:
                self._session.kept.close(line.strip())
            elif self._session.kept:
                self._session.kept.close_all()
            else:
                msg = "there are no kept workers to close"
                raise ConfigError(msg)
