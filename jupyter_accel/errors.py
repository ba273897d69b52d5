"""Every exception this package raises on purpose.

AccelError
├── ConfigError            the caller asked for something that cannot work
├── NotPreparedError       an object was used before prepare() returned it
├── ShippingError          a name cannot travel between the kernel and the ranks
├── PreflightError         a fork of this process would not be safe
├── TemplateError          the process that forks the ranks did not start, or is gone
├── NoInputError           input() was called where nobody can answer
└── WorkerError            a rank failed; carries its rank and its traceback
    ├── WorkerDiedError    a rank ended without a word: a signal, or an exit code
    └── WorkerTimeoutError the ranks ran longer than the caller allowed

KeyboardInterrupt
└── Interrupted            the user stopped a job; not an error of anybody's
"""

from __future__ import annotations


class AccelError(Exception):
    """The root of the tree: catch it to catch everything this package raises."""


class ConfigError(AccelError, ValueError):
    """The caller asked for something that cannot work; nothing has been started."""


class NotPreparedError(AccelError, RuntimeError):
    """An object was used before ``prepare`` returned it."""


class ShippingError(AccelError, TypeError):
    """A name cannot travel between the kernel and the ranks.

    Attributes:
        name: the variable that cannot travel.
    """

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class PreflightError(AccelError, RuntimeError):
    """A fork of this process would give ranks that hang or crash."""


class TemplateError(AccelError, RuntimeError):
    """The process that forks the ranks did not start, or is gone."""


class NoInputError(AccelError, RuntimeError):
    """``input()`` was called where nobody can answer."""


class WorkerError(AccelError, RuntimeError):
    """A rank failed.

    Attributes:
        rank: the rank that failed first.
        ename: the name of the exception's type in that rank, such as ``"ValueError"``.
        traceback: that rank's traceback as lines, ready to print.
    """

    def __init__(
        self, message: str, *, rank: int, ename: str = "", traceback: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.ename = ename
        self.traceback = traceback

    def _render_traceback_(self) -> list[str]:
        """Show the rank's own traceback in a notebook, where IPython asks for this method."""
        first, *others = str(self).splitlines()
        lines = [f"\x1b[31m{first}\x1b[39m", *self.traceback]
        return [*lines, *others] if self.traceback else [first, *others]


class WorkerDiedError(WorkerError):
    """A rank ended without a word: a signal, or an exit code."""


class WorkerTimeoutError(WorkerError):
    """The ranks ran longer than the caller allowed."""


class Interrupted(KeyboardInterrupt):
    """The user stopped a job; a notebook shows it as one line."""

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]
