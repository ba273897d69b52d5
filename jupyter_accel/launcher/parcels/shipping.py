"""Pack values by name in one process and unpack them in another, by value and fast.

Small things go into one stream of pickles with one memory, so that two names for one
object still are one object on the other side; large buffers go beside it into shared
memory, which every receiver maps without a copy.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import io
import linecache
import pickle
import sys
import types
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import cloudpickle

from jupyter_accel.launcher.parcels import by_value, code_names, obstacles, reducers
from jupyter_accel.launcher.parcels.inheritance import Inherited
from jupyter_accel.launcher.parcels.segment import Loose, Segment

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

IN_STREAM = 64 * 1024  # a smaller buffer is cheaper to copy than to map
_LONG = 1024 * 1024  # a longer stream goes beside itself, once for all receivers

# A library's own reducers, used only once the library is loaded: it need not be installed.
LIBRARIES = {
    "numpy": "jupyter_accel.array_shipping",
    "torch": "jupyter_accel.tensor_shipping",
}

_CLOUDPICKLE_TABLE = dict(cloudpickle.Pickler.dispatch_table.maps[0])
_DYNAMIC_CLASS = 6  # what cloudpickle returns for a class that it takes apart

# The first pickle of every stream puts the receiver's namespace into the memory as number 0.
_OPENING = pickle.PROTO + b"\x05" + pickle.BININT1 + b"\x00" + pickle.BINPERSID + pickle.MEMOIZE
_OPENING += pickle.STOP

# What Python and IPython put into a namespace for themselves: each process has its own.
OWN = frozenset(
    (
        *("__builtins__", "__builtin__", "__name__", "__spec__", "__loader__", "__package__"),
        *("__doc__", "In", "get_ipython", "exit", "quit", "_ih", "_dh", "_i", "_ii", "_iii"),
    )
)


@dataclass(frozen=True, slots=True)
class Parcel:
    """Values on their way: a stream, its large buffers, and what helps to use them.

    Attributes:
        stream: the pickles, one for each name; empty if they are the segment's last buffer.
        segment: the large buffers, or None.
        sources: lines of the cells that shipped code came from, for tracebacks.
        sizes: the names, in order, with the bytes that each added.
        imports: submodules that the shipped code reaches through a package.
        notes: sentences on what did not travel as it was.
    """

    stream: bytes
    segment: Segment | Loose | Inherited | None = None
    sources: Mapping[str, list[str]] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    imports: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names that travel, in order."""
        return tuple(self.sizes)

    @property
    def nbytes(self) -> int:
        """The bytes that travel."""
        return len(self.stream) + (self.segment.nbytes if self.segment else 0)

    def describe(self, most: int = 2) -> str:
        """Name the largest values with their sizes: ``X (1.0 GB), model (3.2 MB) and 4 more``."""
        ranked = sorted(self.sizes.items(), key=lambda item: -item[1])
        shown = [f"{name} ({_readable(size)})" for name, size in ranked[:most]]
        rest = len(ranked) - len(shown)
        return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")


def pack(  # noqa: PLR0913 - each is a choice of its own
    values: Mapping[str, object],
    *,
    namespace: dict[str, Any] | None,
    follow: bool,
    attributes: Collection[str] = (),
    ignore: Collection[str] = OWN,
    loose: bool = False,
) -> Parcel:
    """Take values apart for another process.

    Args:
        values: what to send, by name.
        namespace: the user's globals; functions that use them will use the receiver's.
        follow: also send what the packed functions refer to in ``namespace``.
        attributes: names of attributes that the receiver's cell uses; they tell which
            submodules of a package have to be imported there.
        ignore: names of ``namespace`` that are not followed.
        loose: leave the large buffers where they are, for the caller to copy.
    """
    packer = Packer(namespace, follow=follow, ignore=ignore)
    packer.attributes.update(attributes)
    sizes = packer.add_all(values)
    stream = packer.file.getvalue()
    if len(stream) >= _LONG:
        packer.buffers.append(memoryview(stream))
        stream = b""
    make = Loose if loose else Segment.write
    return Parcel(
        stream=stream,
        segment=make(packer.buffers) if packer.buffers else None,
        sources=packer.sources(),
        sizes=sizes,
        imports=packer.submodules(),
        notes=tuple(packer.notes),
    )


def unpack(parcel: Parcel, *, namespace: dict[str, Any] | None) -> dict[str, object]:
    """Build the values again; functions of the sender's namespace use ``namespace`` here."""
    if not parcel.sizes:
        return {}
    for filename, lines in parcel.sources.items():
        # Without a time of change the entry survives linecache.checkcache.
        linecache.cache[filename] = (sum(map(len, lines)), None, list(lines), filename)
    for module in parcel.imports:
        with suppress(ImportError):  # the code may not come by it; if it does, it will say so
            importlib.import_module(module)
    buffers = parcel.segment.map() if parcel.segment else []
    stream = parcel.stream or buffers.pop()
    unpacker = Unpacker(io.BytesIO(stream), namespace, buffers)
    unpacker.load()
    return {name: unpacker.load() for name in parcel.sizes}


class Unpacker(pickle.Unpickler):
    """A stock unpickler that knows one thing more: the namespace of this process."""

    def __init__(
        self,
        file: io.BytesIO,
        namespace: dict[str, Any] | None,
        buffers: Iterable[memoryview],
    ) -> None:
        super().__init__(file, buffers=buffers)
        self.namespace = {} if namespace is None else namespace

    def persistent_load(self, pid: object) -> dict[str, Any]:
        del pid  # there is only one: the namespace
        return self.namespace


class Packer(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """One stream: pickles name after name, and finds the names that come with them."""

    def __init__(
        self,
        namespace: dict[str, Any] | None,
        *,
        follow: bool,
        ignore: Collection[str] = OWN,
    ) -> None:
        # A plain dictionary in place of cloudpickle's chain, as it is asked for every instance;
        # the base class takes it over when it starts.
        self.dispatch_table = {**copyreg.dispatch_table, **_CLOUDPICKLE_TABLE}
        self.file = io.BytesIO()
        self.buffers: list[memoryview] = []
        # Not a method of ours: in that circle the user's arrays would wait for the collector.
        take = functools.partial(self.take_buffer, self.buffers)
        super().__init__(self.file, protocol=5, buffer_callback=take)
        self.file.write(_OPENING)
        self.namespace = {} if namespace is None else namespace
        self.memo = {id(self.namespace): (0, self.namespace)}
        self.follow = follow
        self.ignore = ignore
        self.reducers = _all_reducers()
        self.wanted: dict[str, str] = {}  # name: the function that reads it
        self.attributes: set[str] = set()
        self.keep: dict[Any, Any] = {}  # for reducers: what has been seen in this stream
        self.current = ""  # the name that is being packed
        self.notes: dict[str, None] = {}
        self._filled: set[int] = set()
        self._filenames: set[str] = set()
        self._packages: dict[str, None] = {}

    def add_all(self, values: Mapping[str, object]) -> dict[str, int]:
        """Pickle values and, if asked to, what they refer to; return the bytes of each."""
        self.wanted.update(dict.fromkeys(values, ""))
        sizes: dict[str, int] = {}
        while len(sizes) < len(self.wanted):
            for name in list(self.wanted)[len(sizes) :]:
                value = values[name] if name in values else self.namespace[name]
                sizes[name] = self.add(name, value)
        return sizes

    def add(self, name: str, value: object) -> int:
        """Pickle one value; return the bytes that it added, in the stream and beside it."""
        self.current = name
        start, beside = self.file.tell(), len(self.buffers)
        try:
            self.dump(value)
        except Exception as error:
            raise obstacles.explain(
                name,
                value,
                error,
                probe=functools.partial(failure, namespace=self.namespace),
                reader=self.wanted.get(name, ""),
                to_rank=self.follow,
            ) from error
        return self.file.tell() - start + sum(taken.nbytes for taken in self.buffers[beside:])

    def note(self, happened: str) -> None:
        """Note, once for each name, that something in it does not travel as it is."""
        self.notes.setdefault(f"`{self.current}` {happened}")

    @staticmethod
    def take_buffer(taken: list[memoryview], buffer: pickle.PickleBuffer) -> bool:
        """Take a large buffer out of the stream; True leaves it there."""
        raw = buffer.raw()
        if raw.nbytes < IN_STREAM:
            return True
        taken.append(raw)
        return False

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        reducer = self.reducers.get(kind, _UNSEEN)
        if reducer is _UNSEEN:
            reducer = self.reducers[kind] = _inherited(kind)
        if reducer is not None:
            return reducer(self, obj)
        if issubclass(kind, type):
            reduced = super().reducer_override(obj)
            whole = isinstance(reduced, tuple) and len(reduced) == _DYNAMIC_CLASS
            return by_value.reduce_class(obj, reduced) if whole else reduced
        return NotImplemented

    def reduce_function(self, function: types.FunctionType) -> Any:
        """Take a function apart, by value if it belongs to the notebook or to no module."""
        home: dict[str, Any] | types.ModuleType | None
        if function.__globals__ is self.namespace:
            home, module = self.namespace, self.namespace.get("__name__")
            self._refer(function)
        elif by_value.is_importable(function):
            return NotImplemented
        else:
            home = by_value.home_module(function)
            if home is None:
                return super().reducer_override(function)
            for name in (function.__name__, function.__code__.co_name):
                if vars(home).get(name) is function:  # only its other name hides that
                    return getattr, (home, name)
            module = home.__name__
        code, cells = function.__code__, function.__closure__
        contents = [] if cells is None else self._contents(cells)
        state = (
            by_value.function_attributes(function, module),
            function.__dict__,
            tuple(contents),
        )
        made = (code, home, function.__name__, cells)
        return by_value.make_function, made, state, None, None, by_value.set_function

    def reduce_code(self, code: types.CodeType) -> Any:
        """Take code apart, and remember which cell it came from."""
        self._filenames.add(code.co_filename)
        return by_value.reduce_code(code)

    def _contents(self, cells: Iterable[types.CellType]) -> Iterable[tuple[types.CellType, object]]:
        # The first function that shows a cell fills it; a cell may be shared by several.
        for cell in cells:
            if id(cell) not in self._filled:
                self._filled.add(id(cell))
                with suppress(ValueError):  # an empty cell stays empty
                    yield cell, cell.cell_contents

    def reduce_cell(self, cell: types.CellType) -> Any:
        """Take a cell apart; what it holds may lead back to it, so it is filled later."""
        for _, content in self._contents((cell,)):
            return types.CellType, (), (content,), None, None, by_value.set_cell
        return types.CellType, ()

    def reduce_module(self, module: types.ModuleType) -> Any:
        """Send a module as its name."""
        if hasattr(module, "__path__"):
            self._packages.setdefault(module.__name__)
        return NotImplemented

    def _refer(self, function: types.FunctionType) -> None:
        if not self.follow:
            return
        uses = code_names.uses_of(function.__code__)
        self.attributes.update(uses.attributes)
        for name in uses.read:
            if name in self.namespace and name not in self.ignore:
                self.wanted.setdefault(name, function.__qualname__)

    def sources(self) -> dict[str, list[str]]:
        """Return the lines of the cells that packed functions came from."""
        found: dict[str, list[str]] = {}
        for filename in self._filenames:
            entry = linecache.cache.get(filename)
            # A time of change says: a real file, which the receiver can read itself.
            if entry is not None and len(entry) > 1 and entry[1] is None:
                found[filename] = entry[2]
        return found

    def submodules(self) -> tuple[str, ...]:
        """Return loaded submodules that packed code can reach through a packed package.

        ``import xml.dom`` binds ``xml`` only; where only that name arrives, ``xml.dom``
        would be missing.
        """
        found = list(self._packages)
        for package in found:  # grows as submodules are found
            for attribute in self.attributes:
                name = f"{package}.{attribute}"
                if name in sys.modules:
                    found.append(name)
        return tuple(found[len(self._packages) :])


class _Probe(Packer):
    """A packer that keeps nothing: it only finds out whether a value can be packed."""

    @staticmethod
    def take_buffer(taken: list[memoryview], buffer: pickle.PickleBuffer) -> bool:
        del taken
        buffer.release()
        return False


def failure(
    value: object, *, namespace: dict[str, Any] | None, follow: bool = False
) -> Exception | None:
    """Try to pack one value; return what went wrong, or None."""
    probe = _Probe(namespace, follow=follow)
    try:
        probe.dump(value)
        for name in list(probe.wanted):
            probe.dump(probe.namespace[name])
    except Exception as error:  # noqa: BLE001 - whatever the value's own methods raise
        return error
    return None


_UNSEEN: Any = object()


def _all_reducers() -> dict[type, reducers.Reducer | None]:
    exact, _ = _libraries(_loaded())
    return {
        **exact,
        # A notebook has streams of its own, of types that pickle would take apart.
        type(sys.stdout): reducers.stream,
        type(sys.stderr): reducers.stream,
    }


def _inherited(kind: type) -> reducers.Reducer | None:
    _, families = _libraries(_loaded())
    return next((families[base] for base in kind.__mro__ if base in families), None)


def _loaded() -> tuple[str, ...]:
    return tuple(library for library in LIBRARIES if library in sys.modules)


@functools.lru_cache
def _libraries(
    loaded: tuple[str, ...],
) -> tuple[dict[type, reducers.Reducer], dict[type, reducers.Reducer]]:
    exact, families = dict(reducers.TABLE), dict(reducers.FAMILIES)
    for library in loaded:
        module = importlib.import_module(LIBRARIES[library])
        exact |= module.reducers()
        families |= module.family_reducers()
    return exact, families


def _readable(size: float) -> str:
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000 or unit == "GB":  # noqa: PLR2004
            break
        size /= 1000
    return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
