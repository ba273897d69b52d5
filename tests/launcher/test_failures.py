"""Which of several failures is named first, and in what words."""

from __future__ import annotations

import signal

import pytest

from jupyter_accel.errors import WorkerDiedError, WorkerError
from jupyter_accel.launcher.failures import first_cause, folded, from_end, from_message, to_error
from jupyter_accel.launcher.messages import Failed, RankEnded
from jupyter_accel.launcher.stacks import Stacks

LOST = "[/pytorch/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:25411"


def raised(rank, ename="ValueError", message="bad value", at=0, **more):
    return from_message(rank, Failed(ename, message, ("Traceback", "line"), "<cell>:3", at, **more))


def ended(rank=0, *, code=None, by=None, memory=False, at=0):
    return RankEnded(
        rank=rank,
        exit_code=code,
        signal=by,
        peak_bytes=3 << 30,
        ended_by_us=False,
        out_of_memory=memory,
        at_ns=at,
    )


def test_what_began_first_is_the_cause():
    late, early = raised(0, at=20), raised(1, message="first", at=10)
    assert first_cause([late, early]) == [early, late]


def test_a_lost_connection_is_an_echo_even_if_it_was_noticed_first():
    echo = raised(0, "RuntimeError", LOST, at=5)
    cause = raised(1, at=10)
    assert first_cause([echo, cause])[0] is cause


def test_a_killed_rank_is_a_cause_and_not_an_echo():
    echo = raised(0, "RuntimeError", LOST, at=5)
    killed = from_end(ended(1, by=signal.SIGKILL, at=10), Stacks())
    error = to_error([echo, killed])
    assert isinstance(error, WorkerDiedError)
    assert error.rank == 1
    assert "SIGKILL" in str(error)
    assert "lost its peers" in str(error)


def test_a_users_own_words_on_connections_are_no_echo_if_the_type_is_none():
    assert not raised(0, "ValueError", "broken pipe in the model's config").follows


def test_the_same_failure_on_all_ranks_is_told_once():
    groups = folded([raised(rank, at=rank) for rank in (2, 0, 1)])
    assert [ranks for ranks, _failure in groups] == [[0, 1, 2]]
    error = to_error([raised(0, at=1), raised(1, at=2)])
    assert str(error) == "ranks 0, 1: ValueError: bad value"


def test_different_failures_are_all_told():
    error = to_error([raised(0, at=1), raised(1, "KeyError", "'lr'", at=2)])
    assert str(error).splitlines() == ["rank 0: ValueError: bad value", "  rank 1: KeyError: 'lr'"]


def test_a_failure_without_words_is_its_type():
    assert raised(0, "AssertionError", "").sentence == "AssertionError"


def test_ranks_that_had_ended_are_named_where_others_waited_for_them():
    error = to_error([raised(0, "RuntimeError", LOST)], finished=[1])
    assert str(error).startswith("rank 0 waited in a collective for rank 1")


def test_sys_exit_is_named_with_its_code():
    failure = raised(0, "SystemExit", "3", exit_code=3)
    assert failure.sentence == "SystemExit: called sys.exit(3) before the work was done"


def test_a_failed_connection_says_so():
    assert "could not join the process group" in raised(0, phase="connect").sentence


def test_the_error_carries_rank_name_and_traceback():
    error = to_error([raised(1)])
    assert type(error) is WorkerError
    assert (error.rank, error.ename, error.traceback) == (1, "ValueError", ("Traceback", "line"))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"code": 0}, "exit code 0"),
        ({"code": 7}, "exit code 7"),
        ({"by": 9}, "signal 9 (SIGKILL"),
        ({"by": 11}, "signal 11 (SIGSEGV"),
        ({"by": 9, "memory": True}, "memory ran out"),
        ({"by": 63}, "signal 63"),
    ],
)
def test_the_end_of_a_process_is_put_in_words(how, words):
    failure = from_end(ended(**how), Stacks())
    assert words in failure.sentence
    assert failure.died


def test_the_same_words_at_different_lines_are_two_failures():
    one = from_message(0, Failed("ValueError", "bad", (), "<cell>:3", 1))
    other = from_message(1, Failed("ValueError", "bad", (), "<cell>:9", 2))
    assert len(folded([one, other])) == 2
