"""Explain why a value cannot travel: where inside it the obstacle sits, and what to do.

Searching is slow, and happens only once packing has failed; it is bounded in time.
"""

from __future__ import annotations

import functools
import time
import types
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jupyter_accel.errors import ShippingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Probe = Callable[[object], BaseException | None]

_SECONDS = 2.0
_MOST_PARTS = 10_000

# Types by full name: what a person calls them. A subclass counts as its base.
_KINDS = {
    "_thread.lock": "a lock",
    "_thread.RLock": "a lock",
    "_thread._local": "a set of thread-local variables",
    "threading.Condition": "a lock",
    "threading.Semaphore": "a lock",
    "threading.Event": "an event between threads",
    "threading.Barrier": "a barrier between threads",
    "threading.Thread": "a thread",
    "queue.Queue": "a queue between threads",
    "_queue.SimpleQueue": "a queue between threads",
    "concurrent.futures._base.Executor": "a pool of workers",
    "concurrent.futures._base.Future": "a result that is being computed",
    "multiprocessing.pool.Pool": "a pool of workers",
    "multiprocessing.process.BaseProcess": "a process",
    "multiprocessing.managers.BaseManager": "a process",
    "multiprocessing.queues.Queue": "a queue between processes",
    "multiprocessing.synchronize.SemLock": "a lock between processes",
    "multiprocessing.connection._ConnectionBase": "a connection",
    "subprocess.Popen": "a running program",
    "_io._IOBase": "an open file",
    "tempfile._TemporaryFileWrapper": "an open file",
    "mmap.mmap": "a mapped file",
    "_socket.socket": "a socket",
    "_ssl._SSLContext": "a secure connection's context",
    "sqlite3.Connection": "a database connection",
    "sqlite3.Cursor": "a database cursor",
    "builtins.generator": "a generator that has started or may start",
    "builtins.coroutine": "a coroutine",
    "builtins.async_generator": "an asynchronous generator",
    "builtins.frame": "a frame of a running function",
    "builtins.traceback": "a traceback",
    "builtins.weakref": "a weak reference",
    "weakref.ReferenceType": "a weak reference",
    "weakref.finalize": "a finalizer",
    "_contextvars.ContextVar": "a context variable",
    "_contextvars.Context": "a context",
    "_asyncio.Future": "a task of this process's event loop",
    "_asyncio.Task": "a task of this process's event loop",
    "asyncio.events.AbstractEventLoop": "an event loop",
    "torch.utils.data.dataloader._BaseDataLoaderIter": "a live iterator of a DataLoader",
    "torch.cuda.streams.Stream": "a CUDA stream",
    "torch.cuda.streams.Event": "a CUDA event",
    "torch.cuda.graphs.CUDAGraph": "a CUDA graph",
    "torch._C.Stream": "a stream of a device",
    "torch._C.Event": "an event of a device",
    "torch._C._distributed_c10d.ProcessGroup": "a process group",
    "torch._C._distributed_c10d.Store": "a store of a process group",
}
_RENAMED = {"_io.StringIO", "_io.BytesIO"}  # in memory: these do travel


@dataclass(frozen=True, slots=True)
class Place:
    """Where something sits: an expression, and the functions one passes to reach it."""

    expression: str
    by_way_of: str = ""

    def __str__(self) -> str:
        return f"`{self.expression}`{self.by_way_of}"

    def subject(self, name: str) -> str:
        """Begin a sentence about what sits here, within the value of ``name``."""
        if self == Place(name):
            return "it"
        return f"{self}," if self.by_way_of else str(self)

    def attribute(self, name: str) -> Place:
        """Go to an attribute."""
        return Place(f"{self.expression}.{name}", self.by_way_of)

    def item(self, key: object) -> Place:
        """Go to an item."""
        return Place(f"{self.expression}[{_short(key)}]", self.by_way_of)

    def enclosed(self, variable: str, what: str) -> Place:
        """Go to a variable that a function carries with it."""
        return Place(variable, f", {what} `{self.expression}`{self.by_way_of}")


def kind_of(value: object) -> str:
    """Say what a value is, if it is of a kind that is known to belong to one process."""
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(value).__mro__]
    if _RENAMED.intersection(names):
        return ""
    for name in names:
        if name in _KINDS:
            return _KINDS[name]
    if all(hasattr(type(value), method) for method in ("cursor", "commit", "rollback")):
        return "a database connection"
    if all(hasattr(type(value), method) for method in ("execute", "fetchone", "fetchall")):
        return "a database cursor"
    return ""


def find(name: str, value: object, error: BaseException, probe: Probe) -> Found:
    """Find the nearest part of ``value`` that cannot be packed although its own parts can."""
    deadline = time.monotonic() + _SECONDS
    first = Found(Place(name), value, error)
    queue = deque([first])
    seen = {id(value)}
    keep: list[object] = []  # parts may be made on the way; their ids must stay theirs
    while queue:
        found = queue.popleft()
        if kind_of(found.value):
            return found
        stuck = False
        for count, (place, part) in enumerate(_parts(found.place, found.value)):
            if count > _MOST_PARTS or time.monotonic() > deadline:
                return found
            failure = probe(part)
            if failure is None:
                continue
            stuck = True
            if id(part) not in seen:
                seen.add(id(part))
                keep.append(part)
                queue.append(Found(place, part, failure))
        if not stuck:
            return found
    return first


@dataclass(frozen=True, slots=True)
class Found:
    """A part that cannot be packed, and what packing it alone said."""

    place: Place
    value: object
    error: BaseException


def explain(  # noqa: PLR0913 - one message has that many ingredients
    name: str,
    value: object,
    error: Exception,
    *,
    probe: Probe,
    reader: str,
    to_rank: bool,
) -> ShippingError:
    """Build the error that says what is in the way, who reads it, and what to do."""
    found = find(name, value, error, probe)
    where = "to the ranks" if to_rank else "back to the kernel"
    what = kind_of(found.value)
    sentences = [
        f"`{name}` cannot travel {where}: {found.place.subject(name)} is {_a_kind(found, what)}."
    ]
    if reader:
        sentences.append(f"`{reader}` reads `{name}`.")
    sentences.extend(_remedy(what, reader, to_rank=to_rank))
    return ShippingError(" ".join(sentences), name=name)


def _a_kind(found: Found, what: str) -> str:
    kind = type(found.value)
    full = kind.__qualname__ if kind.__module__ in _PLAIN else _full_name(kind)
    if what:
        return f"{what} ({full}), which belongs to the process that made it"
    if isinstance(found.error.__cause__ or found.error, RecursionError):
        return f"nested too deeply to be taken apart ({full})"
    said = f"{type(found.error).__name__}: {found.error}"
    if isinstance(found.value, type):
        return f"a class that cannot be pickled ({said})"
    return f"an object of type {full} that cannot be pickled ({said})"


_PLAIN = ("builtins", "__main__")


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _remedy(what: str, reader: str, *, to_rank: bool) -> Iterator[str]:
    if not to_rank:
        yield "Keep it in the rank: bring back the numbers, tensors or text that you need from it."
        return
    inside = (
        f"inside `{reader}` or in the cell that the ranks run"
        if reader
        else ("in the cell that the ranks run")
    )
    if what == "a live iterator of a DataLoader":
        yield f"Build the DataLoader {inside}, or `del` the iterator first."
    elif what.startswith("a database"):
        yield f"Connect {inside}: each rank needs a connection of its own."
    elif what == "an open file":
        yield f"Open it {inside}, by its path."
    else:
        yield f"Create it {inside}."
    if "CUDA" not in what:
        yield "Or use `--start-method fork`, which gives the ranks a copy of the whole kernel."


def _short(key: object) -> str:
    text = (
        repr(key)
        if isinstance(key, (str, int, float, bool, bytes, tuple))
        else (f"<{type(key).__qualname__}>")
    )
    return text if len(text) <= 40 else f"{text[:37]}..."  # noqa: PLR2004


def _parts(place: Place, value: object) -> Iterator[tuple[Place, object]]:
    """Yield what packing ``value`` would pack in turn, each with its place."""
    take_apart = _BY_TYPE.get(type(value))
    if take_apart is not None:
        return take_apart(place, value)
    if isinstance(value, type):
        return _parts_of_class(place, value)
    return _parts_of_object(place, value)


def _parts_of_method(place: Place, method: types.MethodType) -> Iterator[tuple[Place, object]]:
    yield place.attribute("__self__"), method.__self__
    yield place, method.__func__


def _parts_of_partial(
    place: Place, partial: functools.partial[Any]
) -> Iterator[tuple[Place, object]]:
    yield place.attribute("func"), partial.func
    yield place.attribute("args"), partial.args
    yield place.attribute("keywords"), partial.keywords


def _parts_of_property(place: Place, value: property) -> Iterator[tuple[Place, object]]:
    for function in (value.fget, value.fset, value.fdel):
        yield place, function


def _parts_of_wrapper(
    place: Place, wrapper: classmethod[Any, Any, Any] | staticmethod[Any, Any]
) -> Iterator[tuple[Place, object]]:
    yield place, wrapper.__func__


def _parts_of_class(place: Place, kind: type) -> Iterator[tuple[Place, object]]:
    for name, attribute in list(vars(kind).items()):
        if name not in ("__dict__", "__weakref__", "__module__", "__doc__"):
            yield place.attribute(name), attribute
    for base in kind.__bases__:
        yield Place(base.__qualname__, f", a base of {place}"), base


def _parts_of_dict(place: Place, mapping: dict[object, object]) -> Iterator[tuple[Place, object]]:
    for key, item in list(mapping.items()):
        yield place.item(key), item
        yield Place(_short(key), f", a key of {place}"), key


def _parts_of_sequence(
    place: Place, items: list[object] | tuple[object, ...]
) -> Iterator[tuple[Place, object]]:
    for index, item in enumerate(list(items)):
        yield place.item(index), item


def _parts_of_set(place: Place, items: set[object]) -> Iterator[tuple[Place, object]]:
    for item in list(items):
        yield Place(_short(item), f", a member of {place}"), item


def _parts_of_function(
    place: Place, function: types.FunctionType
) -> Iterator[tuple[Place, object]]:
    for variable, cell in zip(
        function.__code__.co_freevars, function.__closure__ or (), strict=True
    ):
        try:
            content = cell.cell_contents
        except ValueError:  # empty
            continue
        yield place.enclosed(variable, "which is a variable enclosed in"), content
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    names = arguments[len(arguments) - len(defaults) :]
    for name, default in [*zip(names, defaults, strict=True), *_items(function.__kwdefaults__)]:
        yield place.enclosed(name, "which is the default of an argument of"), default
    for name, annotation in _items(function.__annotations__):
        yield place.enclosed(name, "which annotates"), annotation
    for name, attribute in _items(vars(function)):
        yield place.attribute(name), attribute


def _items(mapping: dict[str, Any] | None) -> list[tuple[str, Any]]:
    return list((mapping or {}).items())


def _parts_of_object(place: Place, value: object) -> Iterator[tuple[Place, object]]:
    try:
        reduced = value.__reduce_ex__(5)
    except Exception:  # noqa: BLE001 - then the value itself is what cannot be packed
        return
    if not isinstance(reduced, tuple):
        return
    _, arguments, state, items, pairs = (*reduced, None, None, None, None)[:5]
    yield from _parts_of_state(place, state)
    yield from _parts_of_sequence(place, list(items or ()))
    for key, item in pairs or ():
        yield place.item(key), item
    for argument in arguments:
        if isinstance(argument, type):
            yield Place(argument.__qualname__, f", the class of {place}"), argument
        else:
            yield place, argument


def _parts_of_state(place: Place, state: object) -> Iterator[tuple[Place, object]]:
    for part in state if isinstance(state, tuple) else (state,):
        if not isinstance(part, dict):
            yield place, part
            continue
        for name, attribute in list(part.items()):
            step = place.attribute(name) if isinstance(name, str) else place.item(name)
            yield step, attribute


_BY_TYPE: dict[type, Callable[[Place, Any], Iterator[tuple[Place, object]]]] = {
    types.FunctionType: _parts_of_function,
    types.MethodType: _parts_of_method,
    functools.partial: _parts_of_partial,
    property: _parts_of_property,
    classmethod: _parts_of_wrapper,
    staticmethod: _parts_of_wrapper,
    dict: _parts_of_dict,
    list: _parts_of_sequence,
    tuple: _parts_of_sequence,
    set: _parts_of_set,
    frozenset: _parts_of_set,
}
