"""The curves beside the main table: intervals, domains, scatter widths, and what it rests on.

Intuition: a table says how good a choice is, a curve how much the choice matters. Four are drawn:
the valley of the save interval; the chance that the loss of a whole domain is too deep, by its
size; what a wider scatter buys (a faster rebuild) and costs (more sets of nodes that kill); and how
far the answer moves when each input moves over its plausible range, one at a time.

Contract: `valley` and `sensitivity` ask ``ettr(scenario, scheme)`` and so use the failures of their
caller, the same at every point. The others need no run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from p2pckpt.save.schedule import FLAT, optimum_s
from simulations.study import network
from simulations.study.durability import pair_loss
from simulations.study.exposure import domain_deep
from simulations.study.plan import placed, prepare
from simulations.study.scenario import Scenario
from simulations.study.schemes import Pieces, parse
from simulations.study.statistics import Estimate, fraction

Ettr = Callable[[Scenario, str], Estimate]
Progress = Callable[[str, int, int], None]

INTERVALS = 15
SPAN = 30.0
"""The valley is drawn from a 30th of the best interval to 30 times it."""
DOMAIN_SIZES = (1, 2, 4, 8, 16, 32, 64, 125, 250, 500)
DEAD_SHARE = 0.03
TRIALS = 2000


@dataclass(frozen=True)
class Valley:
    """ETTR by interval; the intervals that Young, Daly and the product's decider choose."""

    scheme: str
    intervals_s: tuple[float, ...]
    ettr: tuple[Estimate, ...]
    young_s: float
    daly_s: float
    decided_s: float

    @property
    def flat_s(self) -> tuple[float, float]:
        """The simulated intervals whose ETTR is within 1 % of the best one's."""
        best = max(e.value for e in self.ettr)
        good = [
            t for t, e in zip(self.intervals_s, self.ettr, strict=True)
            if e.value >= (1 - FLAT) * best
        ]  # fmt: skip
        return min(good), max(good)


@dataclass(frozen=True)
class Curve:
    """P(too deep for RAM | a whole domain is lost), by the nodes of the domain."""

    name: str
    sizes: tuple[int, ...]
    deep: tuple[float, ...]
    closed_form: bool = False


@dataclass(frozen=True)
class Scatter:
    """One scatter width: nodes that take part in a rebuild, its time, and the chance of loss."""

    scheme: str
    partners: float
    rebuild_s: float
    loss: Estimate


@dataclass(frozen=True)
class Swing:
    """ETTR at both ends of an input's range."""

    key: str
    low: float
    high: float
    at_low: Estimate
    at_high: Estimate

    @property
    def width(self) -> float:
        """How far the answer moves."""
        return abs(self.at_high.value - self.at_low.value)


def valley(scenario: Scenario, scheme: str, ettr: Ettr, progress: Progress) -> Valley:
    """The interval of the RAM tier, swept over a log grid."""
    plan = prepare(scenario, parse(scheme))
    mtbf, stall = scenario.hazards.mtbf_s, max(plan.stall_s, 1e-3)
    daly = optimum_s(stall, mtbf)
    low = max(scenario.saving.low_s, plan.push_s, daly / SPAN)
    grid = np.geomspace(low, max(2 * low, daly * SPAN), INTERVALS).tolist()
    found = []
    for number, interval in enumerate(grid):
        found.append(ettr(scenario.varied("saving.interval_s", interval), scheme))
        progress("intervals", number + 1, len(grid))
    young = float(np.sqrt(2 * stall * mtbf))
    return Valley(scheme, tuple(grid), tuple(found), young, daly, plan.interval_s)


def sensitivity(
    scenario: Scenario, scheme: str, ettr: Ettr, progress: Progress
) -> tuple[Swing, ...]:
    """Every input of ``scenario.vary`` at its two ends, the widest swing first."""
    found = []
    for number, span in enumerate(scenario.vary):
        ends = [ettr(scenario.varied(span.key, end), scheme) for end in (span.low, span.high)]
        found.append(Swing(span.key, span.low, span.high, ends[0], ends[1]))
        progress("sensitivity", number + 1, len(scenario.vary))
    return tuple(sorted(found, key=lambda swing: -swing.width))


def domain_losses(scenario: Scenario) -> tuple[Curve, ...]:
    """Each kind of pieces on peers, placed by domains and at random; pairs by closed form (PC-23).

    The domains that are lost are runs of neighbours by number, whether or not they have a label.
    """
    count = scenario.fleet.nodes
    sizes = tuple(size for size in DOMAIN_SIZES if size <= max(1, count // 2))
    bodies = dict.fromkeys(name.partition("@")[0] for name in scenario.schemes)
    curves = []
    for scheme in (parse(body + at) for body in bodies for at in ("", "@random") if _can(body, at)):
        where = placed(scenario.fleet, scheme)
        deep = tuple(_deep_by_size(where, count, size) for size in sizes)
        curves.append(Curve(scheme.name, sizes, deep))
    if count % 2 == 0:
        pairs = tuple(pair_loss(count, size) for size in sizes)
        curves.append(Curve("disjoint random pairs, exact", sizes, pairs, closed_form=True))
    return tuple(curves)


def _can(body: str, at: str) -> bool:
    scheme = parse(body)
    return scheme.memory and scheme.n > 0 and not (at and scheme.grouped)


def _deep_by_size(where: Pieces, count: int, size: int) -> float:
    return domain_deep(where, [range(a, a + size) for a in range(0, count - size + 1, size)])


def scatter_widths(scenario: Scenario) -> tuple[Scatter, ...]:
    """The first scheme with peers, by copysets of growing width and by the other policies.

    Loss: `DEAD_SHARE` of all nodes die at once, anywhere. Rebuild: what a node held is made again
    by all of its partners at once, each at the speed of its network.
    """
    count, names = scenario.fleet.nodes, [parse(name) for name in scenario.schemes]
    body = next((s for s in names if s.memory and s.n and not s.grouped), None)
    if body is None or count < 3 * (body.n + 1):
        return ()
    rng, found = np.random.default_rng(0), []
    dead = max(body.n - body.k + 2, round(count * DEAD_SHARE))
    sets = [set(rng.choice(count, size=dead, replace=False).tolist()) for _ in range(TRIALS)]
    widths = sorted({body.n * min(step, body.n + 1) for step in (1, 2, 3, 6, 8, 11)})
    for policy in (*(f"copysets:{width}" for width in widths), "domain-aware", "group", "random"):
        scheme = parse(f"{body.name.partition('@')[0]}@{policy}")
        where = placed(scenario.fleet, scheme)
        width = _mean_partners(where)
        hits = sum(where.lost(nodes) for nodes in sets)
        moved = scenario.node_bytes * (1 + scheme.ram)
        rebuild = moved / (width * network.nic_bytes_per_s(scenario.links))
        found.append(Scatter(scheme.name, width, rebuild, fraction(hits, TRIALS)))
    return tuple(found)


def _mean_partners(where: Pieces) -> float:
    """Nodes that hold a piece together with a node, or for it: who can help to rebuild it."""
    partners: list[set[int]] = [set() for _ in where.rows]
    for owner, row in enumerate(where.rows):
        everybody = {owner, *row}
        for node in everybody:
            partners[node] |= everybody
    return float(np.mean([len(found) - 1 for found in partners]))
