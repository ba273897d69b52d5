"""Ranks that share a board agree where to stop."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from jupyter_accel import control
from jupyter_accel.control import Board, Seat


@pytest.fixture
def board():
    made = Board.create(3)
    yield made
    made.close()


@pytest.fixture
def alone():
    """Give the process its seat back, whatever a test has taken."""
    before = control._Here.seat
    yield
    control._Here.seat = before


def walk(board, rank, steps, stopped, pause=0.0):
    seat = Seat(board, rank)
    for step in range(1, steps + 1):
        if seat.should_stop():
            stopped[rank] = step
            break
        time.sleep(pause)
    seat.finish()


def race(board, paces, steps=4000):
    stopped = {}
    walks = [
        threading.Thread(target=walk, args=(board, rank, steps, stopped, pace))
        for rank, pace in enumerate(paces)
    ]
    for each in walks:
        each.start()
    time.sleep(0.05)
    board.request_stop()
    for each in walks:
        each.join(20)
    return stopped


def test_nothing_stops_unless_asked(board):
    stopped = {}
    walk(board, 0, 1000, stopped)
    assert stopped == {}


def test_all_ranks_stop_before_the_same_step(board):
    stopped = race(board, (0.0005, 0.001, 0.002))
    assert len(stopped) == 3
    assert len(set(stopped.values())) == 1


def test_the_others_do_not_wait_for_a_rank_that_has_left(board):
    Seat(board, 2).finish()
    began = time.monotonic()
    stopped = race(board, (0.001, 0.001))
    assert len(set(stopped.values())) == 1
    assert time.monotonic() - began < control.AGREE_SECONDS


def test_a_rank_that_agreed_and_left_at_once_still_counts(board):
    """It may be ahead, and leave before the others have looked at what it pledged."""
    ahead = Seat(board, 0)
    for _ in range(5):
        ahead.should_stop()
    Seat(board, 2).finish()
    board.request_stop()
    board.write(1, control._PLEDGE, 3)  # rank 1 has pledged and waits
    assert ahead.should_stop()
    ahead.finish()
    behind = Seat(board, 1)
    stops = [behind.should_stop() for _ in range(6)]
    assert stops == [False] * 5 + [True]


def test_a_rank_that_nobody_answers_goes_on_and_asks_again(board, monkeypatch):
    monkeypatch.setattr(control, "AGREE_SECONDS", 0.05)
    board.request_stop()
    seat = Seat(board, 0)
    assert not seat.should_stop()
    assert not seat.should_stop()
    for rank in (1, 2):
        Seat(board, rank).finish()
    assert seat.should_stop()


def test_a_board_tells_steps_and_when_the_last_one_began(board):
    assert board.seconds_since_step() is None
    seat = Seat(board, 1)
    seat.should_stop()
    seat.should_stop()
    assert board.steps() == [0, 2, 0]
    assert 0 <= board.seconds_since_step() < 10


def test_a_cleared_board_has_forgotten_the_request(board):
    seat = Seat(board, 0)
    seat.should_stop()
    board.request_stop()
    board.clear()
    assert not board.stop_requested
    assert board.steps() == [0, 0, 0]
    assert board.seconds_since_step() is None


def test_another_process_sees_the_same_page(board):
    code = (
        "import sys; from jupyter_accel.control import Board, Seat\n"
        f"Seat(Board({board.fd}, 3), 2).should_stop()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, pass_fds=[board.fd])
    assert board.steps() == [0, 0, 1]


def test_a_board_leaves_no_descriptor_behind():
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0  # noqa: PTH112, PTH208
    Board.create(2).close()
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0  # noqa: PTH112, PTH208
    assert after == before


@pytest.mark.usefixtures("alone")
def test_outside_a_launch_nothing_ever_stops():
    control._Here.seat = None
    assert not control.should_stop()
    assert not control.inside_launch()


@pytest.mark.usefixtures("alone")
def test_inside_a_launch_the_seat_answers(board):
    control.take_seat(board, 0)
    assert control.inside_launch()
    assert not control.should_stop()
    for rank in (1, 2):
        Seat(board, rank).finish()
    board.request_stop()
    assert control.should_stop()
