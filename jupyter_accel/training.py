"""Prepared optimizers and schedulers: thin wrappers that know which steps were really taken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from jupyter_accel.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_accel.scaling import LossScaler


class PreparedOptimizer(Optimizer):
    """The user's optimizer, stepped through the loss scaler where there is one.

    All state stays in ``optimizer``, hooks included; this object adds only the counters.

    Attributes:
        optimizer: the optimizer that was prepared.
        steps_taken: steps that changed the parameters.
        steps_skipped: steps left out because a gradient overflowed.
    """

    def __init__(self, optimizer: Optimizer, scaler: LossScaler | None = None) -> None:
        # Optimizer.__init__ is not called: it would make state of its own.
        self.optimizer = optimizer
        self.steps_taken = 0
        self.steps_skipped = 0
        self.step_was_skipped = False
        self._scaler = scaler

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step once, unless the loss scaler finds that a gradient overflowed."""
        result = None
        taken = True
        if self._scaler is None:
            result = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        elif closure is None:
            taken = self._scaler.step(self.optimizer)
        else:
            msg = "a closure cannot be used with fp16, which may have to skip the step"
            raise ConfigError(msg)
        self.step_was_skipped = not taken
        self.steps_taken += taken
        self.steps_skipped += not taken
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's own
        """Drop the gradients."""
        if self._scaler is not None:
            self._scaler.forget(self.optimizer)
        self.optimizer.zero_grad(set_to_none=set_to_none)

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not there yet while a copy is being made
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"


class PreparedScheduler(LRScheduler):
    """The user's scheduler: one step for each optimizer step taken, whatever the rank count.

    A call is left out when every optimizer step since the last call was skipped, so that the
    learning rate follows the steps that changed the model. A call for each epoch counts as well:
    it needs one step taken in that epoch.
    """

    def __init__(self, scheduler: LRScheduler, optimizer: PreparedOptimizer) -> None:
        # LRScheduler.__init__ is not called: it would start the schedule anew.
        self.scheduler = scheduler
        self._prepared = optimizer
        self._taken = optimizer.steps_taken
        self._skipped = optimizer.steps_skipped

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move the schedule on, unless every step since the last call was skipped."""
        taken = self._prepared.steps_taken - self._taken
        skipped = self._prepared.steps_skipped - self._skipped
        self._taken += taken
        self._skipped += skipped
        if skipped and not taken:
            return
        self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[Any]:
        return self.scheduler.get_last_lr()

    def get_lr(self) -> list[Any]:
        return self.scheduler.get_lr()

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not there yet while a copy is being made
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __repr__(self) -> str:
        return f"PreparedScheduler({self.scheduler!r})"
