"""The settings of a launch: one place for their names, defaults, bounds and help."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from jupyter_accel.errors import ConfigError

START_METHODS = ("forkserver", "fork", "spawn")
PRECISIONS = ("no", "fp16", "bf16")
DEVICES = ("cpu", "cuda")

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_SIZE = re.compile(r"\s*([\d.]+)\s*([kmg]i?)?b?\s*", re.IGNORECASE)


def size_in_bytes(text: str) -> int:
    """Read a size such as ``2GB`` (10**9 each), ``1.5GiB`` (2**30 each) or ``4096``.

    Raises:
        ConfigError: it is not a size.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match[1].count(".") > 1 or match[1] == ".":
        msg = f"{text!r} is not a size; write a number and a unit, such as 2GB or 512MiB"
        raise ConfigError(msg)
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def _setting(default: Any, text: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": text, **more})


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How to start the ranks of a job; each field's metadata holds its help text."""

    num_processes: int | None = _setting(
        None, "number of ranks; by default one for each usable device, or 1 on CPU", short="-n"
    )
    start_method: str = _setting(
        "forkserver",
        "forkserver: from a clean, warm process; fork: from this kernel, with all of its state; "
        "spawn: fresh interpreters",
        choices=START_METHODS,
    )
    precision: str | None = _setting(
        None, "mixed precision that Accelerator() takes by default", choices=PRECISIONS
    )
    device: str | None = _setting(
        None, "kind of device; by default CUDA if there is any", choices=DEVICES
    )
    timeout: float | None = _setting(
        None, "seconds after which the ranks are ended, with their stacks shown"
    )
    memory_limit: int | None = _setting(
        None, "most memory that one rank may allocate, such as 4GB", parse=size_in_bytes
    )
    connect_timeout: float = _setting(60.0, "seconds that ranks wait for one another at the start")

    def __post_init__(self) -> None:
        """Check each value against its bounds."""
        if self.num_processes is not None and self.num_processes < 1:
            msg = f"the number of ranks must be at least 1, got {self.num_processes}"
            raise ConfigError(msg)
        for item in fields(self):
            value, choices = getattr(self, item.name), item.metadata.get("choices")
            if choices and value is not None and value not in choices:
                msg = f"unknown {item.name} {value!r}; choose one of {', '.join(choices)}"
                raise ConfigError(msg)
        for name in ("timeout", "connect_timeout", "memory_limit"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                msg = f"{name} must be more than 0, got {value:g}"
                raise ConfigError(msg)

    @classmethod
    def metadata(cls) -> Mapping[str, Mapping[str, Any]]:
        """Return each setting's help, choices and default, by name."""
        return {item.name: {**item.metadata, "default": item.default} for item in fields(cls)}
