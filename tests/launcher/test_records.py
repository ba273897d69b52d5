"""Job records: written so that only their owner reads them, and dropped when they are stale."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from jupyter_accel.launcher import records
from jupyter_accel.launcher.records import JobRecord


def record(job="abc", **more):
    here = records.process(os.getpid())
    given = {"kernel": here, "supervisor": here, "ranks": (here,), "state": "running", **more}
    return JobRecord(id=job, **given)


def test_what_was_written_is_read_again(tmp_path):
    folder = tmp_path / "runtime" / "jobs"
    written = record(kernel_id="k1", name="lab", state="kept")
    records.write(folder, written)
    assert records.read_all(folder) == [written]


def test_only_the_owner_can_read_a_record(tmp_path):
    folder = tmp_path / "jobs"
    before = os.umask(0)
    try:
        records.write(folder, record())
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "abc.json").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in folder.iterdir()] == ["abc.json"]


def test_writing_again_replaces_the_record(tmp_path):
    records.write(tmp_path, record(state="running"))
    records.write(tmp_path, record(state="kept"))
    assert [found.state for found in records.read_all(tmp_path)] == ["kept"]


def test_a_record_of_a_dead_process_is_removed(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    named = records.process(process.pid)
    records.write(tmp_path, record("dead", supervisor=named))
    records.write(tmp_path, record("living"))
    assert [found.id for found in records.read_all(tmp_path)] == ["dead", "living"]
    process.communicate()
    assert [found.id for found in records.read_all(tmp_path)] == ["living"]
    assert not (tmp_path / "dead.json").exists()


def test_a_record_without_a_living_rank_is_removed(tmp_path):
    here = records.process(os.getpid())
    records.write(tmp_path, record("half", ranks=(here, (here[0], 1))))
    records.write(tmp_path, record("gone", ranks=((here[0], 1), (here[0], None))))
    assert [found.id for found in records.read_all(tmp_path)] == ["half"]


def test_a_pid_that_was_given_to_another_process_does_not_count(tmp_path):
    pid, started = records.process(os.getpid())
    records.write(tmp_path, record(supervisor=(pid, started - 1)))
    assert records.read_all(tmp_path) == []


def test_a_zombie_is_no_process():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert records.process(pid) == (pid, None)
    os.waitpid(pid, 0)


def test_files_that_are_no_records_are_left_alone(tmp_path):
    (tmp_path / "half.json").write_text('{"id": "half"')
    (tmp_path / "other.json").write_text("[]")
    (tmp_path / "more.json").write_text('{"id": "x", "unknown": 1}')
    assert records.read_all(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 3


def test_removing_the_last_record_removes_the_folder(tmp_path):
    folder = tmp_path / "jobs"
    records.write(folder, record("one"))
    records.write(folder, record("two"))
    records.remove(folder, "one")
    assert folder.exists()
    records.remove(folder, "two")
    assert not folder.exists()
    records.remove(folder, "two")


def test_a_folder_that_is_not_there_holds_no_jobs(tmp_path):
    assert records.read_all(tmp_path / "none") == []


def test_the_folder_is_where_jupyter_keeps_its_runtime_files():
    assert records.default_folder({"JUPYTER_RUNTIME_DIR": "/run/j"}) == Path("/run/j/jupyter-accel")
    data = {"JUPYTER_DATA_DIR": "/data", "HOME": "/home/u"}
    assert records.default_folder(data) == Path("/data/runtime/jupyter-accel")
