"""Exchange values among the ranks: functions of a tree and a world.

Shapes are compared before data is sent. Without that, unequal tensors end a gloo rank by a
signal or come back as made-up values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.distributed as dist

from jupyter_accel.errors import ConfigError
from jupyter_accel.tree import leaves, tree_map

if TYPE_CHECKING:
    from jupyter_accel.world import World

T = TypeVar("T")


def gather(tree: T, world: World) -> T:
    """Join each tensor of all ranks along its first dimension; a scalar becomes a vector."""
    _check_same_shapes(tree, world)

    def join(tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.detach().contiguous()
        rows = rows.reshape(1) if rows.ndim == 0 else rows
        if world.size == 1:
            return rows
        parts = [torch.empty_like(rows) for _ in range(world.size)]
        dist.all_gather(parts, rows)
        return torch.cat(parts)

    return tree_map(join, tree)


def share_from_main(value: T, world: World) -> T:
    """Give every rank the main rank's value; any object that pickles."""
    if world.size == 1:
        return value
    box: list[object] = [value if world.is_main else None]
    dist.broadcast_object_list(box, src=0)
    return cast("T", box[0])


def wait_for_all(world: World) -> None:
    """Wait until every rank is here."""
    if world.size > 1:
        dist.barrier()


def _check_same_shapes(tree: object, world: World) -> None:
    tensors = list(leaves(tree))
    if not tensors:
        msg = f"gather() needs tensors, or containers of tensors; got {type(tree).__name__}"
        raise ConfigError(msg)
    if world.size == 1:
        return
    mine = [(tuple(tensor.shape), str(tensor.dtype), tensor.device.type) for tensor in tensors]
    each: list[list[tuple[object, ...]]] = [[] for _ in range(world.size)]
    dist.all_gather_object(each, mine)
    if any(other != mine for other in each):
        lines = "; ".join(f"rank {rank}: {_words(shapes)}" for rank, shapes in enumerate(each))
        msg = f"gather() needs the same shapes, dtypes and devices on every rank; got {lines}"
        raise ConfigError(msg)


def _words(shapes: list[tuple[object, ...]]) -> str:
    return ", ".join(" ".join(map(str, shape)) for shape in shapes) or "no tensors"
