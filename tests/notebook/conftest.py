"""Kernels with the extension loaded, for the tests of launches from a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from kernel_session import KernelSession
from loaded_kernel import load

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def lab() -> Iterator[KernelSession]:
    """A kernel that has launched once; the tests of a module share it."""
    with KernelSession() as kernel:
        load(kernel)
        yield kernel
        kernel.shutdown()
        kernel.assert_nothing_left()


@pytest.fixture
def fresh_lab() -> Iterator[KernelSession]:
    """A kernel that has launched once, for one test alone."""
    with KernelSession() as kernel:
        load(kernel)
        yield kernel
