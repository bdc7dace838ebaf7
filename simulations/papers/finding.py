"""What a paper check works with: the numbers that a row gives, and what was found with them.

Intuition: a row of ``published.json`` names a form and gives its numbers. A form computes what the
row's paper computes, by the closed form, and where chance is involved it plays the situation too.

Contract: a `Form` takes what is `Given` and a random generator, or None: then nothing is played. It
reads every number that the row gives, and returns a `Finding`. A number that is missing, or that
nobody reads, is a ConfigError that names the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from numpy.random import Generator

from p2pckpt.errors import ConfigError
from simulations.papers.trials import Estimate
from simulations.study.traces import Incident


class Finding(NamedTuple):
    """What a form computed; what was played, its standard error, and what it should then be.

    ``computed`` None: ``note`` says what is missing. ``expected`` None: ``computed``.
    """

    computed: float | None
    played: Estimate | None = None
    expected: float | None = None
    note: str = ""


class Given:
    """The numbers of one row, and LANL's records if the user has them (``lanl``)."""

    def __init__(
        self, row: str, numbers: Mapping[str, Any], lanl: Sequence[Incident] | None = None
    ) -> None:
        self.row, self._numbers, self.lanl = row, numbers, lanl
        self._used: set[str] = set()

    def __getitem__(self, key: str) -> float:
        return float(self.any(key))

    def any(self, key: str) -> Any:
        """The value as it stands."""
        if key not in self._numbers:
            raise ConfigError(
                f"{self.row}: the form needs given.{key}, has {sorted(self._numbers)}"
            )
        self._used.add(key)
        return self._numbers[key]

    def whole(self, key: str) -> int:
        """A whole number."""
        value = self.any(key)
        if value != int(value):
            raise ConfigError(f"{self.row}: given.{key} needs a whole number, found {value!r}")
        return int(value)

    def unused(self) -> set[str]:
        """Keys that nobody asked for."""
        return set(self._numbers) - self._used


Form = Callable[[Given, Generator | None], Finding]
