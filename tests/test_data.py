"""Prepared loaders on real data sets: who reads what, in which order, and what is padding."""

from __future__ import annotations

import copy
import os
from dataclasses import replace

import pytest
import torch
from ranks import in_ranks
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

from jupyter_accel import control
from jupyter_accel.data import PreparedLoader
from jupyter_accel.errors import ConfigError
from jupyter_accel.world import World


class Numbers(Dataset):
    def __init__(self, length):
        self.length = length
        self.epochs = []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        yield from range(self.length)


class NoisyStream(IterableDataset):
    """Drawn in the worker: alike on all ranks only if the workers' seeds are."""

    def __iter__(self):
        yield from torch.randint(10**9, (6,)).tolist()


class Shortest(Sampler):
    """A batch sampler of a user's own, with batches of unequal sizes."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __iter__(self):
        start = 0
        for length in self.lengths:
            yield list(range(start, start + length))
            start += length

    def __len__(self):
        return len(self.lengths)


def prepared(loader, rank=0, size=1):
    """Prepare without a group: nothing here needs to ask the other ranks."""
    ready = PreparedLoader(loader, World())
    if size > 1:
        ready.plan = replace(ready.plan, rank=rank, size=size)
        if ready._dealer is not None:
            ready._dealer.plan = ready.plan
    return ready


def read(loader):
    return [(batch.tolist(), loader.valid) for batch in loader]


def valid_of(steps):
    return [x for batch, valid in steps for x, v in zip(batch, valid, strict=True) if v]


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_share_the_batches_and_padding_is_marked(workers):
    loader = DataLoader(Numbers(10), batch_size=2, num_workers=workers)
    first, second = (read(prepared(loader, rank, 2)) for rank in range(2))
    assert [batch for batch, _ in first] == [[0, 1], [4, 5], [8]]
    assert [batch for batch, _ in second] == [[2, 3], [6, 7], [9]]
    odd = [read(prepared(DataLoader(Numbers(5), 2), rank, 2)) for rank in range(2)]
    assert odd == [
        [([0, 1], (True, True)), ([4], (True,))],
        [([2, 3], (True, True)), ([0], (False,))],
    ]


def test_the_length_is_the_number_of_steps_of_each_rank():
    loader = DataLoader(Numbers(10), batch_size=2)
    assert [len(prepared(loader, 0, size)) for size in (1, 2, 3, 4)] == [5, 3, 2, 2]
    assert len(prepared(DataLoader(Numbers(10), 2, drop_last=True), 0, 2)) == 2


def test_drop_last_leaves_out_the_step_that_not_all_ranks_can_fill():
    loader = DataLoader(Numbers(11), batch_size=2, drop_last=True)
    assert read(prepared(loader, 1, 2)) == [([2, 3], (True, True)), ([6, 7], (True, True))]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("length", [0, 1, 5, 8, 9])
def test_a_stream_gives_every_rank_every_third_batch(length, workers):
    loader = DataLoader(Stream(length), batch_size=2, num_workers=0 if length < 8 else workers)
    ranks = [read(prepared(loader, rank, 3)) for rank in range(3)]
    assert len({len(steps) for steps in ranks}) == 1
    seen = sorted(x for steps in ranks for x in valid_of(steps))
    copies = max(1, loader.num_workers)  # torch gives the whole stream to each worker
    assert seen == sorted(list(range(length)) * copies)


def test_a_stream_with_drop_last_leaves_out_the_incomplete_round():
    loader = DataLoader(Stream(9), batch_size=2, drop_last=True)
    assert [read(prepared(loader, rank, 3))[0][0] for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert all(len(read(prepared(loader, rank, 3))) == 1 for rank in range(3))


def test_workers_of_a_random_stream_are_seeded_alike_on_all_ranks():
    def rank_stream(seed):
        torch.manual_seed(seed)
        loader = DataLoader(NoisyStream(), batch_size=1, num_workers=1)
        return read(PreparedLoader(loader, World.from_env(os.environ)))

    first, second = in_ranks(lambda: rank_stream(int(os.environ["RANK"])), size=2)
    assert len(first) == len(second) == 3
    torch.manual_seed(0)
    alone = read(prepared(DataLoader(NoisyStream(), 1, num_workers=1)))
    assert [batch for batch, _ in alone] == [
        batch for pair in zip(first, second, strict=True) for batch, _ in pair
    ]


def test_batches_of_a_users_own_sampler_stay_whole():
    loader = DataLoader(Numbers(9), batch_sampler=Shortest([1, 3, 2, 2, 1]))
    first, second = (read(prepared(loader, rank, 2)) for rank in range(2))
    assert [batch for batch, _ in first] == [[0], [4, 5], [8]]
    assert [batch for batch, _ in second] == [[1, 2, 3], [6, 7], [0]]
    assert [valid for _, valid in second] == [(True,) * 3, (True,) * 2, (False,)]


def test_a_batch_sampler_of_torch_is_cut_anew_like_a_batch_size():
    sampler = BatchSampler(range(10), 4, drop_last=False)
    spelled = DataLoader(Numbers(10), batch_sampler=sampler)
    ungrouped = DataLoader(TensorDataset(torch.arange(10)), sampler=sampler, batch_size=None)
    assert [b for b, _ in read(prepared(spelled, 1, 2))] == [[4, 5, 6, 7], [9]]
    batches = [batch[0].tolist() for batch in prepared(ungrouped, 1, 2)]
    assert batches == [[4, 5, 6, 7], [9]]


def test_the_shuffled_order_does_not_depend_on_the_number_of_ranks():
    def order(size):
        torch.manual_seed(3)
        loader = DataLoader(Numbers(12), batch_size=12 // size, shuffle=True)
        ready = prepared(loader)
        ranks = [copy.deepcopy(ready) for _ in range(size)]
        for rank, ready in enumerate(ranks):
            ready.plan = replace(ready.plan, rank=rank, size=size)
            ready._dealer.plan = ready.plan
        return [x for ready in ranks for batch, _ in read(ready) for x in batch]

    assert order(1) == order(2) == order(3)
    assert sorted(order(1)) == list(range(12))
    assert order(1) != list(range(12))


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Numbers(20), batch_size=20, shuffle=True),
        DataLoader(Numbers(20), batch_size=20, shuffle=True, generator=torch.Generator()),
        DataLoader(Numbers(20), 20, sampler=RandomSampler(range(20), replacement=True)),
        DataLoader(Numbers(20), 20, sampler=WeightedRandomSampler([0.5] * 20, 20)),
    ],
)
def test_each_pass_is_a_new_order_and_set_epoch_brings_one_back(loader):
    ready = prepared(loader)
    passes = [read(ready) for _ in range(3)]
    assert passes[0] != passes[1] != passes[2]
    ready.set_epoch(1)
    assert read(ready) == passes[1]
    assert ready.epoch == 1


def test_a_pass_that_breaks_off_counts_as_an_epoch():
    ready = prepared(DataLoader(Numbers(20), batch_size=20, shuffle=True))
    assert next(iter(ready)).tolist() != next(iter(ready)).tolist()


def test_the_users_loader_and_its_generator_are_left_as_they_were():
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(Numbers(6), batch_size=2, shuffle=True, generator=generator)
    before = generator.get_state()
    sampler = loader.batch_sampler
    read(prepared(loader, 0, 2))
    assert loader.batch_sampler is sampler
    assert loader.sampler.generator is generator
    assert sorted(x for batch in loader for x in batch.tolist()) == list(range(6))
    assert not torch.equal(before, generator.get_state())  # by the user's own pass, just now


def test_ranks_with_different_seeds_read_the_main_ranks_order():
    def rank_order():
        world = World.from_env(os.environ)
        torch.manual_seed(world.rank)
        shuffled = DataLoader(Numbers(9), batch_size=3, shuffle=True)

        class Unknown(Sampler):
            def __iter__(self):
                return iter(torch.randperm(9).tolist())

            def __len__(self):
                return 9

        unknown = DataLoader(Numbers(9), batch_size=3, sampler=Unknown())
        return [read(PreparedLoader(loader, world)) for loader in (shuffled, unknown)]

    ranks = in_ranks(rank_order, size=2)
    for kind in range(2):
        assert sorted(x for r in ranks for x in valid_of(r[kind])) == list(range(9))


def test_a_data_set_hears_of_the_epoch():
    loader = prepared(DataLoader(Numbers(2)))
    read(loader)
    loader.set_epoch(7)
    read(loader)
    assert loader.dataset.epochs == [0, 7]


def test_two_passes_at_once_do_not_mix():
    ready = prepared(DataLoader(Numbers(5), batch_size=1), 1, 2)
    pairs = [(a.tolist(), b.tolist()) for a, b in zip(ready, ready, strict=True)]
    assert pairs == [([1], [1]), ([3], [3]), ([0], [0])]
    ahead = prepared(DataLoader(Numbers(5), batch_size=1, num_workers=1), 1, 2)
    first, second = iter(ahead), iter(ahead)
    next(first)  # its worker has been asked for the next batches already
    next(second)
    assert [ahead.valid for _ in first] == [ahead.valid for _ in second] == [(True,), (False,)]


def test_the_position_counts_what_the_caller_has_seen():
    ready = prepared(DataLoader(Numbers(6), batch_size=2, num_workers=1))
    positions = [ready.position for _ in ready]
    assert positions == [1, 2, 3]
    assert ready.position == 3


def test_the_loop_asks_before_each_batch_and_once_at_its_end(monkeypatch):
    asked = []
    monkeypatch.setattr(control, "should_stop", lambda: bool(asked.append(1)))
    assert len(read(prepared(DataLoader(Numbers(6), 2)))) == 3
    assert len(asked) == 4


def test_a_stop_ends_the_loop_before_the_next_batch(monkeypatch):
    answers = iter([False, False, True])
    monkeypatch.setattr(control, "should_stop", lambda: next(answers))
    assert [batch for batch, _ in read(prepared(DataLoader(Numbers(8), 2)))] == [[0, 1], [2, 3]]


def test_a_prepared_loader_is_a_data_loader_with_the_settings_of_its_source():
    class Mine(DataLoader):
        extra = "mine"

    source = Mine(Numbers(6), batch_size=2, num_workers=1, persistent_workers=True)
    ready = prepared(source, 0, 2)
    assert isinstance(ready, DataLoader)
    assert (ready.batch_size, ready.num_workers, ready.extra) == (2, 1, "mine")
    assert ready.dataset is source.dataset
    assert [len(read(ready)) for _ in range(2)] == [2, 2]
    del ready._inner._iterator  # ends the workers now, and not at some later collection


def test_workers_that_the_source_keeps_stay_its_own():
    source = DataLoader(Numbers(4), batch_size=2, num_workers=1, persistent_workers=True)
    assert len(list(source)) == 2
    ready = prepared(source, 0, 2)
    assert [batch for batch, _ in read(ready)] == [[0, 1]]
    assert len(list(source)) == 2
    del ready._inner._iterator, source._iterator


def test_a_loader_that_is_dealt_out_already_is_refused():
    sampler = DistributedSampler(Numbers(4), num_replicas=2, rank=0)
    with pytest.raises(ConfigError, match="has a DistributedSampler"):
        prepared(DataLoader(Numbers(4), sampler=sampler))


def test_an_order_that_ranks_could_not_agree_on_is_refused():
    class Endless(Sampler):
        def __iter__(self):
            return iter(int, 1)

    def prepare_in_rank():
        with pytest.raises(ConfigError, match="Endless has neither a length nor a generator"):
            PreparedLoader(DataLoader(Numbers(4), sampler=Endless()), World.from_env(os.environ))

    in_ranks(prepare_in_rank, size=2)


def test_batches_go_to_the_device_and_stay_where_placement_is_off():
    loader = DataLoader(TensorDataset(torch.ones(2)), batch_size=2)
    assert next(iter(PreparedLoader(loader, World(device="meta"))))[0].is_meta
    assert not next(iter(PreparedLoader(loader, World(device="meta"), place=False)))[0].is_meta


@pytest.mark.gpu
def test_batches_arrive_on_the_gpu_unharmed_by_the_look_ahead():
    data = torch.arange(4096).reshape(64, 64)
    loader = DataLoader(TensorDataset(data), batch_size=4, pin_memory=True)
    ready = PreparedLoader(loader, World(device="cuda:0"))
    batches = [(batch[0].clone(), ready.valid) for batch in ready]
    assert all(batch.is_cuda for batch, _ in batches)
    assert torch.equal(torch.cat([batch.cpu() for batch, _ in batches]), data)
