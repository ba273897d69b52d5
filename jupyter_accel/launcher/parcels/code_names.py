"""Which global names a code object reads and writes, straight from its instructions."""

from __future__ import annotations

import inspect
import opcode
import sys
from dataclasses import dataclass, field
from enum import Enum
from types import CodeType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Kind(Enum):
    """What an instruction does with a name."""

    READ = "read"
    WRITE = "write"
    DELETE = "delete"
    CODE = "code"  # an inner function, class body or comprehension is about to be made


# The operations on names that are not local; what this Python lacks is left out.
_KINDS = {
    opcode.opmap[name]: kind
    for name, kind in {
        "LOAD_NAME": Kind.READ,
        "LOAD_GLOBAL": Kind.READ,
        "LOAD_FROM_DICT_OR_GLOBALS": Kind.READ,
        "STORE_NAME": Kind.WRITE,
        "STORE_GLOBAL": Kind.WRITE,
        "DELETE_NAME": Kind.DELETE,
        "DELETE_GLOBAL": Kind.DELETE,
        "LOAD_CONST": Kind.CODE,
    }.items()
    if name in opcode.opmap
}
_LOAD_GLOBAL = opcode.opmap["LOAD_GLOBAL"]
# From 3.11 on the lowest bit of LOAD_GLOBAL's argument says whether a call follows.
_GLOBAL_SHIFT = 1 if sys.version_info >= (3, 11) else 0
# A class body begins with reading the name of its module, of itself.
GIVEN = ("__name__",)
_EXTENDED_ARG = opcode.opmap["EXTENDED_ARG"]


def events(code: CodeType) -> Iterator[tuple[Kind, str | CodeType]]:
    """Yield what ``code`` itself does with names that are not local, in order."""
    raw = code.co_code
    names, constants = code.co_names, code.co_consts
    extended = 0
    for position in range(0, len(raw), 2):
        operation, argument = raw[position], raw[position + 1] | extended
        if operation == _EXTENDED_ARG:
            extended = argument << 8
            continue
        extended = 0
        kind = _KINDS.get(operation)
        if kind is None:
            continue
        if kind is Kind.CODE:
            if isinstance(constants[argument], CodeType):
                yield kind, constants[argument]
        elif operation == _LOAD_GLOBAL:
            yield kind, names[argument >> _GLOBAL_SHIFT]
        else:
            yield kind, names[argument]


def is_class_body(code: CodeType) -> bool:
    """Tell a class body from a function: its names live in a dictionary."""
    return not code.co_flags & inspect.CO_OPTIMIZED


@dataclass(frozen=True, slots=True)
class Uses:
    """What a function uses when called, inner functions included; in order, without repeats.

    Attributes:
        read: names of globals that it reads or deletes.
        written: names of globals that it binds.
        attributes: every name in its code, those of attributes above all.
    """

    read: dict[str, None] = field(default_factory=dict)
    written: dict[str, None] = field(default_factory=dict)
    attributes: set[str] = field(default_factory=set)


def uses_of(code: CodeType) -> Uses:
    """Return what calling ``code`` may touch: ``model.loss`` reads ``model`` only."""
    uses = Uses()
    _collect(code, uses)
    return uses


def _collect(code: CodeType, uses: Uses) -> None:
    in_class = is_class_body(code)
    own = set(GIVEN) if in_class else set()  # a class body's own names
    uses.attributes.update(code.co_names)
    for kind, item in events(code):
        if isinstance(item, CodeType):
            _collect(item, uses)
        elif kind is not Kind.WRITE:
            if item not in own:
                uses.read.setdefault(item)
        elif in_class:
            own.add(item)
        else:
            uses.written.setdefault(item)
