"""What a cluster, a layout and a policy come to, before training starts: the plan and its findings.

Intuition: whether a rack may be lost is decided by labels, k, m and the policy, all known before
the first step. A :class:`Plan` places every owner as the agents would and asks what survives.

Contract: pure. A :class:`Finding` is ``weak`` if something that was asked for, or that any cluster
should have, is not there; else it is a remark. No weak finding: every level asked for may lose any
one domain together with any one owner.

Consequence: what ``p2pckpt topology check`` prints, an agent can say too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from topology.cluster import HOST, NODE, Cluster
from topology.hostlist import fold
from topology.place import place_all
from topology.rules import Placement, Policy, Rules
from topology.survive import Odds, Share, WorstCase, odds, worst_case

NAMES_SHOWN = 60
"""Letters of a host list in a sentence."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence, and whether something is weak."""

    weak: bool
    text: str


@dataclass(frozen=True)
class Plan:
    """Every owner's placement, and what follows."""

    cluster: Cluster
    rules: Rules
    policy: Policy
    placements: Mapping[str, Placement]

    @cached_property
    def loads(self) -> dict[str, int]:
        """Shards held, by node."""
        held = Counter(name for placement in self.placements.values() for name in placement.nodes)
        return {node.name: held[node.name] for node in self.cluster.nodes}

    @cached_property
    def shares(self) -> list[Share]:
        """What each owner would have in a committed step."""
        return [Share(o, p.nodes, self.rules.k) for o, p in self.placements.items()]

    @cached_property
    def worst(self) -> dict[str, WorstCase]:
        """The smallest loss that kills, by level, "node" and "host" first."""
        levels = (NODE, HOST, *self.cluster.levels)
        return {level: worst_case(self.shares, self.cluster, level) for level in levels}

    @property
    def degraded(self) -> dict[str, tuple[str, ...]]:
        """What is not met, by owner; owners that get all are not in it."""
        return {o: p.degraded for o, p in self.placements.items() if p.degraded}

    def odds(self, per_hour: Mapping[str, float], window_h: float) -> Odds:
        """The odds of losing a share; see :func:`topology.survive.odds`."""
        return odds(self.shares, self.cluster, per_hour, window_h)

    def findings(self) -> tuple[Finding, ...]:
        """What is wrong or weak, labels first."""
        return (*_label_findings(self.cluster, self.rules), *_placement_findings(self))


def make_plan(cluster: Cluster, rules: Rules, policy: Policy) -> Plan:
    """Place every owner. Raises TopologyError as :func:`topology.place.place` does."""
    return Plan(cluster, rules, policy, place_all(cluster, rules, policy=policy))


def _label_findings(cluster: Cluster, rules: Rules) -> Iterator[Finding]:
    hosts, need = len(cluster.members(HOST)), rules.count + 1
    layout = f"k={rules.k}, m={rules.m}"
    if hosts < need:
        yield Finding(True, f"host: {layout} needs {need} hosts (k+m and the owner's), has {hosts}")
    elif hosts == need:
        text = (
            f"host: {layout} needs {need} hosts and there is none more: after a loss, shards lack"
        )
        yield Finding(False, text)
    if not rules.m:
        yield Finding(True, "m=0: the owner and any one holder, lost together, lose a checkpoint")
    asked = {level.name for level in rules.spread}
    for level in cluster.levels:
        members = cluster.members(level)
        blind = members.get(None, ())
        labelled = {label: names for label, names in members.items() if label is not None}
        if blind and labelled:
            what = f"{level}: {len(blind)} of {len(cluster)} nodes have no label: {_short(blind)}"
            yield Finding(True, what)
        elif blind and level in asked:
            yield Finding(True, f"{level}: no node has a label, nothing can be spread over it")
        if len(labelled) == 1 and not blind and len(cluster) > 1:
            text = f"{level}: {next(iter(labelled))} holds all nodes, with it everything goes"
            yield Finding(level in asked, text)
    if not cluster.levels:
        yield Finding(
            True, "no level above the host is known: a rack or power loss is not foreseen"
        )
    shared = Counter(node.host for node in cluster.nodes)
    many = [host for host, nodes in shared.items() if nodes > 1]
    if many:
        yield Finding(False, f"host: {len(many)} hosts run several nodes, which fail together")


def _placement_findings(plan: Plan) -> Iterator[Finding]:
    causes: dict[str, list[str]] = {}
    for owner, said in plan.degraded.items():
        for sentence in said:
            causes.setdefault(sentence.partition(":")[0], []).append(owner)
    for level, owners in causes.items():
        said = plan.degraded[owners[0]]
        sentence = next(s for s in said if s.startswith(f"{level}:"))
        count = f"{len(owners)} of {len(plan.cluster)} placements"
        yield Finding(True, f"{sentence} ({count}, as that of {owners[0]})")
    asked = {level.name for level in plan.rules.spread}
    for level, worst in plan.worst.items():
        domains = len([d for d in plan.cluster.members(level) if d is not None])
        if len(worst.domains) == 1 and domains > 1:
            text = f"{level}: losing {worst.domains[0]} alone kills: {worst.reason}"
            yield Finding(level in asked or level in (NODE, HOST), text)
    low, high = min(plan.loads.values()), max(plan.loads.values())
    if high - low > 1:
        full = [name for name, load in plan.loads.items() if load == high]
        text = f"loads differ: {low} to {high} shards a node, most on {_short(tuple(full))}"
        yield Finding(False, f"{text}; memory is granted for the fullest")


def _short(names: tuple[str, ...]) -> str:
    text = fold(names)
    return text if len(text) <= NAMES_SHOWN else text[: NAMES_SHOWN - 1] + "…"
