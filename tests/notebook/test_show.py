"""What is shown of a job, without a kernel: events in, messages out."""

from __future__ import annotations

import random

import pytest

from jupyter_accel.launcher.events import Notice, RankState, Rich, Text
from jupyter_accel.notebook import show
from jupyter_accel.notebook.arranging import Held, Labels
from jupyter_accel.notebook.folding import MOST_CHARS, Fold
from jupyter_accel.notebook.show import BACKLOG_CHARS, NotebookPresenter, whereabouts


class FrontEnd:
    """Stands for a publisher; ``limit`` is how many characters pass at each tick."""

    def __init__(self, *, in_kernel=True):
        self.in_kernel = in_kernel
        self.limit = None
        self.said = []
        self.pending = False

    @property
    def ready(self):
        return self.limit is None or self.limit > 0

    def text(self, stream, text, *, free=False):
        most = len(text) if free or self.limit is None else min(self.limit, len(text))
        if self.limit is not None and not free:
            self.limit -= most
        self.said.append((stream, text[:most]))
        return most

    def flush(self):
        pass

    def display(self, bundle, display_id, *, update):
        if not update or self.in_kernel:
            self.said.append(("update" if update else "display", bundle["text/plain"], display_id))

    def rich(self, event):
        self.said.append((event.kind, event.content["data"].get("text/plain")))

    def clear(self):
        self.said.append(("clear", ""))

    def of(self, *kinds):
        return [message[1] for message in self.said if message[0] in kinds]


@pytest.fixture
def front():
    return FrontEnd()


def presenter(front, *, size=2, shown=(0,), ordered=False):
    made = NotebookPresenter(front, size=size, shown=shown, ordered=ordered, headline="2 ranks")
    made.begin()
    return made


def out(rank, text, stream="stdout"):
    return Text(rank, stream, text)


def shown(rank, text, kind="display", display_id="d"):
    data = {"data": {"text/plain": text}, "metadata": {}, "transient": {"display_id": display_id}}
    return Rich(rank, kind, data)


def clear(rank, *, wait=True):
    return Rich(rank, "clear", {"wait": wait})


def played(job, events):
    for event in events:
        job.show(event)
        job.tick()
    job.release()
    job.tick(ended=True)
    assert job.idle
    job.finish("done")


def test_rank_0_is_plain_and_the_others_fold_at_the_end(front):
    played(presenter(front), [out(0, "a\n"), out(1, "b\n"), RankState(0, "done")])
    assert front.of("stdout") == ["a\n"]
    assert front.of("display") == ["2 ranks", "rank 1 · 1 line\nb\n"]
    assert front.of("update")[-1].endswith("done")


def test_a_running_job_shows_the_last_line_of_each_folded_rank(front, monkeypatch):
    monkeypatch.setattr(show, "_GLIMPSE_AFTER", 0.0)
    job = presenter(front)
    job.show(out(1, "step 1\nstep 2\n"))
    job.tick()
    assert front.of("display")[-1] == "rank 1 · 2 lines · step 2"
    job.finish("done")
    assert "rank 1 · 2 lines\nstep 1\nstep 2\n" in front.of("update")


def test_output_above_the_limit_waits_and_nothing_is_lost(front):
    job = presenter(front)
    text = "".join(f"{n}\n" for n in range(1000))
    job.show(out(0, text))
    front.limit = 0
    job.tick()
    assert not job.idle
    for _ in range(100):
        front.limit = 50
        job.tick()
    front.limit = None
    job.tick()
    assert "".join(front.of("stdout")) == text
    assert job.idle


def test_the_ranks_wait_while_too_much_is_unsent(front):
    front.limit = 0
    job = presenter(front)
    assert not job.full
    job.show(out(0, "x" * (BACKLOG_CHARS + 1)))
    job.tick()
    assert job.full
    front.limit = None
    job.tick()
    assert not job.full
    assert job._waiting_cost == 0


def test_large_displays_count_as_well(front):
    front.limit = 0
    job = presenter(front)
    job.show(Rich(0, "display", {"data": {"image/png": b"x" * (BACKLOG_CHARS + 1)}}))
    assert job.full


def test_what_waits_at_a_stop_is_left_out_but_for_its_end(front):
    front.limit = 0
    job = presenter(front)
    for n in range(30):
        job.show(out(0, f"{n} " + "x" * 100_000 + "\n"))
    job.show(out(0, "the end\n"))
    job.tick()
    job.cut()
    job.tick(ended=True)
    assert job.idle
    assert "MB of output left out" in front.of("stderr")[0]
    assert "".join(front.of("stdout")).endswith("x\nthe end\n")
    assert sum(map(len, front.of("stdout"))) == 100_000


def test_a_cut_of_little_changes_nothing(front):
    front.limit = 0
    job = presenter(front)
    job.show(out(0, "short\n"))
    job.cut()
    front.limit = None
    job.tick(ended=True)
    assert front.of("stdout") == ["short\n"]
    assert not front.of("stderr")


def test_what_is_still_to_be_shown_is_said(front):
    front.limit = 0
    job = presenter(front)
    job.show(out(0, "x" * 3_000_000))
    job.tick(ended=True)
    assert "3.0 MB of output to show" in front.of("update")[-1]


def test_only_the_newest_state_of_a_display_is_sent_when_many_wait(front):
    front.limit = 0
    job = presenter(front)
    for n in range(100):
        job.show(shown(0, str(n), "update", "bar"))
        job.show(shown(0, f"other {n}", "update", "other"))
    front.limit = None
    job.tick()
    assert front.of("update")[-2:] == ["99", "other 99"]
    assert len(front.of("update")) == 2


def test_clearing_keeps_the_state_line_and_the_folds(front):
    played(
        presenter(front),
        [out(1, "folded\n"), out(0, "old\n"), clear(0), out(0, "new\n"), clear(0)],
    )
    at = front.said.index(("clear", ""))
    assert front.said[at - 1] == ("stdout", "old\n")
    assert front.said[at + 1][:2] == ("display", "2 ranks")
    assert front.said[at + 2] == ("stdout", "new\n")
    assert front.of("clear") == [""], "the last one waits for output that never came"


def test_a_folded_rank_clears_and_updates_only_its_fold(front):
    events = [
        out(1, "old\n"),
        clear(1, wait=False),
        shown(1, "0 %", display_id="bar"),
        out(1, "text"),
        shown(1, "figure", display_id="other"),
        shown(1, "100 %", "update", "bar"),
        Rich(1, "comm_open", {"data": {}}),
    ]
    played(presenter(front), events)
    assert not front.of("clear", "comm_open")
    assert front.of("display")[-1] == "rank 1 · 3 lines\n100 %\ntext\nfigure\n"


def test_a_terminal_gets_folds_and_state_once_at_the_end():
    front = FrontEnd(in_kernel=False)
    played(presenter(front), [out(1, "b\n")])
    displays = front.of("display", "update")
    assert displays[0] == "rank 1 · 1 line\nb\n"
    assert len(displays) == 2
    assert displays[1].endswith("done")


def test_notices_go_to_standard_error(front):
    played(presenter(front), [Notice("asked the ranks to stop")])
    assert front.of("stderr") == ["asked the ranks to stop\n"]


def test_ordered_output_does_not_depend_on_how_ranks_interleave(front):
    own = {
        rank: [
            shown(rank, "start", display_id=f"{rank}"),
            out(rank, "one\n"),
            shown(rank, "end", "update", f"{rank}"),
            out(rank, "two"),
        ]
        for rank in range(3)
    }
    seen = []
    for seed in range(5):
        source = random.Random(seed)  # noqa: S311 - any order will do
        queues = {rank: list(events) for rank, events in own.items()}
        front = FrontEnd()
        job = presenter(front, size=3, ordered=True)
        events = []
        while any(queues.values()):
            rank = source.choice([rank for rank in queues if queues[rank]])
            events.append(queues[rank].pop(0))
        played(job, events)
        seen.append([message[:2] for message in front.said][:-1])
    assert all(each == seen[0] for each in seen)
    assert [text for kind, text in seen[0] if kind == "stdout"][:3] == [
        "[rank 0]\n",
        "one\n",
        "two",
    ]
    assert ("display", "end") in seen[0]
    assert ("display", "start") not in seen[0]


def test_labels_stand_before_whole_lines():
    labels = Labels()
    assert labels.put(out(1, "a\nb\n")).text == "[rank 1] a\n[rank 1] b\n"
    assert labels.put(out(0, "half")).text == "[rank 0] half"
    assert labels.put(out(0, " line\n")).text == " line\n"
    assert labels.put(out(0, "half")).text == "[rank 0] half"
    assert labels.put(out(1, "c\n")).text == "\n[rank 1] c\n"


def test_a_bar_keeps_its_label_when_it_is_redrawn():
    assert Labels().put(out(1, "\r 10%\r 20%", "stderr")).text == "\r[rank 1]  10%\r[rank 1]  20%"
    assert Labels().put(out(1, "dos\r\n")).text == "[rank 1] dos\r\n"


def test_separators_that_only_python_knows_end_no_line():
    assert Labels().put(out(1, "a\x0bb\u2028c\n")).text == "[rank 1] a\x0bb\u2028c\n"


def test_held_output_has_a_heading_for_each_rank_that_wrote():
    held = Held(3)
    held.add(out(2, "x\n"))
    held.add(out(0, "y"))
    texts = [event.text for event in held.release()]
    assert texts == ["[rank 0]\n", "y", "\n[rank 2]\n", "x\n"]
    assert list(held.release()) == []


def test_a_fold_shows_bars_as_they_ended_and_escapes_html():
    fold = Fold(1)
    fold.add("\r 1%\r 50%\r100%\n<b>\x1b[31mred\x1b[0m\r\n")
    bundle = fold.bundle()
    assert bundle["text/plain"] == "rank 1 · 2 lines\n100%\n<b>\x1b[31mred\x1b[0m\n"
    assert "&lt;b&gt;red\n" in bundle["text/html"]
    assert fold.glimpse()["text/plain"].startswith("rank 1 · 2 lines · <b>")


def test_a_fold_of_much_keeps_its_beginning_and_its_end():
    fold = Fold(1)
    for n in range(200_000):
        fold.add(f"{n:06} " + "x" * 52 + "\n")
    text = fold.bundle()["text/plain"]
    assert text.startswith("rank 1 · 200000 lines\n000000 x")
    assert text.endswith("x\n")
    assert "199999" in text[-100:]
    assert "left out here; --ranks 1 shows this rank in full" in text
    assert len(text) < MOST_CHARS + 1000


def test_where_the_names_are_is_told():
    info = {"pulled": ("model",), "stayed": list("abcdefgh"), "skipped": {"lock": "why"}}
    words = whereabouts(info)
    assert "in the kernel now: model" in words
    assert "and 2 more" in words
    assert "cannot travel: lock" in words
    assert whereabouts({}) == ""


def test_a_folded_rank_begins_another_streams_text_on_a_line_of_its_own():
    fold = Fold(1)
    fold.add("no end", "stdout")
    fold.add("raw 0\n", "stderr")
    fold.add("bar ", "stderr")
    fold.add("50%\n", "stderr")
    assert fold.bundle()["text/plain"].partition("\n")[2] == "no end\nraw 0\nbar 50%\n"
