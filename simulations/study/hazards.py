"""Failure processes: from a scenario and a seed to the history of one run.

Intuition: what differs between clusters is not only how often nodes fail but how they fail
together. Node failures are a Poisson process over the cluster, or a Weibull renewal process in
each node (a falling hazard, as in the LANL logs); some nodes are lemons. Shocks strike whole
domains at once (Marshall and Olkin 1967): a rack, a leaf switch, a power feed. Maintenance is
announced. A trace replaces all of these by what once happened.

Contract: `draw` and `replay` are pure functions of scenario and seed. Each process has its own
stream, so a changed parameter of one leaves the draws of the others as they were. A history knows
nothing of redundancy: schemes are compared on the same failures.

A renewal process starts in its steady state: the first gap is the residual of a length-biased one
(U X with X^k ~ Gamma(1 + 1/k)). With k < 1 a fresh start would have too many early failures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from p2pckpt.errors import ConfigError
from simulations.study.scenario import YEAR_S, Cause, Scenario

Floats = NDArray[np.float64]
NODES, SHOCKS, PLANNED, STAGES, LEMONS = range(5)
"""Streams."""


class Failure(NamedTuple):
    """One event: when, why, which nodes, whether their RAM can still be read, and its stages."""

    at_s: float
    cause: int
    nodes: tuple[int, ...]
    readable: bool
    detect_s: float
    diagnose_s: float
    allocate_s: float
    init_s: float
    away_s: float


class History(NamedTuple):
    """All failures of one run, by time, and the causes that their numbers mean."""

    causes: tuple[Cause, ...]
    failures: Sequence[Failure]


class _Events(NamedTuple):
    at_s: Floats
    cause: NDArray[np.int64]
    nodes: Sequence[tuple[int, ...]]


def shock_rate(scenario: Scenario, cause: Cause) -> float:
    """Events a second over all domains of a cause above the node."""
    return cause.per_year / YEAR_S * len(scenario.fleet.members(cause.level))


def node_rate(scenario: Scenario) -> float:
    """Unplanned failures a second of single nodes, over the cluster. Raises ConfigError."""
    hazards = scenario.hazards
    rate = 1 / hazards.mtbf_s
    if hazards.mtbf_counts == "all":
        shocks = sum(shock_rate(scenario, c) for c in hazards.causes if c.level != "node")
        if shocks > rate:
            raise ConfigError(
                f"scenario {scenario.name}: an MTBF of {hazards.mtbf_s:.4g} s over all causes, but "
                f"the domain shocks alone come every {1 / shocks:.4g} s"
            )
        rate -= shocks
    return rate


def cause_rates(scenario: Scenario) -> tuple[float, ...]:
    """Events a second of each cause, in the scenario's order."""
    causes = scenario.hazards.causes
    shares = sum(c.share for c in causes if c.level == "node" and not c.planned)
    base = node_rate(scenario) / shares if shares else 0.0
    return tuple(
        c.per_year / YEAR_S if c.planned
        else shock_rate(scenario, c) if c.level != "node"
        else base * c.share
        for c in causes
    )  # fmt: skip


def draw(scenario: Scenario, seed: np.random.SeedSequence) -> History:
    """One history of ``scenario``, or of its trace.

    Raises ConfigError if the shocks alone exceed the MTBF.
    """
    if scenario.losses:
        return replay(scenario, scenario.losses, seed)
    parts = [_node_failures(scenario, seed)]
    rng = _stream(seed, SHOCKS)
    for number, cause in enumerate(scenario.hazards.causes):
        if cause.level != "node" and not cause.planned:
            parts.append(_shocks(scenario, number, rng))
    rng = _stream(seed, PLANNED)
    for number, cause in enumerate(scenario.hazards.causes):
        if cause.planned:
            times = _poisson_times(cause.per_year / YEAR_S, scenario.horizon_s, rng)
            picks = rng.integers(scenario.fleet.nodes, size=len(times)).tolist()
            parts.append(_Events(times, np.full(len(times), number), list(zip(picks, strict=True))))
    return _staged(scenario, parts, seed)


def replay(
    scenario: Scenario, losses: Sequence[tuple[float, int]], seed: np.random.SeedSequence
) -> History:
    """A history from a trace of (seconds, nodes lost at once).

    Which nodes, and which of the scenario's node causes, is drawn; losses after the horizon are
    left out. Raises ConfigError for a loss of fewer than 1 or more than all nodes.
    """
    rng = _stream(seed, NODES)
    kept = sorted((at, count) for at, count in losses if 0 <= at < scenario.horizon_s)
    for at, count in kept:
        if not 1 <= count <= scenario.fleet.nodes:
            raise ConfigError(
                f"trace: {count} nodes lost at {at:.4g} s, needs 1 to {scenario.fleet.nodes}"
            )
    nodes = [
        tuple(rng.choice(scenario.fleet.nodes, size=count, replace=False).tolist())
        for _, count in kept
    ]
    causes = _node_causes(scenario, len(kept), rng)
    events = _Events(np.array([at for at, _ in kept], dtype=float), causes, nodes)
    return _staged(scenario, [events], seed)


def _stream(seed: np.random.SeedSequence, number: int) -> np.random.Generator:
    """A stream of its own; unlike spawn() it leaves the seed as it was."""
    child = np.random.SeedSequence(seed.entropy, spawn_key=(*seed.spawn_key, number))
    return np.random.Generator(np.random.PCG64(child))


def _poisson_times(rate: float, horizon_s: float, rng: np.random.Generator) -> Floats:
    return np.sort(rng.random(rng.poisson(rate * horizon_s))) * horizon_s


def _node_causes(scenario: Scenario, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    weights = np.array(
        [c.share if c.level == "node" and not c.planned else 0.0 for c in scenario.hazards.causes]
    )
    if not weights.sum():
        raise ConfigError(f"scenario {scenario.name}: no cause has a share of the node failures")
    edges = np.cumsum(weights / weights.sum())
    edges[-1] = 1.0
    return np.searchsorted(edges, rng.random(count), side="right")


def _node_failures(scenario: Scenario, seed: np.random.SeedSequence) -> _Events:
    hazards, fleet = scenario.hazards, scenario.fleet
    rate, rng = node_rate(scenario), _stream(seed, NODES)
    weights = None
    if hazards.lemon_shape:
        weights = _stream(seed, LEMONS).gamma(hazards.lemon_shape, size=fleet.nodes)
        weights /= weights.sum()
    if hazards.shape == 1:
        times = _poisson_times(rate, scenario.horizon_s, rng)
        nodes = (
            rng.integers(fleet.nodes, size=len(times))
            if weights is None
            else rng.choice(fleet.nodes, size=len(times), p=weights)
        )
    else:
        rates = rate * (np.full(fleet.nodes, 1 / fleet.nodes) if weights is None else weights)
        times, nodes = _renewals(rates, hazards.shape, scenario.horizon_s, rng)
    causes = _node_causes(scenario, len(times), rng) if len(times) else np.zeros(0, dtype=int)
    return _Events(times, causes, list(zip(nodes.tolist(), strict=True)))


def _renewals(
    rates: Floats, shape: float, horizon_s: float, rng: np.random.Generator
) -> tuple[Floats, NDArray[np.int64]]:
    """Times and nodes of independent Weibull renewal processes with these long-run rates."""
    scale = 1 / (rates * math.gamma(1 + 1 / shape))
    biased = rng.gamma(1 + 1 / shape, size=len(rates)) ** (1 / shape)
    clock = rng.random(len(rates)) * biased * scale
    alive = np.flatnonzero(clock < horizon_s)
    times, nodes = [clock[alive]], [alive]
    while len(alive):
        clock[alive] += rng.weibull(shape, size=len(alive)) * scale[alive]
        alive = alive[clock[alive] < horizon_s]
        times.append(clock[alive])
        nodes.append(alive)
    return np.concatenate(times), np.concatenate(nodes)


def _shocks(scenario: Scenario, number: int, rng: np.random.Generator) -> _Events:
    cause = scenario.hazards.causes[number]
    domains = scenario.fleet.members(cause.level)
    times = _poisson_times(shock_rate(scenario, cause), scenario.horizon_s, rng)
    nodes = []
    for pick in rng.integers(len(domains), size=len(times)).tolist():
        members = domains[pick]
        if cause.hit < 1:
            hit = rng.random(len(members)) < cause.hit
            nodes.append(tuple(node for node, down in zip(members, hit, strict=True) if down))
        else:
            nodes.append(tuple(members))
    return _Events(times, np.full(len(times), number), nodes)


def _staged(scenario: Scenario, parts: list[_Events], seed: np.random.SeedSequence) -> History:
    """All events by time, each with its stage times drawn."""
    causes, recovery = scenario.hazards.causes, scenario.recovery
    times = np.concatenate([part.at_s for part in parts])
    order = np.argsort(times, kind="stable")
    number = np.concatenate([part.cause for part in parts]).astype(np.int64)[order]
    nodes = [node for part in parts for node in part.nodes]
    rng = _stream(seed, STAGES)
    spread = np.exp(recovery.sigma * rng.standard_normal((4, len(order))))
    away = rng.standard_normal(len(order))

    def of(name: str) -> Floats:
        return np.array([getattr(cause, name) for cause in causes], dtype=float)[number]

    columns = (
        times[order].tolist(),
        number.tolist(),
        [nodes[i] for i in order.tolist()],
        (rng.random(len(order)) < of("readable")).tolist(),
        (of("detect_s") * recovery.detect_scale * spread[0]).tolist(),
        (of("diagnose_s") * recovery.diagnose_scale * spread[1]).tolist(),
        (recovery.allocate_s * spread[2]).tolist(),
        (recovery.init_s * spread[3]).tolist(),
        (of("away_s") * np.exp(of("away_sigma") * away)).tolist(),
    )
    failures = [f for f in map(Failure, *columns) if f.nodes]
    return History(causes, failures)
