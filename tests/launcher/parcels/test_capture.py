from __future__ import annotations

import ast
import sys
import threading

import pytest
from fresh_interpreter import modules_after

from jupyter_accel.launcher.parcels.capture import CellNames, capture, names_in
from jupyter_accel.launcher.parcels.code_names import uses_of

# A cell, the names that it needs from the notebook, and those that it binds.
READS = [
    ("", "", ""),
    ("x", "x", ""),
    ("y = x", "x", "y"),
    ("x = 1\ny = x", "", "x y"),
    ("x += 1", "x", "x"),
    ("x: int = y", "int y", "x"),
    ("x: int", "int", ""),
    ("del x", "x", ""),
    ("x = 1\ndel x\nx", "x", "x"),
    ("a.b.c = d[e]", "a d e", ""),
    ("a[i] = 1", "a i", ""),
    ("a, (b, *c) = d", "d", "a b c"),
    ("import a.b.c, d as e\nfrom f import g, h as i", "", "a e g i"),
    ("from os import *\npath", "path", ""),
    ("if a: x = 1\nx", "a x", "x"),
    ("if a: x = 1\nelse: x = 2\nx", "a", "x"),
    ("for i in n: x = i\nx, i", "n x i", "i x"),
    ("for i in n: print(last); last = i", "n print last", "i last"),
    ("for i, a[j] in n: pass", "n a j", "i"),
    ("for i in n: break\nelse: x = 1\nx", "n", "i x"),
    ("while a: x = 1\nx", "a x", "x"),
    ("with a as b, c(b) as d: x = 1\nx, b, d", "a c", "b d x"),
    ("try: x = 1\nexcept E as e: print(e)\nx, e", "E print x e", "x e"),
    ("try: x = 1\nfinally: y = x\nx, y", "x", "x y"),
    ("try: x = 1\nexcept E: x = 2\nelse: z = x\nx, z", "E z", "x z"),
    ("match a:\n  case [b, *c]: d = b\n  case {'k': e, **f}: pass\nd", "a d", "b c d e f"),
    ("match a:\n  case P(x=Q.r) if s: pass\n  case _ as w: pass", "a P Q s", "w"),
    ("[i for i in x if f(i)]", "x f", ""),
    ("{k: v for k, v in x for y in k}", "x", ""),
    ("sum(a * i for i in x)", "sum a x", ""),
    ("x = 1\n[x for _ in y]", "y", "x"),
    ("print(z := f(x)); z", "print f x", "z"),
    ("[w := i for i in x]", "x", "w"),
    ("lambda a, b=c: a + b + d", "c d", ""),
    ("f'{x} {y!r:>{z}}'", "x y z", ""),
    ("await f(x)", "f x", ""),
    ("async for i in x: pass\nasync with y as z: pass", "x y", "i z"),
    ("def f(a, b=c, *d, e=g, **h) -> i:\n  j = a + k\n  return j", "c g i k", "f"),
    ("@d\ndef f(): pass", "d", "f"),
    ("def f():\n  def g(): return x\n  return g", "x", "f"),
    ("def f(x):\n  def g(): return x\n  return g", "", "f"),
    ("def f():\n  global n\n  n = 1", "", "f n"),
    ("def f():\n  global n\n  n += 1", "n", "f n"),
    ("def f():\n  import a; b = 1; return [a, b, c]", "c", "f"),
    ("def f():\n  class C:\n    x = y\n    z = x\n  return C", "y", "f"),
    ("async def f(): return await x", "x", "f"),
    ("def f(): return f() + g()\ndef g(): return f()\nf()", "", "f g"),
    ("def f(): return x\nx = 1\nf()", "", "f x"),
    ("def f(): return x\nf()\nx = 1", "x", "f x"),
    ("def f(): return x\nx = 1", "", "f x"),
    ("@d\ndef f(): return x\nx = 1", "d x", "f x"),
    ("def g(): return f()\ndef f(): return x\nx = 1\ng()", "", "g f x"),
    ("class C(B, metaclass=M):\n  x = y\n  def m(self, z=x): return w + C.x", "B M y w", "C"),
    ("class C:\n  @property\n  def p(self): return 1\n  @p.setter\n  def p(self, v): pass",
     "property", "C"),
    ("class C:\n  a: T = 1", "T", "C"),
    ("f = open(p)\nfor line in f: pass", "open p", "f line"),
    ("x = y if a else b", "y a b", "x"),
    ("return x", "x", ""),
    ("global x\nx = 1", "", "x"),
    ("assert x, y\nraise z", "x y z", ""),
    ("__name__", "__name__", ""),
]  # fmt: skip


@pytest.mark.parametrize(("source", "read", "written"), READS)
def test_names_are_read_before_they_are_bound_and_bound_in_order(source, read, written):
    names = names_in(source)
    assert names.read == set(read.split())
    assert names.written == tuple(written.split())


@pytest.mark.skipif(sys.version_info < (3, 12), reason="needs the syntax of Python 3.12")
def test_type_aliases_and_type_parameters():
    assert names_in("type A[T] = list[T] | B").written == ("A",)
    assert "B" in names_in("type A[T] = list[T] | B").read
    assert names_in("def f[T: B](x: T) -> T: return y").read == {"B", "y"}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs the syntax of Python 3.11")
def test_groups_of_exceptions():
    names = names_in("try: x = 1\nexcept* E as e: y")
    assert names == CellNames(frozenset({"E", "y"}), ("x", "e"))


def test_a_tree_will_do_as_well():
    assert names_in(ast.parse("y = x")) == names_in("y = x")


def test_a_tree_is_left_as_it_was():
    tree = ast.parse("for a[i], b in c:\n  with d as (e, f): pass")
    before = ast.dump(tree, include_attributes=True)
    names_in(tree)
    assert ast.dump(tree, include_attributes=True) == before


def test_nothing_is_run():
    names_in("raise SystemExit(print('ran'))")


def test_a_cell_that_is_no_python_is_a_syntax_error():
    with pytest.raises(SyntaxError):
        names_in("x = = 1")


def test_attributes_are_collected_for_the_search_of_submodules():
    assert names_in("a.b.c(d.e)").attributes == {"b", "c", "e"}


MAGICS = [
    ("get_ipython().run_line_magic('time', 'train(x)')", "train x", "", ""),
    ("get_ipython().run_line_magic('timeit', '-n 10 -r 2 f(x)')", "f x", "", ""),
    ("y = get_ipython().run_line_magic('time', 'f(x)')", "f x", "y", ""),
    ("get_ipython().run_cell_magic('time', '', 'y = f(x)\\nz = y')", "f x", "y z", ""),
    ("get_ipython().run_cell_magic('capture', 'out', '%time f(x)\\ng(y)')", "out g y", "", ""),
    ("get_ipython().system('echo {x.y} $z data')", "x z", "", ""),
    ("files = get_ipython().getoutput('ls {folder}')", "folder", "files", ""),
    ("get_ipython().run_line_magic('memray', 'f x.y')", "", "", "f x"),
    ("get_ipython().run_cell_magic('bash', '', 'for i in a; do echo $i; done')", "i", "", "a do"),
    ("def f(): get_ipython().system('echo {x}')", "", "f", ""),
]


@pytest.mark.parametrize(("source", "read", "written", "hints"), MAGICS)
def test_names_in_the_text_of_magics(source, read, written, hints):
    names = names_in(source)
    assert names.read == {"get_ipython", *read.split()}
    assert names.written == tuple(written.split())
    assert names.hints >= set(hints.split())


def test_a_word_that_only_looks_like_a_name_ships_if_it_can_and_never_fails():
    namespace = {"lock": threading.Lock(), "x": 1}
    source = "get_ipython().run_line_magic('unknown', '--with lock x')"
    assert capture(names_in(source), namespace).names == ("x",)


def test_names_that_do_not_exist_are_left_to_the_rank():
    assert capture(names_in("print(missing, x)"), {"x": 1}).names == ("x",)


def test_a_builtin_that_the_notebook_shadows_travels():
    assert capture(names_in("print(x)"), {"x": 1, "print": str}).names == ("print", "x")


def test_names_of_ipython_stay_at_home_and_results_travel_when_read():
    namespace = dict.fromkeys(["In", "Out", "_", "_i", "_1", "get_ipython", "exit", "quit"], 7)
    source = "_ + Out[1]; In; get_ipython(); exit; quit; _i"
    assert capture(names_in(source), namespace).names == ("Out", "_")
    assert capture(names_in("for _ in (): pass"), namespace).names == ()


def test_what_python_keeps_in_a_module_stays_at_home():
    namespace = {"__name__": "__main__", "__builtins__": {}, "__file__": "a.py"}
    assert capture(names_in("__name__, __builtins__, __file__"), namespace).names == ("__file__",)


def test_other_names_can_be_ignored():
    assert capture(["a", "b"], {"a": 1, "b": 2}, ignore={"a"}).names == ("b",)


def uses(source):
    namespace = {}
    exec(compile(source, "<cell>", "exec", dont_inherit=True), namespace)  # noqa: S102
    return uses_of(namespace["f"].__code__)


@pytest.mark.parametrize(
    ("source", "read", "written"),
    [
        ("def f(): return a.b(c)", "a c", ""),
        ("def f(x):\n  del x\n  return lambda: [y for z in w]", "y w", ""),
        ("def f():\n  global a, b\n  a = 1; b += 1; del c", "b", "a b"),
        ("def f():\n  global d\n  del d", "d", ""),
        ("def f():\n  class C:\n    a = b\n    c = a\n    def m(self): return e", "b e", ""),
        ("def f(): import a, b.c; from d import e", "", ""),
        ("def f(): return (" + "x" + " + x" * 500 + ")", "x", ""),
        ("def f(): return [" + ", ".join(f"n{i}" for i in range(400)) + "]",
         " ".join(f"n{i}" for i in range(400)), ""),
    ],
)  # fmt: skip
def test_the_globals_of_a_function_are_read_from_its_code(source, read, written):
    found = uses(source)
    assert set(found.read) == set(read.split())
    assert set(found.written) == set(written.split())


def test_attributes_are_no_globals():
    assert "b" in uses("def f(): return a.b").attributes
    assert "b" not in uses("def f(): return a.b").read


@pytest.mark.parametrize("module", ["capture", "shipping", "segment", "obstacles"])
def test_the_launcher_side_imports_neither_torch_nor_numpy_nor_ipython(module):
    loaded = modules_after(f"import jupyter_accel.launcher.parcels.{module}")
    assert not {"torch", "numpy", "IPython"} & set(loaded)
