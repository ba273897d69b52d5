"""How tensors travel: whole storages, once, beside the stream and without a copy on arrival."""

from __future__ import annotations

import copyreg
import ctypes
import functools
import pickle
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_accel.launcher.parcels.shipping import Packer

    Reducer = Callable[[Packer, Any], Any]

_MAPPED = 64 * 1024  # a smaller storage is copied on arrival, into memory that can be resized
_TRACKED = "_wrapped_by_lr_sched"  # torch's mark on an optimizer's step that a scheduler wrapped

# These have no types of their own: `Any` says so once.
_new_storage: Any = torch.UntypedStorage
_copy_to_cpu: Any = torch.UntypedStorage.cpu
_new_object: Any = vars(copyreg)["__newobj__"]


def reducers() -> dict[type, Reducer]:
    """Return the reducers for exactly these types; subclasses know better themselves."""
    return {
        torch.Tensor: _tensor,
        torch.nn.Parameter: _tensor,
        torch.UntypedStorage: _storage,
    }


def family_reducers() -> dict[type, Reducer]:
    """Return the reducers for these types and what is derived from them."""
    return {DistributedDataParallel: _wrapped, torch.optim.Optimizer: _optimizer}


def _tensor(packer: Packer, tensor: torch.Tensor) -> Any:
    """Take a plain dense tensor apart; leave every other kind to torch's own way."""
    if (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.device.type == "meta"
    ):
        return NotImplemented
    if tensor.device.type != "cpu":
        packer.note(f"was on {tensor.device} and travelled as a copy on the CPU")
    storage = tensor.untyped_storage()
    # Views of one storage may each come with a wrapper of their own: keep the first.
    storage = packer.keep.setdefault(storage._cdata, storage)  # noqa: SLF001
    parts = (
        type(tensor) is torch.nn.Parameter,
        storage,
        tensor.dtype,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
    )
    if vars(tensor):
        return _rebuild_tensor, parts, vars(tensor), None, None, _set_attributes
    return _rebuild_tensor, parts


def _rebuild_tensor(  # noqa: PLR0913, PLR0917 - a tensor has that many properties
    is_parameter: bool,  # noqa: FBT001 - positions keep the stream short
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,  # noqa: FBT001
    is_conj: bool,  # noqa: FBT001
    is_neg: bool,  # noqa: FBT001
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
    if is_conj:
        tensor = tensor.conj()
    if is_neg:
        tensor = torch._neg_view(tensor)  # noqa: SLF001 - there is no public name
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


def _set_attributes(tensor: torch.Tensor, attributes: dict[str, object]) -> None:
    tensor.__dict__.update(attributes)


def _storage(packer: Packer, storage: torch.UntypedStorage) -> Any:
    """Take a storage apart: its bytes, seen where they are."""
    if storage.device.type == "meta":
        return NotImplemented
    if storage.device.type != "cpu":
        storage = _copy_to_cpu(storage)
        packer.keep[id(storage)] = storage
    size = storage.nbytes()
    if size == 0:
        return _new_storage, (0,)
    # The packer remembers the storage, so that the memory stays until it has been copied.
    view = (ctypes.c_ubyte * size).from_address(storage.data_ptr())
    return _rebuild_storage, (pickle.PickleBuffer(view),)


def _rebuild_storage(buffer: memoryview | bytearray) -> torch.UntypedStorage:
    size = len(buffer)
    if size >= _MAPPED:
        return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    storage: torch.UntypedStorage = _new_storage(size)
    ctypes.memmove(storage.data_ptr(), (ctypes.c_char * size).from_buffer(buffer), size)
    return storage


def _wrapped(packer: Packer, model: DistributedDataParallel) -> Any:
    """Send the model inside: the wrapper belongs to a process group, which stays here."""
    packer.note("came without its DistributedDataParallel wrapper")
    return _itself, (model.module,)


def _itself(thing: object) -> object:
    return thing


def _optimizer(packer: Packer, optimizer: torch.optim.Optimizer) -> Any:
    """Send all of an optimizer; torch itself would drop its hooks and its own attributes."""
    del packer
    kind = type(optimizer)
    if kind.__getstate__ is not torch.optim.Optimizer.__getstate__:
        return NotImplemented
    state = dict(vars(optimizer))
    if not hasattr(state.get("step"), _TRACKED):
        return _new_object, (kind,), state
    # A scheduler has put a wrapper around `step`, which refers to the optimizer weakly.
    del state["step"]
    return _new_object, (kind,), state, None, None, _set_tracked_optimizer


def _set_tracked_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    """Restore an optimizer whose scheduler wants to know that it has taken a step."""
    optimizer.__setstate__(state)
    reference = weakref.ref(optimizer)
    plain = type(optimizer).step

    @functools.wraps(plain)
    def step(*args: Any, **kwargs: Any) -> Any:
        mine: Any = reference()
        mine._opt_called = True  # noqa: SLF001 - what torch's wrapper sets
        return plain(mine, *args, **kwargs)

    setattr(step, _TRACKED, True)
    optimizer.step = step
