"""How things of the standard library travel that pickle, or cloudpickle, gets wrong.

Each reducer takes the packer and a thing, and returns what ``__reduce__`` would, or
NotImplemented to leave the thing to pickle.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import pickle
import sys
import types
import typing
import weakref
from typing import TYPE_CHECKING, Any

from jupyter_accel.launcher.parcels import by_value

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_accel.launcher.parcels.shipping import Packer

    Reducer = Callable[[Packer, Any], Any]

_STREAMS = ("stdout", "stderr", "stdin", "__stdout__", "__stderr__", "__stdin__")


def stream(packer: Packer, file: Any) -> Any:
    """Send a standard stream as its name; any other text file stays where it was opened."""
    del packer
    for name in _STREAMS:
        if file is getattr(sys, name, None):
            return getattr, (sys, name)
    if isinstance(file, io.TextIOWrapper):
        # cloudpickle would read the whole file, and move its position to do so.
        msg = "cannot pickle an open file"
        raise pickle.PicklingError(msg)
    return NotImplemented


def _method(packer: Packer, method: Any) -> Any:
    """Send ``random.randint`` and the like by name: they belong to a hidden shared object."""
    del packer
    owner: Any = method.__self__
    if owner is None or isinstance(owner, (types.ModuleType, type)):
        return NotImplemented
    module: Any = sys.modules.get(type(owner).__module__)
    if module is None or module.__name__ == "__main__":
        return NotImplemented
    if vars(module).get(method.__name__) is method:
        return getattr, (module, method.__name__)
    return NotImplemented


def _cached(packer: Packer, wrapper: Any) -> Any:
    """Send the function behind an ``lru_cache``; what it has cached stays here."""
    del packer
    if by_value.is_importable(wrapper):
        return NotImplemented
    parts = (wrapper.__wrapped__, wrapper.cache_parameters())
    return by_value.make_cached, parts, vars(wrapper)


def _cached_property(packer: Packer, cached: functools.cached_property[Any]) -> Any:
    del packer
    return by_value.make_cached_property, (cached.func, cached.attrname)


def _weak_keys(packer: Packer, mapping: weakref.WeakKeyDictionary[Any, Any]) -> Any:
    del packer
    return weakref.WeakKeyDictionary, (dict(mapping),)


def _weak_values(packer: Packer, mapping: weakref.WeakValueDictionary[Any, Any]) -> Any:
    del packer
    return weakref.WeakValueDictionary, (dict(mapping),)


def _new_type(packer: Packer, kind: Any) -> Any:
    del packer
    if by_value.is_importable(kind):
        return NotImplemented
    return type(kind), (kind.__name__, kind.__supertype__)


def _type_parameter(packer: Packer, parameter: Any) -> Any:
    del packer
    if by_value.is_importable(parameter):
        return NotImplemented
    return type(parameter), (parameter.__name__,)


def _type_alias(packer: Packer, alias: Any) -> Any:
    del packer
    if by_value.is_importable(alias):
        return NotImplemented
    build: Any = type(alias)
    made = functools.partial(build, type_params=alias.__type_params__)
    return made, (alias.__name__, alias.__value__)


def _named(name: str) -> Reducer:
    """Send one of the marks of ``dataclasses``, which are compared by identity."""
    return lambda _packer, _mark: (getattr, (dataclasses, name))


TABLE: dict[type, Reducer] = {
    types.FunctionType: lambda packer, function: packer.reduce_function(function),
    types.CellType: lambda packer, cell: packer.reduce_cell(cell),
    types.ModuleType: lambda packer, module: packer.reduce_module(module),
    types.CodeType: lambda packer, code: packer.reduce_code(code),
    types.MethodType: _method,
    types.BuiltinMethodType: _method,
    type(functools.lru_cache(int)): _cached,
    functools.cached_property: _cached_property,
    weakref.WeakKeyDictionary: _weak_keys,
    weakref.WeakValueDictionary: _weak_values,
    typing.NewType: _new_type,
    typing.ParamSpec: _type_parameter,
}
# The same for types that people derive from.
FAMILIES: dict[type, Reducer] = {io.TextIOWrapper: stream}
for _mark in ("MISSING", "KW_ONLY", "_HAS_DEFAULT_FACTORY"):
    if hasattr(dataclasses, _mark):
        TABLE[type(getattr(dataclasses, _mark))] = _named(_mark)
for _kind, _reducer in (("TypeVarTuple", _type_parameter), ("TypeAliasType", _type_alias)):
    if hasattr(typing, _kind):  # newer Pythons only
        TABLE[getattr(typing, _kind)] = _reducer
