from __future__ import annotations

import functools
import io
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import types
import weakref

import pytest
from notebook_pair import main_module

from jupyter_accel.errors import ShippingError
from jupyter_accel.launcher.parcels.capture import capture, names_in
from jupyter_accel.launcher.parcels.shipping import pack


@pytest.fixture
def namespace(monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    return main_module()


def said(namespace, source):
    """Capture a cell that cannot be shipped; return what the error says."""
    with pytest.raises(ShippingError) as caught:
        capture(names_in(source), namespace)
    assert caught.value.name in namespace
    return str(caught.value)


def run(source, namespace):
    exec(compile(source, "<cell>", "exec", dont_inherit=True), namespace)  # noqa: S102


def test_a_lock_in_a_dictionary_is_found_named_and_given_a_way_out(namespace):
    namespace["config"] = {"lr": 0.1, "deep": [{"lock": threading.Lock()}]}
    run("def train(): return config", namespace)
    assert said(namespace, "train()") == (
        "`config` cannot travel to the ranks: "
        "`config['deep'][0]['lock']` is a lock (_thread.lock), "
        "which belongs to the process that made it. `train` reads `config`. "
        "Create it inside `train` or in the cell that the ranks run. "
        "Or use `--start-method fork`, which gives the ranks a copy of the whole kernel."
    )


def test_a_file_in_an_object_is_found_and_not_read(namespace, tmp_path):
    (tmp_path / "log").write_text("0123456789")
    run("class Trainer: pass\ntrainer = Trainer()\ntrainer.opts = {}", namespace)
    with (tmp_path / "log").open() as file:
        file.read(3)
        namespace["trainer"].log_file = file
        message = said(namespace, "trainer")
        assert file.tell() == 3
    assert "`trainer.log_file` is an open file (_io.TextIOWrapper)" in message
    assert "Open it in the cell that the ranks run, by its path." in message


def test_a_variable_that_a_function_encloses_is_named_with_its_function(namespace):
    run("def make(lock):\n  def train(): return lock\n  return train", namespace)
    namespace["train"] = namespace["make"]({"l": threading.Lock()})
    message = said(namespace, "train()")
    assert "`lock['l']`, which is a variable enclosed in `train`, is a lock" in message


def test_a_default_argument_is_named(namespace):
    namespace["lock"] = threading.Lock()
    run("def train(x, lock=lock): return x", namespace)
    assert "`lock`, which is the default of an argument of `train`, is a lock" in said(
        namespace, "train(1)"
    )


def test_an_attribute_of_a_class_is_named(namespace):
    run("import threading\nclass Model:\n  guard = threading.Lock()\nmodel = Model()", namespace)
    message = said(namespace, "model")
    assert "`Model.guard`, the class of `model`, is a lock" in message


def a_started_generator():
    generator = (n for n in range(3))
    next(generator)
    return generator


class Connection:
    def __init__(self):
        self.lock = threading.Lock()

    def cursor(self): ...
    def commit(self): ...
    def rollback(self): ...


async def coroutine(): ...


KINDS = {
    "a lock": [threading.Lock, threading.RLock, threading.Condition],
    "an event between threads": [threading.Event],
    "a thread": [threading.Thread],
    "a set of thread-local variables": [threading.local],
    "a socket": [socket.socket],
    "a generator": [a_started_generator],
    "a coroutine": [coroutine],
    "a weak reference": [lambda: weakref.ref(Connection)],
    "a frame": [sys._getframe],
    "a database connection": [lambda: sqlite3.connect(":memory:"), Connection],
    "a database cursor": [lambda: sqlite3.connect(":memory:").cursor()],
    "an open file": [lambda: open(__file__, "rb"), lambda: open(__file__)],  # noqa: PTH123, SIM115
    "a running program": [lambda: subprocess.Popen(["true"])],
}


@pytest.mark.parametrize(
    ("kind", "make"), [(kind, make) for kind, makes in KINDS.items() for make in makes]
)
def test_what_belongs_to_a_process_is_called_by_its_name(namespace, kind, make):
    thing = make()
    namespace["box"] = types.SimpleNamespace(first=1, thing=thing)
    try:
        message = said(namespace, "box")
    finally:
        for end in ("close", "wait"):
            if end != "wait" or isinstance(thing, subprocess.Popen):
                getattr(thing, end, lambda: None)()
        if isinstance(thing, sqlite3.Cursor):
            thing.connection.close()
    assert f"`box.thing` is {kind}" in message


def test_files_in_memory_do_travel(namespace):
    namespace["text"] = io.StringIO("abc")
    assert capture(["text"], namespace).names == ("text",)


@pytest.mark.parametrize("method", ["__reduce__", "__getstate__"])
def test_an_error_of_the_users_own_method_is_passed_on(namespace, method):
    run(
        f"class Mine:\n  def {method}(self): raise ValueError('not while training')\n"
        "  def __len__(self): return 1\nbox = [0, Mine()]",
        namespace,
    )
    message = said(namespace, "box")
    assert "`box[1]` is an object of type Mine" in message
    assert "ValueError: not while training" in message


def test_the_nearest_way_is_shown_where_objects_refer_to_each_other(namespace):
    run(
        "import threading\nclass Node: pass\na, b = Node(), Node()\n"
        "a.other, b.other, b.lock = b, a, threading.Lock()",
        namespace,
    )
    assert "`a.other.lock` is a lock" in said(namespace, "a")


def test_only_the_name_that_needs_it_is_blamed(namespace):
    namespace.update(fine=1, lock=threading.Lock())
    run("def f(): return fine\ndef g(): return lock", namespace)
    assert capture(names_in("f()"), namespace).names == ("f", "fine")
    with pytest.raises(ShippingError) as caught:
        capture(names_in("f(); g()"), namespace)
    assert caught.value.name == "lock"
    assert "it is a lock" in str(caught.value)


def test_partials_and_bound_methods_are_looked_into(namespace):
    namespace["p"] = functools.partial(print, end=threading.Lock())
    assert "`p.keywords['end']` is a lock" in said(namespace, "p")
    namespace["m"] = Connection().cursor
    assert "`m.__self__` is a database connection" in said(namespace, "m")


def test_something_nested_without_end_is_said_to_be(namespace):
    run("x = []\nfor _ in range(100_000): x = [x]", namespace)
    assert "nested too deeply" in said(namespace, "x")


def test_on_the_way_back_the_advice_is_another_one():
    with pytest.raises(ShippingError) as caught:
        pack({"result": [threading.Lock()]}, namespace={}, follow=False)
    assert "`result` cannot travel back to the kernel: `result[0]` is a lock" in str(caught.value)
    assert "--start-method" not in str(caught.value)


def test_the_search_ends_in_a_large_structure(namespace):
    namespace["big"] = {n: [n] * 20 for n in range(200_000)}
    namespace["big"]["lock"] = threading.Lock()
    start = time.monotonic()
    assert "`big`" in said(namespace, "big")
    assert time.monotonic() - start < 10


def test_keys_and_members_are_found_too(namespace):
    namespace["d"] = {threading.get_ident: 1, (1, 2): threading.Lock()}
    assert "`d[(1, 2)]` is a lock" in said(namespace, "d")
    namespace["s"] = {threading.Lock()}
    assert "a member of `s`, is a lock" in said(namespace, "s")
