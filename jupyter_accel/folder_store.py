"""A rendezvous for the ranks of one machine: a private folder with one file for each key.

Why not torch's own stores: ``FileStore`` sleeps 10 ms whenever a key is not there yet, and a
``TCPStore`` listens on a port that every user of the machine can write to. See
``process_group.py`` for the figures.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import Store

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_FIRST_SLEEP = 0.0002
_LONGEST_SLEEP = 0.005


class FolderStore(Store):
    """Keys and values as files, which only the folder's owner can read or write.

    The folder must be new for each group: a key left from another one would be believed.
    """

    def __init__(self, folder: str | Path, *, timeout: float) -> None:
        super().__init__()
        self._folder = Path(folder)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._timeout = timedelta(seconds=timeout)

    @property
    def timeout(self) -> timedelta:
        """How long ``get`` and ``wait`` wait."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        # Without the lock: what is written does not depend on what was there.
        self._write(key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        self.wait([key], self._timeout)
        return self._path(key).read_bytes()

    def add(self, key: str, amount: int) -> int:
        with self._locked():
            total = int(self._read(key) or b"0") + amount
            self._write(key, b"%d" % total)
        return total

    def append(self, key: str, value: str | bytes) -> None:
        with self._locked():
            more = value.encode() if isinstance(value, str) else value
            self._write(key, (self._read(key) or b"") + more)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._locked():
            current = self._read(key)
            if current is None and expected:
                return expected.encode()
            if current is not None and current != expected.encode():
                return current
            self._write(key, desired.encode())
        return desired.encode()

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._path(key).exists() for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        end = time.monotonic() + (timeout or self._timeout).total_seconds()
        sleep = _FIRST_SLEEP
        while not self.check(keys):
            if time.monotonic() > end:
                msg = f"no other rank wrote {', '.join(keys)} in time"
                raise DistStoreError(msg)
            time.sleep(sleep)
            # Eager at first, since ranks start together; then gentle with the cores.
            sleep = min(_LONGEST_SLEEP, sleep * 1.2)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def delete_key(self, key: str) -> bool:
        with self._locked():
            found = self._path(key).exists()
            self._path(key).unlink(missing_ok=True)
        return found

    def num_keys(self) -> int:
        return sum(1 for _ in self._folder.glob("*.key"))

    def _path(self, key: str) -> Path:
        # Keys hold slashes and can be longer than a file name may be.
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()}.key"

    def _read(self, key: str) -> bytes | None:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None

    def _write(self, key: str, value: bytes) -> None:
        path = self._path(key)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_bytes(value)
        draft.replace(path)  # so that no reader ever sees half a value

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep the other ranks from writing meanwhile."""
        handle = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)
