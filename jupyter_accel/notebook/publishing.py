"""Sends output to the front end, no faster than Jupyter's server lets it pass."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from jupyter_accel.launcher.events import Rich
from jupyter_accel.notebook.pacing import Pace, fitting

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_MESSAGE_CHARS = 200_000

Name = Literal["stdout", "stderr"]

_pace = Pace()  # the server counts what this process sends, in whatever cell and for whatever job


class Publisher:
    """Speaks to the front end of one shell.

    Attributes:
        in_kernel: there is a front end which can replace what it has shown; a terminal cannot.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._pace = _pace
        self._stream: Name = "stdout"
        self._pending: list[str] = []
        self._pending_chars = 0
        self.in_kernel = hasattr(shell, "kernel")

    @property
    def ready(self) -> bool:
        """Whether a message may be sent now."""
        return not self.in_kernel or self._pace.room() > 0

    @property
    def pending(self) -> bool:
        """Whether text was taken that ``flush`` would send."""
        return bool(self._pending)

    def text(self, stream: Name, text: str, *, free: bool = False) -> int:
        """Take as much of the text as may be sent now; return how many characters that is."""
        done = 0
        # Asked once: it grows all the time, and would be used up in ever so small pieces.
        room = self._pace.room()
        while done < len(text):
            if stream != self._stream or self._pending_chars >= _MESSAGE_CHARS:
                self.flush()  # one message holds text of one stream: else the order would be lost
            piece = text[done : done + _MESSAGE_CHARS - self._pending_chars]
            if self.in_kernel and not free:
                piece = fitting(piece, room)
            if not piece:
                break
            room -= self._take(stream, piece)
            done += len(piece)
        return done

    def flush(self) -> None:
        """Send the text that was taken."""
        if self._pending:
            target = sys.stdout if self._stream == "stdout" else sys.stderr
            target.write("".join(self._pending))
            target.flush()
            self._pending, self._pending_chars = [], 0

    def display(self, bundle: Mapping[str, Any], display_id: str, *, update: bool) -> None:
        """Show a bundle of representations, or replace the one of this id."""
        if update and not self.in_kernel:
            return  # a terminal cannot take back what it has shown
        self._before_message()
        self._shell.display_pub.publish(
            dict(bundle), {}, transient={"display_id": display_id}, update=update
        )

    def rich(self, event: Rich) -> None:
        """Show what a rank displays, as if the kernel had."""
        content = event.content
        self._before_message()
        if event.kind.startswith("comm_"):
            self._relay(event)
        else:
            self._shell.display_pub.publish(
                dict(content["data"]),
                dict(content["metadata"]),
                transient=dict(content.get("transient", {})),
                update=event.kind == "update",
            )

    def clear(self) -> None:
        """Have the front end clear the cell's output once something new comes."""
        self._before_message()
        self._shell.display_pub.clear_output(wait=True)

    def _relay(self, event: Rich) -> None:
        """Speak for a widget that lives in a rank."""
        import comm  # noqa: PLC0415 - only where a rank makes widgets

        sys.stdout.flush()  # a comm's message would overtake what was written
        sys.stderr.flush()
        content = event.content
        name = content["comm_id"]
        known = comm.get_comm_manager().comms.get(name)
        if event.kind == "comm_open":
            comm.create_comm(
                target_name=content["target_name"],
                data=content["data"],
                metadata=content["metadata"],
                buffers=list(event.buffers),
                comm_id=name,
            )
        elif known is not None and event.kind == "comm_msg":
            known.send(content["data"], content["metadata"], list(event.buffers))
        elif known is not None:
            known.close()

    def _take(self, stream: Name, piece: str) -> int:
        """Add a piece to what ``flush`` sends; return how many bytes that takes."""
        size = self._pace.note_text(piece)
        if not self._pending:
            size += self._pace.note_message()
        self._stream = stream
        self._pending.append(piece)
        self._pending_chars += len(piece)
        return size

    def _before_message(self) -> None:
        """Keep the order: what was written before a message is shown before it.

        The kernel flushes its streams itself before it sends a display.
        """
        self.flush()
        self._pace.note_message()
