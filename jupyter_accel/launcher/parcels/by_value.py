"""How functions and classes that were written in cells are taken apart and built again.

A function keeps its link to the notebook: its globals *are* the namespace of the process
that it arrives in, so that a cell that rebinds a name changes what the function sees.
A class keeps its identity: a process that sent a class and gets an instance back finds
its own class, untouched.
"""

from __future__ import annotations

import functools
import marshal
import sys
import types
import typing
import uuid
import weakref
from contextlib import contextmanager
from enum import Enum
from types import CellType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Setter = Callable[[Any, Any], object]
    Reduced = tuple[Any, ...]

# Classes that travelled, their ids, and those among them that were built here from a
# stream. Weak: a class that nobody uses any more may go.
_classes: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
_ids: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
_arrived: weakref.WeakSet[type] = weakref.WeakSet()


def is_importable(thing: Any) -> bool:
    """Tell whether importing its module and following its name leads to this very object."""
    name = getattr(thing, "__module__", None)
    if not isinstance(name, str) or name in ("__main__", "__mp_main__"):
        return False
    found: Any = sys.modules.get(name)
    for part in thing.__qualname__.split("."):
        found = getattr(found, part, None)
        if found is None:
            return False
    return found is thing


def home_module(function: FunctionType) -> ModuleType | None:
    """Return the importable module whose globals a function uses, if there is one."""
    module = sys.modules.get(function.__globals__.get("__name__", ""))
    if module is None or module.__name__ in ("__main__", "__mp_main__"):
        return None
    return module if vars(module) is function.__globals__ else None


def reduce_code(code: CodeType) -> Any:
    """Take a code object apart; both ends run the same interpreter, so marshal will do."""
    try:
        return marshal.loads, (marshal.dumps(code),)
    except ValueError:  # a tool has put other things than constants among its constants
        return NotImplemented


def function_attributes(function: FunctionType, home: str | None) -> dict[str, Any]:
    """Return what a function has beyond its code, leaving out what the code implies."""
    code = function.__code__
    documented = code.co_consts[0] if code.co_consts else None
    implied: dict[str, Any] = {
        "__qualname__": getattr(code, "co_qualname", code.co_name),
        "__module__": home,
        "__doc__": documented if isinstance(documented, str) else None,
        "__defaults__": None,
        "__kwdefaults__": None,
        "__annotations__": {},
        "__type_params__": (),
    }
    return {
        key: value
        for key, usual in implied.items()
        if (value := getattr(function, key, usual)) is not usual and value != usual
    }


def make_function(
    code: CodeType,
    home: dict[str, Any] | ModuleType,
    name: str,
    closure: tuple[CellType, ...] | None,
) -> FunctionType:
    """Build a function without defaults; ``set_function`` adds what may refer back to it."""
    where = vars(home) if isinstance(home, ModuleType) else home
    return FunctionType(code, where, name, None, closure)


def set_function(function: FunctionType, state: tuple[Any, ...]) -> None:
    """Fill in attributes and the cells that no earlier function has filled."""
    attributes, own, cells = state
    for key, value in attributes.items():
        setattr(function, key, value)
    if own:
        function.__dict__.update(own)
    for cell, content in cells:
        cell.cell_contents = content


def set_cell(cell: CellType, content: tuple[Any]) -> None:
    """Fill a cell that was reached by itself, after it has been remembered."""
    cell.cell_contents = content[0]


def reduce_class(kind: type, reduced: Reduced) -> Reduced:
    """Give a class that cloudpickle took apart an id, by which it is known from then on."""
    build, arguments, state, _, _, fill = reduced
    number = remember(kind)
    filling = ((fill, state), None, None, fill_class)
    if issubclass(kind, Enum):
        return build_enum, (number, build, arguments), *filling
    meta, name, bases, body = arguments[:4]
    if "__slots__" in vars(kind):
        # Without it the class would arrive with a __dict__ in place of its slots.
        body["__slots__"] = vars(kind)["__slots__"]
    if typing.NamedTuple in bases:  # a function that makes another kind of class
        body["__orig_bases__"], bases = bases, kind.__bases__
    return build_class, (number, meta, name, bases, body), *filling


def remember(kind: type) -> str:
    """Return the id of a class; a forked process keeps the ids that it inherits."""
    number = _ids.get(kind)
    if number is None:
        number = _ids[kind] = uuid.uuid4().hex
        _classes[number] = kind
    return number


def build_class(
    number: str, meta: type, name: str, bases: tuple[Any, ...], body: dict[str, Any]
) -> type:
    """Return the class known by this id, or an empty one to fill."""
    known = _classes.get(number)
    if known is not None:
        return known
    resolved = types.resolve_bases(bases)
    if resolved is not bases:
        body.setdefault("__orig_bases__", bases)
    # What the user's metaclass and ``__init_subclass__`` did has been done, and travels with
    # the class; those of libraries run, as this process's copy of the library is another.
    maker: Any = next(kind for kind in meta.__mro__ if kind not in _ids)
    with _quiet(resolved):
        if maker is meta:
            made = types.new_class(name, resolved, {"metaclass": meta}, lambda ns: ns.update(body))
        else:
            made = maker.__new__(meta, name, resolved, body)
    return _arrive(number, made)


def build_enum(number: str, build: Callable[..., type], arguments: tuple[object, ...]) -> type:
    """Return the enumeration known by this id, or a new one with its members."""
    known = _classes.get(number)
    return known if known is not None else _arrive(number, build(*arguments))


def _arrive(number: str, made: type) -> type:
    _ids[made] = number
    _classes[number] = made
    _arrived.add(made)
    return made


@contextmanager
def _quiet(bases: tuple[type, ...]) -> Iterator[None]:
    """Let the bases that travelled not notice that a class is derived from them again."""
    kept = {
        kind: vars(kind)["__init_subclass__"]
        for base in bases
        for kind in base.__mro__
        if kind in _ids and "__init_subclass__" in vars(kind)
    }
    for kind in kept:
        type.__setattr__(kind, "__init_subclass__", classmethod(_pass_on(kind)))
    try:
        yield
    finally:
        for kind, method in kept.items():
            type.__setattr__(kind, "__init_subclass__", method)


def _pass_on(owner: Any) -> Callable[[Any], None]:
    def init_subclass(kind: Any) -> None:
        super(owner, kind).__init_subclass__()

    return init_subclass


def fill_class(kind: type, state: tuple[Setter, object]) -> None:
    """Give a class its attributes, unless it was defined in this process."""
    fill, attributes = state
    if kind in _arrived:
        fill(kind, attributes)


def make_cached(wrapped: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    """Build an ``lru_cache`` again, empty."""
    return functools.lru_cache(**parameters)(wrapped)


def make_cached_property(getter: Callable[[Any], Any], name: str | None) -> object:
    """Build a ``cached_property`` again; before Python 3.12 it holds a lock of its own."""
    made: functools.cached_property[Any] = functools.cached_property(getter)
    if name is not None:
        made.attrname = name
    return made


def remember_classes(namespace: Mapping[str, object]) -> None:
    """Give the classes of a notebook their ids before a fork.

    A forked rank inherits the ids, so that what it sends back is an instance of the class
    that the kernel knows.
    """
    for value in list(namespace.values()):
        kind = value if isinstance(value, type) else type(value)
        for each in kind.__mro__:
            if each.__module__ == "__main__":
                remember(each)
                remember_classes({k: v for k, v in vars(each).items() if isinstance(v, type)})
