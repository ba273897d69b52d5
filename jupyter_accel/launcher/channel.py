"""Messages over a Unix socket pair: pickled dataclasses, with open files sent along.

Both ends are processes that this package started and the socket has no name, so nobody else can
connect to it; that is what makes it safe to unpickle what arrives.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import struct
from array import array
from collections import deque
from collections.abc import Sequence

_HEADER = struct.Struct("!QH")  # length of the message in bytes, number of files that go with it
_MOST_FILES = 250  # the kernel allows 253 in one call
_FILES_SPACE = socket.CMSG_SPACE(_MOST_FILES * array("i").itemsize)
_CHUNK = 1 << 18


class Channel:
    """One end of a socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self._files: deque[int] = deque()
        self.ended = False

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Make a channel for this process and the raw socket for the other one."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours), theirs

    @classmethod
    def adopt(cls, fd: int) -> Channel:
        """Take over an open socket that another process handed to this one."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        """Return the socket's descriptor, for a selector."""
        return self._sock.fileno()

    def send(self, message: object, files: Sequence[int] = ()) -> None:
        """Send one message, and copies of the open files.

        Raises:
            BrokenPipeError: the other end is gone.
        """
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        view = memoryview(_HEADER.pack(len(body), len(files)) + body)
        batches = [list(files[i : i + _MOST_FILES]) for i in range(0, len(files), _MOST_FILES)]
        # Each batch must ride on at least one byte; the header has more than enough of them.
        for batch in batches:
            sent = socket.send_fds(self._sock, [view[:1]], batch)
            view = view[sent:]
        self._sock.sendall(view)

    def receive(self) -> tuple[object, list[int]] | None:
        """Wait for one message and its files; None when the other end is gone."""
        while (parsed := self._parse()) is None:
            if not self._fill():
                return None
        return parsed

    def drain(self) -> list[tuple[object, list[int]]]:
        """Return the messages that are here already, without waiting."""
        with contextlib.suppress(BlockingIOError):
            while self._fill(socket.MSG_DONTWAIT):
                pass
        messages = []
        while (parsed := self._parse()) is not None:
            messages.append(parsed)
        return messages

    def close(self) -> None:
        """Close the socket and any file that came and was not taken."""
        while self._files:
            os.close(self._files.popleft())
        self._sock.close()

    def wait(self, seconds: float) -> None:
        """Wait at most this long until there is something to receive."""
        poller = select.poll()  # select() itself cannot take descriptors above 1023
        poller.register(self._sock, select.POLLIN)
        poller.poll(seconds * 1000)

    def _fill(self, flags: int = 0) -> bool:
        try:
            # Not socket.recv_fds: it forgets its flags on some versions of Python.
            data, ancillary, _flags, _from = self._sock.recvmsg(_CHUNK, _FILES_SPACE, flags)
        except ConnectionError:
            data, ancillary = b"", []
        files = array("i")
        for level, kind, raw in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                files.frombytes(raw[: len(raw) - len(raw) % files.itemsize])
        for fd in files:
            os.set_inheritable(fd, False)  # noqa: FBT003 - positional in the standard library
        self._files.extend(files)
        self._buffer += data
        self.ended = not data
        return bool(data)

    def _parse(self) -> tuple[object, list[int]] | None:
        if len(self._buffer) < _HEADER.size:
            return None
        length, count = _HEADER.unpack_from(self._buffer)
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(memoryview(self._buffer)[_HEADER.size : end])
        del self._buffer[:end]
        files = [self._files.popleft() for _ in range(count)]
        return pickle.loads(body), files  # noqa: S301 - see the first lines of this file
