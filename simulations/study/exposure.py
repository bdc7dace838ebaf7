"""What a placement loses, cause by cause: the chance that a failure is too deep for RAM.

Intuition: a loss in RAM is rare, so it is not waited for. Every cause says which sets of nodes it
takes at once; each set is tried against the placement, and P(loss) is the sum over causes of
rate times P(loss | cause), stratified instead of sampled (a run of 90 days sees a power domain go
a few times, the strata see each of them). What is left is two failures that overlap: while one is
being recovered the next one strikes.

Contract: exact where a cause takes whole domains or single nodes; where it takes a fraction of a
domain, or where failures overlap, `TRIALS` seeded draws. Unreachable counts as lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from simulations.study.hazards import cause_rates
from simulations.study.scenario import Cause, Fate, Scenario
from simulations.study.schemes import Pieces, Scheme

TRIALS = 2000


@dataclass(frozen=True)
class Exposure:
    """One cause: events a second, and the share of them that RAM cannot recover."""

    cause: str
    level: str
    per_s: float
    deep: float


def exposures(scenario: Scenario, scheme: Scheme, pieces: Pieces) -> tuple[Exposure, ...]:
    """Of each unplanned cause, the chance to lose what RAM holds."""
    rng = np.random.default_rng(0)
    found = []
    for cause, rate in zip(scenario.hazards.causes, cause_rates(scenario), strict=True):
        if not cause.planned:
            deep = 1.0 if not scheme.memory else _deep(scenario, cause, pieces, rng)
            found.append(Exposure(cause.name, cause.level, rate, deep))
    return tuple(found)


def deep_share(scenario: Scenario, scheme: Scheme, pieces: Pieces, open_s: float) -> float:
    """Of all unplanned failures, the share that RAM cannot recover.

    ``open_s``: how long after a failure its nodes still count as gone; another failure within it
    adds to the first.
    """
    found = exposures(scenario, scheme, pieces)
    total = sum(e.per_s for e in found)
    if not scheme.memory or not total:
        return 1.0
    alone = sum(e.per_s * e.deep for e in found) / total
    dead = sum(
        rate
        for cause, rate in zip(scenario.hazards.causes, cause_rates(scenario), strict=True)
        if not cause.planned and cause.fate is not Fate.PROCESS
    )
    again = -np.expm1(-dead * open_s) * dead / total
    return float(min(1.0, alone + again * _pair_kills(pieces)))


def domain_deep(pieces: Pieces, domains: Iterable[Sequence[int]]) -> float:
    """The share of ``domains`` whose loss as a whole loses something."""
    found = [pieces.lost(frozenset(domain)) for domain in domains]
    return sum(found) / len(found)


def _deep(scenario: Scenario, cause: Cause, pieces: Pieces, rng: np.random.Generator) -> float:
    if cause.fate is Fate.PROCESS:
        return 0.0
    domains = scenario.fleet.members(cause.level)
    if cause.hit < 1:
        parts = []
        for pick in rng.integers(len(domains), size=TRIALS):
            hit = rng.random(len(domains[pick])) < cause.hit
            parts.append([n for n, down in zip(domains[pick], hit, strict=True) if down])
        return domain_deep(pieces, [p for p in parts if p])
    unread = 1 - cause.readable if cause.fate is Fate.GPU else 1.0
    return unread * domain_deep(pieces, domains)


def _pair_kills(pieces: Pieces) -> float:
    """Two random nodes gone: the chance that something is lost."""
    count = len(pieces.rows)
    if count < 2:
        return 1.0
    rng = np.random.default_rng(1)
    pairs = rng.integers(count, size=(TRIALS, 2)).tolist()
    return domain_deep(pieces, [pair for pair in pairs if pair[0] != pair[1]])
