"""Workers that live on between cells: named, listed, closed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jupyter_accel.errors import ConfigError

if TYPE_CHECKING:  # loading the extension must be quick
    from jupyter_accel.launcher.launching import Crew


@dataclass(eq=False)
class Kept:
    """The ranks of one name, and the names that they have set themselves."""

    crew: Crew
    names: set[str] = field(default_factory=set)


class KeptWorkers:
    """All kept workers of a kernel."""

    def __init__(self) -> None:
        self._by_name: dict[str, Kept] = {}

    def __iter__(self) -> Iterator[tuple[str, Kept]]:
        return iter(list(self._by_name.items()))

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def add(self, name: str, crew: Crew) -> Kept:
        """Keep these ranks under a name."""
        self._by_name[name] = Kept(crew)
        return self._by_name[name]

    def living(self, name: str) -> Kept | None:
        """Return the workers of a name if they can be given work; forget them if they cannot."""
        kept = self._by_name.get(name)
        if kept is not None and not kept.crew.alive:
            self.close(name)
            return None
        return kept

    def close(self, name: str) -> None:
        """End the workers of a name.

        Raises:
            ConfigError: there are none.
        """
        if name not in self._by_name:
            there = ", ".join(self._by_name) or "none"
            msg = f"no kept workers are called {name!r}; there are: {there}"
            raise ConfigError(msg)
        self._by_name.pop(name).crew.close()

    def close_all(self) -> None:
        """End all of them."""
        for name in list(self._by_name):
            self.close(name)
