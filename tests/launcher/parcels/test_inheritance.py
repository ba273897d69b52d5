"""Data that a process is born with: written from outside, shared, and its own when changed."""

from __future__ import annotations

import os
from array import array

import pytest

from jupyter_accel.launcher.parcels import inheritance
from jupyter_accel.launcher.parcels.segment import spans_of

pytestmark = pytest.mark.skipif(not inheritance.possible(), reason="needs process_vm_writev")


def buffers() -> list[memoryview]:
    return [memoryview(bytes(range(256)) * 40), memoryview(array("d", [1.5] * 3000)).cast("B")]


def answer_of(child) -> bytes:
    """Run a function in a fork and return what it returns."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, child())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        said = file.read()
    assert os.waitpid(pid, 0)[1] == 0
    return said


@pytest.fixture
def filled():
    data = buffers()
    spans, size = spans_of(data)
    memory, address = inheritance.reserve(size)
    assert inheritance.fill(os.getpid(), address, data)
    inheritance.receive(memory)
    yield inheritance.Inherited(tuple(spans))
    inheritance.receive(None)


def test_buffers_arrive_as_they_were_also_read_only_ones(filled):
    assert [bytes(view) for view in filled.map()] == [bytes(buffer) for buffer in buffers()]


def test_a_fork_has_the_data_and_keeps_its_changes_to_itself(filled):
    def change() -> bytes:
        view = filled.map()[0]
        view[0] = 99
        return bytes(view[:2])

    assert answer_of(change) == bytes([99, 1])
    assert filled.map()[0][0] == 0


def test_a_process_without_the_data_says_so(filled):
    inheritance.receive(None)
    with pytest.raises(ValueError, match="was not born with the data"):
        filled.map()


def test_memory_that_is_not_there_cannot_be_filled():
    memory, address = inheritance.reserve(4096)
    memory.close()
    assert not inheritance.fill(os.getpid(), address, buffers())


def test_a_process_that_is_gone_cannot_be_filled():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert not inheritance.fill(pid, 4096, buffers())
