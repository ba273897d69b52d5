"""The template process: how it starts, what it is, and how it ends."""

from __future__ import annotations

import os
import time

import pytest

from jupyter_accel.errors import TemplateError
from jupyter_accel.launcher import processes
from jupyter_accel.launcher.template import PRELOAD, Template
from jupyter_accel.notebook.session import _RANK_SHELL


def gone(pid: int, within: float = 3.0) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if processes.start_time(pid) is None:
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def template():
    template = Template.start(preload=("json",), warm=())
    yield template
    template.close()


def test_a_template_with_torch_and_a_shell_has_one_thread():
    template = Template.start(preload=(*PRELOAD, _RANK_SHELL), warm=())
    try:
        assert template.wait_ready().threads == 1
    finally:
        template.close()


def test_starting_one_does_not_wait_for_it():
    began = time.monotonic()
    template = Template.start(preload=(*PRELOAD,), warm=())
    took = time.monotonic() - began
    ready = template.wait_ready()
    template.close()
    assert took < ready.seconds


def test_it_stands_in_a_session_of_its_own(template):
    template.wait_ready()
    assert os.getsid(template.pid) == template.pid != os.getsid(0)


def test_one_that_cannot_start_says_why():
    template = Template.start(preload=("no_such_module_at_all",), warm=())
    with pytest.raises(TemplateError, match="No module named 'no_such_module_at_all'"):
        template.wait_ready()
    template.close()


def test_one_that_takes_too_long_says_how_long_it_was_given():
    template = Template.start(preload=("torch",), warm=())
    with pytest.raises(TemplateError, match="is not ready after"):
        template.wait_ready(0.01)
    template.close()


def test_closing_it_ends_its_process(template):
    template.wait_ready()
    template.close()
    assert gone(template.pid)


def test_one_that_was_killed_is_not_alive(template):
    template.wait_ready()
    assert template.alive
    os.kill(template.pid, 9)
    deadline = time.monotonic() + 3
    while template.alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not template.alive
