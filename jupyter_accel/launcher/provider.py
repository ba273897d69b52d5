"""Where ``launch`` finds the launcher of this process, without loading it before it is needed."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jupyter_accel.launcher.launching import Launcher
    from jupyter_accel.launcher.presenting import Presenter


class _Process:
    """What belongs to this process as a whole."""

    launcher: Callable[[], Launcher] | None = None
    present: Callable[[int], Presenter] | None = None
    own: Launcher | None = None


def use(launcher: Callable[[], Launcher], present: Callable[[int], Presenter]) -> None:
    """Have ``launch`` use this launcher, and show what ranks do by this presenter."""
    _Process.launcher, _Process.present = launcher, present


def forget() -> None:
    """Undo ``use``."""
    _Process.launcher, _Process.present = None, None


def launcher() -> Launcher:
    """Return the launcher to use; one of this process's own if nobody gave another."""
    if _Process.launcher is not None:
        return _Process.launcher()
    if _Process.own is None:
        from jupyter_accel.launcher.launching import Launcher  # noqa: PLC0415 - slow to load
        from jupyter_accel.launcher.records import default_folder  # noqa: PLC0415

        _Process.own = Launcher(records_folder=default_folder(os.environ))
        atexit.register(_Process.own.close)
    return _Process.own


def presenter(size: int) -> Presenter:
    """Return a new presenter for one job of this many ranks."""
    if _Process.present is not None:
        return _Process.present(size)
    from jupyter_accel.launcher.presenting import PlainPresenter  # noqa: PLC0415

    return PlainPresenter()
