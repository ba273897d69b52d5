"""What a cell raises whose job the user has stopped."""

from __future__ import annotations


class Interrupted(KeyboardInterrupt):
    """The user stopped the job; shown as one line."""

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]
