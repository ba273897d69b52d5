"""Which order a loader reads its data in, so that every rank deals from the same one."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import BatchSampler, DistributedSampler, Sampler, SequentialSampler

from jupyter_accel.collectives import share_from_main
from jupyter_accel.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.utils.data import DataLoader

    from jupyter_accel.plan import Plan
    from jupyter_accel.world import World


@dataclass(frozen=True, slots=True)
class Order:
    """The items of an epoch, in an order that is the same on all ranks.

    A sampler that takes a ``generator`` gets one that is seeded alike everywhere. Of any other
    sampler nothing is known, so the main rank reads it and sends the order to all.
    """

    sampler: Iterable[Any]
    seed: int
    world: World

    def of(self, epoch: int) -> Iterable[Any]:
        """Give the order of one epoch."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        if hasattr(self.sampler, "generator"):
            seeded = copy.copy(self.sampler)
            seeded.generator = seeded_generator(self.seed, epoch)
            return seeded
        if self.world.size == 1 or isinstance(self.sampler, SequentialSampler):
            return self.sampler
        return share_from_main(list(self.sampler) if self.world.is_main else [], self.world)

    def length(self) -> int | None:
        """Count the items of an epoch; None where only the end will tell."""
        return length_of(self.sampler)


class Dealer(Sampler[Any]):
    """Stands in a loader where its sampler stood, and deals this rank's part of the order.

    Attributes:
        whole: whether an item is a batch by itself; else ``per_rank`` items make a batch.
        marks: for the newest iteration, which items of each batch are no padding, in order.
    """

    def __init__(self, order: Order, plan: Plan, *, whole: bool) -> None:
        self.order = order
        self.plan = plan
        self.whole = whole
        self.epoch = 0
        self.marks: deque[tuple[bool, ...]] = deque()

    def __iter__(self) -> Iterator[Any]:
        # A fresh queue for each iteration: a loader that is read twice at once mixes nothing.
        self.marks = deque()
        return self._deal(self.marks)

    def _deal(self, marks: deque[tuple[bool, ...]]) -> Iterator[Any]:
        for share in self.plan.deal(self.order.of(self.epoch)):
            marks.append(share.valid)
            yield share.items[0] if self.whole else list(share.items)

    def __len__(self) -> int:
        return len(self.plan)


def first_seed(loader: DataLoader[Any], world: World) -> int:
    """Choose the seed of a loader's orders: the main rank's, so that all ranks agree."""
    generator = getattr(loader.sampler, "generator", None) or loader.generator
    if isinstance(generator, torch.Generator):
        seed = generator.initial_seed()
    else:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
    return share_from_main(seed, world)


def seeded_generator(seed: int, epoch: int) -> torch.Generator:
    """Make the generator of one epoch."""
    return torch.Generator().manual_seed((seed + epoch) % 2**63)


def index_source(loader: DataLoader[Any], world: World) -> Iterable[Any]:
    """Find what gives a loader its indices, and refuse what cannot be dealt out."""
    source: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    order = source.sampler if cuts_batches(source) else source
    if isinstance(order, DistributedSampler) or isinstance(loader.sampler, DistributedSampler):
        msg = (
            "this loader has a DistributedSampler, and prepare() deals the data out as well; "
            "build it without, with shuffle=True if the order should be random"
        )
        raise ConfigError(msg)
    if world.size > 1 and length_of(order) is None and not hasattr(order, "generator"):
        msg = (
            f"{type(order).__name__} has neither a length nor a generator, so {world.size} ranks "
            "cannot agree on its order; give it a __len__, or a generator attribute"
        )
        raise ConfigError(msg)
    return cast("Iterable[Any]", source)


def cuts_batches(source: object) -> bool:
    """Whether batches can be cut anew: of torch's own class, which only groups indices."""
    return type(source) is BatchSampler


def length_of(thing: Any) -> int | None:
    """Give ``len(thing)``, or None where it has none."""
    try:
        return len(thing)
    except TypeError:
        return None
