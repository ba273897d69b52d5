"""Widgets made in a rank: their messages go to the kernel, which speaks to the browser for them."""

from __future__ import annotations

from typing import Any

import comm
from comm.base_comm import BaseComm

from jupyter_accel.launcher.worker import RankSide


class _Here:
    side: RankSide | None = None


class RelayComm(BaseComm):
    """The rank's end of a widget's connection; it only sends."""

    def publish_msg(
        self,
        msg_type: str,
        data: Any = None,
        metadata: Any = None,
        buffers: Any = None,
        **keys: Any,
    ) -> None:
        """Hand one message to the kernel."""
        if _Here.side is None:
            return
        content = {
            "comm_id": self.comm_id,
            "target_name": self.target_name,
            "data": data or {},
            "metadata": metadata or {},
            **keys,
        }
        raw = tuple(bytes(memoryview(buffer).cast("B")) for buffer in buffers or ())
        _Here.side.show(msg_type, content, raw)


def use(side: RankSide) -> None:
    """Have the widgets of this process talk through this rank."""
    _Here.side = side
    comm.create_comm = RelayComm
