"""The place of one process in a run, and the one reading of the environment that tells it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jupyter_accel.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: torchrun's names; a launcher sets all of them, a lone process has none.
RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
#: Set by our launcher when it has chosen this rank's device, such as ``cuda:1``.
DEVICE_NAME = "JUPYTER_ACCEL_DEVICE"
#: Set by our launcher from its ``--precision`` option.
PRECISION_NAME = "JUPYTER_ACCEL_MIXED_PRECISION"

_DEVICE = re.compile(r"[a-z]+(:\d+)?")


@dataclass(frozen=True, slots=True)
class World:
    """The place of one process in a run: fixed at launch, never changed.

    ``local_rank`` and ``local_size`` count the processes of this machine alone.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.size < 1:
            msg = f"size must be at least 1, got {self.size}"
            raise ConfigError(msg)
        if not 0 <= self.rank < self.size:
            msg = f"rank must be in [0, {self.size}), got {self.rank}"
            raise ConfigError(msg)
        if not 1 <= self.local_size <= self.size:
            msg = f"local_size must be in [1, {self.size}], got {self.local_size}"
            raise ConfigError(msg)
        if not 0 <= self.local_rank < self.local_size:
            msg = f"local_rank must be in [0, {self.local_size}), got {self.local_rank}"
            raise ConfigError(msg)
        if not _DEVICE.fullmatch(self.device):
            msg = f"device must look like 'cpu' or 'cuda:1', got {self.device!r}"
            raise ConfigError(msg)

    @classmethod
    def from_env(cls, env: Mapping[str, str], device: str | None = None) -> World:
        """Read the variables that torchrun sets; a lone process has none of them.

        Args:
            env: usually ``os.environ``.
            device: where to compute when the launcher left that open; the CPU if not given.
        """
        place = env.get(DEVICE_NAME) or device or "cpu"
        missing = [name for name in RANK_NAMES if name not in env]
        if len(missing) == len(RANK_NAMES):
            return cls(device=place)
        if missing:
            msg = f"{', '.join(RANK_NAMES)} go together; missing {', '.join(missing)}"
            raise ConfigError(msg)
        rank, size, local_rank, local_size = (_whole_number(env, name) for name in RANK_NAMES)
        return cls(rank, size, local_rank, local_size, place)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0 of the whole run."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank has the highest number."""
        return self.rank == self.size - 1

    @property
    def device_type(self) -> str:
        """The kind of device, without its number: ``cpu``, ``cuda``."""
        return self.device.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Environment:
    """All that the core reads from the environment, read once.

    ``device`` and ``precision`` are None where the launcher left them open.
    """

    world: World = World()
    device: str | None = None
    precision: str | None = None
    launched: bool = False

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Environment:
        """Read torchrun's names and our launcher's two own ones."""
        return cls(
            world=World.from_env(env),
            device=env.get(DEVICE_NAME) or None,
            precision=env.get(PRECISION_NAME) or None,
            launched="RANK" in env,
        )


def _whole_number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        msg = f"{name} must be a whole number, got {env[name]!r}"
        raise ConfigError(msg) from None
