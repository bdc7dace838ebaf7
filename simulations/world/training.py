"""Nouns of the simulated trainings: a job as its launcher knows it, and a save that was due."""

from __future__ import annotations

from dataclasses import dataclass

COPY_S = 0.2
"""What a snapshot takes to be copied into its slot."""


@dataclass(frozen=True)
class Training:
    """One job: how many ranks it has, what it saves, and how long it runs."""

    job: str
    first_node: int
    ranks: int
    layout: str
    keep_last: int
    every: int
    saves: int
    quiet_saves: int
    step_s: float
    auto: bool = False
    """Ranks tell how far they are, and agents choose which saves go to the object store."""


@dataclass(frozen=True)
class Due:
    """A save that was due, and when rank 0 began it."""

    at_s: float
    attempt_key: str
