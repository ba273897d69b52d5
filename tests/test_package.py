"""What the package promises before anything is used: names, version, and cheap imports."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import pytest
from fresh_interpreter import REPOSITORY, modules_after

import jupyter_accel

PROMISED = {
    "Accelerator",
    "World",
    "launch",
    "launch_all_ranks",
    "notebook_launcher",
    # exceptions, see errors.py
    "AccelError",
    "ConfigError",
    "Interrupted",
    "NoInputError",
    "NotPreparedError",
    "PreflightError",
    "ShippingError",
    "TemplateError",
    "WorkerDiedError",
    "WorkerError",
    "WorkerTimeoutError",
}
HEAVY = {"torch", "IPython", "ipykernel", "ipywidgets", "traitlets"}


def test_the_promised_names_are_the_exported_ones():
    assert set(jupyter_accel.__all__) - {"__version__"} == PROMISED


@pytest.mark.parametrize("name", sorted(PROMISED))
def test_a_promised_name_resolves_to_its_object(name):
    assert getattr(jupyter_accel, name).__name__ == name
    assert name in dir(jupyter_accel)


def test_every_exception_of_the_tree_is_exported():
    errors = import_module("jupyter_accel.errors")
    tree = {
        n
        for n, v in vars(errors).items()
        if isinstance(v, type) and v.__module__ == errors.__name__
    }
    assert tree <= set(jupyter_accel.__all__)


def test_an_unknown_name_is_an_attribute_error():
    name = "launhc"
    with pytest.raises(AttributeError, match=name):
        getattr(jupyter_accel, name)


def test_importing_the_package_is_cheap():
    assert not modules_after("import jupyter_accel") & (HEAVY | {"numpy"})


@pytest.mark.parametrize("module", ["launcher", "world", "control", "errors"])
def test_the_launcher_side_imports_neither_torch_nor_jupyter(module):
    assert not modules_after(f"import jupyter_accel.{module}") & HEAVY


def test_naming_the_launch_functions_does_not_import_torch():
    assert "torch" not in modules_after("from jupyter_accel import launch, notebook_launcher")


def test_the_accelerator_does_not_import_jupyter():
    assert not modules_after("from jupyter_accel import Accelerator") & (HEAVY - {"torch"})


def test_the_extension_can_be_loaded():
    assert callable(jupyter_accel.load_ipython_extension)


def test_the_installed_version_is_the_one_in_the_source():
    try:
        installed = version("jupyter-accel")
    except PackageNotFoundError:
        pytest.skip("not installed; `make test` installs it")
    assert installed == jupyter_accel.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+([a-z]+\d+)?", installed)


def test_the_package_says_that_it_is_typed():
    assert (REPOSITORY / "jupyter_accel" / "py.typed").exists()
