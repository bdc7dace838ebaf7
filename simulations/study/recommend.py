"""Which (k, m), which placement, which interval, how many spares: an answer with its reasons.

Intuition: many layouts cost a job the same time, because what peers bring back is nearly free. So
time does not choose between them; it says which are as good (the flat region, within 1 % of
useful time). Among those the cheapest in RAM is taken that keeps a margin: beside any whole domain,
`MARGIN` more nodes may be lost (one that fails while the domain is recovered); of equal ones that
with more parity. Where no layout can keep it, the answer says what is the most, and why.

Contract: no chance but seeded; exact margins, counted on the product's own placement. Only layouts
that the product has are advised. An `Advice` holds every option that was weighed.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from p2pckpt.save.schedule import FLAT
from simulations.study.hazards import cause_rates
from simulations.study.plan import Plan, placed, prepare
from simulations.study.scenario import LEFT_OUT, Cause, Fate, Fleet, Scenario
from simulations.study.schemes import Pieces, parse

MARGIN = 1
COPIES = ("copies:1", "copies:2", "copies:3")
LAYOUTS = (
    *COPIES, "rs:2,1", "rs:2,2", "rs:3,1", "rs:3,2", "rs:4,1", "rs:4,2", "rs:4,3", "rs:6,2",
    "rs:6,3", "rs:8,2", "rs:8,3", "rs:8,4",
)  # fmt: skip
SPARES_SHARE = 0.99
DRAWS = 20_000
VERSIONS = 2
"""While a save is in flight the one before is still held."""


@dataclass(frozen=True)
class Option:
    """One layout on this cluster.

    ``margin``: nodes that may be lost beside any whole domain; -1: some domain alone is too much.
    ``overhead``: share of time that saving, lost work and restore cost. ``ram_bytes`` of one node,
    its own copies included.
    """

    plan: Plan
    margin: int
    weakest: str
    overhead: float
    ram_bytes: float

    @property
    def name(self) -> str:
        """The layout, as `Checkpointer(layout=...)` takes it."""
        return self.plan.scheme.name


@dataclass(frozen=True)
class Advice:
    """What to do, what else would be as good, and what to know."""

    scenario: Scenario
    chosen: Option
    options: tuple[Option, ...]
    as_good: tuple[str, ...]
    spares: int
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]


def recommend(scenario: Scenario) -> Advice:
    """Weigh all layouts that the cluster has hosts for."""
    most = max(1, scenario.fleet.nodes - 1)
    free = replace(scenario.saving, interval_s=0.0, s3_interval_s=0.0)
    scenario = replace(scenario, saving=free)
    options = tuple(
        _option(scenario, name) for name in LAYOUTS if parse(name).n <= most or name == COPIES[0]
    )
    best = min(option.overhead for option in options)
    good = [option for option in options if option.overhead <= best + FLAT]
    wanted = min(MARGIN, max(option.margin for option in good))
    chosen = min(
        (option for option in good if option.margin >= wanted),
        key=lambda option: (option.ram_bytes, -option.plan.scheme.n),
    )
    spares = spares_for(scenario)
    return Advice(
        scenario=scenario,
        chosen=chosen,
        options=options,
        as_good=tuple(option.name for option in good),
        spares=spares,
        reasons=_reasons(scenario, chosen, good, spares),
        warnings=_warnings(scenario, chosen, spares),
    )


def _option(scenario: Scenario, name: str) -> Option:
    scheme = parse(name)
    plan = prepare(scenario, scheme)
    margin, weakest = margin_of(scenario.fleet, placed(scenario.fleet, scheme))
    ram = VERSIONS * (1 + scheme.ram) * scenario.node_bytes
    return Option(plan, margin, weakest, plan.overhead, ram)


def margin_of(fleet: Fleet, where: Pieces) -> tuple[int, str]:
    """The most nodes that may be lost beside any one domain, and the level that allows fewest.

    An owner in the lost domain D may lose slack - |row in D| more; one outside is safe while it
    lives, so it is itself one of the nodes, and then as many more. Only domains that placement
    knows are looked at, and only levels with two of them: what takes everything is not for a layout
    to survive. Nodes without a label at a level count as one domain there.
    """
    found: list[tuple[int, str]] = []
    for level in ("node", *_known(fleet)):
        least = min(
            _owner_margin(fleet, level, (owner, *row), slack)
            for owner, (row, slack) in enumerate(zip(where.rows, where.slack, strict=True))
        )
        found.append((max(-1, least), level))
    return min(found, key=lambda pair: pair[0])


def _known(fleet: Fleet) -> list[str]:
    """Levels at which placement knows two domains or more."""
    levels = [level for level, _ in fleet.domains if fleet.labelled]
    return [level for level in levels if len(fleet.members(level)) > 1]


def _owner_margin(fleet: Fleet, level: str, nodes: tuple[int, ...], slack: int) -> int:
    domains = nodes if level == "node" else [fleet.domain(level, node) for node in nodes]
    held = Counter(domains[1:])
    own = held.pop(domains[0], 0)
    return min(slack - own, max(0, slack - max(held.values(), default=0) + 1))


def spares_for(scenario: Scenario) -> int:
    """Spares that are enough for 99 of 100 failures of single nodes; 0 where none is evicted.

    A failure needs its own node replaced while those of earlier ones are still away. Arrivals are
    Poisson, so a failure finds what a random moment finds: of each cause a Poisson number with the
    mean of rate times mean time away (M/G/infinity). A domain that goes as a whole comes back as a
    whole: nobody keeps spares for it.
    """
    rng = np.random.default_rng(0)
    causes = [
        (cause, rate)
        for cause, rate in zip(scenario.hazards.causes, cause_rates(scenario), strict=True)
        if cause.evict and cause.fate is not Fate.PROCESS and not cause.planned
    ]
    if not any(cause.level == "node" and rate for cause, rate in causes):
        return 0
    need = np.ones(DRAWS)
    for cause, rate in causes:
        mean_s = cause.away_s * math.exp(cause.away_sigma**2 / 2)
        need += _size(scenario, cause) * rng.poisson(rate * mean_s, size=DRAWS)
    return int(np.quantile(need, SPARES_SHARE, method="inverted_cdf"))


def _size(scenario: Scenario, cause: Cause) -> float:
    members = scenario.fleet.members(cause.level)
    return float(round(cause.hit * max(len(domain) for domain in members)))


# -- saying so ---------------------------------------------------------------------------------


def _reasons(
    scenario: Scenario, chosen: Option, good: list[Option], spares: int
) -> tuple[str, ...]:
    plan = chosen.plan
    known = _known(scenario.fleet)
    beside = " or ".join(("node", *known))
    keeps = (
        f"{chosen.name}: the least RAM of the {len(good)} layouts within {FLAT:.0%} of the best, "
        f"that survives any one {beside} and {_nodes(chosen.margin)} beside it"
    )
    if chosen.margin < 0:
        keeps = f"{chosen.name}: no layout survives every {chosen.weakest}; this one is as good"
    where = f"over {', '.join(known) or 'hosts only'}"
    deep = plan.deep_share
    fallback = f"one in {1 / deep:,.0f} failures" if deep > 1e-9 else "none that is modelled"
    return (
        keeps,
        f"placement: domain-aware, {where}; too deep for RAM: {fallback}",
        *plan.schedule.reasons,
        f"spares: {spares} are enough for {SPARES_SHARE:.0%} of the failures of single nodes",
    )


def _nodes(count: int) -> str:
    return "no more node" if not count else "any one node" if count == 1 else f"any {count} nodes"


def _warnings(scenario: Scenario, chosen: Option, spares: int) -> tuple[str, ...]:
    fleet, found = scenario.fleet, []
    found += _label_warnings(scenario)
    if chosen.margin < MARGIN:
        can = "not even that" if chosen.margin < 0 else f"it and {_nodes(chosen.margin)} beside it"
        found.append(
            f"wanted is to survive any one {chosen.weakest} and {_nodes(MARGIN)} beside it, the "
            f"best layout survives {can}: {fleet.nodes} nodes are too few, or in too few domains; "
            "keep the store's interval short"
        )
    if chosen.plan.scheme.n + 1 == fleet.nodes:
        found.append(
            f"{chosen.name} needs all {fleet.nodes} nodes: while one is away, every save is "
            "degraded, and survives less"
        )
    if fleet.ram_bytes and chosen.ram_bytes > fleet.ram_bytes:
        found.append(
            f"needs {_gb(chosen.ram_bytes)} of RAM on a node, it has {_gb(fleet.ram_bytes)}"
        )
    if not scenario.links.s3_bytes_per_s:
        found.append("there is no store: what is too deep for RAM is lost for good")
    if fleet.spares < spares:
        found.append(f"spares: {spares} advised, {fleet.spares} there: the job will wait")
    return tuple(found)


def _label_warnings(scenario: Scenario) -> list[str]:
    """What nobody knows about what fails together."""
    fleet, found = scenario.fleet, []
    if not (fleet.labelled and fleet.domains):
        found.append(
            "no node has a label: what a rack, switch or power feed takes at once is not known, "
            "nothing can be placed against it, and the store's interval does not count it; label "
            "the nodes"
        )
    for level, _ in fleet.domains if fleet.labelled else ():
        if len(fleet.members(level)) == 1:
            found.append(f"all nodes are in one {level}: its loss takes all that is in RAM")
        if lacking := fleet.nodes - sum(map(len, fleet.members(level))):
            found.append(f"{lacking} of {fleet.nodes} nodes have no label for {level}")
    unknown = [f"{note.value} ({note.text})" for note in scenario.notes if note.key == LEFT_OUT]
    if unknown and fleet.domains:
        found.append(f"not counted, so losses are too few: {'; '.join(unknown)}")
    return found


def text(advice: Advice) -> str:
    """For people."""
    chosen = advice.chosen
    plan, node = chosen.plan, advice.scenario.node_bytes
    store = f"every {_span(plan.every * plan.interval_s)}" if plan.every else "none"
    store += f", one snapshot in {plan.every}" if plan.every > 1 else ""
    low, high = plan.schedule.ram.flat_s
    lines = [
        advice.scenario.about,
        "",
        f"layout      {chosen.name}",
        "placement   domain-aware",
        f"interval    {_span(plan.interval_s)}; as good from {_span(low)} to {_span(high)}",
        f"store       {store}",
        f"spares      {advice.spares}",
        f"RAM         {_gb(chosen.ram_bytes)} a node: 2 versions of {_gb(node)}, "
        f"and {plan.scheme.ram:.3g} times as much for others",
        f"network     {_gb(plan.scheme.sent * node)} sent by a node for each save",
        "",
        "why",
        *(f"  {reason}" for reason in advice.reasons),
        "",
        f"as good, within {FLAT:.0%} of useful time: {', '.join(advice.as_good)}",
        "",
        "layout     margin  beside  time lost   RAM/node  sent",
    ]
    for option in advice.options:
        mark = "->" if option is chosen else "  "
        lines.append(
            f"{mark}{option.name:9} {option.margin:5}  {option.weakest:6}  {option.overhead:8.3%}"
            f"  {_gb(option.ram_bytes):>9}  {option.plan.scheme.sent:.3g} x"
        )
    lines += [
        "",
        "margin: nodes that may be lost beside any whole domain; beside: the level that allows",
        "fewest; -1: some domain alone is too much. RAM: own copies included. sent: for each save,",
        "in snapshots of a node.",
    ]
    lines += ["", *(f"WARNING: {warning}" for warning in advice.warnings)]
    return "\n".join(lines).rstrip()


def _gb(count: float) -> str:
    """Bytes for people."""
    return f"{count / 1e9:.3g} GB" if count < 1e12 else f"{count / 1e9:,.0f} GB"


def _span(seconds: float) -> str:
    """A time for people."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def document(advice: Advice) -> dict[str, Any]:
    """The same as plain values."""
    chosen = advice.chosen
    plan, scheme = chosen.plan, chosen.plan.scheme
    return {
        "layout": chosen.name,
        "k": scheme.k,
        "m": scheme.n - scheme.k,
        "placement": scheme.policy,
        "interval_s": plan.interval_s,
        "interval_flat_s": list(plan.schedule.ram.flat_s),
        "store_interval_s": plan.every * plan.interval_s or None,
        "spares": advice.spares,
        "ram_bytes_per_node": chosen.ram_bytes,
        "margin": chosen.margin,
        "beside": chosen.weakest,
        "as_good": list(advice.as_good),
        "reasons": list(advice.reasons),
        "warnings": list(advice.warnings),
        "options": [
            {
                "layout": option.name,
                "margin": option.margin,
                "beside": option.weakest,
                "overhead": option.overhead,
                "deep_share": option.plan.deep_share,
                "ram_bytes_per_node": option.ram_bytes,
                "sent_per_save": option.plan.scheme.sent,
            }
            for option in advice.options
        ],
    }
