"""Counting devices from files, as a machine with any number of GPUs would show them."""

from __future__ import annotations

import pytest
from fresh_interpreter import modules_after

from jupyter_accel.devices import Devices, cpu_threads_per_rank, usable_devices


def machine(folder, listed, nodes):
    """Make the files of a machine; ``listed=None`` for one without the driver."""
    driver_list, device_files = folder / "gpus", folder / "dev"
    device_files.mkdir()
    for name in (*(f"nvidia{i}" for i in range(nodes)), "nvidiactl", "nvidia-uvm"):
        (device_files / name).touch()
    if listed is not None:
        driver_list.mkdir()
        for i in range(listed):
            (driver_list / f"0000:0{i}:00.0").mkdir()
    return {"driver_list": driver_list, "device_files": device_files}


def test_a_machine_without_gpus_gives_one_cpu_process_and_says_why(tmp_path):
    assert usable_devices({}, **machine(tmp_path, None, 0)) == Devices(
        "cpu", 1, "no accelerator found, so one CPU process; -n N for more"
    )


def test_every_gpu_gets_a_process(tmp_path):
    devices = usable_devices({}, **machine(tmp_path, 2, 2))
    assert (devices.kind, devices.count) == ("cuda", 2)
    assert devices.reason == "2 NVIDIA GPUs visible, so 2 processes; -n N to change"
    assert [devices.name(rank) for rank in range(2)] == ["cuda:0", "cuda:1"]


def test_a_container_sees_the_gpus_that_it_was_given(tmp_path):
    assert usable_devices({}, **machine(tmp_path, 8, 2)).count == 2


def test_a_driver_that_does_not_list_its_gpus_is_counted_by_files(tmp_path):
    assert usable_devices({}, **machine(tmp_path, None, 3)).count == 3


def test_a_container_without_gpus_says_that_their_files_are_missing(tmp_path):
    devices = usable_devices({}, **machine(tmp_path, 4, 0))
    assert devices.kind == "cpu"
    assert "lists 4 NVIDIA GPUs, but /dev/nvidia* is not there" in devices.reason


@pytest.mark.parametrize(
    ("value", "count"),
    [
        ("0", 1),
        ("0,1", 2),
        (" 3 , 1 ", 2),
        ("0,9,1", 1),
        ("0,-1,1", 1),
        ("0,0", 0),
        ("", 0),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("GPU-1f2e,GPU-3a", 2),
        ("GPU-1f2e,MIG-3a", 1),
        ("GPU-1f2e,GPU-1f2e", 0),
        ("MIG-a,MIG-b,MIG-c,MIG-d,MIG-e", 5),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(tmp_path, value, count):
    devices = usable_devices({"CUDA_VISIBLE_DEVICES": value}, **machine(tmp_path, 4, 4))
    assert (devices.count if devices.kind == "cuda" else 0) == count


def test_hidden_gpus_are_the_reason_for_the_cpu(tmp_path):
    devices = usable_devices({"CUDA_VISIBLE_DEVICES": ""}, **machine(tmp_path, 1, 1))
    assert devices.reason.startswith("CUDA_VISIBLE_DEVICES='' hides 1 NVIDIA GPU, so one CPU")
    assert devices.name(0) == "cpu"


@pytest.mark.parametrize(("size", "cores", "threads"), [(1, 8, 8), (2, 8, 4), (3, 8, 2), (4, 2, 1)])
def test_ranks_share_the_cores(size, cores, threads):
    assert cpu_threads_per_rank(size, cores) == threads


def test_counting_does_not_import_torch():
    code = "from jupyter_accel.devices import usable_devices; usable_devices({})"
    assert "torch" not in modules_after(code)
