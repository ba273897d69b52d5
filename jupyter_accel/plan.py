"""Which items each rank gets in each step of an epoch: length, order, padding and position.

The plan is pure: it knows neither data sets nor tensors. An *item* is whatever the order is made
of: the index of a sample, or a whole batch where batches cannot be cut anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle, islice
from typing import TYPE_CHECKING, Generic, TypeVar

from jupyter_accel.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Share(Generic[T]):
    """What one rank gets in one step; ``valid`` is False for items that only pad."""

    items: tuple[T, ...]
    valid: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """How one epoch's order is dealt to the ranks.

    A step takes ``per_rank`` items for each rank, in the order of the ranks. All ranks get the
    same number of steps and, in each step, the same number of items. The last, shorter step is
    dealt evenly, so that at most ``size - 1`` items are repeated, taken from the order's start;
    one process on the whole batch sees the same step. ``drop_last`` leaves that step out.

    Attributes:
        length: items in the order; None when only its end will tell.
        start: steps to leave out at the beginning, for a run that resumes.
    """

    per_rank: int = 1
    rank: int = 0
    size: int = 1
    drop_last: bool = False
    length: int | None = None
    start: int = 0

    def __post_init__(self) -> None:
        if self.per_rank < 1:
            msg = f"a step needs at least 1 item for each rank, got {self.per_rank}"
            raise ConfigError(msg)
        if not 0 <= self.rank < self.size:
            msg = f"rank must be in [0, {self.size}), got {self.rank}"
            raise ConfigError(msg)
        if self.start < 0:
            msg = f"start must be 0 or more, got {self.start}"
            raise ConfigError(msg)

    @property
    def per_step(self) -> int:
        """Items that all ranks together take in a full step."""
        return self.per_rank * self.size

    @property
    def steps(self) -> int | None:
        """Steps of the whole epoch, the same on every rank; None when the length is unknown."""
        if self.length is None:
            return None
        full, rest = divmod(self.length, self.per_step)
        return full + (1 if rest and not self.drop_last else 0)

    def __len__(self) -> int:
        if self.steps is None:
            msg = "the length of this data is not known before its end"
            raise TypeError(msg)
        return max(0, self.steps - self.start)

    def deal(self, order: Iterable[T]) -> Iterator[Share[T]]:
        """Yield this rank's share of each step; ``order`` is read as it goes."""
        items = iter(order)
        first: list[T] = []  # the order's start, which pads the last step
        step = 0
        while taken := list(islice(items, self.per_step)):
            first.extend(taken[: self.size - 1 - len(first)])
            real = len(taken)
            if real < self.per_step and self.drop_last:
                return
            taken.extend(islice(cycle(first), -real % self.size))
            each = len(taken) // self.size
            mine = range(self.rank * each, (self.rank + 1) * each)
            if step >= self.start:
                yield Share(tuple(taken[i] for i in mine), tuple(i < real for i in mine))
            step += 1
