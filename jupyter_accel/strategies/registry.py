"""Find a strategy by its name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jupyter_accel.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_accel.strategies.base import Strategy

#: A new strategy is one new file, and one line here.
KNOWN = {
    "ddp": "jupyter_accel.strategies.ddp:DDP",
    "single": "jupyter_accel.strategies.single:Single",
}


def by_name(name: str, **options: Any) -> Strategy:
    """Build the strategy called ``name``."""
    if name not in KNOWN:
        msg = f"unknown strategy {name!r}; choose one of {', '.join(sorted(KNOWN))}"
        raise ConfigError(msg)
    module, _, attribute = KNOWN[name].partition(":")
    build: Callable[..., Strategy] = getattr(import_module(module), attribute)
    return build(**options)
