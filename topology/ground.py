"""What the rules allow: a cluster seen through its spread levels, and the tightest caps that fit.

Intuition: for placing, a node is its host and its domain at each level asked for, its *signature*.
Caps say how many shards of one owner a domain may take: in the owner's own, in any other, without
a label. Before anything is placed, the tightest caps are found under which all shards still fit.

Contract: pure functions. Rules that nest form a laminar matroid, in which taking whatever is still
allowed, in any order, ends at the largest possible set (Rado 1957, Edmonds 1971): the caps found
are then exact. Where the levels do not nest, a rule may be called unmet that another choice would
have met.

Consequence: :class:`Hand`, the shards of one owner as they are dealt, is the only place where the
caps and the host rule (never two on one host, never one on the owner's) are applied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from topology.cluster import HOST, Cluster
from topology.rules import Rules

UNKNOWN = -1

Signature = tuple[int, ...]  # a node's domain number at each spread level, UNKNOWN if unlabelled


class Caps(NamedTuple):
    """Shards allowed at one level: in any other domain, in the owner's, without a label."""

    other: int
    own: int
    unlabelled: int


@dataclass(frozen=True, slots=True)
class Ground:
    """A cluster seen through its spread levels, by position on the ring."""

    names: tuple[str, ...]
    position: dict[str, int]
    hosts: tuple[str, ...]
    seats: tuple[tuple[str, str], ...]
    signatures: tuple[Signature, ...]
    labels: tuple[tuple[str, ...], ...]
    wide_first: tuple[int, ...]
    host_nodes: dict[str, tuple[str, ...]]
    room: dict[Signature, int]
    sizes: tuple[tuple[tuple[int, int], ...], ...]
    nested: bool
    regular: bool


@dataclass(frozen=True, slots=True)
class Ask:
    """One question: how many shards, under which rules, seen from where, on which hosts."""

    rules: Rules
    target: int
    own: Signature
    room: dict[Signature, int]


class Hand:
    """The shards of one owner as they are dealt; ``caps`` empty: only hosts are told apart."""

    __slots__ = ("caps", "ground", "hosts", "nodes", "own", "rules", "used")

    def __init__(self, ground: Ground, owner: int, rules: Rules, caps: tuple[Caps, ...]) -> None:
        self.ground, self.rules, self.caps = ground, rules, caps
        self.own = ground.signatures[owner]
        self.hosts = {ground.hosts[owner]}
        self.used: list[dict[int, int]] = [{} for _ in self.own]
        self.nodes: list[int] = []

    def fits(self, at: int, instead: int = -1) -> bool:
        """Whether position ``at`` may take a shard (in place of the holder ``instead``)."""
        ground = self.ground
        host = ground.hosts[at]
        if host in self.hosts and (instead < 0 or ground.hosts[instead] != host or instead == at):
            return False
        leaving = ground.signatures[instead] if instead >= 0 else None
        signature = ground.signatures[at]
        for i, caps in enumerate(self.caps):
            code = signature[i]
            used = self.used[i].get(code, 0)
            if leaving is not None and leaving[i] == code:
                used -= 1
            if used >= (caps[code == self.own[i]] if code != UNKNOWN else caps.unlabelled):
                return False
        return True

    def has_room(self, i: int, code: int) -> bool:
        """Whether domain ``code`` of level i may take one more shard, as far as that level says."""
        caps = self.caps[i]
        cap = caps[code == self.own[i]] if code != UNKNOWN else caps.unlabelled
        return self.used[i].get(code, 0) < cap

    def take(self, at: int) -> None:
        """Give a shard to ``at``."""
        self.hosts.add(self.ground.hosts[at])
        self.nodes.append(at)
        for used, code in zip(self.used, self.ground.signatures[at], strict=True):
            used[code] = used.get(code, 0) + 1

    def swap(self, old: int, new: int) -> None:
        """Give the shard of ``old`` to ``new``; its index stays."""
        self.hosts.discard(self.ground.hosts[old])
        for used, code in zip(self.used, self.ground.signatures[old], strict=True):
            used[code] -= 1
        self.take(new)
        self.nodes[self.nodes.index(old)] = self.nodes.pop()

    def unmet(self) -> tuple[int, ...]:
        """The levels asked for whose rule these shards do not meet."""
        most, m = self.rules.most, self.rules.m
        missed = []
        for i, used in enumerate(self.used):
            own = self.own[i]
            if (
                own == UNKNOWN
                or used.get(UNKNOWN)
                or max(used.values(), default=0) > most
                or (not m and used.get(own))
            ):
                missed.append(i)
        return tuple(missed)


def survey(cluster: Cluster, levels: tuple[str, ...]) -> Ground:
    """The cluster, seen through ``levels``."""
    names = cluster.ring
    nodes = [cluster.node(name) for name in names]
    labels = tuple(
        tuple(sorted(label for label in cluster.members(level) if label is not None))
        for level in levels
    )
    number = [{label: i for i, label in enumerate(known)} for known in labels]
    signatures = tuple(
        tuple(number[i].get(node.domain(level) or "", UNKNOWN) for i, level in enumerate(levels))
        for node in nodes
    )
    hosts = tuple(node.host for node in nodes)
    nested = cluster.nests(levels)
    by_host = {node.host: signature for node, signature in zip(nodes, signatures, strict=True)}
    return Ground(
        names=names,
        position={name: i for i, name in enumerate(names)},
        hosts=hosts,
        seats=tuple(node.seat for node in nodes),
        signatures=signatures,
        labels=labels,
        wide_first=tuple(
            sorted(range(len(levels)), key=lambda i: -cluster.levels.index(levels[i]))
        ),
        host_nodes={h: members for h, members in cluster.members(HOST).items() if h is not None},
        room=dict(Counter(by_host.values())),
        sizes=tuple(
            tuple(Counter(signature[i] for signature in by_host.values()).items())
            for i in range(len(levels))
        ),
        nested=nested,
        regular=nested and is_regular(hosts, signatures),
    )


def is_regular(hosts: Sequence[str], signatures: Sequence[Signature]) -> bool:
    """Whether, on a ring of these nodes, to share a domain is a matter of distance alone.

    At each level (hosts included) the labels recur with period P, the number of labels, so the
    nodes i and j share one if and only if i = j mod P; at P = 1 all may lack it. Then turning the
    ring by one keeps who shares what, so where levels nest (and caps are exact) all owners have
    the same caps and skip the same distances D: node j holds a shard of the owners j - d, d in D,
    and of no other, which are as many for every j.
    """
    for labels in (hosts, *zip(*signatures, strict=True)):
        period = len(set(labels))
        recur = tuple(labels) == tuple(labels[:period]) * (len(labels) // max(1, period))
        if not recur or (period > 1 and UNKNOWN in labels):
            return False
    return True


def ask_from(ground: Ground, start: int, rules: Rules, shut: Set[int]) -> Ask:
    """The question of the owner at ``start``: its target is k+m, or all hosts that there are.

    A host is no host if all its nodes are in ``shut``, or if it is the owner's.
    """
    hosts = {ground.hosts[at] for at in shut}
    hosts = {h for h in hosts if shut >= {ground.position[name] for name in ground.host_nodes[h]}}
    room = dict(ground.room)
    for host in hosts | {ground.hosts[start]}:
        room[ground.signatures[ground.position[ground.host_nodes[host][0]]]] -= 1
    return Ask(rules, min(rules.count, sum(room.values())), ground.signatures[start], room)


def _cap(caps: Caps, code: int, own: int) -> int:
    if code == UNKNOWN:
        return caps.unlabelled
    return caps.own if code == own else caps.other


def fill(ask: Ask, caps: tuple[Caps, ...]) -> dict[Signature, int]:
    """How many hosts of each signature the rules let in, greedily, up to the target."""
    used: dict[tuple[int, int], int] = {}
    taken: dict[Signature, int] = {}
    missing = ask.target
    for signature, room in ask.room.items():
        n = min(room, missing)
        for i, code in enumerate(signature):
            n = min(n, _cap(caps[i], code, ask.own[i]) - used.get((i, code), 0))
            if n <= 0:
                break
        if n > 0:
            taken[signature] = n
            missing -= n
            for i, code in enumerate(signature):
                used[i, code] = used.get((i, code), 0) + n
        if not missing:
            break
    return taken


def _alone(ask: Ask, i: int, caps: Caps, ground: Ground) -> bool:
    """Whether level i lets the target in, were it the only one: quick to say, and needed."""
    left = ask.target
    for code, hosts in ground.sizes[i]:
        left -= min(_cap(caps, code, ask.own[i]), hosts)
        if left <= 0:
            return True
    return left <= 0


def choose_caps(
    ask: Ask, ground: Ground, refuse: Callable[[int, int], Exception]
) -> tuple[Caps, ...]:
    """The tightest caps, level by level, under which all shards of the target still fit.

    Raises ``refuse(i, room)`` for a required level i that cannot be met, with the room it has.
    """
    rules = ask.rules
    rule = Caps(rules.most, rules.most if rules.m else 0, 0)
    chosen = [Caps(ask.target, ask.target, ask.target)] * len(rules.spread)
    order = sorted(range(len(rules.spread)), key=lambda i: not rules.spread[i].required)

    def room(i: int, caps: Caps) -> int:
        return sum(fill(ask, (*chosen[:i], caps, *chosen[i + 1 :])).values())

    def fits(i: int, caps: Caps) -> bool:
        return _alone(ask, i, caps, ground) and room(i, caps) == ask.target

    for i in order:  # first which levels can be met at all, together
        if ask.own[i] != UNKNOWN and fits(i, rule):
            chosen[i] = rule
        elif rules.spread[i].required:
            raise refuse(i, room(i, rule))
    for i in order:  # then each as well as it can be
        chosen[i] = next(caps for caps in _ladder(ask) if fits(i, caps))
    return tuple(chosen)


def _ladder(ask: Ask) -> Iterator[Caps]:
    """Caps of one level from best to worst; the last one allows everything."""
    most, target = ask.rules.most, ask.target
    spare = min(most, max(1, target - ask.rules.k))  # with hosts short, fewer may go at once
    for other in range(spare, most + 1):
        yield Caps(other, 0, 0)
    for own in range(1, most + 1):
        yield Caps(most, own, 0)
    for other in range(most + 1, target + 1):
        yield Caps(other, 0, 0)
        yield Caps(other, spare, 0)
    for own in range(spare + 1, target + 1):
        yield Caps(target, own, 0)
    for unlabelled in range(target + 1):
        yield Caps(target, target, unlabelled)
