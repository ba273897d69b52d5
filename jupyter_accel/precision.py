"""In which number format a model computes: checked before the start, applied around each call.

Parameters stay float32; autocast computes in the smaller format, and outputs come back as
float32, so that losses and metrics are exact.
"""

from __future__ import annotations

import copy
import copyreg
import types
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import nn

from jupyter_accel.errors import ConfigError
from jupyter_accel.tree import to_float32

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
#: What each kind of device computes without emulation; bf16 on CUDA is asked of the device.
CAPABLE = {
    "cpu": ("no", "fp16", "bf16"),
    "cuda": ("no", "fp16", "bf16"),
    "mps": ("no", "fp16", "bf16"),
    "xpu": ("no", "fp16", "bf16"),
}


@dataclass(frozen=True, slots=True)
class Precision:
    """The format in which a model computes: ``no`` (float32), ``fp16`` or ``bf16``."""

    name: str = "no"

    def __post_init__(self) -> None:
        if self.name not in DTYPES:
            msg = f"unknown precision {self.name!r}; choose one of {', '.join(DTYPES)}"
            raise ConfigError(msg)

    @property
    def compute(self) -> torch.dtype:
        """The format of matrix products and the like."""
        return DTYPES[self.name]

    @property
    def is_mixed(self) -> bool:
        """Whether computing and parameters differ in format."""
        return self.name != "no"

    @property
    def needs_scaler(self) -> bool:
        """Whether small gradients would vanish unless the loss is scaled up."""
        return self.name == "fp16"

    def check(self, device: str, *, native_bf16: bool | None = None) -> None:
        """Refuse a device that cannot compute in this format.

        Args:
            device: such as ``cuda:1``.
            native_bf16: whether that CUDA device has bf16 units; asked of the device if not given.
        """
        kind = device.partition(":")[0]
        able = self.name == "no" or self.name in CAPABLE.get(kind, ())
        if able and self.name == "bf16" and kind == "cuda":
            able = _has_bf16(device) if native_bf16 is None else native_bf16
        if not able:
            instead = "fp16" if kind == "cuda" else "no"
            msg = f"{device} cannot compute in {self.name}; use mixed_precision={instead!r}"
            raise ConfigError(msg)

    def check_model(self, model: nn.Module) -> None:
        """Refuse parameters whose gradients a loss scaler could not unscale."""
        if not self.needs_scaler:
            return
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.dtype == torch.float16:
                msg = (
                    f"parameter {name!r} is float16, whose gradients cannot be unscaled; call "
                    "model.float() before prepare(): fp16 computes in float16 all the same"
                )
                raise ConfigError(msg)

    def autocast(self, device_type: str) -> AbstractContextManager[None]:
        """Compute in this format inside the block; nothing changes for ``no``."""
        context = torch.autocast(device_type, dtype=self.compute, enabled=self.is_mixed)
        return cast("AbstractContextManager[None]", context)


@dataclass(frozen=True, slots=True)
class Attached:
    """The handle of a model that computes under autocast."""

    model: nn.Module

    def remove(self) -> None:
        """Let the model compute as it did before; twice is no error."""
        if isinstance(self.model, Autocast):
            # mypy reads the assigned class as the narrowed one.
            self.model.__class__ = self.model.plain  # type: ignore[assignment]


class Autocast(nn.Module):
    """The part of a model's class that makes each call run under autocast.

    ``attach`` gives the model a class made of this one and its own, as ``fully_shard`` does, and
    for the same reasons: the model stays the same object, ``isinstance`` and its ``forward`` stay
    as they were. Not a pair of forward hooks: torch calls no hook when Ctrl-C interrupts a
    forward, and autocast would stay on in the notebook from then on.
    """

    plain: ClassVar[type[nn.Module]]
    precision: ClassVar[Precision]
    device_type: ClassVar[str]

    def __call__(self, *args: object, **kwargs: object) -> object:
        with self.precision.autocast(self.device_type):
            output = super().__call__(*args, **kwargs)
        return to_float32(output)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the plain class: a saved or returned model must not need this package."""
        with self._as_plain():
            build, arguments, *rest = self.__reduce_ex__(protocol)
        if build is copyreg.__newobj__:  # type: ignore[attr-defined]
            # Pickle insists that this one names the class of the object, which is ours again.
            build = copyreg._reconstructor  # type: ignore[attr-defined]  # noqa: SLF001
            arguments = (self.plain, object, None)
        return (build, arguments, *rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy with autocast: an average of the weights computes as the model itself does."""
        with self._as_plain():
            clone = copy.deepcopy(self, memo)
        attach(clone, self.precision, self.device_type)
        return clone

    @contextmanager
    def _as_plain(self) -> Iterator[None]:
        kind = type(self)
        self.__class__ = kind.plain  # type: ignore[assignment]
        try:
            yield
        finally:
            self.__class__ = kind


def attach(model: nn.Module, precision: Precision, device_type: str) -> Attached:
    """Make each call of ``model`` compute in this precision and give float32.

    A model has one precision at a time: attaching again replaces the former one.
    """
    handle = Attached(model)
    handle.remove()
    if precision.is_mixed:
        plain = type(model)
        body = {
            "plain": plain,
            "precision": precision,
            "device_type": device_type,
            "__doc__": plain.__doc__,
            "__module__": plain.__module__,
            "__qualname__": plain.__qualname__,
        }
        bases = (Autocast, plain)
        model.__class__ = types.new_class(plain.__name__, bases, exec_body=lambda n: n.update(body))
    return handle


def _has_bf16(device: str) -> bool:
    with torch.cuda.device(device):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
