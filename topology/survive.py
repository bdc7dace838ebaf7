"""Which losses a recorded placement survives, the smallest that kills it, and how likely one is.

Intuition: a share (all that one node saved in a step) has its own copy and its shards. It is
restored from the own copy, or from any k distinct shards. So it dies exactly when its own copy
is gone and fewer than k shards are left; a checkpoint dies with its first share.

Contract: pure functions, exact, linear in the number of shards (times a sort of each share's few
domains). "Loses N domains" means all nodes of any N domains of one level ("node", "host", "rack",
...) at once.

Why greedy is exact for one share. Let w(d) be the living shards in domain d. A killing set must
contain the owner's domain o while the own copy lives, so o is taken first; it costs 1 and removes
w(o). Of the other domains, t remove at most the sum of the t largest w, and exactly that if those
are chosen. So the smallest killing set is o and the fewest largest domains that bring the rest
below k. Over several shares the smallest of their sets is the smallest of all.

Consequence: a node without a label at the level may be in any domain, so the worst case is for the
labels that make it worst: all such nodes of a share lie in one domain, the owner's, or, if that
is unknown or its copy is gone, the one with most shards. The true number is never below it.
:func:`odds` counts them as one domain of their own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import lru_cache

from topology.cluster import NODE, Cluster, TopologyError

NOTHING_LOST: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Share:
    """Where one share lies: its owner, the holder of each shard index (None: missing), and k.

    ``own_copy``: the owner still holds the whole of it. Raises TopologyError for k < 1.
    """

    owner: str
    holders: tuple[str | None, ...]
    k: int
    own_copy: bool = True

    def __post_init__(self) -> None:
        if self.k < 1:
            raise TopologyError(f"share of {self.owner!r}: k must be at least 1, got {self.k}")


@dataclass(frozen=True, slots=True)
class WorstCase:
    """The smallest loss that kills: domains of ``level``, all their ``nodes``, whose share, why.

    ``domains`` is empty where the share is lost already.
    """

    level: str
    domains: tuple[str, ...]
    nodes: frozenset[str]
    owner: str
    reason: str


def sources(share: Share, lost: Set[str] = NOTHING_LOST) -> tuple[str, ...]:
    """Living nodes that hold a piece: the owner if its own copy lives, then by shard index.

    With h shards on as many nodes beside the owner, len(sources) - k node losses are survived.
    """
    own = (share.owner,) if share.own_copy else ()
    held = (name for name in share.holders if name is not None)
    return tuple(name for name in (*own, *held) if name not in lost)


def survives(share: Share, lost: Set[str]) -> bool:
    """Whether the share can be restored when the nodes in ``lost`` are gone."""
    if share.own_copy and share.owner not in lost:
        return True
    return _living(share, lost) >= share.k


def why_not(shares: Iterable[Share], lost: Set[str]) -> tuple[str, ...]:
    """A sentence for each share that ``lost`` kills, saying what is missing; empty if none."""
    sentences = []
    for share in shares:
        if not survives(share, lost):
            left = _living(share, lost)
            missing = ", ".join(
                f"{index} ({'never placed' if name is None else name})"
                for index, name in enumerate(share.holders)
                if name is None or name in lost
            )
            sentences.append(
                f"share of {share.owner}: its own copy is lost, needs {share.k} shards, "
                f"has {left} of {len(share.holders)}; missing shards: {missing or 'none'}"
            )
    return tuple(sentences)


def survivable_losses(shares: Iterable[Share], cluster: Cluster, level: str = "node") -> int:
    """The largest N such that losing any N domains of ``level`` leaves every share restorable.

    -1 where a share is lost already. At "node", for one share whose own copy lives and h shards
    on other nodes: 1 + h - k if h >= k, else 0. Raises TopologyError if there are no shares, or
    for a node or level that the cluster does not have.
    """
    return len(worst_case(shares, cluster, level).domains) - 1


def worst_case(shares: Iterable[Share], cluster: Cluster, level: str = "node") -> WorstCase:
    """A smallest set of domains of ``level`` whose loss kills a share; the first such share.

    Raises TopologyError as :func:`survivable_losses` does.
    """
    worst: tuple[Share, tuple[str, ...], frozenset[str]] | None = None
    for share in shares:
        domains, unlabelled = _smallest_kill(share, cluster, level)
        if worst is None or len(domains) < len(worst[1]):
            worst = share, domains, unlabelled
    if worst is None:
        raise TopologyError("no shares given: what they survive has no answer")
    share, domains, unlabelled = worst
    members = cluster.members(level)
    nodes = frozenset(name for d in domains for name in members.get(d, ())) | unlabelled
    return WorstCase(level, domains, nodes, share.owner, _why(share, level, domains, unlabelled))


def _living(share: Share, lost: Set[str] = NOTHING_LOST) -> int:
    return sum(name is not None and name not in lost for name in share.holders)


def _smallest_kill(
    share: Share, cluster: Cluster, level: str
) -> tuple[tuple[str, ...], frozenset[str]]:
    """Domains of a smallest killing set, and the unlabelled nodes counted into its first one."""
    weights: Counter[str] = Counter()
    adrift: list[str] = []
    own = cluster.domain(share.owner, level) if share.own_copy else None
    if share.own_copy and own is None:
        adrift.append(share.owner)
    for name in share.holders:
        if name is not None:
            domain = cluster.domain(name, level)
            if domain is None:
                adrift.append(name)
            else:
                weights[domain] += 1
    left = _living(share)
    if not share.own_copy and left < share.k:
        return (), frozenset()
    by_weight = sorted(weights, key=lambda domain: (domain != own, -weights[domain], domain))
    if own is not None and own not in weights:
        by_weight.insert(0, own)
    left -= len(adrift) - (share.own_copy and own is None)  # they go with the first domain
    taken = []
    for domain in by_weight or [f"(unknown {level})"]:
        taken.append(domain)
        left -= weights[domain]
        if left < share.k:
            break
    return tuple(taken), frozenset(adrift)


def _why(share: Share, level: str, domains: tuple[str, ...], unlabelled: frozenset[str]) -> str:
    if not domains:
        return f"share of {share.owner} is lost already: {_living(share)} shards of {share.k}"
    own = f"its own copy on {share.owner} and" if share.own_copy else "its own copy is lost;"
    guess = f" ({', '.join(sorted(unlabelled))} counted into the first: no {level} label)"
    return (
        f"share of {share.owner} needs {share.k} of its {_living(share)} shards: {own} all but "
        f"{share.k - 1} or fewer of them go with {level} {', '.join(domains)}"
        f"{guess if unlabelled else ''}"
    )


# -- how likely a loss is -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hazard:
    """One class of events, the loss of a whole domain of ``level``.

    ``per_hour``: events of all its ``domains`` together. ``chance``: of losing a share, given one
    such event. ``deadly``: the domains whose loss alone loses a share.
    """

    level: str
    domains: int
    per_hour: float
    chance: float
    deadly: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Odds:
    """The hazards of a checkpoint, and what follows from all together."""

    hazards: tuple[Hazard, ...]

    @property
    def losses_per_hour(self) -> float:
        """Events that lose a share, per hour."""
        return math.fsum(h.per_hour * h.chance for h in self.hazards)

    @property
    def from_peers(self) -> float:
        """The fraction of all events after which every share can be restored; 1 without events."""
        events = math.fsum(h.per_hour for h in self.hazards)
        return 1 - self.losses_per_hour / events if events else 1.0

    def loss_within(self, hours: float) -> float:
        """Chance that at least one event within ``hours`` loses a share."""
        return -math.expm1(-self.losses_per_hour * hours)


@dataclass(slots=True)
class _Tally:
    """What one level's domains do to the shares."""

    dead: set[str | None] = field(default_factory=set)
    singles: dict[str | None, set[str]] = field(default_factory=dict)
    more: dict[str | None, float] = field(default_factory=dict)

    def chance(self, domain: str | None, down: float) -> float:
        """Of losing a share when ``domain`` is lost and any other node is down by chance."""
        if domain in self.dead:
            return 1.0
        one = -math.expm1(len(self.singles.get(domain, ())) * math.log1p(-down)) if down else 0.0
        return min(1.0, one + self.more.get(domain, 0.0))


def odds(
    shares: Iterable[Share], cluster: Cluster, per_hour: Mapping[str, float], window_h: float = 0.0
) -> Odds:
    """The odds of losing a share, if each domain is lost ``per_hour[level]`` times an hour.

    Domains of every level, nodes included, are lost whole and independently, at constant rates
    (shocks: Marshall and Olkin 1967). By total probability, the losses per hour are

        sum over levels c of  rate(c) * mean over domains d of c of  P(loss | d is lost).

    With ``window_h`` = 0, all was whole before the event, P is 0 or 1, and the sum is exact. Else
    any other node is down with p = 1 - exp(-rate("node") * window_h), the time in which lost shards
    have no new place yet, and P(loss | d) is

        1 - (1 - p)^s  +  sum over shares of  P(it dies, and none of these s nodes is down):

    exact in the s nodes that complete a loss alone; the sum is Boole's bound, each term exact.
    So P is exact to first order in p and never too low. Left out: a second *domain* lost within
    the window, and shares that do not touch d (the events of level "node" count those).

    Raises TopologyError for a negative or infinite rate or window, a level that the cluster does
    not have, or a share that is lost already.
    """
    for what, value in (*per_hour.items(), ("window_h", window_h)):
        if not 0 <= value < math.inf:
            raise TopologyError(f"{what}: needs a rate or time of 0 or more, got {value}")
    down = -math.expm1(-per_hour.get(NODE, 0.0) * window_h)
    members = {level: cluster.members(level) for level in per_hour}
    tallies = {level: _Tally() for level in per_hour}
    for share in shares:
        if not share.own_copy and _living(share) < share.k:
            raise TopologyError(f"share of {share.owner} is lost already: it has no odds")
        for level, tally in tallies.items():
            _count(share, cluster, level, tally, down)
    return Odds(
        tuple(
            Hazard(
                level,
                len(members[level]),
                rate * len(members[level]),
                math.fsum(tallies[level].chance(d, down) for d in members[level])
                / max(1, len(members[level])),
                tuple(d for d in members[level] if d in tallies[level].dead),
            )
            for level, rate in per_hour.items()
        )
    )


def _count(share: Share, cluster: Cluster, level: str, tally: _Tally, down: float) -> None:
    """Enter into ``tally`` what the loss of each domain that the share touches does to it."""
    shards = Counter(name for name in share.holders if name is not None)
    touched: dict[str | None, set[str]] = {}
    for name in (*shards, *((share.owner,) if share.own_copy else ())):
        touched.setdefault(cluster.domain(name, level), set()).add(name)
    for domain, lost in touched.items():
        rest = {name: n for name, n in shards.items() if name not in lost}
        left = sum(rest.values())
        own = share.own_copy and share.owner not in lost
        if not own and left < share.k:
            tally.dead.add(domain)
        elif down:
            alone, tail = _completes(share, rest, own, down)
            tally.singles.setdefault(domain, set()).update(alone)
            tally.more[domain] = tally.more.get(domain, 0.0) + tail


def _completes(
    share: Share, rest: dict[str, int], own: bool, down: float
) -> tuple[set[str], float]:
    """Nodes whose loss alone completes the loss of a share, and the chance that others do.

    ``rest``: shards left, by node; ``own``: the owner's copy is left too.
    """
    left = sum(rest.values())
    if own:
        left -= rest.get(share.owner, 0)
        if left < share.k:
            return {share.owner}, 0.0
        others = tuple(sorted(n for name, n in rest.items() if name != share.owner))
        return set(), down * _fewer_than(share.k, others, down)
    alone = {name for name, n in rest.items() if left - n < share.k}
    others = tuple(sorted(n for name, n in rest.items() if name not in alone))
    missing = share.k - (left - sum(others))
    if missing <= 0:
        return alone, 0.0
    return alone, (1 - down) ** len(alone) * _fewer_than(missing, others, down)


@lru_cache(maxsize=4096)
def _fewer_than(k: int, shards: tuple[int, ...], down: float) -> float:
    """Chance that fewer than k shards live, each node of ``shards`` down with chance ``down``."""
    living = [1.0] + [0.0] * (k - 1)  # chance that so many live; k and more are left out
    for n in shards:
        for have in range(k - 1, -1, -1):
            up = living[have - n] * (1 - down) if have >= n else 0.0
            living[have] = living[have] * down + up
    return math.fsum(living)
