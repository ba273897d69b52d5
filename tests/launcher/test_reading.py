"""What the kernel makes of the bytes and messages of one rank."""

from __future__ import annotations

import os

import pytest

from jupyter_accel.launcher.channel import Channel
from jupyter_accel.launcher.events import Rich, Text
from jupyter_accel.launcher.framing import Marks
from jupyter_accel.launcher.messages import Connected, Failed, Shown
from jupyter_accel.launcher.reading import Lines, Reader


class Rank:
    """Both ends of one rank's pipes and channel."""

    def __init__(self):
        self.marks = Marks("aa")
        out, self.out = os.pipe()
        err, self.err = os.pipe()
        for fd in (out, err):
            os.set_blocking(fd, False)
        channel, theirs = Channel.pair()
        self.channel = Channel(theirs)
        self.reader = Reader(3, out, err, channel, self.marks)
        self._open = {self.out, self.err}

    def write(self, data):
        os.write(self.out, data)

    def read(self):
        return self.reader.read_pipe(self.reader.out)

    def end(self, fd):
        self._open.discard(fd)
        os.close(fd)

    def close(self):
        for fd in self._open:
            os.close(fd)
        self.channel.close()
        self.reader.close()


@pytest.fixture
def rank():
    made = Rank()
    yield made
    made.close()


def text(events):
    return "".join(event.text for event in events)


def test_lines_are_held_until_they_are_whole():
    lines = Lines(0, "stdout")
    assert lines.push(b"loss ") == []
    assert lines.push(b"0.1\nlo") == [Text(0, "stdout", "loss 0.1\n")]
    assert lines.release() == [Text(0, "stdout", "lo")]
    assert lines.release() == []


def test_a_character_split_between_reads_is_put_together():
    lines = Lines(0, "stdout")
    data = "naïve 🙂\n".encode()
    events = [event for byte in data for event in lines.push(bytes([byte]))]
    assert events == [Text(0, "stdout", "naïve 🙂\n")]


def test_bytes_that_are_no_text_are_replaced():
    lines = Lines(0, "stdout")
    assert text(lines.push(b"\xff\xfe!\n")) == "\ufffd\ufffd!\n"


def test_half_a_character_at_the_end_is_not_lost():
    lines = Lines(0, "stdout")
    assert text(lines.push("ab€".encode()[:-1], final=True)) == "ab\ufffd"


def test_a_bar_that_redraws_its_line_is_shown_at_once():
    lines = Lines(0, "stderr")
    assert text(lines.push(b"\r 10%|#   ")) == "\r 10%|#   "


def test_a_line_of_a_megabyte_is_one_event():
    lines = Lines(0, "stdout")
    for _ in range(16):
        assert lines.push(b"x" * 65_536) == []
    (event,) = lines.push(b"\n")
    assert len(event.text) == 16 * 65_536 + 1


def test_standard_error_keeps_its_place_between_lines(rank):
    rank.write(b"one\n" + rank.marks.stderr(b"careful\n") + b"two\n")
    assert [(e.stream, e.text) for e in rank.read()] == [
        ("stdout", "one\n"),
        ("stderr", "careful\n"),
        ("stdout", "two\n"),
    ]


def test_a_display_stands_where_it_was_made_behind_an_unfinished_line(rank):
    rank.channel.send(Shown(1, "display", {"data": {"text/plain": "figure"}}))
    rank.write(b"before" + rank.marks.place(1) + b"after\n")
    before, shown, after = rank.read()
    assert (before.text, after.text) == ("before", "after\n")
    assert isinstance(shown, Rich)
    assert shown.content["data"]["text/plain"] == "figure"


def test_a_mark_without_its_message_is_skipped(rank):
    rank.write(b"a\n" + rank.marks.place(9) + b"b\n")
    assert text(rank.read()) == "a\nb\n"


def test_the_last_word_waits_for_the_output_before_it_on_both_pipes(rank):
    rank.channel.send(Failed("ValueError", "no", (), "", 0))
    rank.reader.read_channel()
    assert rank.reader.finished() is None
    rank.write(b"last line\n" + rank.marks.place(0))
    assert text(rank.read()) == "last line\n"
    assert rank.reader.finished() is None
    os.write(rank.err, rank.marks.place(0))
    rank.reader.read_pipe(rank.reader.err)
    message, files = rank.reader.finished()
    assert (message.ename, files) == ("ValueError", [])
    assert rank.reader.finished() is None


def test_the_last_word_of_a_rank_that_is_gone_waits_for_the_end_of_its_pipes(rank):
    rank.channel.send(Failed("ValueError", "no", (), "", 0))
    rank.write(b"half a line")
    rank.end(rank.out)
    rank.end(rank.err)
    assert text(rank.read() + rank.read()) == "half a line"
    rank.reader.read_pipe(rank.reader.err)
    rank.reader.read_channel()
    assert not rank.reader.open
    assert rank.reader.finished() is not None


def test_a_pipe_that_never_runs_dry_lets_the_others_have_their_turn(rank):
    os.set_blocking(rank.out, False)
    rank.write(b"x\n" * 20_000)
    assert text(rank.read()) == "x\n" * 20_000


def test_the_reader_hears_of_the_connection(rank):
    rank.channel.send(Connected(5))
    rank.reader.read_channel()
    assert rank.reader.connected == Connected(5)
