"""The seam between training and distributing: a Strategy describes, its Engine acts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from jupyter_accel.precision import Precision, attach

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from contextlib import AbstractContextManager

    from torch.optim import Optimizer

    from jupyter_accel.scaling import LossScaler
    from jupyter_accel.world import World


@dataclass(frozen=True, slots=True)
class Training:
    """A model, the optimizers that hold its parameters, and how to compute.

    Attributes:
        place: whether the model should be moved to the world's device.
        scaler: scales the loss for fp16; None where the precision needs none.
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...] = ()
    precision: Precision = field(default_factory=Precision)
    scaler: LossScaler | None = None
    place: bool = True

    def move(self, device: str) -> None:
        """Move the model, and what its optimizers already remember about it."""
        if not self.place:
            return
        self.model.to(device)
        for optimizer in self.optimizers:
            if optimizer.state:
                # Loading its own state is how torch puts each value on the right device.
                optimizer.load_state_dict(optimizer.state_dict())

    @property
    def learns(self) -> bool:
        """Whether any parameter gets gradients."""
        return any(parameter.requires_grad for parameter in self.model.parameters())


class Engine:
    """A model that is ready to train; the defaults fit a plain module.

    Attributes:
        model: what the user calls; the wrapped model, where a strategy wraps.
    """

    def __init__(self, training: Training, world: World, model: nn.Module | None = None) -> None:
        self.training = training
        self.world = world
        self.model = training.model if model is None else model
        self.attach_precision()

    def attach_precision(self) -> None:
        """Make the model compute in the precision asked for."""
        attach(self.unwrap(), self.training.precision, self.world.device_type)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Add the loss's gradients to the parameters."""
        scaler = self.training.scaler
        scaled = loss if scaler is None else scaler.scale(loss)
        scaled.backward(**options)  # type: ignore[no-untyped-call]

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep gradients to this rank for the backward passes inside the block."""
        return nullcontext()

    def clip(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Scale gradients down to at most this norm, and return the norm they had."""
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def unwrap(self) -> nn.Module:
        """Give the model that the user built."""
        return self.training.model

    def state_dict(self) -> dict[str, Any]:
        """Give the weights under the names of the user's model."""
        return self.unwrap().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take weights; a missing or an unexpected name is an error."""
        self.unwrap().load_state_dict(state)


class Strategy(ABC):
    """How to distribute one model: a frozen, picklable description."""

    @abstractmethod
    def wrap(self, training: Training, world: World) -> Engine:
        """Distribute a model together with its optimizers."""
