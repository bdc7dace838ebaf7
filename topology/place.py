"""Where the k+m shards of one owner go: a walk along the cluster's ring, and what it cannot give.

Intuition: the nodes stand on a ring in which neighbours are far apart (``Cluster.ring``). An owner
gives its shards to the nodes around it, nearest first, alternately after and before it, skipping
whoever would break a rule. In a cluster of equal domains a rule skips the same distances for every
owner, so the holders are fixed offsets from the owner and every node holds exactly k+m shards:
balance by construction. A hash per owner (rendezvous) moves fewer shards when a node goes, but
loads nodes unevenly, and memory is granted for the fullest. Both sides rather than successors
only, because holding is then mutual and fewer sets of nodes can kill (9 nodes, rs(4, 2): 99 of 126
quadruples instead of all). ``excluded`` is the stable way to lose a node: each owner that used it
moves one shard, no other moves.

Contract: a pure function of its arguments. Never two shards on one host, never one on the owner's.
At each spread level a domain holds at most max(1, m) shards; in the owner's own domain as few as
suffice, and for m = 0 none. Rules that nest form a laminar matroid, in which taking whatever is
still allowed, in any order, ends at the largest possible set (Rado 1957, Edmonds 1971): if a
placement that meets all rules exists, it is found. Where the levels do not nest, a result still
meets every rule that it does not call degraded, but a rule may be reported unmet that another
choice would have met.

Consequence: a required level that cannot be met is an error. A preferred one is met as nearly as
possible and named in ``degraded`` with the losses that now kill. Levels are served in the order:
required ones, then preferred ones as listed; an earlier one is never weakened for a later one.
A node without a label at a level is used there only when the labelled ones do not suffice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import NamedTuple

from topology.cluster import HOST, NODE, Cluster, TopologyError

NOBODY: frozenset[str] = frozenset()
UNKNOWN = -1
NAMED_AT_MOST = 4


@dataclass(frozen=True, slots=True)
class Level:
    """A level to spread over; ``required``: refuse rather than place against its rule."""

    name: str
    required: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """k data and m parity shards, and the levels that they must be spread over.

    Raises TopologyError for k < 1, m < 0, a level named twice, or "host" (always required).
    """

    k: int
    m: int
    spread: tuple[Level, ...] = ()

    def __post_init__(self) -> None:
        if self.k < 1 or self.m < 0:
            raise TopologyError(f"rules need k >= 1 and m >= 0, got k={self.k}, m={self.m}")
        names = [level.name for level in self.spread]
        if len(set(names)) != len(names) or {NODE, HOST} & set(names):
            raise TopologyError(
                f"spread names distinct levels above the host (always required), got {names}"
            )

    @property
    def count(self) -> int:
        """Shards of one owner, k+m."""
        return self.k + self.m

    @property
    def most(self) -> int:
        """Shards of one owner that one domain may hold."""
        return max(1, self.m)


@dataclass(frozen=True, slots=True)
class Placement:
    """Holders in shard order, fewer than k+m where hosts are short; why; and what is not met."""

    nodes: tuple[str, ...]
    reason: str
    degraded: tuple[str, ...] = ()


class _Caps(NamedTuple):
    """Shards allowed at one level: in the owner's domain, in any other, without a label."""

    own: int
    other: int
    unlabelled: int


Signature = tuple[int, ...]  # a node's domain number at each spread level, UNKNOWN if unlabelled


@dataclass(frozen=True, slots=True)
class _Ground:
    """A cluster seen through its spread levels, by position on the ring."""

    names: tuple[str, ...]
    position: dict[str, int]
    hosts: tuple[str, ...]
    signatures: tuple[Signature, ...]
    labels: tuple[tuple[str, ...], ...]
    host_nodes: dict[str, tuple[str, ...]]
    room: dict[Signature, int]
    nested: bool


@dataclass(frozen=True, slots=True)
class _Ask:
    """One question: how many shards, under which rules, seen from where, on which hosts."""

    rules: Rules
    target: int
    own: Signature
    room: dict[Signature, int]


def place(cluster: Cluster, owner: str, rules: Rules, excluded: Set[str] = NOBODY) -> Placement:
    """Holders for the shards of ``owner``, in shard order.

    ``excluded`` names nodes that cannot take a shard (lost, no room); others are ignored. With
    fewer usable hosts than k+m the placement is shorter and ``degraded`` says so; the caller
    decides. Raises TopologyError for an unknown owner or level, and for a required level that
    cannot be met.
    """
    levels = tuple(level.name for level in rules.spread)
    for level in levels:
        cluster.domain(owner, level)  # refuses what the cluster does not know
    start_node = cluster.node(owner)
    ground = cluster.derived(("ground", levels), lambda: _survey(cluster, levels))
    start = ground.position[owner]

    def decide() -> tuple[_Ask, tuple[_Caps, ...]]:
        room = _usable_room(ground, start_node.host, excluded)
        target = min(rules.count, sum(room.values()))
        ask = _Ask(rules, target, ground.signatures[start], room)
        return ask, _choose_caps(owner, ask, ground)

    if excluded:
        ask, caps = decide()
    else:  # all owners of one domain ask the same question
        key = ("caps", rules, ground.signatures[start])
        ask, caps = cluster.derived(key, decide)
    nodes = _walk(ground, start, ask, caps, excluded)
    return Placement(nodes, _reason(nodes, ground, ask, caps), _degraded(nodes, owner, ground, ask))


def _survey(cluster: Cluster, levels: tuple[str, ...]) -> _Ground:
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
    by_host = {node.host: signature for node, signature in zip(nodes, signatures, strict=True)}
    return _Ground(
        names=names,
        position={name: i for i, name in enumerate(names)},
        hosts=tuple(node.host for node in nodes),
        signatures=signatures,
        labels=labels,
        host_nodes={h: members for h, members in cluster.members(HOST).items() if h is not None},
        room=dict(Counter(by_host.values())),
        nested=cluster.nests(levels),
    )


def _usable_room(ground: _Ground, own_host: str, excluded: Set[str]) -> dict[Signature, int]:
    """Hosts that can take a shard, by signature."""
    shut = {ground.hosts[ground.position[name]] for name in excluded if name in ground.position}
    shut = {host for host in shut if excluded >= set(ground.host_nodes[host])} | {own_host}
    room = dict(ground.room)
    for host in shut:
        room[ground.signatures[ground.position[ground.host_nodes[host][0]]]] -= 1
    return room


def _cap(caps: _Caps, code: int, own: int) -> int:
    if code == UNKNOWN:
        return caps.unlabelled
    return caps.own if code == own else caps.other


def _fill(ask: _Ask, caps: tuple[_Caps, ...]) -> dict[Signature, int]:
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


def _choose_caps(owner: str, ask: _Ask, ground: _Ground) -> tuple[_Caps, ...]:
    """The tightest caps, level by level, under which all shards of the target still fit."""
    rules = ask.rules
    rule = _Caps(rules.most if rules.m else 0, rules.most, 0)
    chosen = [_Caps(ask.target, ask.target, ask.target)] * len(rules.spread)
    order = sorted(range(len(rules.spread)), key=lambda i: not rules.spread[i].required)

    def fits(i: int, caps: _Caps) -> int:
        return sum(_fill(ask, (*chosen[:i], caps, *chosen[i + 1 :])).values())

    for i in order:  # first which levels can be met at all, together
        level = rules.spread[i]
        have = fits(i, rule)
        if ask.own[i] != UNKNOWN and have == ask.target:
            chosen[i] = rule
        elif level.required:
            raise TopologyError(_refusal(owner, ask, i, have, ground))
    for i in order:  # then each as well as it can be
        chosen[i] = next(caps for caps in _ladder(ask) if fits(i, caps) == ask.target)
    return tuple(chosen)


def _ladder(ask: _Ask) -> Iterator[_Caps]:
    """Caps of one level from best to worst; the last one allows everything."""
    most, target = ask.rules.most, ask.target
    spare = min(most, max(1, target - ask.rules.k))  # with hosts short, fewer may go at once
    for other in range(spare, most + 1):
        yield _Caps(0, other, 0)
    for own in range(1, most + 1):
        yield _Caps(own, most, 0)
    for other in range(most + 1, target + 1):
        yield _Caps(0, other, 0)
        yield _Caps(spare, other, 0)
    for own in range(spare + 1, target + 1):
        yield _Caps(own, target, 0)
    for unlabelled in range(target + 1):
        yield _Caps(target, target, unlabelled)


def _walk(
    ground: _Ground, start: int, ask: _Ask, caps: tuple[_Caps, ...], excluded: Set[str]
) -> tuple[str, ...]:
    """The nodes nearest to ``start`` on the ring that the caps and the host rule let in."""

    def follow(quota: dict[Signature, int] | None) -> tuple[str, ...]:
        hosts = {ground.hosts[start]}
        used: Counter[tuple[int, int]] = Counter()
        filled: Counter[Signature] = Counter()
        nodes: list[str] = []
        size = len(ground.names)
        for step in range(2, size + 1):  # +1, -1, +2, -2, ... all round
            if len(nodes) == ask.target:
                break
            at = (start + (step // 2 if step % 2 == 0 else -(step // 2))) % size
            signature = ground.signatures[at]
            if ground.hosts[at] in hosts or ground.names[at] in excluded:
                continue
            if quota is not None and filled[signature] >= quota.get(signature, 0):
                continue
            if any(
                used[i, code] >= _cap(caps[i], code, ask.own[i]) for i, code in enumerate(signature)
            ):
                continue
            hosts.add(ground.hosts[at])
            filled[signature] += 1
            used.update(enumerate(signature))
            nodes.append(ground.names[at])
        return tuple(nodes)

    nodes = follow(None)
    if len(nodes) < ask.target:  # only where levels do not nest: take what the decision counted on
        nodes = follow(_fill(ask, caps))
    return nodes


# -- saying so --------------------------------------------------------------------------------


def _refusal(owner: str, ask: _Ask, i: int, have: int, ground: _Ground) -> str:
    level = ask.rules.spread[i].name
    what = f"owner {owner}: level {level} is required"
    if ask.own[i] == UNKNOWN:
        return f"{what}, but the owner has no {level} label"
    rule = f"at most {ask.rules.most} in one {level}" + (
        "" if ask.rules.m else f" and none in the owner's own {level}"
    )
    hint = "" if ground.nested else " (the levels do not nest: none was found, one may exist)"
    return f"{what}: needs room for {ask.target} shards, {rule}; has room for {have}{hint}"


def _reason(nodes: tuple[str, ...], ground: _Ground, ask: _Ask, caps: tuple[_Caps, ...]) -> str:
    parts = [f"the nearest {len(nodes)} hosts on the ring, one shard each"]
    for i, level in enumerate(ask.rules.spread):
        if ask.own[i] == UNKNOWN:
            own = f"the owner's {level.name} is unknown"
        else:
            own = f"{caps[i].own or 'none'} in the owner's own {ground.labels[i][ask.own[i]]}"
        parts.append(f"{level.name}: at most {caps[i].other} in one, {own}")
    return "; ".join(parts)


def _degraded(nodes: tuple[str, ...], owner: str, ground: _Ground, ask: _Ask) -> tuple[str, ...]:
    """A sentence for each rule that the placement does not meet, with the losses that kill."""
    k, count, held = ask.rules.k, ask.rules.count, len(nodes)
    sentences = []
    if held < count:
        kills = (
            f"the owner and any {held - k + 1} of the holders"
            if held >= k
            else f"the owner {owner}"
        )
        sentences.append(
            f"host: needs {count} hosts beside the owner's, has {held}; losing {kills} kills"
        )
    signatures = [ground.signatures[ground.position[name]] for name in nodes]
    for i, level in enumerate(ask.rules.spread):
        shards = Counter(signature[i] for signature in signatures)
        named = Counter({ground.labels[i][c]: n for c, n in shards.items() if c != UNKNOWN})
        own = ground.labels[i][ask.own[i]] if ask.own[i] != UNKNOWN else None
        blind = tuple(
            name for name, signature in zip(nodes, signatures, strict=True)
            if signature[i] == UNKNOWN
        )  # fmt: skip
        causes = list(_causes(ask.rules, level.name, named, own, (owner, blind)))
        short = held < count and held >= k and held - max(named.values(), default=0) < k
        if short and ask.rules.m:
            causes.append(f"only {held} of {count} shards have a host")
        if causes:
            kills = "; ".join(_kills(level.name, named, own, held - len(blind) - k, held - k))
            safe = f"the owner and any one {level.name} may still be lost"
            sentences.append(f"{level.name}: {', '.join(causes)}; {kills or safe}")
    return tuple(sentences)


def _causes(
    rules: Rules, level: str, named: Counter[str], own: str | None, who: tuple[str, tuple[str, ...]]
) -> Iterator[str]:
    owner, blind = who
    if own is None:
        yield f"owner {owner} has no {level} label"
    if blind:
        yield f"no {level} label on {_some(blind)}"
    over = tuple(sorted(label for label, shards in named.items() if shards > rules.most))
    if over:
        worst = max(named.values())
        yield f"needs at most {rules.most} in one {level}, has up to {worst} in {_some(over)}"
    if not rules.m and own is not None and named[own]:
        yield f"needs none in the owner's {own}, has {named[own]}"


def _kills(
    level: str, named: Counter[str], own: str | None, sure: int, spare: int
) -> Iterator[str]:
    """Losses that kill: ``spare`` shards may go; ``sure`` of them if unlabelled holders go too."""
    if own is not None and named[own] > spare:
        yield f"losing {level} {own} kills"
    elif (named[own] if own is not None else max(named.values(), default=0)) > sure:
        yield f"losing {f'{level} {own}' if own is not None else f'one {level}'} may kill"
    certain = tuple(sorted(d for d, n in named.items() if d != own and n > spare))
    maybe = tuple(sorted(d for d, n in named.items() if d != own and spare >= n > sure))
    if certain:
        yield f"losing the owner and {level} {_some(certain)} kills"
    if maybe:
        yield f"losing the owner and {level} {_some(maybe)} may kill"


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return ", ".join(names[:NAMED_AT_MOST]) + more
