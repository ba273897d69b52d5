"""Messages and open files over a socket pair."""

from __future__ import annotations

import os
import threading
import time

import pytest
from leftovers import open_descriptors

from jupyter_accel.launcher.channel import Channel


@pytest.fixture
def pair():
    ours, theirs = Channel.pair()
    other = Channel(theirs)
    yield ours, other
    ours.close()
    other.close()


def test_messages_arrive_in_order(pair):
    ours, other = pair
    for number in range(100):
        ours.send({"number": number})
    assert [other.receive()[0]["number"] for _ in range(100)] == list(range(100))


def test_a_message_larger_than_the_socket_arrives_whole(pair):
    ours, other = pair
    body = os.urandom(5_000_000)
    sender = threading.Thread(target=ours.send, args=(body,))
    sender.start()
    assert other.receive() == (body, [])
    sender.join()


def test_open_files_go_along_with_their_own_message(pair):
    ours, other = pair
    pipes = [os.pipe() for _ in range(3)]
    ours.send("none")
    ours.send("two", [pipes[0][1], pipes[1][1]])
    ours.send("one", [pipes[2][1]])
    received = [other.receive() for _ in range(3)]
    assert [len(files) for _message, files in received] == [0, 2, 1]
    sent = [fd for _message, files in received for fd in files]
    for number, (fd, (out, into)) in enumerate(zip(sent, pipes, strict=True)):
        os.write(fd, bytes([number]))
        assert os.read(out, 8) == bytes([number])
        for each in (fd, out, into):
            os.close(each)


def test_more_files_than_one_call_can_carry_arrive(pair):
    ours, other = pair
    out, into = os.pipe()
    ours.send("many", [into] * 300)
    _message, files = other.receive()
    assert len(files) == 300
    for fd in (*files, out, into):
        os.close(fd)


def test_files_that_arrive_are_not_inherited(pair):
    ours, other = pair
    out, into = os.pipe()
    ours.send("file", [into])
    ((_message, (fd,)),) = other.drain()
    assert not os.get_inheritable(fd)
    for each in (fd, out, into):
        os.close(each)


def test_drain_does_not_wait(pair):
    ours, other = pair
    began = time.monotonic()
    assert other.drain() == []
    ours.send(1)
    ours.send(2)
    assert [message for message, _files in other.drain()] == [1, 2]
    assert time.monotonic() - began < 2
    assert not other.ended


def test_drain_leaves_half_a_message_for_later(pair):
    ours, other = pair
    body = b"x" * 2_000_000
    sender = threading.Thread(target=ours.send, args=(body,))
    sender.start()
    messages = []
    while not messages:
        messages = other.drain()
    sender.join()
    assert messages == [(body, [])]


def test_the_end_of_the_other_side_is_seen_after_its_last_message(pair):
    ours, other = pair
    ours.send("last")
    ours.close()
    assert other.receive() == ("last", [])
    assert not other.ended
    assert other.receive() is None
    assert other.ended


def test_sending_to_a_side_that_is_gone_is_an_error_and_not_a_signal(pair):
    ours, other = pair
    other.close()
    with pytest.raises(BrokenPipeError):
        ours.send("hello")


def test_files_that_nobody_took_are_closed_with_the_channel(pair):
    ours, other = pair
    out, into = os.pipe()
    before = len(open_descriptors(os.getpid()))
    ours.send("first", [into])
    other._fill()  # received and never parsed
    assert len(open_descriptors(os.getpid())) == before + 1
    other.close()
    assert len(open_descriptors(os.getpid())) == before - 1
    os.close(out)
    os.close(into)
