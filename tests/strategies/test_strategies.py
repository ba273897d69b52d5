"""What each strategy refuses, wraps and leaves alone."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from jupyter_accel.errors import ConfigError
from jupyter_accel.strategies.base import Engine, Strategy, Training
from jupyter_accel.strategies.ddp import DDP
from jupyter_accel.strategies.registry import KNOWN, by_name
from jupyter_accel.strategies.single import Single
from jupyter_accel.world import World


def pair():
    return World(dist.get_rank(), 2, dist.get_rank(), 2)


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_a_strategy_is_found_by_name_and_is_a_plain_value(name):
    strategy = by_name(name)
    assert isinstance(strategy, Strategy)
    assert pickle.loads(pickle.dumps(strategy)) == strategy


def test_options_are_fields():
    assert by_name("ddp", static_graph=True) == DDP(static_graph=True)


def test_an_unknown_strategy_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="unknown strategy 'fsd'; choose one of ddp, single"):
        by_name("fsd")


def test_single_refuses_several_ranks():
    with pytest.raises(ConfigError, match=r"on 2 ranks would train 2 models .* use strategy='ddp'"):
        Single().wrap(Training(nn.Linear(1, 1)), World(0, 2, 0, 2))


def test_ddp_for_one_process_needs_no_wrapper():
    model = nn.Linear(1, 1)
    assert DDP().wrap(Training(model), World()).model is model


@pytest.mark.gpu
def test_an_optimizers_state_follows_the_model_to_its_device():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 1)).backward()
    optimizer.step()
    Training(model, (optimizer,)).move("cuda")
    assert all(s["momentum_buffer"].is_cuda for s in optimizer.state.values())
    assert all(p.is_cuda for p in model.parameters())


def test_placement_off_leaves_the_model_where_it_is():
    model = nn.Linear(1, 1)
    Single().wrap(Training(model, place=False), World(device="meta"))
    assert not model.weight.is_meta


def test_ddp_starts_all_ranks_from_the_main_ranks_weights():
    def start(learns):
        torch.manual_seed(dist.get_rank())
        model = nn.BatchNorm1d(3)
        nn.init.uniform_(model.weight)
        nn.init.uniform_(model.running_mean)
        model.requires_grad_(learns)
        engine = DDP().wrap(Training(model), pair())
        assert isinstance(engine.model, DistributedDataParallel) == learns
        assert engine.unwrap() is model
        return {name: value.tolist() for name, value in engine.state_dict().items()}

    for learns in (True, False):
        first, second = in_ranks(start, learns)
        assert first == second


def test_no_sync_keeps_gradients_to_the_rank():
    def gradients():
        engine = DDP().wrap(Training(nn.Linear(1, 1, bias=False)), pair())
        x = torch.full((1, 1), float(dist.get_rank()))
        with engine.no_sync():
            engine.backward(engine.model(x).sum())
        alone = engine.unwrap().weight.grad.item()
        engine.backward(engine.model(x).sum())
        return alone, engine.unwrap().weight.grad.item()

    assert in_ranks(gradients) == [(0.0, 1.0), (1.0, 1.0)]  # 0 and 1 each twice, averaged


def test_a_part_of_the_model_that_is_not_used_can_be_allowed():
    class Half(nn.ModuleDict):
        def forward(self, x):
            return self["used"](x)

    def unused():
        model = Half({"used": nn.Linear(1, 1), "unused": nn.Linear(1, 1)})
        engine = DDP(find_unused_parameters=True).wrap(Training(model), pair())
        for _ in range(2):
            engine.backward(engine.model(torch.ones(1, 1)).sum())
        return model["used"].weight.grad.item()

    assert in_ranks(unused) == [2.0, 2.0]


def test_weights_go_in_and_out_under_the_users_names():
    engine = Engine(Training(nn.Linear(1, 1)), World())
    state = {name: value + 1 for name, value in engine.state_dict().items()}
    engine.load_state_dict(state)
    assert engine.state_dict() == state
    with pytest.raises(RuntimeError, match="Missing key"):
        engine.load_state_dict({"weight": state["weight"]})


@pytest.mark.gpu
def test_single_trains_on_the_gpu():
    model = nn.Linear(2, 1)
    engine = Single().wrap(Training(model), World(device="cuda:0"))
    engine.backward(engine.model(torch.ones(1, 2, device="cuda")).sum())
    assert model.weight.grad.is_cuda
