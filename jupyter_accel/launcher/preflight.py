"""Looks whether this process may be forked, and for what opened a device in it.

A device context cannot be used in a fork of the process that made it. Asking the library is not
enough, since any import can make one: what counts is whether the driver's files are open.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field

from jupyter_accel.errors import PreflightError
from jupyter_accel.launcher import processes

_DEVICE_FILE = re.compile(
    r"/dev/(nvidia(?!-caps)[\w-]*|kfd|dri/render\w*|accel(/\w+|\d*)|davinci\w*|habanalabs\w*"
    r"|neuron\d+|hl\d+|vfio/\d+)$"
)


@dataclass
class DeviceWatch:
    """Remembers which cell first opened a device, and which modules came with that cell.

    Call ``before`` and ``after`` around each cell; both cost well under a millisecond.
    """

    culprit: str = ""
    _modules: frozenset[str] = field(default_factory=frozenset)
    _seen: bool = False

    def start(self) -> None:
        """Look at what is open already."""
        self._seen = bool(open_devices())
        if self._seen:
            self.culprit = "something that ran before the extension was loaded"

    def before(self) -> None:
        """Note the modules that are there before a cell runs."""
        if not self._seen:
            self._modules = frozenset(sys.modules)

    def after(self, cell: str, first_line: str) -> None:
        """Look whether the cell that has just run opened a device."""
        if self._seen or not open_devices():
            return
        self._seen = True
        new = {name.partition(".")[0] for name in frozenset(sys.modules) - self._modules}
        roots = sorted(name for name in new if not name.startswith("_"))
        self.culprit = f"{cell} ({first_line.strip()[:60]})"
        if roots:
            self.culprit += f", which imported {', '.join(roots[:5])}"


def open_devices() -> list[str]:
    """Return the device files that this process holds open."""
    return sorted({path for path in processes.open_files().values() if _DEVICE_FILE.search(path)})


def check_fork(watch: DeviceWatch | None = None) -> None:
    """Refuse to fork this process if a device context exists in it.

    Raises:
        PreflightError: names the device, and the cell or module that opened it.
    """
    devices = open_devices()
    torch = sys.modules.get("torch")
    initialised = torch is not None and torch.cuda.is_initialized()
    if not devices and not initialised:
        return
    what = f"{', '.join(devices)} is open" if devices else "CUDA is initialised"
    by = f" by {watch.culprit}" if watch is not None and watch.culprit else ""
    msg = (
        f"a fork of this kernel could not use its device: {what}, opened{by}; "
        "leave --start-method at forkserver, or restart the kernel and launch before that"
    )
    raise PreflightError(msg)
