"""The template's idle time: one thing after another, and none of them can stop it."""

from __future__ import annotations

import subprocess
import sys

from jupyter_accel.launcher.warming import Warming, load

GATHER = """
import re, sys
from jupyter_accel.launcher.warming import Warming
keep = [str(n) * 3 for n in range(600_000)]  # some 60 MB of small objects
def huge():
    text = open("/proc/self/smaps_rollup").read()
    return int(re.search(r"AnonHugePages: +([0-9]+) kB", text)[1])
before = huge()
warming = Warming(["json"])
steps = 0
while warming:
    warming.step()
    steps += 1
assert all(keep[n] == str(n) * 3 for n in range(0, 600_000, 997))
print(steps, before, huge())
"""


def test_nothing_to_import_means_nothing_to_do():
    assert not Warming([])


def test_an_import_that_fails_is_said_and_does_not_stop_the_rest(capsys):
    warming = Warming(["no_such_module_at_all", "json"])
    warming.step()
    assert "no_such_module_at_all" in capsys.readouterr().err
    warming.step()
    assert warming  # its memory is still to be gathered


def test_an_entry_can_be_a_function_to_call():
    load("gc:collect")


def test_gathered_memory_holds_what_it_held():
    done = subprocess.run(
        [sys.executable, "-c", GATHER], capture_output=True, text=True, check=True, timeout=60
    )
    steps, before, after = map(int, done.stdout.split())
    assert steps > 2
    assert after >= before
