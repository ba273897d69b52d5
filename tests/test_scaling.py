"""The loss scaler: one scale for one backward pass, and no step with gradients that overflowed."""

from __future__ import annotations

import pytest
import torch

from jupyter_accel.errors import AccelError
from jupyter_accel.scaling import LossScaler


@pytest.fixture
def scaler():
    return LossScaler("cpu")


def weight(value=1.0):
    parameter = torch.nn.Parameter(torch.tensor([value]))
    return parameter, torch.optim.SGD([parameter], lr=0.5)


def test_a_step_is_that_of_the_unscaled_gradient(scaler):
    parameter, optimizer = weight()
    scaler.scale((parameter * 2).sum()).backward()
    assert parameter.grad.item() == 2 * 65536
    assert scaler.step(optimizer)
    assert parameter.item() == 1 - 0.5 * 2


def test_an_overflow_skips_the_step_and_lowers_the_scale_before_the_next_backward(scaler):
    parameter, optimizer = weight()
    scaler.scale((parameter * float("inf")).sum()).backward()
    assert not scaler.step(optimizer)
    assert parameter.item() == 1.0
    assert scaler.grad_scaler.get_scale() == 65536
    scaler.scale(torch.ones(()))
    assert scaler.grad_scaler.get_scale() == 32768


def test_two_optimizers_of_one_backward_share_its_scale(scaler):
    (bad, first), (good, second) = weight(), weight()
    scaler.scale((bad * float("inf")).sum() + (good * 2).sum()).backward()
    assert [scaler.step(first), scaler.step(second)] == [False, True]
    assert good.item() == 0.0  # unscaled by the scale it was made with, not by a lowered one


def test_unscaling_twice_before_a_step_is_harmless(scaler):
    parameter, optimizer = weight()
    scaler.scale((parameter * 2).sum()).backward()
    scaler.unscale(optimizer)
    scaler.unscale(optimizer)
    assert parameter.grad.item() == 2
    assert scaler.step(optimizer)


def test_a_backward_onto_unscaled_gradients_is_refused(scaler):
    parameter, optimizer = weight()
    scaler.scale((parameter * 2).sum()).backward()
    scaler.unscale(optimizer)
    with pytest.raises(
        AccelError, match=r"call optimizer.step\(\) or optimizer.zero_grad\(\) first"
    ):
        scaler.scale((parameter * 2).sum())


def test_gradients_thrown_away_after_clipping_free_the_next_backward(scaler):
    parameter, optimizer = weight()
    scaler.scale((parameter * 2).sum()).backward()
    scaler.unscale(optimizer)
    scaler.forget(optimizer)
    optimizer.zero_grad()
    scaler.scale((parameter * 2).sum()).backward()
    assert scaler.step(optimizer)
    assert parameter.item() == 0.0
