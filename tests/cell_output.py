"""What a notebook shows of a cell, worked out from the messages that a kernel published."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the kernel.

    Attributes:
        kind: ``stream``, ``display_data``, ``status`` and so on.
        parent: the msg_id of the request that it belongs to, so the cell that shows it.
        content: its content, as sent.
        metadata: its metadata, as sent.
        at: ``time.monotonic()`` when it arrived.
    """

    kind: str
    parent: str
    content: dict[str, Any]
    metadata: dict[str, Any]
    at: float

    @classmethod
    def received(cls, raw: Mapping[str, Any]) -> Message:
        return cls(
            kind=raw["msg_type"],
            parent=raw["parent_header"].get("msg_id", ""),
            content=raw["content"],
            metadata=raw["metadata"],
            at=time.monotonic(),
        )

    @property
    def is_idle(self) -> bool:
        return self.kind == "status" and self.content["execution_state"] == "idle"


@dataclass(slots=True)
class Display:
    """One output with a mime bundle, as it stands after all updates.

    Attributes:
        data: the mime bundle.
        metadata: the bundle's metadata.
        display_id: its id, if it can be updated.
        updates: how many times it was replaced.
    """

    data: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    display_id: str | None = None
    updates: int = 0

    @property
    def text(self) -> str:
        return str(self.data.get("text/plain", ""))

    @property
    def html(self) -> str:
        return str(self.data.get("text/html", ""))


@dataclass(slots=True)
class Stream:
    """Consecutive text on one stream."""

    name: str
    text: str


@dataclass(frozen=True)
class CellResult:
    """A cell as a notebook shows it.

    Attributes:
        msg_id: the id of the request, which is the parent of all the cell's messages.
        status: ``ok``, ``error``, ``aborted``, or ``running`` as long as it has not ended.
        ename: name of the exception's type, else ``""``.
        evalue: text of the exception, else ``""``.
        traceback: lines of the traceback, with their colours.
        outputs: streams and displays in the order in which the cell shows them.
        execute_result: the value of the last line, if it is shown.
        execution_count: the number in ``In [n]``.
        elapsed: seconds from sending the cell to its idle status.
        messages: every message with this cell as its parent, updates of displays included.
        late: those of them that arrived after the cell's idle status.
    """

    msg_id: str
    status: str
    ename: str
    evalue: str
    traceback: list[str]
    outputs: list[Stream | Display]
    execute_result: Display | None
    execution_count: int | None
    elapsed: float
    messages: list[Message]
    late: list[Message]

    @property
    def stdout(self) -> str:
        return self._stream("stdout")

    @property
    def stderr(self) -> str:
        return self._stream("stderr")

    @property
    def displays(self) -> list[Display]:
        return [o for o in self.outputs if isinstance(o, Display) and o is not self.execute_result]

    @property
    def plain_traceback(self) -> str:
        return ANSI.sub("", "\n".join(self.traceback))

    @property
    def all_text(self) -> str:
        """Streams, text and HTML of displays, and the traceback: to look for a word anywhere."""
        parts = [o.text if isinstance(o, Stream) else f"{o.text}\n{o.html}" for o in self.outputs]
        return "\n".join([*parts, self.plain_traceback])

    def _stream(self, name: str) -> str:
        return "".join(o.text for o in self.outputs if isinstance(o, Stream) and o.name == name)


class _Page:
    """The outputs of all cells, kept as a front end keeps them."""

    def __init__(self) -> None:
        self.cells: dict[str, list[Stream | Display]] = {}
        self._cleared_by_next: set[str] = set()

    def take(self, message: Message) -> None:
        content = message.content
        if message.kind == "update_display_data":
            self._update(content)
        elif message.kind == "clear_output":
            if content.get("wait"):
                self._cleared_by_next.add(message.parent)
            else:
                self.cells[message.parent] = []
        elif message.kind == "stream":
            self._write(message.parent, content["name"], content["text"])
        elif message.kind in {"display_data", "execute_result"}:
            self._outputs(message.parent).append(_display(content))

    def _outputs(self, parent: str) -> list[Stream | Display]:
        """The outputs of a cell, about to get one more."""
        if parent in self._cleared_by_next:
            self._cleared_by_next.discard(parent)
            self.cells[parent] = []
        return self.cells.setdefault(parent, [])

    def _write(self, parent: str, name: str, text: str) -> None:
        outputs = self._outputs(parent)
        last = outputs[-1] if outputs else None
        if isinstance(last, Stream) and last.name == name:
            last.text += text
        else:
            outputs.append(Stream(name, text))

    def _update(self, content: Mapping[str, Any]) -> None:
        """Replace every output that has this display id, in whatever cell it stands."""
        display_id = content["transient"]["display_id"]
        for output in (o for outputs in self.cells.values() for o in outputs):
            if isinstance(output, Display) and output.display_id == display_id:
                output.data, output.metadata = content["data"], content["metadata"]
                output.updates += 1


def _display(content: Mapping[str, Any]) -> Display:
    display_id = content.get("transient", {}).get("display_id")
    return Display(content["data"], content["metadata"], display_id)


def read_cell(
    msg_id: str, messages: Sequence[Message], reply: Message | None, sent_at: float
) -> CellResult:
    """Work out how a cell looks after ``messages``; ``reply`` is the kernel's answer, if any."""
    page = _Page()
    messages = list(messages)
    for message in messages:
        page.take(message)
    own = [m for m in messages if m.parent == msg_id]
    idle = next((i for i, m in enumerate(own) if m.is_idle), None)
    ended = reply is not None and idle is not None
    answer: Mapping[str, Any] = reply.content if reply is not None else {}
    outputs = page.cells.get(msg_id, [])
    error: Mapping[str, Any] = next((m.content for m in own if m.kind == "error"), answer)
    return CellResult(
        msg_id=msg_id,
        status=answer["status"] if ended else "running",
        ename=error.get("ename", ""),
        evalue=error.get("evalue", ""),
        traceback=list(error.get("traceback", [])),
        outputs=outputs,
        execute_result=_execute_result(own, outputs),
        execution_count=answer.get("execution_count"),
        elapsed=(own[idle].at if idle is not None else time.monotonic()) - sent_at,
        messages=own,
        late=own[idle + 1 :] if idle is not None else [],
    )


def _execute_result(own: Sequence[Message], outputs: Sequence[Stream | Display]) -> Display | None:
    """Find the shown value of the last line among the outputs, where updates have reached it."""
    for message in own:
        if message.kind == "execute_result":
            data = message.content["data"]
            return next((o for o in outputs if isinstance(o, Display) and o.data is data), None)
    return None
