"""The bodies that every contender runs on its ranks."""

from __future__ import annotations

PLAIN = "print('plain')"
CHECKED = "checked 3.0"

REDUCE = """
import torch, torch.distributed as dist
t = torch.full((4,), float(dist.get_rank() + 1))
dist.all_reduce(t)
assert t.eq(3.0).all(), t
if dist.get_rank() == 0:
    print(f"checked {t[0].item()}")
""".strip()

# What a training step does: operations large enough to use several threads.
BUSY_RANK = f"""
{REDUCE}
weight = torch.randn(1000, 1000, requires_grad=True)
(weight @ weight).sum().backward()
dist.all_reduce(weight.grad)
if dist.get_rank() == 0:
    print("trained")
""".strip()
TRAINED = "trained"

BUSY_KERNEL = """
import torch
torch.set_num_threads(max(2, torch.get_num_threads()))
_weight = torch.randn(2000, 2000, requires_grad=True)
(_weight @ _weight).sum().backward()
""".strip()

FAILING_LINE = 'raise ValueError("rank one stops on purpose")'
FAILING = f"""
import torch, torch.distributed as dist
if dist.get_rank() % 2:
    {FAILING_LINE}
dist.all_reduce(torch.ones(4))
""".strip()

GIGABYTE = 1_000_000_000
_ELEMENTS = GIGABYTE // 4
_PAGES = -(-_ELEMENTS // 1024)
BIG_IN_KERNEL = f"""
import numpy, torch
big = torch.from_numpy(numpy.ones({_ELEMENTS}, dtype=numpy.float32))
""".strip()
READ = "read by 4.0"
_MEET = """
readers = torch.ones(1)
dist.all_reduce(readers)
if dist.get_rank() == 0:
    print(f"read by {readers.item()}")
""".strip()


def change_big(first: int) -> str:
    """Write another number into the tensor, so that a copy kept from an earlier launch shows."""
    return f"big.numpy()[0] = {first}"


def read_big(first: int | None, *, stay: float = 0.0) -> str:
    """Touch each page of the tensor in each rank; with ``None``, do the rest alone."""
    lines = ["import time, torch, torch.distributed as dist"]
    if first is not None:
        lines.append(f"assert big[::1024].sum().item() == {_PAGES - 1 + first}")
    lines.append(_MEET)
    if stay:
        lines.append(f"time.sleep({stay})")
    return "\n".join(lines)
