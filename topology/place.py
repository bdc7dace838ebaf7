"""Where the k+m shards of one owner go, by one function, whatever the policy.

Intuition: the nodes stand on a ring in which neighbours are far apart (``Cluster.ring``). By the
default policy, domain-aware, an owner gives its shards to the nodes around it, nearest first,
alternately after and before it, skipping whoever would break a rule. In a regular cluster (equal
domains that nest, ``ground.is_regular``) a rule skips the same distances for every owner, so the
holders are fixed offsets from the owner and every node holds exactly k+m shards: balance by
construction, and no owner needs to know of the others. Anywhere else all owners walk, and then
balance.py levels what they chose. Both sides rather than successors only, because holding is then
mutual and fewer sets of nodes can kill (9 nodes, rs(4, 2): 99 of 126 quadruples instead of all).
The other policies differ only in what they propose (policies.py). ``excluded`` is the stable way to
lose a node: each owner that used it moves one shard, no other moves.

Contract: pure functions of their arguments. Never two shards on one host, never one on the owner's.
At each spread level a domain holds at most max(1, m) shards; for m = 0 none in the owner's own
domain; by default in the owner's own as few as suffice, more only to level loads. If the levels
nest and a placement that meets all rules exists, it is found (ground.py).

Consequence: a required level that cannot be met is an error, for the owners that cannot meet it. A
preferred one is met as nearly as possible and named in ``degraded`` with the losses that now kill.
Levels are served in the order: required ones, then preferred ones as listed; an earlier one is
never weakened for a later one. A node without a label at a level is used there only when the
labelled ones do not suffice. Policies that ignore domains (ring, random) say so in ``degraded``.
"""

from __future__ import annotations

from collections.abc import Set
from contextlib import suppress
from functools import cached_property

from topology.balance import balance
from topology.cluster import Cluster, TopologyError
from topology.explain import degraded, reason, refusal
from topology.ground import (
    Ask,
    Caps,
    Ground,
    Hand,
    Signature,
    ask_from,
    choose_caps,
    fill,
    survey,
)
from topology.policies import Proposals, around, propose
from topology.rules import BLIND, DOMAIN_AWARE, Level, Placement, Policy, Rules

__all__ = ["Level", "Placement", "Policy", "Rules", "place", "place_all"]

NOBODY: frozenset[str] = frozenset()
DEFAULT = Policy()


def place(
    cluster: Cluster,
    owner: str,
    rules: Rules,
    excluded: Set[str] = NOBODY,
    policy: Policy = DEFAULT,
) -> Placement:
    """Holders for the shards of ``owner``, in shard order.

    ``excluded`` names nodes that cannot take a shard (lost, no room); others are ignored. With
    fewer usable hosts than k+m the placement is shorter and ``degraded`` says so; the caller
    decides. Raises TopologyError for an unknown owner or level, for a required level that cannot be
    met, and for a required level that the policy does not meet because it ignores domains.
    """
    return _book(cluster, rules, excluded, policy).placement(owner)


def place_all(
    cluster: Cluster, rules: Rules, excluded: Set[str] = NOBODY, policy: Policy = DEFAULT
) -> dict[str, Placement]:
    """The placement of every owner, by name; raises as :func:`place` does for the first."""
    book = _book(cluster, rules, excluded, policy)
    return {node.name: book.placement(node.name) for node in cluster.nodes}


def _book(cluster: Cluster, rules: Rules, excluded: Set[str], policy: Policy) -> _Book:
    """The book of this question; kept with the cluster as long as nobody is excluded."""

    def opened() -> _Book:
        levels = tuple(level.name for level in rules.spread)
        for level in levels:
            cluster.members(level)  # refuses what the cluster does not know
        ground = cluster.derived(("ground", levels), lambda: survey(cluster, levels))
        return _Book(ground, rules, policy)

    book = cluster.derived(("book", rules, policy), opened)
    if not excluded:
        return book
    return cluster.derived(
        ("book", rules, policy, frozenset(excluded)),
        lambda: _Book(book.ground, rules, policy, book, frozenset(excluded)),
    )


class _Book:
    """All that is worked out for one cluster, rules, policy and set of excluded nodes."""

    def __init__(
        self,
        ground: Ground,
        rules: Rules,
        policy: Policy,
        whole: _Book | None = None,
        excluded: frozenset[str] = NOBODY,
    ) -> None:
        self.ground, self.rules, self.policy = ground, rules, policy
        self.whole = whole  # the same with nobody excluded
        self.excluded = excluded
        self.shut = {ground.position[name] for name in excluded if name in ground.position}
        self.asked: dict[tuple[Signature, str], tuple[Ask, tuple[Caps, ...]]] = {}
        self.refused: set[tuple[Signature, str]] = set()
        self.reasons: dict[tuple[object, ...], str] = {}

    def placement(self, owner: str) -> Placement:
        """The answer for one owner."""
        ground, rules = self.ground, self.rules
        start = ground.position.get(owner)
        if start is None:
            raise TopologyError(f"node {owner!r} is not one of the cluster's {len(ground.names)}")
        ask, caps = self._decide(start)
        walks = self.policy.name == DOMAIN_AWARE and ground.regular
        if walks:
            how, hand = "the nearest {} hosts on the ring", self._walk(start)
        else:
            how, hands = self._table
            hand = hands[start]
            caps = hand.caps
        missed = hand.unmet()
        for i in missed:
            if rules.spread[i].required:
                raise TopologyError(
                    f"owner {owner}: level {rules.spread[i].name} is required, "
                    f"policy {self.policy} does not meet it"
                )
        nodes = tuple([ground.names[at] for at in hand.nodes])
        said: tuple[str, ...] = ()
        if self.policy.name in BLIND and rules.spread:
            levels = ", ".join(level.name for level in rules.spread)
            said = (f"policy: {self.policy} ignores domains, {levels} are met by chance only",)
        if missed or len(nodes) < rules.count:
            said += degraded(nodes, owner, ground, ask)
        key = (ask.own, caps, len(nodes))
        if key not in self.reasons:
            how = how.format(len(nodes)) + ", one shard each"
            self.reasons[key] = reason(how, ground, ask, caps, exact=walks)
        return Placement(nodes, self.reasons[key], said)

    def _decide(self, start: int) -> tuple[Ask, tuple[Caps, ...]]:
        """The question of the owner at ``start``, and the tightest caps that fit.

        With nobody excluded all owners of one domain ask the same question.
        """
        ground = self.ground
        key = self._key(start)
        if key not in self.asked:
            self.refused.add(key)  # unless it gets past the next lines
            ask, name = ask_from(ground, start, self.rules, self.shut), ground.names[start]
            caps = choose_caps(ask, ground, lambda i, room: refusal(name, ask, i, room, ground))
            self.refused.discard(key)
            self.asked[key] = ask, caps
        return self.asked[key]

    def _key(self, start: int) -> tuple[Signature, str]:
        return self.ground.signatures[start], self.ground.hosts[start] if self.shut else ""

    def _walk(self, start: int) -> Hand:
        """The nodes nearest to ``start`` on the ring that the caps and the host rule let in."""
        ask, caps = self._decide(start)
        ground, shut = self.ground, self.shut
        hand = Hand(ground, start, self.rules, caps)
        for at in around(start, len(ground.names)):
            if at not in shut and hand.fits(at):
                hand.take(at)
                if len(hand.nodes) == ask.target:
                    return hand
        if len(hand.nodes) < ask.target:  # only where levels do not nest: take what was counted on
            quota = fill(ask, caps)
            hand = Hand(ground, start, self.rules, caps)
            for at in around(start, len(ground.names)):
                signature = ground.signatures[at]
                if quota.get(signature, 0) and at not in shut and hand.fits(at):
                    hand.take(at)
                    quota[signature] -= 1
        return hand

    # -- all owners at once -----------------------------------------------------------------------

    @cached_property
    def _table(self) -> tuple[str, list[Hand]]:
        """How, and the hand of every owner by position."""
        if self.whole:
            how, hands = self.whole._table
            return how, self._without(hands)
        if self.policy.name != DOMAIN_AWARE:
            proposals, how = propose(self.ground, self.rules, self.policy)
            hands = self._deal(proposals)
        else:
            how, hands = "near on the ring", self._walks()
        balance(hands)
        return how, hands

    def _walks(self) -> list[Hand]:
        """What all owners walk to, levelled as far as the tightest caps let it; then as ruled."""
        new = [self._new_hand(start) for start in range(len(self.ground.names))]
        hands = [self._walk(at) if target else hand for at, (hand, target) in enumerate(new)]
        balance(hands)
        for hand, (ruled, _) in zip(hands, new, strict=True):
            hand.caps = ruled.caps
        return hands

    def _deal(self, proposals: Proposals) -> list[Hand]:
        """To each owner the first of its proposals that fit, then the nearest nodes."""
        new, load = [], [0] * len(proposals)
        for start, proposal in enumerate(proposals):
            hand, target = self._new_hand(start)
            for at in proposal:
                if len(hand.nodes) == target:
                    break
                if hand.fits(at):
                    hand.take(at)
                    load[at] += 1
            new.append((hand, target))
        fair = self.rules.count
        return [self._filled(at, *hand, load, fair) for at, hand in enumerate(new)]

    def _without(self, hands: list[Hand]) -> list[Hand]:
        """New hands for owners that used an excluded node: one shard each moves, no other."""
        load = [0] * len(hands)
        for hand in hands:
            for at in hand.nodes:
                load[at] += 1
        fair = -(-sum(load) // max(1, len(hands) - len(self.shut)))
        kept = list(hands)
        for start, old in enumerate(hands):
            if old.nodes and self.shut.isdisjoint(old.nodes):  # none: refused, maybe no more now
                continue
            hand, target = self._new_hand(start)
            for at in old.nodes:
                if at not in self.shut and len(hand.nodes) < target and hand.fits(at):
                    hand.take(at)
                else:
                    load[at] -= 1
            kept[start] = self._filled(start, hand, target, load, fair)
        return kept

    def _new_hand(self, start: int) -> tuple[Hand, int]:
        """An empty hand, and how many shards it is to take: none if a required level refuses them.

        Its caps are those of the rules, wider only where these cannot be met.
        """
        target, wide = 0, (Caps(0, 0, 0),) * len(self.rules.spread)
        if self._key(start) not in self.refused:
            with suppress(TopologyError):
                ask, caps = self._decide(start)
                most = self.rules.most
                own = most if self.rules.m else 0
                wide = tuple(Caps(max(c.other, most), max(c.own, own), c.unlabelled) for c in caps)
                target = ask.target
        blind = self.policy.name in BLIND
        return Hand(self.ground, start, self.rules, () if blind else wide), target

    def _filled(self, start: int, hand: Hand, target: int, load: list[int], fair: int) -> Hand:
        """``hand`` with its missing shards on the nearest nodes, first those below ``fair``."""
        for limit in (fair, self.rules.count * len(load)):
            if len(hand.nodes) == target:
                return hand
            for at in around(start, len(load)):
                if load[at] < limit and at not in self.shut and hand.fits(at):
                    hand.take(at)
                    load[at] += 1
                    if len(hand.nodes) == target:
                        return hand
        if len(hand.nodes) < target:  # only where levels do not nest
            caps = hand.caps
            for at in hand.nodes:
                load[at] -= 1
            hand = self._walk(start)
            hand.caps = caps
            for at in hand.nodes:
                load[at] += 1
        return hand
