"""Text, displays and widgets' messages on their way to the front end, and at what pace."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from jupyter_accel.launcher.events import Rich
from jupyter_accel.notebook import publishing
from jupyter_accel.notebook.pacing import Pace, fitting, wire_bytes
from jupyter_accel.notebook.publishing import Publisher


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


class Stream:
    """Stands for a kernel's stream: what is flushed together is one message."""

    def __init__(self, name, messages):
        self.name, self.messages, self.held = name, messages, ""

    def write(self, text):
        self.held += text

    def flush(self):
        if self.held:
            self.messages.append((self.name, self.held))
        self.held = ""


@pytest.fixture
def messages(monkeypatch):
    sent = []
    streams = {name: Stream(name, sent) for name in ("stdout", "stderr")}
    # Not in sys itself: pytest puts streams of its own there between a fixture and its test.
    monkeypatch.setattr(publishing, "sys", SimpleNamespace(**streams))
    return sent


@pytest.fixture
def publisher(messages, clock, monkeypatch):
    """A publisher of a kernel, and what it sends."""
    monkeypatch.setattr(publishing, "_pace", Pace(clock))
    pub = SimpleNamespace(
        publish=lambda data, _metadata, *, transient, update: messages.append(
            ("update" if update else "display", data, transient)
        ),
        clear_output=lambda *, wait: messages.append(("clear", wait)),
    )
    return Publisher(SimpleNamespace(display_pub=pub, kernel=object()))


def passed(pace, clock, seconds, size):
    """How much a greedy sender gets through."""
    sent = 0
    end = clock.now + seconds
    while clock.now < end:
        while pace.room() >= size:
            pace.note_message()
            pace.note_text("x" * (size - 2))
            sent += 1
        clock.now += 0.05
    return sent


@pytest.mark.parametrize("size", [5000, 30_000])
def test_no_three_seconds_hold_more_text_than_the_server_passes(clock, size):
    pace = Pace(clock)
    for _ in range(5):
        assert passed(pace, clock, 3, size) * (size + 700) < 2_700_000


def test_no_three_seconds_hold_more_messages_than_the_server_passes(clock):
    pace = Pace(clock)
    for _ in range(5):
        assert passed(pace, clock, 3, 10) < 2700


def test_after_a_rest_a_burst_goes_at_once(clock):
    pace = Pace(clock)
    passed(pace, clock, 3, 5000)
    clock.now += 10
    assert pace.room() > 600_000


def test_the_size_on_the_wire_counts_escapes():
    text = 'a"\n\x1b[31mü'
    assert wire_bytes(text) == len(json.dumps(text, ensure_ascii=False).encode())


@pytest.mark.parametrize("text", ["x" * 1000, "\n" * 1000, "ü\n" * 500, "\x1b" * 300])
@pytest.mark.parametrize("room", [0, 1, 3, 50, 1500])
def test_a_piece_fits_and_is_not_much_smaller_than_it_could_be(text, room):
    piece = fitting(text, room)
    assert text.startswith(piece)
    assert not piece or wire_bytes(piece) <= room
    if len(piece) < len(text) and room >= 50:
        assert wire_bytes(text[: len(piece) + 10]) > room - 10


def test_text_of_one_stream_is_one_message(publisher, messages):
    for _ in range(100):
        publisher.text("stdout", "line\n")
    assert not messages
    assert publisher.pending
    publisher.flush()
    assert messages == [("stdout", "line\n" * 100)]
    assert not publisher.pending


def test_streams_keep_their_order(publisher, messages):
    for name, text in (("stdout", "a"), ("stderr", "b"), ("stdout", "c")):
        publisher.text(name, text)
    publisher.flush()
    assert messages == [("stdout", "a"), ("stderr", "b"), ("stdout", "c")]


def test_text_comes_before_the_display_that_follows_it(publisher, messages):
    publisher.text("stdout", "before")
    publisher.display({"text/plain": "x"}, "id", update=False)
    publisher.rich(Rich(0, "update", {"data": {}, "metadata": {}, "transient": {"d": 1}}))
    assert [message[0] for message in messages] == ["stdout", "display", "update"]


def test_what_exceeds_the_pace_is_left_to_the_caller(publisher, messages, clock):
    text = "y" * 2_000_000
    done = publisher.text("stdout", text)
    assert 600_000 < done < 700_000
    while done < len(text):
        clock.now += 0.05
        done += publisher.text("stdout", text[done:])
    publisher.flush()
    assert "".join(text for _name, text in messages) == text
    assert 1.5 < clock.now < 3
    assert max(len(text) for _name, text in messages) <= 200_000


def test_notices_pass_when_there_is_no_room(publisher, messages):
    publisher.text("stdout", "y" * 2_000_000)
    assert not publisher.ready
    assert publisher.text("stderr", "stopped\n", free=True) == 8
    publisher.flush()
    assert messages[-1] == ("stderr", "stopped\n")


def test_a_terminal_has_no_pace_and_no_updates(publisher, messages):
    publisher.in_kernel = False
    assert publisher.ready
    assert publisher.text("stdout", "y" * 2_000_000) == 2_000_000
    publisher.display({"text/plain": "x"}, "id", update=True)
    assert not [m for m in messages if m[0] == "update"]


def test_a_rank_widgets_messages_are_spoken_for_by_the_kernel(publisher, monkeypatch):
    import comm

    said, comms = [], {}

    class Comm:
        def __init__(self, **keys):
            said.append(("open", keys["target_name"], keys["data"]))
            comms[keys["comm_id"]] = self

        def send(self, data, metadata, buffers):
            said.append(("send", data, metadata, buffers))

        def close(self):
            said.append(("close",))

    monkeypatch.setattr(comm, "create_comm", Comm)
    monkeypatch.setattr(comm, "get_comm_manager", lambda: SimpleNamespace(comms=comms))
    content = {"comm_id": "c", "target_name": "t", "data": {"a": 1}, "metadata": {}}
    for kind, buffers in (("comm_open", ()), ("comm_msg", (b"z",)), ("comm_close", ())):
        publisher.rich(Rich(0, kind, content, buffers))
    publisher.rich(Rich(0, "comm_msg", {**content, "comm_id": "unknown"}))
    assert said == [("open", "t", {"a": 1}), ("send", {"a": 1}, {}, [b"z"]), ("close",)]
