"""Data parallel: every rank holds the whole model, and gradients are averaged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from jupyter_accel.strategies.base import Engine, Strategy, Training

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from jupyter_accel.world import World


@dataclass(frozen=True, slots=True)
class DDP(Strategy):
    """Average gradients across ranks during each backward pass.

    ``find_unused_parameters`` and ``static_graph`` are those of
    :class:`torch.nn.parallel.DistributedDataParallel`.
    """

    find_unused_parameters: bool = False
    static_graph: bool = False

    def wrap(self, training: Training, world: World) -> Engine:
        training.move(world.device)
        if world.size == 1:
            # Nobody to average with: the model needs no wrapper, and gives the same numbers.
            return Engine(training, world)
        if not training.learns:
            return _FrozenEngine(training, world)
        index = torch.device(world.device).index
        ddp = DistributedDataParallel(
            training.model,
            device_ids=[index] if training.place and world.device_type != "cpu" else None,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
        )
        return DDPEngine(training, world, ddp)


class DDPEngine(Engine):
    """A model whose gradients are averaged as they are made."""

    def no_sync(self) -> AbstractContextManager[None]:
        ddp = cast("DistributedDataParallel", self.model)
        return cast("AbstractContextManager[None]", ddp.no_sync())


class _FrozenEngine(Engine):
    """A model without gradients, such as a teacher: alike on all ranks, but not wrapped."""

    def __init__(self, training: Training, world: World) -> None:
        super().__init__(training, world)
        # What DDP does for a model that learns: all ranks start from the main rank's weights.
        with torch.no_grad():
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                dist.broadcast(tensor, src=0)
