"""Run a function in real gloo ranks, with a hard time limit; stands in for jupyter_accel.launch.

``in_ranks(function, *args, size=2)`` gives the list of all ranks' values, as
``launch_all_ranks(function, *args, num_processes=2)`` does.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import cloudpickle

from jupyter_accel.world import RANK_NAMES

# The fork server never runs a tensor operation, so that its children may; see the launcher.
_CONTEXT = multiprocessing.get_context("forkserver")
# torch imports its compiler when the first optimizer is made: once here, not in every rank.
_CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "jupyter_accel.accelerator"])


class RankFailedError(AssertionError):
    """A rank raised, died or ran too long."""


def in_ranks(function, *args, size=2, timeout=60.0, connect=True, env=None):
    """Call ``function(*args)`` in ``size`` ranks and return their values in rank order."""
    folder = tempfile.mkdtemp()
    work = cloudpickle.dumps((function, args))
    setup = {"folder": folder, "size": size, "connect": connect, "env": env or {}}
    pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(size)]
    ranks = [
        _CONTEXT.Process(target=_rank, args=(rank, setup, work, pipes[rank][1]), daemon=False)
        for rank in range(size)
    ]
    try:
        for process in ranks:
            process.start()
        for _, sender in pipes:
            sender.close()  # so that a rank's death is the end of its pipe
        deadline = time.monotonic() + timeout
        return [_value(rank, pipes[rank][0], deadline) for rank in range(size)]
    finally:
        for process in ranks:
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()
        for receiver, _ in pipes:
            receiver.close()
        shutil.rmtree(folder)
        assert not any(process.is_alive() for process in ranks)


def _value(rank: int, receiver: Any, deadline: float) -> Any:
    if not receiver.poll(max(0.0, deadline - time.monotonic())):
        message = f"rank {rank} ran too long"
        raise RankFailedError(message)
    try:
        ok, value = cloudpickle.loads(receiver.recv_bytes())
    except EOFError:
        message = f"rank {rank} died"
        raise RankFailedError(message) from None
    if not ok:
        message = f"rank {rank} failed:\n{value}"
        raise RankFailedError(message)
    return value


def _rank(rank: int, setup: dict, work: bytes, sender: Any) -> None:
    warnings.simplefilter("error")
    size = setup["size"]
    os.environ.update(zip(RANK_NAMES, map(str, (rank, size, rank, size)), strict=True))
    os.environ.update(setup["env"])
    from jupyter_accel import process_group
    from jupyter_accel.world import World

    try:
        function, args = cloudpickle.loads(work)
        process_group.share_threads(1)
        if setup["connect"]:
            world = World.from_env(os.environ)
            process_group.connect(world, str(Path(setup["folder"]) / "meet"), timeout=30)
        answer = (True, function(*args))
        process_group.disconnect()
    except BaseException:  # noqa: BLE001 - whatever ended the rank is the answer
        answer = (False, traceback.format_exc())
    sender.send_bytes(cloudpickle.dumps(answer))
