"""Prepared data loaders: each rank reads its own share, and batches arrive on its device."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from jupyter_accel import control
from jupyter_accel.errors import ConfigError
from jupyter_accel.plan import Plan
from jupyter_accel.sampling import (
    Dealer,
    Order,
    cuts_batches,
    first_seed,
    index_source,
    length_of,
    seeded_generator,
)
from jupyter_accel.tree import batch_size, leaves, move

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Iterable, Iterator

    from jupyter_accel.world import World

#: A batch, and which of its samples are no padding.
Marked = tuple[Any, tuple[bool, ...]]


class PreparedLoader(DataLoader[Any]):
    """A loader that gives this rank's batches, on its device.

    Every rank gets ``batch_size`` samples a step, and all get the same number of steps; see
    :class:`~jupyter_accel.plan.Plan` for the last one. Shuffled orders come from a seed that the
    ranks share and from the epoch, so they do not depend on the number of ranks; each pass is a
    new epoch unless ``set_epoch`` says which. An iterable data set is read whole by every rank,
    which keeps every ``size``-th batch; it must give the same stream everywhere.

    What is not set here, such as ``dataset``, is that of the loader that was prepared.

    Attributes:
        source: the loader that was prepared, unchanged.
        plan: who gets what.
        epoch: the epoch in progress, or the last one.
        position: batches of this epoch that the caller has been given.
        valid: which samples of the newest batch are no padding.
    """

    def __init__(self, source: DataLoader[Any], world: World, *, place: bool = True) -> None:
        # DataLoader.__init__ is not called: what iterates is a copy of the source, which so keeps
        # its class and all its settings, those of later torch versions included.
        _check(source, world)
        self.source = source
        self.epoch = -1
        self.position = 0
        self.valid: tuple[bool, ...] = ()
        self._next_epoch = 0
        self._device = torch.device(world.device) if place else None
        self._seed = first_seed(source, world)
        self._dealer: Dealer | None = None
        self._inner = copy.copy(source)
        # vars(): past DataLoader.__setattr__, which refuses to change a finished loader. The
        # workers that the source may keep running stay its own.
        vars(self._inner)["_iterator"] = None
        plan = Plan(rank=world.rank, size=world.size, drop_last=bool(source.drop_last))
        if isinstance(source.dataset, IterableDataset):
            self.plan = replace(plan, length=length_of(source))
            return
        indices = index_source(source, world)
        order = Order(indices, self._seed, world)
        if cuts_batches(indices):
            order = replace(order, sampler=indices.sampler)  # type: ignore[attr-defined]
            plan = replace(
                plan,
                per_rank=indices.batch_size,  # type: ignore[attr-defined]
                drop_last=indices.drop_last,  # type: ignore[attr-defined]
            )
        self.plan = replace(plan, length=order.length())
        self._dealer = Dealer(order, self.plan, whole=not cuts_batches(indices))
        slot = "sampler" if source.batch_sampler is None else "batch_sampler"
        vars(self._inner)[slot] = self._dealer

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, and with it its order."""
        self._next_epoch = epoch

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.epoch = self._next_epoch
        self._next_epoch += 1
        self.position = self.plan.start
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        marked = self._dealt() if self._dealer else self._streamed()
        return self._hand_out(self._placed(marked))

    def __getattr__(self, name: str) -> Any:
        if name in {"_inner", "source"}:  # not there yet while a copy is being made
            raise AttributeError(name)
        return getattr(self._inner, name)

    def _dealt(self) -> Iterator[Marked]:
        """Read a data set by index: the loader's workers fetch only this rank's samples."""
        dealer = self._dealer
        assert dealer is not None  # noqa: S101
        dealer.epoch = self.epoch
        batches = iter(self._inner)
        marks = dealer.marks
        return _with_marks(batches, marks, whole=dealer.whole)

    def _streamed(self) -> Iterator[Marked]:
        """Read a stream: every rank sees all batches and keeps its own."""
        generator = seeded_generator(self._seed, self.epoch)
        own = getattr(self.dataset, "generator", None)
        if isinstance(own, torch.Generator):
            own.manual_seed(generator.initial_seed())
        # The loader's workers derive their seeds from it: alike on all ranks, or streams differ.
        vars(self._inner)["generator"] = generator
        for share in self.plan.deal(self._inner):
            batch = share.items[0]
            yield batch, share.valid * (batch_size(batch) or 1)

    def _placed(self, marked: Iterator[Marked]) -> Iterator[Marked]:
        if self._device is None:
            return marked
        if self._device.type == "cuda":
            return _ahead(marked, self._device)
        return ((move(batch, self._device), valid) for batch, valid in marked)

    def _hand_out(self, marked: Iterator[Marked]) -> Iterator[Any]:
        # All ranks ask equally often: before each batch, and once more at the end. A loop without
        # gradients is an evaluation: after a stop it tells how good the model so far is.
        trains = torch.is_grad_enabled()
        while not (trains and control.should_stop()):
            try:
                batch, self.valid = next(marked)
            except StopIteration:
                return
            self.position += 1
            yield batch


def _with_marks(
    batches: Iterable[Any], marks: deque[tuple[bool, ...]], *, whole: bool
) -> Iterator[Marked]:
    """Pair each batch with its marks, which the dealer wrote when the batch was asked for."""
    for batch in batches:
        valid = marks.popleft()
        yield batch, valid * (batch_size(batch) or 1) if whole else valid


def _ahead(marked: Iterator[Marked], device: torch.device) -> Iterator[Marked]:
    """Copy the next batch to the GPU while the step on this one runs."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copied() -> Marked | None:
        try:
            batch, valid = next(marked)
        except StopIteration:
            return None
        with torch.cuda.stream(side):
            return move(batch, device, non_blocking=True), valid

    coming = copied()
    while coming is not None:
        now = coming
        main = torch.cuda.current_stream(device)
        main.wait_stream(side)
        for tensor in leaves(now[0]):
            if tensor.is_cuda:
                # Or its memory could be given away before the step has read it.
                tensor.record_stream(main)
        coming = copied()
        yield now


def _check(loader: DataLoader[Any], world: World) -> None:
    if world.size > 1 and not getattr(loader, "in_order", True):
        msg = "in_order=False on several ranks loses track of which samples are padding"
        raise ConfigError(msg)
