"""Every strategy, on any number of ranks and in every precision, equals plain PyTorch alone.

The reference is a loop without this package on the whole batch. A last batch that does not divide
among the ranks is filled from the epoch's start, at most one sample for each rank but one; the
reference is given the same filled batch, so that the comparison stays exact.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from ranks import in_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from jupyter_accel.accelerator import Accelerator

WHOLE_BATCH = 12
EPOCHS = 3
#: A new strategy is one line here.
STRATEGIES = [("single", 1), ("ddp", 1), ("ddp", 2), ("ddp", 3)]
#: Largest difference of a loss or of a weight, and why. Ranks add up gradients in another order
#: than one process, and round their parts to the smaller format before they are averaged.
TOLERANCES = {"no": 1e-6, "bf16": 2e-3, "fp16": 3e-4}
LENGTHS = {"even": 24, "divides": 30, "filled": 29}


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=5)
    return model, optimizer, scheduler


def data(length):
    torch.manual_seed(1)
    x = torch.randn(length, 8)
    return x, 0.2 * x.sum(1, keepdim=True)


def loss_of(output, y):
    # Small, so that no gradient overflows in fp16: a rank's few samples weigh more than many.
    return 0.25 * nn.functional.mse_loss(output, y)


def reference(length, precision, size):
    """Train with plain PyTorch on the whole batch, filled to a multiple of ``size``."""
    model, optimizer, scheduler = parts()
    x, y = data(length)
    dtype = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    losses = []
    for start in [*range(0, length, WHOLE_BATCH)] * EPOCHS:
        rows = list(range(start, min(start + WHOLE_BATCH, length)))
        rows += range(-len(rows) % size)
        with torch.autocast("cpu", dtype, enabled=precision != "no"):
            output = model(x[rows])
        loss = loss_of(output.float(), y[rows])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        losses.append(loss.item())
    return losses, weights(model)


def train(strategy, length, precision, size):
    """Train with the package; each rank returns all losses and its weights."""
    accelerator = Accelerator(precision, strategy=strategy)
    model, optimizer, scheduler = parts()
    loader = DataLoader(TensorDataset(*data(length)), batch_size=WHOLE_BATCH // size)
    loader, scheduler, optimizer, model = accelerator.prepare(loader, scheduler, optimizer, model)
    losses = []
    for _ in range(EPOCHS):
        for x, y in loader:
            loss = loss_of(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            assert not accelerator.optimizer_step_was_skipped
            scheduler.step()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    return losses, weights(accelerator.unwrap_model(model))


@cache
def trained(strategy, size):
    """Train all cases in one launch; for each case a list of the ranks' results."""
    cases = [(length, precision) for length in LENGTHS.values() for precision in TOLERANCES]

    def train_all():
        return [train(strategy, length, precision, size) for length, precision in cases]

    ranks = in_ranks(train_all, size=size)
    return dict(zip(cases, zip(*ranks, strict=True), strict=True))


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize(("strategy", "size"), STRATEGIES)
def test_training_equals_plain_pytorch_on_the_whole_batch(strategy, size, precision, length):
    losses, expected = reference(length, precision, size)
    assert losses[0] > 1.5 * losses[-1]  # or there is nothing to compare
    ranks = trained(strategy, size)[length, precision]
    for rank_losses, rank_weights in ranks:
        assert rank_losses == pytest.approx(losses, abs=TOLERANCES[precision])
        assert rank_weights == pytest.approx(expected, abs=TOLERANCES[precision])
    assert all(rank == ranks[0] for rank in ranks)
