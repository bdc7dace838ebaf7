"""Which losses a recorded placement survives, the smallest that kills it, and why.

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

Consequence: a node without a label at the level may be in any domain, so the answer is for the
labels that make it worst: all such nodes of a share lie in one domain, the owner's, or, if that
is unknown or its copy is gone, the one with most shards. The true number is never below it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass

from topology.cluster import Cluster, TopologyError

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
