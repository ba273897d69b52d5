"""Nested tensors: batches and outputs made of dicts, lists, tuples and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Protocol, TypeVar, cast, runtime_checkable

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


@runtime_checkable
class Movable(Protocol):
    """Anything that goes to a device by itself, such as a packed sequence or a token batch."""

    def to(self, device: torch.device, /) -> object:
        """Give a copy that lives on ``device``."""


def tree_map(function: Callable[[torch.Tensor], object], tree: T) -> T:
    """Give a copy of ``tree`` with each tensor replaced; containers keep their types."""
    return cast("T", _map(function, tree))


def leaves(tree: object) -> Iterator[torch.Tensor]:
    """Yield each tensor of ``tree``, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
        return
    for child in _children(tree):
        yield from leaves(child)


def move(tree: T, device: torch.device, *, non_blocking: bool = False) -> T:
    """Give a copy of ``tree`` on ``device``; objects with a ``to`` of their own use it."""

    def place(leaf: object) -> object:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        return leaf.to(device) if isinstance(leaf, Movable) else leaf

    return cast("T", _map(place, tree, stop=Movable))


def to_float32(tree: T) -> T:
    """Give a copy of ``tree`` whose half precision tensors are float32."""
    half = (torch.float16, torch.bfloat16)
    return tree_map(lambda x: x.float() if x.dtype in half else x, tree)


def batch_size(tree: object) -> int | None:
    """Give the first dimension of the first tensor that has one."""
    return next((leaf.shape[0] for leaf in leaves(tree) if leaf.ndim), None)


def _children(tree: object) -> Iterator[object]:
    if isinstance(tree, Mapping):
        yield from tree.values()
    elif isinstance(tree, (list, tuple)):
        yield from tree
    elif _is_dataclass(tree):
        yield from (getattr(tree, name) for name in _fields(tree))


def _map(
    function: Callable[[torch.Tensor], object], tree: object, stop: type = torch.Tensor
) -> object:
    """Rebuild ``tree``; ``function`` is called for each leaf that is a ``stop``."""
    if isinstance(tree, stop):
        return function(cast("torch.Tensor", tree))
    if isinstance(tree, Mapping):
        values = {key: _map(function, value, stop) for key, value in tree.items()}
        return _like(tree, values)
    if isinstance(tree, (list, tuple)):
        items = [_map(function, item, stop) for item in tree]
        # A named tuple takes its fields one by one, all others a sequence.
        kind: Callable[..., object] = type(tree)
        return kind(*items) if hasattr(tree, "_fields") else kind(items)
    if _is_dataclass(tree):
        clone = copy.copy(tree)
        for name in _fields(tree):
            # Past a frozen class and past __post_init__: the copy is already valid.
            object.__setattr__(clone, name, _map(function, getattr(tree, name), stop))
        return clone
    return tree


def _like(tree: Mapping[object, object], values: dict[object, object]) -> object:
    """Put ``values`` into a mapping of the type of ``tree``."""
    if type(tree) is dict:
        return values
    if isinstance(tree, MutableMapping):
        # A copy keeps what a constructor would not, such as a default factory.
        clone = copy.copy(tree)
        clone.update(values)
        return clone
    return type(tree)(values)  # type: ignore[call-arg]


def _is_dataclass(tree: object) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)


def _fields(tree: object) -> Iterator[str]:
    for field in dataclasses.fields(tree):  # type: ignore[arg-type]
        if hasattr(tree, field.name):
            yield field.name
