"""The ways to run one cell on several ranks that are compared, each used as its manual says."""

from __future__ import annotations

import os
import socket
import textwrap
import uuid
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ONE_SHOT = "one-shot"
KEPT = "kept workers"


@dataclass(frozen=True, slots=True)
class Contender:
    """How one of them is made ready, and how it is asked to run a body on ``n`` ranks."""

    key: str
    label: str
    package: str
    kind: str
    group: str
    ready: Callable[[int], list[str]]
    cell: Callable[[str, int], str]
    before_plain: str = ""
    before_launch: str = ""
    farewell: str = ""
    settle: float = 0.0
    probe: str = ""
    note: str = ""

    @property
    def installed(self) -> str:
        """The installed version, or nothing."""
        if find_spec(self.package.replace("-", "_")) is None:
            return ""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return "source tree"


def _ours_ready(_size: int) -> list[str]:
    return ["%load_ext jupyter_accel"]


def _ours_cell(body: str, size: int) -> str:
    return f"%%accel_launch -n {size}\n{body}"


def _accelerate_ready(_size: int) -> list[str]:
    return ["from accelerate import notebook_launcher"]


def _accelerate_cell(body: str, size: int) -> str:
    # notebook_launcher leaves CPU processes without a group: the function has to make one.
    lines = [
        "def train():",
        "    import torch.distributed as dist",
        "    dist.init_process_group('gloo')",
        textwrap.indent(body, "    "),
        *["# (filler: keeps the lines above out of the call's own traceback context)"] * 6,
        f"notebook_launcher(train, num_processes={size}, use_port='{_free_port()}')",
    ]
    return "\n".join(lines)


def _nbdistributed_ready(size: int) -> list[str]:
    return [f"%load_ext nbdistributed\n%dist_init -n {size}"]


def _plain_text(body: str, _size: int) -> str:
    return body  # its "distributed mode" sends plain cells to the workers


def _ipyparallel_ready(size: int) -> list[str]:
    start = f"""
        import logging
        import ipyparallel
        _cluster = ipyparallel.Cluster(n={size}, log_level=logging.ERROR)
        _engines = _cluster.start_and_connect_sync()
        _engines.activate()
        for _rank in _engines.ids:
            _engines[_rank].push({{"rank": _rank}}, block=True)"""
    return [textwrap.dedent(start).strip()]


def _ipyparallel_kept_ready(size: int) -> list[str]:
    return [*_ipyparallel_ready(size), "%%px\n" + _join(size)]


def _ipyparallel_kept_cell(body: str, _size: int) -> str:
    return f"%%px\n{body}"


def _ipyparallel_fresh_cell(body: str, size: int) -> str:
    return f"%%px\n{_join(size)}\n{body}\ndist.destroy_process_group()"


def _join(size: int) -> str:
    store = Path(os.environ["JUPYTER_RUNTIME_DIR"]) / f"store-{uuid.uuid4().hex}"
    where = f"init_method='file://{store}', rank=rank, world_size={size}"
    return f"import torch.distributed as dist\ndist.init_process_group('gloo', {where})"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


_STOP_CLUSTER = "_cluster.stop_cluster_sync()"

ALL = (
    Contender(
        "ours",
        "jupyter-accel %%accel_launch",
        "jupyter-accel",
        ONE_SHOT,
        "made by the launch",
        _ours_ready,
        _ours_cell,
    ),
    Contender(
        "accelerate",
        "accelerate notebook_launcher",
        "accelerate",
        ONE_SHOT,
        "made by the function",
        _accelerate_ready,
        _accelerate_cell,
    ),
    Contender(
        "nbdistributed",
        "nbdistributed",
        "nbdistributed",
        KEPT,
        "kept",
        _nbdistributed_ready,
        _plain_text,
        before_plain="%dist_mode --disable",
        before_launch="%dist_mode --enable",
        farewell="%dist_shutdown",
        settle=2.0,
        probe="%dist_status",
        note=(
            "nbdistributed: a cell sent as soon as %dist_init returns is lost and ends after 30 s;"
            " made ready here: 2 s of waiting, then %dist_status until the workers answer"
        ),
    ),
    Contender(
        "ipyparallel",
        "ipyparallel %%px",
        "ipyparallel",
        KEPT,
        "kept",
        _ipyparallel_kept_ready,
        _ipyparallel_kept_cell,
        farewell=_STOP_CLUSTER,
    ),
    Contender(
        "ipyparallel-fresh",
        "ipyparallel %%px, new group",
        "ipyparallel",
        KEPT,
        "new in each cell",
        _ipyparallel_ready,
        _ipyparallel_fresh_cell,
        farewell=_STOP_CLUSTER,
    ),
)
