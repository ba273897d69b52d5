"""Run a notebook cell on several processes at once, and train with PyTorch there.

Names are resolved on first use, so that importing the package, or only its launcher, does not
import PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jupyter_accel.accelerator import Accelerator
    from jupyter_accel.errors import (
        AccelError,
        ConfigError,
        Interrupted,
        NoInputError,
        NotPreparedError,
        PreflightError,
        ShippingError,
        TemplateError,
        WorkerDiedError,
        WorkerError,
        WorkerTimeoutError,
    )
    from jupyter_accel.launcher.calling import launch, launch_all_ranks, notebook_launcher
    from jupyter_accel.world import World

__version__ = "0.1.0"

__all__ = [
    "AccelError",
    "Accelerator",
    "ConfigError",
    "Interrupted",
    "NoInputError",
    "NotPreparedError",
    "PreflightError",
    "ShippingError",
    "TemplateError",
    "WorkerDiedError",
    "WorkerError",
    "WorkerTimeoutError",
    "World",
    "__version__",
    "launch",
    "launch_all_ranks",
    "notebook_launcher",
]

_HOMES = {
    "Accelerator": "jupyter_accel.accelerator",
    "World": "jupyter_accel.world",
    "launch": "jupyter_accel.launcher.calling",
    "launch_all_ranks": "jupyter_accel.launcher.calling",
    "notebook_launcher": "jupyter_accel.launcher.calling",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(_HOMES.get(name, "jupyter_accel.errors")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(shell: Any) -> None:
    """Answer ``%load_ext jupyter_accel``."""
    import_module("jupyter_accel.notebook.extension").load_ipython_extension(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Answer ``%unload_ext jupyter_accel``."""
    import_module("jupyter_accel.notebook.extension").unload_ipython_extension(shell)
