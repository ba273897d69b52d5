"""A kernel and a rank for tests: this process and a forked child, each with a namespace."""

from __future__ import annotations

import linecache
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
import types
import warnings

from jupyter_accel.launcher.parcels.capture import capture, names_in
from jupyter_accel.launcher.parcels.shipping import pack, unpack

SECONDS = 60
_HEAD = struct.Struct("<Q")


class Pair:
    """The kernel's side. Cells run here; ``ship`` sends what a cell needs to the rank."""

    def __init__(self):
        self.socket, theirs = socket.socketpair()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this process may have threads
            self.pid = os.fork()
        if self.pid == 0:
            self.socket.close()
            signal.alarm(SECONDS)  # a child that hangs must not outlive the test
            _serve(theirs)
        theirs.close()
        self.socket.settimeout(SECONDS)
        self.previous = sys.modules["__main__"]
        self.namespace = main_module()
        self.cells = 0

    def close(self):
        """End the child; it has its time limit in any case."""
        sys.modules["__main__"] = self.previous
        self.socket.close()
        os.waitpid(self.pid, 0)

    def cell(self, source):
        """Run a cell in the kernel, with its lines where tracebacks look for them."""
        self.cells += 1
        run(source, self.namespace, f"<cell {self.cells} of kernel {id(self)}>")

    def ship(self, source):
        """Send what a cell needs, as the launcher would; return the parcel."""
        parcel = capture(names_in(source), self.namespace)
        self.send(parcel)
        return parcel

    def send(self, parcel):
        """Send a parcel; the rank binds what is in it."""
        self._ask("take", parcel, parcel.segment)
        if parcel.segment is not None:
            parcel.segment.close()

    def launch(self, source):
        """Ship what a cell needs, and run it in the rank."""
        self.ship(source)
        self._ask("run", source)

    def rank(self, expression):
        """Evaluate an expression in the rank; the value comes back as a plain pickle."""
        return self._ask("evaluate", expression)

    def bring(self, *names):
        """Bring variables of the rank back, as the launcher would."""
        parcel = self._ask("give", names)
        values = unpack(parcel, namespace=self.namespace)
        if parcel.segment is not None:
            parcel.segment.close()
        return values

    def _ask(self, what, body, segment=None):
        _send(self.socket, (what, body), segment)
        fine, answer = _receive(self.socket)
        if not fine:
            raise AssertionError(answer)
        return answer


def main_module():
    """Take the place of ``__main__`` with an empty module, as a kernel does."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    return vars(module)


def run(source, namespace, filename):
    """Run a cell the way that IPython does: compiled under a name that linecache knows."""
    lines = source.splitlines(keepends=True)
    linecache.cache[filename] = (len(source), None, lines, filename)
    exec(compile(source, filename, "exec", dont_inherit=True), namespace)  # noqa: S102


def _send(peer, message, segment):
    data = pickle.dumps(message)
    fds = [] if segment is None else [segment.fd]
    socket.send_fds(peer, [_HEAD.pack(len(data))], fds)
    peer.sendall(data)


def _receive(peer):
    head, fds, _, _ = socket.recv_fds(peer, _HEAD.size, 1)
    if not head:
        raise EOFError
    (size,) = _HEAD.unpack(head)
    data = bytearray()
    while len(data) < size:
        data += peer.recv(min(size - len(data), 1 << 20))
    message = pickle.loads(data)
    if fds:
        message[1].segment.attach(fds[0])
    return message


def _serve(peer):
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # its threads did not survive the fork
    namespace = main_module()
    while True:
        try:
            what, body = _receive(peer)
        except EOFError:
            os._exit(0)
        segment = None
        try:
            answer = _ANSWERS[what](body, namespace)
            segment = getattr(answer, "segment", None)
            _send(peer, (True, answer), segment)
        except BaseException:  # noqa: BLE001 - the test reads it
            _send(peer, (False, traceback.format_exc()), None)
        if segment is not None:
            segment.close()


def _take(parcel, namespace):
    namespace.update(unpack(parcel, namespace=namespace))
    if parcel.segment is not None:
        parcel.segment.close()


_ANSWERS = {
    "take": _take,
    "evaluate": eval,
    "run": lambda body, namespace: run(body, namespace, "<cell in the rank>"),
    "give": lambda names, namespace: pack(
        {name: namespace[name] for name in names}, namespace=namespace, follow=False
    ),
}
