"""The marks in a rank's standard output, and how they are found again."""

from __future__ import annotations

import os
import random

import pytest

from jupyter_accel.launcher.framing import FRAME_BYTES, FramedStderr, Marks, Place, Plain, Stderr


@pytest.fixture
def marks():
    return Marks("0123456789abcdef")


def joined(pieces):
    """Pieces with neighbours of one kind put together, as a reader sees them."""
    result = []
    for piece in pieces:
        if result and type(result[-1]) is type(piece) and not isinstance(piece, Place):
            result[-1] = type(piece)(result[-1].data + piece.data)
        else:
            result.append(piece)
    return result


def test_text_without_marks_is_plain(marks):
    assert marks.split(bytearray(b"loss 0.1\nloss")) == [Plain(b"loss 0.1\nloss")]


def test_pieces_keep_their_order(marks):
    data = b"before\n" + marks.stderr(b"warned\n") + b"between" + marks.place(7) + b"after"
    assert marks.split(bytearray(data)) == [
        Plain(b"before\n"),
        Stderr(b"warned\n"),
        Plain(b"between"),
        Place(7),
        Plain(b"after"),
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 29, 64])
def test_a_stream_cut_anywhere_gives_the_same_pieces(marks, size):
    data = b"a\0acc" + marks.stderr(b"w\0accel:") + marks.place(12) + b"\0" + marks.stderr(b"") * 2
    buffer, pieces = bytearray(), []
    for start in range(0, len(data), size):
        buffer += data[start : start + size]
        pieces += marks.split(buffer)
    pieces += marks.split(buffer, final=True)
    assert joined(pieces) == joined(marks.split(bytearray(data), final=True))
    assert not buffer


def test_half_a_frame_waits_for_the_rest(marks):
    frame = marks.place(3)
    buffer = bytearray(b"text" + frame[:-1])
    assert marks.split(buffer) == [Plain(b"text")]
    buffer += frame[-1:]
    assert marks.split(buffer) == [Place(3)]


def test_half_a_frame_at_the_end_is_shown_rather_than_lost(marks):
    frame = marks.stderr(b"killed while writing")
    buffer = bytearray(frame[:-3])
    assert marks.split(buffer, final=True) == [Plain(frame[:-3])]
    assert not buffer


def test_marks_of_another_job_are_plain_text(marks):
    alien = Marks("ffffffffffffffff").place(1)
    assert marks.split(bytearray(alien), final=True) == [Plain(alien)]


def test_random_bytes_come_through_unchanged(marks):
    source = random.Random(0)  # noqa: S311 - any bytes will do
    data = bytes(source.choice(b"\0accel:0123456789abcdefEP\n") for _ in range(20_000))
    buffer, out = bytearray(), bytearray()
    for start in range(0, len(data), 997):
        buffer += data[start : start + 997]
        for piece in marks.split(buffer):
            out += piece.data
    for piece in marks.split(buffer, final=True):
        out += piece.data
    assert bytes(out) == data


def test_a_frame_is_one_write_that_the_system_does_not_split(marks):
    assert len(marks.stderr(b"x" * marks.most)) == FRAME_BYTES


def test_a_long_message_takes_several_frames_and_comes_out_whole(marks):
    out, into = os.pipe()
    text = "ä".encode() * 10_000
    try:
        stderr = FramedStderr(marks, into)
        assert stderr.write(text) == len(text)
        data = os.read(out, 1 << 16)
    finally:
        os.close(out)
        os.close(into)
    pieces = marks.split(bytearray(data))
    assert all(isinstance(piece, Stderr) for piece in pieces)
    assert b"".join(piece.data for piece in pieces) == text


def test_a_child_that_is_given_this_stream_writes_to_descriptor_2(marks):
    assert FramedStderr(marks, 1).fileno() == 2
