"""Find the names that a cell needs from the notebook, and those that it leaves behind."""

from __future__ import annotations

import ast
import re
from collections import ChainMap
from dataclasses import dataclass
from types import CodeType, MappingProxyType
from typing import TYPE_CHECKING, Any

from jupyter_accel.launcher.parcels import code_names, shipping
from jupyter_accel.launcher.parcels.code_names import Kind, Uses

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    Block = Iterable[ast.stmt]

# IPython's results and inputs: shipped only where they are really read.
_HISTORY = re.compile(r"_i?\d+|_{1,3}|Out|_oh")

# Magics whose text is Python, and what may stand before it, such as `-n 10`.
_PYTHON_MAGICS = frozenset(("time", "timeit", "prun", "memit", "mprun", "lprun", "capture"))
_OPTIONS = re.compile(r"\s*(?:-\w+(?:\s+\d+)?\s+)*")
_EXPANDED = re.compile(r"(?<!\\)\$\{?(\w+)|\{([^{}]+)\}")
_WORD = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
_MAGICS = ("run_line_magic", "run_cell_magic", "system", "getoutput")

_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
# What has names of its own inside; only the compiler knows for sure which are global.
_SCOPES = (
    *(ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.NamedExpr),
    *((ast.TypeAlias,) if hasattr(ast, "TypeAlias") else ()),
)
_ANNOTATIONS = frozenset(("__annotations__", "__conditional_annotations__", "__classdict__"))


@dataclass(frozen=True, slots=True)
class CellNames:
    """The names that a cell uses.

    Attributes:
        read: names whose value from before the cell may be needed.
        written: names that the cell binds, in order.
        attributes: names of attributes that it uses, to tell which submodules it reaches.
        hints: names in the text of magics; they may be meant, or not.
    """

    read: frozenset[str]
    written: tuple[str, ...]
    attributes: frozenset[str] = frozenset()
    hints: frozenset[str] = frozenset()


def names_in(source: str | ast.Module) -> CellNames:
    """Analyse a cell, already plain Python, without running it."""
    tree = ast.parse(source) if isinstance(source, str) else source
    flow = _Flow()
    flow.block(tree.body)
    flow.finish()
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return CellNames(
        read=frozenset(flow.read) - _ANNOTATIONS,
        written=tuple(name for name in flow.written if name not in _ANNOTATIONS),
        attributes=frozenset(attributes),
        hints=frozenset(flow.hints) - frozenset(flow.read),
    )


def capture(
    names: CellNames | Iterable[str],
    namespace: dict[str, Any],
    *,
    local: Mapping[str, Any] = MappingProxyType({}),
    ignore: Collection[str] = shipping.OWN,
    loose: bool = False,
) -> shipping.Parcel:
    """Pack what a cell needs: its names, as far as they exist, and what those refer to.

    Args:
        names: what the cell uses.
        namespace: the user's globals.
        local: the variables of the function that launches, if one does; they come first.
        ignore: names of the namespace that stay.
        loose: leave large buffers where they are, for the caller to copy.
    """
    cell = names if isinstance(names, CellNames) else CellNames(frozenset(names), ())
    visible = ChainMap(dict(local), {n: v for n, v in namespace.items() if n not in ignore})
    values = {name: visible[name] for name in sorted(cell.read) if name in visible}
    for name in sorted(cell.hints.intersection(namespace)):
        if name in ignore or _HISTORY.fullmatch(name):
            continue
        # A word in a magic's text may only look like a name: it must not be what fails.
        if shipping.failure(namespace[name], namespace=namespace, follow=True) is None:
            values.setdefault(name, namespace[name])
    return shipping.pack(
        values,
        namespace=namespace,
        follow=True,
        attributes=cell.attributes,
        ignore=ignore,
        loose=loose,
    )


class _Flow:
    """Follow the statements of a cell in order, and note what is read before it is bound.

    A name that the cell has surely bound already is not read from the notebook: its old
    value may be huge, or may be an open file. The inside of a function counts when the
    function is first used, or at the end.
    """

    def __init__(self) -> None:
        self.read: dict[str, None] = {}
        self.written: dict[str, None] = {}
        self.hints: set[str] = set()
        self.bound: set[str] = set()
        self.inside: dict[str, Uses] = {}  # a function: the globals it uses

    def finish(self) -> None:
        """Count the insides of functions that the cell defines and does not use."""
        for name in list(self.inside):
            self._use(name)

    def block(self, statements: Block) -> None:
        """Follow statements in order."""
        for statement in statements:
            follow = _COMPOUND.get(type(statement))
            if follow is None:
                self._simple(statement)
            else:
                follow(self, statement)

    def _simple(self, statement: ast.stmt) -> None:
        nodes = list(ast.walk(statement))
        self._magics(nodes)
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            for alias in statement.names:
                if alias.name != "*":
                    self._store(alias.asname or alias.name.partition(".")[0])
        elif any(isinstance(node, _SCOPES) for node in nodes):
            self._compiled(statement, nodes)
        else:
            self._plain(statement, nodes)

    def _plain(self, statement: ast.stmt, nodes: list[ast.AST]) -> None:
        """Follow a statement without inner functions: it reads first, and then binds."""
        names = [node for node in nodes if isinstance(node, ast.Name)]
        for name in names:
            if not isinstance(name.ctx, ast.Store) or isinstance(statement, ast.AugAssign):
                self._load(name.id)
            if isinstance(name.ctx, ast.Del):
                self.bound.discard(name.id)
        if isinstance(statement, ast.AnnAssign) and statement.value is None:
            return  # it only announces the name
        for name in names:
            if isinstance(name.ctx, ast.Store):
                self._store(name.id)

    def _compiled(self, statement: ast.stmt, nodes: list[ast.AST]) -> None:
        """Let the compiler say what is global inside lambdas and comprehensions."""
        try:
            code = _compile(statement)
        except SyntaxError:  # the rank will say so, with its line
            self._plain(statement, nodes)
            return
        for kind, item in code_names.events(code):
            if isinstance(item, CodeType):
                self._inner(code_names.uses_of(item))
            elif kind is Kind.WRITE:
                self._store(item)
            else:
                self._load(item)
                if kind is Kind.DELETE:
                    self.bound.discard(item)

    def _inner(self, uses: Uses) -> None:
        for name in uses.read:
            self._load(name)
        for name in uses.written:
            self.written.setdefault(name)

    def _load(self, name: str) -> None:
        if name not in self.bound:
            self.read.setdefault(name)
        self._use(name)

    def _use(self, name: str) -> None:
        uses = self.inside.pop(name, None)  # popped first: functions may call each other
        if uses is not None:
            self._inner(uses)
            self.inside[name] = uses

    def _store(self, name: str) -> None:
        self.written.setdefault(name)
        self.bound.add(name)
        self.inside.pop(name, None)

    def expression(self, expression: ast.expr | None) -> None:
        """Follow one expression."""
        if isinstance(expression, ast.Name):
            self._load(expression.id)
        elif expression is not None:
            self._simple(ast.copy_location(ast.Expr(expression), expression))

    def target(self, target: ast.expr) -> None:
        """Bind a target of a loop or of ``with``."""
        if isinstance(target, ast.Name):
            self._store(target.id)
            return
        nothing = ast.copy_location(ast.Constant(None), target)
        assigned = ast.Assign(targets=[target], value=nothing)
        self._simple(ast.copy_location(assigned, target))

    def define(self, statement: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        """Follow a function or class: what runs now, and what runs when it is used."""
        try:
            code = _compile(statement)
        except SyntaxError:
            self._plain(statement, list(ast.walk(statement)))
            return
        later = Uses()
        for kind, item in code_names.events(code):
            if isinstance(item, CodeType):
                self._body(item, later)
            elif kind is Kind.WRITE:
                self._store(item)
            else:
                self._load(item)
        if statement.decorator_list:  # a decorator may call it at once
            self._inner(later)
        self.written.update(later.written)
        self.inside[statement.name] = later

    def _body(self, code: CodeType, later: Uses) -> None:
        """Run a class body now, and add what the functions in it use later."""
        if not code_names.is_class_body(code):
            uses = code_names.uses_of(code)
            later.read.update(uses.read)
            later.written.update(uses.written)
            return
        own = set(code_names.GIVEN)
        for kind, item in code_names.events(code):
            if isinstance(item, CodeType):
                self._body(item, later)
            elif kind is Kind.WRITE:
                own.add(item)
            elif item not in own:
                self._load(item)

    def branches(self, *paths: Callable[[], None]) -> None:
        """Follow alternatives: only what all of them bind is bound afterwards."""
        before = set(self.bound)
        after: set[str] | None = None
        for path in paths:
            self.bound = set(before)
            path()
            after = self.bound if after is None else after & self.bound
        self.bound = before if after is None else after

    def _magics(self, nodes: list[ast.AST]) -> None:
        for node in nodes:
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in _MAGICS
            ):
                self._magic(node.func.attr, list(_texts(node.args)))

    def _magic(self, method: str, texts: list[str]) -> None:
        name, bodies = ("", texts) if "magic" not in method else (texts[:1], texts[1:])
        for text in bodies:
            for word, expression in _EXPANDED.findall(text):
                self._text(word or expression)
            if name and name[0] in _PYTHON_MAGICS:
                self._text(text[_OPTIONS.match(text).end() :])  # type: ignore[union-attr]
            elif name:
                self.hints.update(_WORD.findall(text))

    def _text(self, text: str) -> None:
        plain = "\n".join(
            line for line in text.splitlines() if not line.lstrip().startswith(("%", "!"))
        )
        try:
            self.block(ast.parse(plain.strip()).body)
        except SyntaxError:
            self.hints.update(_WORD.findall(text))


def _compile(statement: ast.stmt) -> CodeType:
    module = ast.Module(body=[statement], type_ignores=[])
    code: CodeType = compile(module, "<cell>", "exec", flags=_AWAIT, dont_inherit=True)
    return code


def _texts(arguments: list[ast.expr]) -> Iterator[str]:
    for argument in arguments:
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield argument.value


def _if(flow: _Flow, node: ast.If) -> None:
    flow.expression(node.test)
    flow.branches(lambda: flow.block(node.body), lambda: flow.block(node.orelse))


def _for(flow: _Flow, node: ast.For | ast.AsyncFor) -> None:
    flow.expression(node.iter)

    def once() -> None:
        flow.target(node.target)
        flow.block(node.body)

    flow.branches(once, lambda: None)
    flow.block(node.orelse)


def _while(flow: _Flow, node: ast.While) -> None:
    flow.expression(node.test)
    flow.branches(lambda: flow.block(node.body), lambda: None)
    flow.block(node.orelse)


def _with(flow: _Flow, node: ast.With | ast.AsyncWith) -> None:
    for item in node.items:
        flow.expression(item.context_expr)
        if item.optional_vars is not None:
            flow.target(item.optional_vars)
    flow.block(node.body)


def _try(flow: _Flow, node: ast.Try) -> None:
    def whole() -> None:
        flow.block(node.body)
        flow.block(node.orelse)

    def handled(handler: ast.ExceptHandler) -> Callable[[], None]:
        def path() -> None:
            flow.expression(handler.type)
            if handler.name:
                flow.target(ast.copy_location(ast.Name(handler.name, ast.Store()), handler))
            flow.block(handler.body)
            if handler.name:  # Python deletes it at the end
                flow.bound.discard(handler.name)

        return path

    before = set(flow.bound)
    flow.branches(whole, *(handled(handler) for handler in node.handlers))
    after = flow.bound
    flow.bound = before  # the last part also runs when the first statement fails
    flow.block(node.finalbody)
    flow.bound |= after


def _match(flow: _Flow, node: ast.Match) -> None:
    flow.expression(node.subject)

    def path(case: ast.match_case) -> Callable[[], None]:
        def follow() -> None:
            _pattern(flow, case.pattern)
            flow.expression(case.guard)
            flow.block(case.body)

        return follow

    flow.branches(*(path(case) for case in node.cases), lambda: None)


def _pattern(flow: _Flow, pattern: ast.pattern) -> None:
    for part in ast.iter_child_nodes(pattern):
        if isinstance(part, ast.pattern):
            _pattern(flow, part)
        elif isinstance(part, ast.expr):
            flow.expression(part)
    name = getattr(pattern, "rest", None) or getattr(pattern, "name", None)
    if isinstance(name, str):
        flow.target(ast.copy_location(ast.Name(name, ast.Store()), pattern))


_COMPOUND: dict[type[ast.stmt], Callable[[_Flow, Any], None]] = {
    ast.FunctionDef: _Flow.define,
    ast.AsyncFunctionDef: _Flow.define,
    ast.ClassDef: _Flow.define,
    ast.If: _if,
    ast.For: _for,
    ast.AsyncFor: _for,
    ast.While: _while,
    ast.With: _with,
    ast.AsyncWith: _with,
    ast.Try: _try,
    ast.Match: _match,
}
if hasattr(ast, "TryStar"):  # from Python 3.11 on
    _COMPOUND[ast.TryStar] = _try
