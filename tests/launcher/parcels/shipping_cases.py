"""Cells of a kernel, cells that then run in a rank (--), and what holds there (>>)."""

from __future__ import annotations

_TEXT = """
== a function sees a global that the rank binds again
x = 1
def f(): return x
--
x = 5
r = f()
>> r == 5
== a function may bind a global
n = 0
def f():
  global n
  n += 1
--
f(); f()
>> n == 2
== recursion
def f(n): return 1 if n < 2 else n * f(n - 1)
--
r = f(5)
>> r == 120
== defaults, annotations, attributes and docstring
def f(a: int, b=2, *, c=3) -> str:
  'doc'
  return a, b, c
f.tag = 't'
--
r = f(1), f.tag, f.__doc__, f.__annotations__
>> r == ((1, 2, 3), 't', 'doc', {'a': int, 'return': str})
== closures share their cells
def make():
  n = 0
  def up():
    nonlocal n
    n += 1
  def get(): return n
  return up, get
up, get = make()
--
up(); up(); r = get()
>> r == 2
== a closure that refers to itself
def make():
  def f(n): return 0 if n == 0 else 1 + f(n - 1)
  return f
f = make()
--
r = f(3)
>> r == 3
== an empty cell
def make():
  def f(): return late
  if False: late = 1
  return f
f = make()
--
try: f()
except NameError: r = 1
>> r == 1
== lambdas with defaults and closures
fs = [lambda i=i: i for i in range(3)]
add = (lambda k: lambda x: x + k)(3)
--
r = [f() for f in fs], add(1)
>> r == ([0, 1, 2], 4)
== super and isinstance
class A:
  def f(self): return 'A'
class B(A):
  def f(self): return super().f() + 'B'
b = B()
--
r = b.f(), B().f(), isinstance(b, B), isinstance(b, A)
>> r == ('AB', 'AB', True, True)
== a class from a function
def make(n):
  class L:
    def f(self): return n
    def g(self): return L
  return L
L = make(3)
l = L()
--
r = l.f(), l.g() is L
>> r == (3, True)
== properties and their relatives
import functools
class A:
  @property
  def p(self): return 1
  @classmethod
  def c(cls): return cls
  @staticmethod
  def s(): return 2
  @functools.cached_property
  def cp(self): return 3
  @functools.lru_cache(maxsize=3)
  def lc(self): return 4
  @functools.singledispatchmethod
  def sd(self, x): return 'o'
  @sd.register
  def _(self, x: int): return 'i'
  pm = functools.partialmethod(lambda self, a: a, 5)
a = A()
--
r = (a.p, A.c() is A, A.s(), a.cp, a.lc(), a.sd(1), a.sd('x'), a.pm())
>> r == (1, True, 2, 3, 4, 'i', 'o', 5)
== a descriptor that was told its name
class D:
  def __set_name__(s, o, n): s.n = n
  def __get__(s, o, t): return s.n
class A: field = D()
a = A()
--
r = a.field
>> r == 'field'
== slots
class P: __slots__ = ('a',)
class C(P): __slots__ = ('b', '__weakref__')
c = C(); c.a = 1; c.b = 2
--
r = c.a, c.b, hasattr(c, '__dict__')
>> r == (1, 2, False)
== dataclasses, also as a base
from dataclasses import dataclass, field, fields, MISSING
@dataclass
class C:
  x: int
  y: list = field(default_factory=list)
c = C(1)
--
@dataclass
class D(C):
  z: int = 3
r = D(1).y, C(2).y, c == C(1), fields(C)[0].default is MISSING, repr(c)
>> r == ([], [], True, True, 'C(x=1, y=[])')
== frozen dataclasses with slots
from dataclasses import dataclass
@dataclass(slots=True, frozen=True)
class C:
  x: int
  y: int = 2
c = C(1)
--
r = c.y, hasattr(c, '__dict__'), hash(C(1)) == hash(c)
>> r == (2, False, True)
== enumerations
import enum
class E(enum.Enum):
  A = 1
  B = 2
  def f(self): return self.value
class F(enum.IntFlag):
  X = 1
  Y = 2
xy = F.X | F.Y
d = {E.A: 1}
class S(str, enum.Enum): A = 'a'
class Auto(enum.Enum):
  P = enum.auto()
  Q = enum.auto()
--
r = d[E.A], E.B.f(), F.X in xy, E(1) is E.A, S('a') is S.A, S.A == 'a', Auto.Q.value
>> r == (1, 2, True, True, True, True, 2)
== named tuples and typed dictionaries
from collections import namedtuple
from typing import NamedTuple, TypedDict
P = namedtuple('P', 'x y')
class N(NamedTuple):
  a: int
  b: str = 'q'
class T(TypedDict):
  k: int
p = P(1, 2); n = N(3)
--
r = (p.x, n.b, P(1, 2) == p, T(k=1), N(3) == n, N._fields)
>> r == (1, 'q', True, {'k': 1}, True, ('a', 'b'))
== abstract classes and registered ones
import abc
class A(abc.ABC):
  @abc.abstractmethod
  def f(self): ...
class B(A):
  def f(self): return 1
@A.register
class V: pass
b = B()
--
r = isinstance(b, A), isinstance(V(), A)
try: A(); e = 0
except TypeError: e = 1
>> r == (True, True) and e
== a metaclass with keywords
class M(type):
  def __new__(m, n, b, d, flag):
    c = super().__new__(m, n, b, d)
    c.flag = flag; return c
  def __init__(c, n, b, d, flag): pass
  def hi(c): return c.__name__
class A(metaclass=M, flag=3): pass
--
r = A.flag, A.hi(), type(A) is M
>> r == (3, 'A', True)
== a base is not told twice of what derives from it
seen = []
class A:
  def __init_subclass__(cls, tag): seen.append(tag); cls.tag = tag
class B(A, tag='x'): pass
--
n = list(seen)
class C(A, tag='y'): pass
r = B.tag, n, seen
>> r == ('x', ['x'], ['x', 'y'])
== generics, protocols and what typing makes
from typing import *
T = TypeVar('T')
P = ParamSpec('P')
U = NewType('U', int)
class B(Generic[T]):
  def g(self, x: T) -> T: return x
@runtime_checkable
class Pr(Protocol):
  def g(self, x): ...
L = List[int]
Opt = Optional[B[int]]
--
r = B[int]().g(1), isinstance(B(), Pr), U(3), P.__name__, L, Opt
>> r[:4] == (1, True, 3, 'P')
== exceptions
class Bad(ValueError):
  def __init__(self, a, b=None): super().__init__(a); self.b = b
e = Bad('x', b=3)
--
r = e.args, e.b
try: raise Bad(1)
except Bad: pass
>> r == (('x',), 3)
== decorated functions
import functools
def deco(f):
  @functools.wraps(f)
  def w(*a): return f(*a) * 2
  return w
@deco
def g(x): return x + y
y = 1
--
r = g(1); y = 10; r2 = g(1)
>> (r, r2) == (4, 22)
== decorators of libraries keep their module's globals
import contextlib
@contextlib.contextmanager
def c(): yield 5
--
with c() as v: pass
r = v, type(c()).__module__
>> r == (5, 'contextlib')
== caches and single dispatch
import functools
@functools.lru_cache
def f(x): return x + 1
@functools.cache
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
@functools.singledispatch
def sd(x): return 'o'
@sd.register
def _(x: int): return 'i'
--
r = f(1), fib(50), sd(1), sd('')
>> r == (2, 12586269025, 'i', 'o')
== bound methods keep their object
class A:
  def __init__(self): self.v = 1; self.cb = self.m
  def m(self): return self.v
a = A(); m = a.m
--
a.v = 7; r = m(), a.cb()
>> r == (7, 7)
== collections
from collections import *
d = defaultdict(lambda: defaultdict(list))
d[1][2].append(3)
q = deque([1], maxlen=2)
ks = d.keys()
--
r = d[1][2], d[5][5], q.maxlen, list(ks)
>> r == ([3], [], 2, [1])
== generator and coroutine functions
def g(n):
  for i in range(n): yield i * k
k = 2
async def co(): return k
--
import asyncio
r = list(g(3)), asyncio.run(co())
>> r == ([0, 2, 4], 2)
== iterators where they stand
it = iter([1, 2, 3]); next(it); e = enumerate('ab')
--
r = list(it), list(e)
>> r == ([2, 3], [(0, 'a'), (1, 'b')])
== functions of hidden random generators obey the seed
from random import randint
import random
from numpy.random import rand
import numpy as np
--
random.seed(3); a = randint(0, 10**9); random.seed(3); b = random.randint(0, 10**9)
np.random.seed(1); c = rand(); np.random.seed(1); d = np.random.rand()
>> a == b and c == d
== builtins that the notebook shadows
def print(*a): return 'mine'
sum = lambda x: -1
--
r = print(1), sum([1])
>> r == ('mine', -1)
== submodules of a package that a function uses
import xml.dom.minidom, os.path
def f(): return xml.dom.minidom.parseString('<a/>').documentElement.tagName
--
r = f(), os.path.join('a', 'b')
>> r == ('a', 'a/b')
== submodules of a package that the cell uses
import xml.etree.ElementTree
--
r = xml.etree.ElementTree.fromstring('<b/>').tag
>> r == 'b'
== one object under several names
x = [1]; y = [x]; z = {'x': x}; none = object()
def f(a=none): return a is none
x.append(y)
--
r = y[0] is x, z['x'] is x, f(), x[1] is y
>> r == (True,) * 4
== weak dictionaries
import weakref
class K: pass
k = K()
w = weakref.WeakKeyDictionary({k: 1})
v = weakref.WeakValueDictionary({1: k})
--
r = w[k], v[1] is k
>> r == (1, True)
== standard streams, loggers, patterns and paths
import sys, logging, re, pathlib
out = sys.stdout
log = logging.getLogger('q')
rx = re.compile('a+')
p = pathlib.Path('/tmp')
--
r = out is sys.stdout, log is logging.getLogger('q'), rx.match('aa').end(), str(p)
>> r == (True, True, 2, '/tmp')
== the namespace itself and its module
g = globals()
import __main__ as me
--
r = g is globals(), vars(me) is globals()
>> r == (True, True)
== data frames
import pandas as pd, numpy as np
df = pd.DataFrame({'a': np.arange(100_000), 's': ['x'] * 100_000})
--
n = int(df.a.sum()); df.loc[0, 'a'] = 7
r = n, df.s.iloc[0], int(df.a.iloc[0])
>> r == (4999950000, 'x', 7)
== arrays of all kinds
import numpy as np
a = np.arange(100_000); ro = np.arange(100_000)
ro.flags.writeable = False
t = a.reshape(100, 1000).T; st = np.array(['a', 'b'])
o = np.array([1, 'x', None], dtype=object); s = a[::2]
rec = np.zeros(10_000, dtype=[('a', 'f8'), ('b', 'i4')])
F = np.asfortranarray(np.ones((300, 300))); z = np.empty((0, 3)); sc = np.float64(3)
--
a[0] = 9
r = a[0], ro.flags.writeable, t.shape, st[1], o[1], s[1], rec['a'].sum(), z.shape, sc
r += (F.flags.f_contiguous,)
>> r == (9, False, (1000, 100), 'b', 'x', 2, 0, (0, 3), 3, True)
"""


def _cases():
    for text in _TEXT.removeprefix("\n== ").split("\n== "):
        title, _, body = text.partition("\n")
        cells, _, holds = body.partition("\n>> ")
        kernel, _, rank = cells.partition("\n--\n")
        yield title, (kernel, rank, holds.strip())


CASES = dict(_cases())
