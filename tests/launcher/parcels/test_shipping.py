from __future__ import annotations

import gc
import os
import pickle
import signal
import weakref

import numpy as np
import pytest
from notebook_pair import Pair
from shipping_cases import CASES

from jupyter_accel.launcher.parcels.by_value import remember_classes
from jupyter_accel.launcher.parcels.shipping import IN_STREAM, pack, unpack


@pytest.fixture
def pair():
    pair = Pair()
    yield pair
    pair.close()


@pytest.mark.parametrize("case", CASES)
def test_these_work_in_a_rank_as_in_the_kernel(pair, case):
    kernel, rank, holds = CASES[case]
    pair.cell(kernel)
    pair.launch(rank)
    shown = pair.rank("repr(globals().get('r'))")
    assert pair.rank(f"bool({holds})"), shown


@pytest.mark.parametrize("case", CASES)
def test_a_kept_rank_takes_the_same_names_again(pair, case):
    kernel, rank, holds = CASES[case]
    pair.cell(kernel)
    pair.ship(rank)
    pair.launch(rank)
    assert pair.rank(f"bool({holds})")


def test_what_is_not_referred_to_is_never_touched(pair):
    pair.cell(
        "class Trap:\n  def __reduce__(self): raise SystemError('touched')\n"
        "trap = Trap()\ndef other(): return trap\nclass Box: trap = 1\nbox = Box()\n"
        "def f(): return box.trap"
    )
    pair.launch("r = f()")
    assert pair.rank("r") == 1
    assert not pair.rank("'trap' in globals() or 'other' in globals()")


def test_names_that_functions_refer_to_travel_transitively(pair):
    pair.cell(
        "d = 1\nclass C:\n  def m(self): return d\ndef b(make=lambda: C): return make()().m()\n"
        "def a(): return [b() for _ in 'x']"
    )
    parcel = pair.ship("a()")
    assert set(parcel.names) == {"a", "b", "C", "d"}
    assert pair.rank("a()") == [1]


def test_a_name_that_does_not_exist_stays_a_name_error_of_the_rank(pair):
    pair.cell("def f(): return missing")
    pair.launch("try:\n    f()\nexcept NameError as error:\n    r = str(error)")
    assert pair.rank("r") == "name 'missing' is not defined"


def test_an_instance_that_comes_back_is_of_the_kernels_class(pair):
    pair.cell("class A:\n  count = 0\n  def who(self): return 'kernel'\nmade = A()")
    kind = pair.namespace["A"]
    pair.launch(
        "A.count = 99\nA.who = lambda self: 'rank'\nback = A(); back.v = 1\nsame = [back, A]"
    )
    values = pair.bring("back", "same")
    assert type(values["back"]) is kind
    assert values["same"] == [values["back"], kind]
    assert (kind.count, values["back"].who(), values["back"].v) == (0, "kernel", 1)


def test_the_kernels_class_is_not_even_derived_from_again(pair):
    pair.cell(
        "seen = []\nclass A:\n  def __init_subclass__(cls): seen.append(cls)\nclass B(A): pass"
    )
    pair.launch("b = B()")
    assert type(pair.bring("b")["b"]) is pair.namespace["B"]
    assert pair.namespace["seen"] == [pair.namespace["B"]]


def test_members_of_an_enumeration_come_back_as_the_kernels_own(pair):
    pair.cell("import enum\nclass E(enum.Enum):\n  A = 1")
    pair.launch("e = {E.A: [E.A]}")
    assert pair.bring("e")["e"] == {pair.namespace["E"].A: [pair.namespace["E"].A]}


def test_a_class_of_the_rank_arrives_once(pair):
    pair.launch("class New:\n  def f(self): return 5\na, b = New(), New()")
    first, second = pair.bring("a")["a"], pair.bring("b")["b"]
    assert type(first) is type(second)
    assert first.f() == 5


def test_a_kept_rank_gets_the_kernels_later_version_of_a_class(pair):
    pair.cell("class A:\n  def f(self): return 1\na = A()")
    pair.launch("old = a")
    pair.cell("A.f = lambda self: 2")
    pair.launch("r = old.f(), A is type(old), a.f()")
    assert pair.rank("r") == (2, True, 2)


def test_a_forked_rank_sends_back_instances_of_classes_that_were_remembered():
    namespace = {"__name__": "__main__"}
    exec("class A:\n  class Inner: pass\na = [A(), A.Inner()]", namespace)  # noqa: S102
    remember_classes(namespace)
    arrived, sent = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        parcel = pack({"a": namespace["a"]}, namespace=namespace, follow=False)
        os.write(sent, pickle.dumps(parcel))
        os._exit(0)
    os.waitpid(pid, 0)
    with os.fdopen(arrived, "rb") as file:
        os.close(sent)
        values = unpack(pickle.load(file), namespace=namespace)
    kinds = [type(value) for value in values["a"]]
    assert kinds == [namespace["A"], namespace["A"].Inner]


def test_functions_that_come_back_use_the_kernels_globals(pair):
    pair.cell("scale = 2")
    pair.launch("def f(x): return x * scale")
    assert pair.bring("f")["f"](10) == 20
    pair.cell("scale = 3")
    back = pair.bring("f")["f"]
    assert back(10) == 30
    assert back.__globals__ is pair.namespace


def test_tracebacks_in_the_rank_show_the_kernels_lines(pair):
    pair.cell("def f():\n    x = 1\n    return x / 0  # the line to see\n")
    pair.ship("f()")
    pair.launch("import traceback\ntry: f()\nexcept ZeroDivisionError: r = traceback.format_exc()")
    assert "return x / 0  # the line to see" in pair.rank("r")


def test_methods_and_comprehensions_bring_their_lines_too(pair):
    pair.cell("class A:\n    def f(self):\n        return [1 / n for n in (0,)]  # here\n")
    pair.launch(
        "import linecache, traceback\nlinecache.checkcache()\n"
        "try: A().f()\nexcept ZeroDivisionError: r = traceback.format_exc()"
    )
    assert "# here" in pair.rank("r")


def test_large_arrays_travel_beside_the_stream(pair):
    pair.namespace["big"] = np.arange(1_000_000)
    parcel = pair.ship("big")
    assert len(parcel.stream) < 1000
    assert parcel.nbytes > 8_000_000
    assert pair.rank("int(big.sum())") == 499_999_500_000


def test_a_long_stream_goes_through_shared_memory_too(pair):
    lines = pair.namespace["lines"] = [f"line {n}" for n in range(200_000)]
    array = pair.namespace["array"] = np.arange(20_000)
    parcel = pair.ship("lines, array")
    assert parcel.stream == b""
    assert pair.rank("len(lines), lines[-1], int(array.sum())") == (
        len(lines),
        lines[-1],
        array.sum(),
    )


def test_a_change_in_the_rank_leaves_the_kernels_array_alone(pair):
    big = pair.namespace["big"] = np.zeros(100_000)
    pair.launch("big[:] = 5")
    assert big.sum() == 0
    assert pair.bring("big")["big"].sum() == 500_000


@pytest.mark.parametrize(
    ("size", "beside"), [(IN_STREAM - 8, 0), (IN_STREAM, 1), (IN_STREAM + 8, 1)]
)
def test_only_large_buffers_go_beside_the_stream(size, beside):
    parcel = pack({"a": np.zeros(size, dtype="u1")}, namespace=None, follow=False)
    spans = parcel.segment.spans if parcel.segment else ()
    assert len(spans) == beside
    assert unpack(parcel, namespace=None)["a"].nbytes == size
    if parcel.segment:
        parcel.segment.close()


def test_a_mapped_file_is_opened_again_not_copied(pair, tmp_path):
    np.arange(100_000).tofile(tmp_path / "tokens.bin")
    tokens = np.memmap(tmp_path / "tokens.bin", dtype="i8", mode="r+")
    pair.namespace.update(tokens=tokens, part=tokens[500:600], every=tokens[::2], more=tokens + 1)
    parcel = pair.ship("tokens, part")
    assert parcel.nbytes < 2000
    assert pair.rank("tokens.shape, int(part[0]), type(part).__name__") == (
        (100_000,),
        500,
        "memmap",
    )
    pair.ship("every, more")
    assert pair.rank("int(every[10]), int(more[10])") == (20, 11)


def test_what_was_packed_is_let_go_without_the_collector():
    array = np.zeros(100_000)
    gone = weakref.ref(array)
    gc.disable()
    try:
        pack({"a": array}, namespace={}, follow=True).segment.close()
        del array
        assert gone() is None
    finally:
        gc.enable()


def test_packing_leaves_the_position_of_iterators_and_the_values_alone(pair):
    pair.cell("it = iter([1, 2, 3]); next(it); d = {'a': [1]}")
    pair.ship("it, d")
    pair.cell("left = list(it)")
    assert pair.namespace["left"] == [2, 3]


def test_a_parcel_can_say_what_is_in_it(pair):
    pair.namespace.update(big=np.zeros(3_000_000), small=np.zeros(1000), a=1, b=2)
    parcel = pair.ship("big, small, a, b")
    assert parcel.describe() == "big (24.0 MB), small (8.0 KB) and 2 more"
    assert parcel.describe(9).count("(") == 4


def test_ipythons_own_names_are_left_out_also_where_functions_use_them(pair):
    pair.cell(
        "class Shell:\n  def __reduce__(self): raise SystemError('shipped')\n"
        "get_ipython = Shell()\ndef f(): return get_ipython"
    )
    assert pair.ship("f()").names == ("f",)


def test_without_a_namespace_functions_carry_what_they_need():
    base = 10

    def add(x):
        return x + base

    parcel = pack({"add": add}, namespace=None, follow=False)
    assert unpack(parcel, namespace=None)["add"](1) == 11
