"""One process, one device, nothing to synchronise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jupyter_accel.errors import ConfigError
from jupyter_accel.strategies.base import Engine, Strategy, Training

if TYPE_CHECKING:
    from jupyter_accel.world import World


@dataclass(frozen=True, slots=True)
class Single(Strategy):
    """Train on the one device of a lone process."""

    def wrap(self, training: Training, world: World) -> Engine:
        if world.size > 1:
            msg = (
                f"strategy 'single' on {world.size} ranks would train {world.size} models that "
                "know nothing of each other; use strategy='ddp', or launch one process"
            )
            raise ConfigError(msg)
        training.move(world.device)
        return Engine(training, world)
