"""What a benchmark says: ratios with their spread, each beside the limit of this very machine.

A figure of one run is a ratio of two times that were measured in turn; the figure is the median of
its runs. If the largest is more than NOISY times the smallest, a neighbour was louder than what
was measured, and the figure says so itself.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

NOISY = 1.5


@dataclass
class Figure:
    """One row. ``limit_is`` says what a perfect data path would still have to do."""

    name: str
    what: str
    limit_is: str
    to: str = "copies"
    runs: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    def add(self, run: float, limit: float) -> None:
        """One more run, with the limit as it was measured beside it."""
        self.runs.append(run)
        self.limits.append(limit)

    @property
    def ratio(self) -> float:
        """The median run."""
        return statistics.median(self.runs)

    @property
    def limit(self) -> float:
        """The median limit."""
        return statistics.median(self.limits)

    @property
    def noisy(self) -> bool:
        """Do the runs differ by more than the measurement can tell?"""
        return max(self.runs) > NOISY * min(self.runs)

    def record(self) -> dict[str, Any]:
        """As it stands in the JSON."""
        return {
            "name": self.name,
            "ratio": round(self.ratio, 3),
            "runs": [round(run, 3) for run in self.runs],
            "noisy": self.noisy,
            "limit": round(self.limit, 3),
            "limit_is": self.limit_is,
        }


def table(figures: list[Figure]) -> str:
    """The figures as lines of text."""
    head = f"{'figure':20} {'ratio':>6} {'(min-max)':>13} {'limit':>6}  what, and what limits it"
    lines = [head, "-" * len(head)]
    for f in figures:
        spread = f"({min(f.runs):.2f}-{max(f.runs):.2f})"
        noisy = "  NOISY" if f.noisy else ""
        lines.append(
            f"{f.name:20} {f.ratio:6.2f} {spread:>13} {f.limit:6.2f}  {f.what}, in {f.to}{noisy}"
        )
        lines.append(f"{'':49}limit: {f.limit_is}")
    return "\n".join(lines)
