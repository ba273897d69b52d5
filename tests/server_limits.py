"""The limits of Jupyter's server, applied to recorded messages by the server's own code."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest import mock

from jupyter_server.services.kernels.connection.channels import ZMQChannelsWebsocketConnection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cell_output import Message

_HEADERS = b"h" * 700  # about what a real message has


class ServerLimits:
    """One websocket's count of what passed, with the server's default limits."""

    def __init__(self) -> None:
        defaults = ZMQChannelsWebsocketConnection.class_traits()
        names = ("iopub_msg_rate_limit", "iopub_data_rate_limit", "rate_limit_window")
        self._connection = SimpleNamespace(
            **{name: defaults[name].default_value for name in names},
            limit_rate=True,
            write_stderr=lambda *_: None,
            log=mock.Mock(),
            get_part=lambda _field, value, _parts: value,
            _iopub_window_msg_count=0,
            _iopub_window_byte_count=0,
            _iopub_msgs_exceeded=False,
            _iopub_data_exceeded=False,
            _iopub_window_byte_queue=[],
        )

    def dropped(self, messages: Sequence[Message]) -> int:
        """Return how many of the messages the server would not have passed on."""
        return sum(self._drops(message) for message in messages)

    def _drops(self, message: Message) -> bool:
        parsed = {
            "header": {"msg_type": message.kind},
            "parent_header": {},
            "content": message.content,
        }
        content = json.dumps(message.content, ensure_ascii=False).encode(errors="replace")
        loop = mock.Mock(time=lambda: message.at)
        target = "jupyter_server.services.kernels.connection.channels.IOLoop.current"
        with mock.patch(target, return_value=loop):
            limit = ZMQChannelsWebsocketConnection._limit_rate
            return bool(limit(self._connection, "iopub", parsed, [_HEADERS, content]))
