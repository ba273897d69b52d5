"""Join the ranks of a run into one process group, and leave it again.

Measured on 2 cores with gloo, ranks forked from a process that had imported torch (ms from the
first line in the rank to a connected group, and from the fork to the ranks' end with one
all-reduce in between; quiet: median of 15 with a store without locks and presence keys, the first
form of ours; busy, load 4 to 5: median of 25 with the present one):

            ranks   FileStore     TCPStore on a given socket   FolderStore
    quiet   2       12.8 / 24.0   5.2 / 18.7                   4.4 / 17.5
            4       16.5 / 36.6   13.5 / 30.6                  14.3 / 31.4
    busy    2       13.4 / 40.0   11.7 / 31.5                  11.9 / 38.2
            4       31.7 / 61.0   29.0 / 64.7                  32.1 / 63.6

``FileStore`` sleeps 10 ms when a key is not there yet, which the ranks' first meeting always
hits. A ``TCPStore`` listens where every user of the machine can write. So CPU ranks meet in a
``FolderStore``. CUDA ranks keep ``FileStore``: NCCL's own threads go on asking the store during
the run, which should not need Python, and 10 ms are nothing beside what NCCL takes to start.
"""

from __future__ import annotations

import atexit
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from jupyter_accel.errors import ConfigError, WorkerTimeoutError
from jupyter_accel.folder_store import FolderStore

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from jupyter_accel.world import World

#: What each kind of device talks through. CUDA ranks get gloo too, for tensors on the CPU.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def connect(world: World, store_path: str, *, timeout: float) -> None:
    """Join the group of one machine's ranks; a world of one gets a group too.

    Args:
        world: this rank's place.
        store_path: a path that does not exist yet, in a folder that only this user can enter; the
            ranks meet there, and whoever made that folder removes it.
        timeout: seconds for the others to come, and later for each collective.
    """
    backend = _backend(world)
    _stay_on_this_machine()
    store: Store
    if world.device_type == "cpu":
        store = FolderStore(store_path, timeout=timeout)
    else:
        store = FileStore(store_path, world.size)
    store.set_timeout(timedelta(seconds=timeout))
    store.set(f"here/{world.rank}", "1")
    try:
        _join(world, backend, timeout=timeout, store=store)
        if world.device_type == "cpu":
            dist.barrier()  # or a rank with little to do is gone while others still connect to it
    except dist.DistStoreError as error:
        absent = [r for r in range(world.size) if not store.check([f"here/{r}"])]
        if not absent:
            raise
        msg = f"rank {world.rank} waited {timeout:g} s for rank {', '.join(map(str, absent))}"
        raise WorkerTimeoutError(msg, rank=absent[0]) from error


def connect_from_env(world: World, *, timeout: float = 1800.0) -> None:
    """Join the group that a launcher such as torchrun describes in the environment."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        msg = (
            f"rank {world.rank} of {world.size} has no process group, and {', '.join(missing)} "
            "is not set to find one; launch with %%accel_launch, jupyter_accel.launch or torchrun"
        )
        raise ConfigError(msg)
    backend = _backend(world)
    if world.size == world.local_size:
        _stay_on_this_machine()
    _join(world, backend, timeout=timeout, store=None)
    atexit.register(disconnect)


def disconnect() -> None:
    """Leave the group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _stores.clear()


def share_threads(count: int) -> None:
    """Give this rank its part of the machine's cores."""
    torch.set_num_threads(count)


def _join(world: World, backend: str, *, timeout: float, store: Store | None) -> None:
    device = None
    if world.device_type == "cuda":
        device = torch.device(world.device)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=store,
        init_method=None if store else "env://",
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout),
        device_id=device,
    )
    if store:
        # A store written in Python ends with its last Python reference, and the group's own
        # reference is in C++; sub-groups that are made later meet there too.
        _stores[:] = [store]


_stores: list[Store] = []


def _backend(world: World) -> str:
    try:
        return BACKENDS[world.device_type]
    except KeyError:
        known = " and ".join(BACKENDS)
        msg = f"ranks on {world.device_type!r} cannot form a group; only {known} can so far"
        raise ConfigError(msg) from None


def _stay_on_this_machine() -> None:
    """Use the loopback interface, unless the user chose another."""
    names = [name for _, name in socket.if_nameindex() if name in {"lo", "lo0"}]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if names:
            os.environ.setdefault(variable, names[0])
