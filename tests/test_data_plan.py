"""The plan as a property: each item once, alike on all ranks, padding marked."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, islice

import pytest

from jupyter_accel.errors import ConfigError
from jupyter_accel.plan import Plan

LENGTHS = range(41)
SHAPES = [(per_rank, size) for per_rank in range(1, 6) for size in range(1, 5)]


def dealt(length, per_rank, size, *, drop_last=False, start=0):
    """Deal an order to all ranks; a list of steps for each rank."""
    plan = Plan(per_rank, 0, size, drop_last, length, start)
    return [list(replace(plan, rank=rank).deal(range(length))) for rank in range(size)]


@pytest.mark.parametrize(("per_rank", "size"), SHAPES)
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_ranks_together_see_each_item_once(per_rank, size, drop_last):
    for length in LENGTHS:
        check_each_item_once(length, per_rank, size, drop_last=drop_last)


def check_each_item_once(length, per_rank, size, *, drop_last):
    ranks = dealt(length, per_rank, size, drop_last=drop_last)
    seen = [
        item
        for steps in ranks
        for share in steps
        for item, valid in zip(share.items, share.valid, strict=True)
        if valid
    ]
    kept = length - length % (per_rank * size) if drop_last else length
    assert sorted(seen) == list(range(kept))

    plan = Plan(per_rank, 0, size, drop_last, length)
    assert [len(steps) for steps in ranks] == [len(plan)] * size
    for shares in zip(*ranks, strict=True):
        sizes = {len(share.items) for share in shares}
        assert len(sizes) == 1
        assert sizes <= set(range(1, per_rank + 1))
        assert sum(not valid for share in shares for valid in share.valid) < size
        assert drop_last <= all(all(share.valid) for share in shares)


@pytest.mark.parametrize(("per_rank", "size"), SHAPES)
def test_each_step_holds_the_batch_that_one_process_would_see(per_rank, size):
    for length in LENGTHS:
        (alone,) = dealt(length, per_rank * size, 1)
        for step, shares in enumerate(zip(*dealt(length, per_rank, size), strict=True)):
            together = [item for share in shares for item in share.items]
            whole = alone[step].items
            assert tuple(together[: len(whole)]) == whole
            assert set(together[len(whole) :]) <= set(range(size))  # padding: the order's start


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("start", range(7))
def test_a_later_start_leaves_out_the_first_steps_and_no_others(start, drop_last):
    whole = dealt(23, 2, 2, drop_last=drop_last)
    rest = dealt(23, 2, 2, drop_last=drop_last, start=start)
    assert rest == [steps[start:] for steps in whole]
    assert len(Plan(2, 0, 2, drop_last, 23, start)) == len(rest[0])


def test_an_order_without_end_is_read_as_it_goes():
    shares = islice(Plan(2, 1, 2).deal(count()), 3)
    assert [share.items for share in shares] == [(2, 3), (6, 7), (10, 11)]


def test_an_unknown_length_has_no_len():
    with pytest.raises(TypeError, match="not known before its end"):
        len(Plan())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"per_rank": 0}, "at least 1 item"),
        ({"rank": 1}, r"rank must be in \[0, 1\)"),
        ({"start": -1}, "start must be 0 or more"),
    ],
)
def test_an_impossible_plan_is_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        Plan(**values)
