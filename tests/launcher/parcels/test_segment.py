from __future__ import annotations

import mmap
import os
import pickle
import signal
from pathlib import Path

import pytest

from jupyter_accel.launcher.parcels.segment import Segment

MIB = 1024 * 1024


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def written():
    """Write buffers; the segments are closed after the test."""
    segments = []

    def write(*buffers):
        segments.append(Segment.write([memoryview(buffer) for buffer in buffers]))
        return segments[-1]

    yield write
    for segment in segments:
        segment.close()


@pytest.mark.parametrize(
    "sizes",
    [[1], [0], [0, 0], [5, 0, 7], [4096], [4097, 4095], [3 * MIB + 1, 10], [70 * MIB, 3, 70 * MIB]],
)
def test_every_buffer_arrives_as_it_was(written, sizes):
    buffers = [os.urandom(min(size, MIB)) * (size // MIB + 1) for size in sizes]
    buffers = [buffer[:size] for buffer, size in zip(buffers, sizes, strict=True)]
    assert [bytes(view) for view in written(*buffers).map()] == buffers


def test_buffers_begin_at_pages(written):
    assert all(start % mmap.PAGESIZE == 0 for start, _ in written(b"a" * 5, b"b" * 6000).spans)


def test_a_buffer_of_numbers_is_taken_as_its_bytes(written):
    numbers = memoryview(bytearray(80)).cast("d")
    (view,) = written(numbers).map()
    assert (view.format, view.nbytes) == ("B", 80)


def test_views_outlive_the_segment(written):
    segment = written(b"x" * 10_000)
    (view,) = segment.map()
    segment.close()
    assert bytes(view[-3:]) == b"xxx"


def test_closing_twice_does_not_close_a_stranger(written):
    segment = written(b"x")
    segment.close()
    with Path(os.devnull).open() as stranger:
        segment.close()
        assert os.fstat(stranger.fileno())


def test_a_change_stays_with_its_view(written):
    segment = written(b"x" * 10_000)
    (mine,) = segment.map()
    (other,) = segment.map()
    mine[0] = ord("y")
    assert bytes(other[:1]) == b"x"


def test_a_change_stays_in_its_process(written):
    segment = written(b"x" * 10_000)
    (view,) = segment.map()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        (theirs,) = segment.map()
        theirs[0] = view[0] = ord("y")
        os._exit(theirs[0] != ord("y"))
    assert os.waitpid(pid, 0)[1] == 0
    assert bytes(view[:1]) == b"x"
    assert bytes(segment.map()[0][:1]) == b"x"


def test_a_pickled_segment_is_a_description_without_a_descriptor(written):
    segment = written(b"abc")
    copy = pickle.loads(pickle.dumps(segment))
    with pytest.raises(ValueError, match="no descriptor"):
        copy.map()
    copy.attach(os.dup(segment.fd))
    assert bytes(copy.map()[0]) == b"abc"
    copy.close()


def test_many_buffers_need_few_descriptors(written):
    segment = written(*[b"x" * 70_000] * 500, *[bytes(65 * MIB)] * 3)
    before = descriptors()
    views = segment.map()
    assert len(views) == 503
    assert descriptors() - before <= 40


def test_nothing_lies_in_the_file_system_and_programs_do_not_inherit_it(written):
    segment = written(b"x")
    assert os.fstat(segment.fd).st_nlink == 0
    assert not os.get_inheritable(segment.fd)


def test_a_failed_write_leaves_no_descriptor(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    before = descriptors()
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        Segment.write([memoryview(b"x" * 100)])
    assert descriptors() == before


def test_without_memfd_a_file_without_a_name_does_the_same(monkeypatch, written):
    monkeypatch.delattr(os, "memfd_create")
    segment = written(b"abc" * 5000)
    assert bytes(segment.map()[0]) == b"abc" * 5000
    assert os.fstat(segment.fd).st_nlink == 0
