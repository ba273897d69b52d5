"""Prepared optimizers and schedulers count the steps that were really taken."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau, StepLR

from jupyter_accel.errors import ConfigError
from jupyter_accel.scaling import LossScaler
from jupyter_accel.training import PreparedOptimizer, PreparedScheduler


def parts(scaler=None, kind=torch.optim.SGD):
    parameter = torch.nn.Parameter(torch.ones(1))
    return parameter, PreparedOptimizer(kind([parameter], lr=1.0), scaler)


def train(parameter, optimizer, *, overflow=False):
    factor = float("inf") if overflow else 0.25
    loss = (parameter * factor).sum()
    scaler = optimizer._scaler
    (loss if scaler is None else scaler.scale(loss)).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_prepared_optimizer_is_an_optimizer_with_the_users_state():
    parameter, optimizer = parts(kind=torch.optim.Adam)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    train(parameter, optimizer)
    assert optimizer.state is optimizer.optimizer.state
    assert set(optimizer.state_dict()["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.steps_taken == 1
    other = parts(kind=torch.optim.Adam)[1]
    other.load_state_dict(optimizer.state_dict())
    assert other.optimizer.state_dict()["state"][0]["step"] == 1


def test_a_closure_is_called_and_its_loss_returned():
    parameter, optimizer = parts()

    def closure():
        loss = (parameter * 3).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert parameter.item() == -2.0
    with pytest.raises(ConfigError, match="closure cannot be used with fp16"):
        parts(LossScaler("cpu"))[1].step(closure)


def test_hooks_sit_where_the_step_happens():
    parameter, optimizer = parts()
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    train(parameter, optimizer)
    assert seen == ["post"]


def test_what_a_special_optimizer_has_is_reached():
    optimizer = parts()[1]
    optimizer.optimizer.train = lambda: "training"
    assert optimizer.train() == "training"
    assert not hasattr(optimizer, "nothing_of_the_kind")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_an_optimizer_can_be_copied(copied):
    twin = copied(parts()[1])
    assert twin.param_groups[0]["lr"] == 1.0
    assert twin.optimizer is not None


def test_skipped_steps_are_known():
    parameter, optimizer = parts(LossScaler("cpu"))
    train(parameter, optimizer, overflow=True)
    assert (optimizer.step_was_skipped, optimizer.steps_skipped, optimizer.steps_taken) == (1, 1, 0)
    train(parameter, optimizer)
    assert (optimizer.step_was_skipped, optimizer.steps_skipped, optimizer.steps_taken) == (0, 1, 1)


@pytest.mark.parametrize("before", [True, False])
def test_the_rate_follows_the_steps_taken_whichever_optimizer_the_scheduler_was_built_on(before):
    parameter, optimizer = parts(LossScaler("cpu"))
    inner = LambdaLR(optimizer.optimizer if before else optimizer, lambda step: 0.5**step)
    scheduler = PreparedScheduler(inner, optimizer)
    for overflow in (True, False, True, False):
        train(parameter, optimizer, overflow=overflow)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert scheduler.get_last_lr() == [0.25]


def test_a_scheduler_called_once_an_epoch_steps_although_the_last_step_was_skipped():
    parameter, optimizer = parts(LossScaler("cpu"))
    scheduler = PreparedScheduler(StepLR(optimizer, 1, gamma=0.5), optimizer)
    for overflow in (False, False, True):
        train(parameter, optimizer, overflow=overflow)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_prepared_scheduler_is_a_scheduler_with_the_users_state():
    parameter, optimizer = parts()
    scheduler = PreparedScheduler(OneCycleLR(optimizer, 1.0, total_steps=4), optimizer)
    assert isinstance(scheduler, LRScheduler)
    train(parameter, optimizer)
    scheduler.step()
    assert scheduler.last_epoch == 1
    assert scheduler.state_dict()["last_epoch"] == 1
    scheduler.load_state_dict({"last_epoch": 3})
    assert scheduler.scheduler.last_epoch == 3
    assert copy.deepcopy(scheduler).total_steps == 4


def test_a_scheduler_may_take_the_metric_that_it_needs():
    _, optimizer = parts()
    scheduler = PreparedScheduler(ReduceLROnPlateau(optimizer, patience=0), optimizer)
    for loss in (1.0, 2.0):
        scheduler.step(loss)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
