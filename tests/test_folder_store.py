"""The rendezvous folder keeps the promises of a torch store."""

from __future__ import annotations

import stat
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from ranks import in_ranks

from jupyter_accel.folder_store import FolderStore


@pytest.fixture
def store(tmp_path):
    return FolderStore(tmp_path / "meet", timeout=0.05)


def test_a_value_is_read_as_it_was_written(store):
    store.set("a/b", "text")
    store.set("c", b"\x00\xff")
    assert (store.get("a/b"), store.get("c")) == (b"text", b"\x00\xff")
    assert store.multi_get(["a/b", "c"]) == [b"text", b"\x00\xff"]


def test_two_stores_on_one_folder_see_each_other(store, tmp_path):
    FolderStore(tmp_path / "meet", timeout=1).set("key", "value")
    assert store.get("key") == b"value"


def test_a_prefix_keeps_groups_apart(store):
    dist.PrefixStore("one", store).set("k", "1")
    dist.PrefixStore("two", store).set("k", "2")
    assert dist.PrefixStore("one", store).get("k") == b"1"


def test_waiting_for_a_key_that_never_comes_ends_and_names_it(store):
    began = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="wrote absent in time"):
        store.get("absent")
    with pytest.raises(dist.DistStoreError):
        store.wait(["absent"], timedelta(seconds=0.01))
    assert time.monotonic() - began < 1


def test_counters_and_lists_grow(store):
    assert [store.add("n", 2), store.add("n", 3), store.add("n", 0)] == [2, 5, 5]
    store.append("list", "a")
    store.append("list", "b")
    assert (store.get("n"), store.get("list")) == (b"5", b"ab")


def test_compare_and_set_writes_only_over_what_was_expected(store):
    assert store.compare_set("k", "x", "y") == b"x"
    assert not store.check(["k"])
    assert store.compare_set("k", "", "one") == b"one"
    assert store.compare_set("k", "zero", "two") == b"one"
    assert store.compare_set("k", "one", "two") == b"two"


def test_keys_can_be_deleted_and_counted(store):
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.num_keys() == 2
    assert (store.delete_key("a"), store.delete_key("a")) == (True, False)
    assert store.num_keys() == 1


@pytest.mark.usefixtures("store")
def test_only_the_owner_can_enter_the_folder(tmp_path):
    assert stat.S_IMODE((tmp_path / "meet").stat().st_mode) == 0o700


def test_no_count_is_lost_between_ranks(tmp_path):
    def count(folder):
        store = FolderStore(folder, timeout=5)
        for _ in range(100):
            store.add("n", 1)

    in_ranks(count, tmp_path / "shared", size=3, connect=False)
    assert FolderStore(tmp_path / "shared", timeout=1).get("n") == b"300"
