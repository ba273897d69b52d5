"""Ranks meet without ports, say who did not come, and leave again."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks

from jupyter_accel import process_group
from jupyter_accel.errors import ConfigError, WorkerTimeoutError
from jupyter_accel.world import World


def total():
    one = torch.ones(1)
    dist.all_reduce(one)
    return one.item()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_of_any_number_form_a_group(size):
    assert in_ranks(total, size=size) == [size] * size


def test_sub_groups_meet_in_the_same_place():
    def pair_total():
        pair = dist.new_group([0, 2])
        one = torch.ones(1)
        if dist.get_rank() != 1:
            dist.all_reduce(one, group=pair)
        return one.item()

    assert in_ranks(pair_total, size=3) == [2.0, 1.0, 2.0]


def test_ranks_can_leave_and_meet_again(tmp_path):
    def again(folder):
        world = World.from_env(os.environ)
        first = total()
        process_group.disconnect()
        assert not dist.is_initialized()
        process_group.connect(world, str(folder / "second"), timeout=10)
        return first + total()

    assert in_ranks(again, tmp_path, size=2) == [4.0, 4.0]


def test_a_rank_that_does_not_come_is_named(tmp_path):
    def alone(folder):
        with pytest.raises(WorkerTimeoutError, match=r"rank 0 waited 0.3 s for rank 1, 2") as info:
            process_group.connect(World(0, 3, 0, 3), str(folder / "meet"), timeout=0.3)
        return info.value.rank

    assert in_ranks(alone, tmp_path, size=1, connect=False) == [1]


def test_leaving_no_group_is_no_error():
    process_group.disconnect()


def test_gloo_stays_on_the_loopback_interface_unless_the_user_chose():
    def interfaces():
        return os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]

    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    assert in_ranks(interfaces, size=1) == [(loopback, loopback)]
    chosen = {"NCCL_SOCKET_IFNAME": "eth7"}
    assert in_ranks(interfaces, size=1, env=chosen) == [(loopback, "eth7")]


def test_a_device_without_a_backend_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="ranks on 'mps' cannot form a group; only cpu and cuda"):
        process_group.connect(World(device="mps"), str(tmp_path / "meet"), timeout=1)


def test_ranks_without_an_address_are_told_how_to_launch(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigError, match="rank 0 of 2 has no process group, and MASTER_ADDR is"):
        process_group.connect_from_env(World(0, 2, 0, 2))


def test_a_rank_takes_its_share_of_threads():
    def threads():
        process_group.share_threads(3)
        return torch.get_num_threads()

    assert in_ranks(threads, size=1) == [3]


@pytest.mark.gpu
def test_a_rank_on_the_gpu_talks_through_nccl(tmp_path):
    def gpu_total(folder):
        process_group.connect(World(device="cuda:0"), str(folder / "meet"), timeout=30)
        one = torch.ones(1, device="cuda:0")
        dist.all_reduce(one)
        return one.item(), total(), dist.get_backend()

    assert in_ranks(gpu_total, tmp_path, size=1, connect=False)[0][:2] == (1.0, 1.0)
