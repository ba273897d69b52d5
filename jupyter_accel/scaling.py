"""Scale the loss up for fp16, so that small gradients survive, and skip steps that overflowed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from jupyter_accel.errors import AccelError

if TYPE_CHECKING:
    from torch.optim import Optimizer


class LossScaler:
    """One scale for all models and optimizers of an accelerator.

    The scale changes only between one backward pass and the next, never between the steps of
    two optimizers: their gradients were made with the same scale.
    """

    def __init__(self, device_type: str) -> None:
        self.grad_scaler = torch.amp.GradScaler(device_type)
        self._unscaled: dict[int, Optimizer] = {}
        self._stepped = False

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply the loss by the scale."""
        self.settle()
        if self._unscaled:
            # Scaled gradients would be added to unscaled ones, and the sum taken for unscaled.
            msg = (
                "gradients were clipped, and then came another backward pass; after "
                "clip_grad_norm_ call optimizer.step() or optimizer.zero_grad() first"
            )
            raise AccelError(msg)
        return self.grad_scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Bring this optimizer's gradients to their true size, at most once before each step."""
        if id(optimizer) not in self._unscaled:
            self.grad_scaler.unscale_(optimizer)
            self._unscaled[id(optimizer)] = optimizer

    def step(self, optimizer: Optimizer) -> bool:
        """Step, unless a gradient overflowed; return whether the step was taken."""
        self.grad_scaler.step(optimizer)
        self._unscaled.pop(id(optimizer), None)
        self._stepped = True
        # Private, but all that tells for fused optimizers as well, which skip by themselves.
        found = self.grad_scaler._found_inf_per_device(optimizer)  # noqa: SLF001
        return not any(flag.item() for flag in found.values())

    def forget(self, optimizer: Optimizer) -> None:
        """Note that these gradients were thrown away without a step."""
        if self._unscaled.pop(id(optimizer), None) is not None:
            self._stepped = True

    def settle(self) -> None:
        """Adapt the scale to what the last steps met; before saving, and before a backward."""
        if self._stepped:
            self.grad_scaler.update()
            self._unscaled.clear()
            self._stepped = False
