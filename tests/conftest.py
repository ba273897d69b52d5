"""Fixtures for all tests: real kernels, and checks that nothing is left behind."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import psutil
import pytest
from kernel_session import KernelSession
from leftovers import MARK, SESSION, NoLeftovers, marked, new_mark, retried

if TYPE_CHECKING:
    from collections.abc import Iterator

# Processes that tests start are known by this, also after their parent is gone.
os.environ[MARK] = new_mark("tests")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run, and say what is missing."""
    if item.get_closest_marker("browser") and chromium_path() is None:
        pytest.skip("no chromium on PATH; on Debian: apt-get install chromium")
    if item.get_closest_marker("gpu") and not has_gpu():
        pytest.skip("no CUDA device")


def chromium_path() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="module")
def kernel() -> Iterator[KernelSession]:
    """A kernel that the tests of a module share; it carries their names and imports over."""
    with KernelSession() as session:
        yield session


@pytest.fixture
def fresh_kernel() -> Iterator[KernelSession]:
    """A kernel for one test alone, which may kill it."""
    with KernelSession() as session:
        yield session


@pytest.fixture
def no_leftovers() -> Iterator[NoLeftovers]:
    """Fail a test that leaves processes or shared memory; for launches without a kernel."""
    leftovers = NoLeftovers()
    yield leftovers
    leftovers.check()


@pytest.fixture(scope="session", autouse=True)
def _nothing_survives_the_tests() -> Iterator[None]:
    """No process of a tested kernel, and no orphan of any test, outlives the whole run.

    Living children of this process are not counted: they end when it does.
    """
    yield

    def remains() -> str | None:
        children = set(psutil.Process().children(recursive=True))
        orphans = [p for p in marked(SESSION) if p not in children and p.pid != os.getpid()]
        return "\n".join(f"{p.pid} {p.name()}" for p in orphans) or None

    retried(remains, within=5.0)
