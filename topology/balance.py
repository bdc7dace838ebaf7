"""Level loads: shards move from full nodes to empty ones until all hold the same, or nothing can.

Intuition: memory is granted for the fullest node, so a load that differs is memory that is wasted.
A shard may move from node a to node b if its owner's rules allow b in place of a. Where no shard of
a may go to b, a chain can: a gives to c, and c gives to b.

Contract: hands keep the number of their shards and every rule; deterministic. A move goes from a
node to one that holds at least two less, along a shortest chain, so the sum of squares falls with
each. It ends when there is no such chain: for moves that do not disturb each other this is the
least spread that there is (a flow without a negative cycle is of least cost, Klein 1967). Two
moves of one owner in one chain may disturb each other; the chain then ends early, all rules kept.

Consequence: one pass for every policy, so that policies differ in what they mean, not in how evenly
they happen to load. The search for chains is bounded by CHECKS; direct moves do nearly all.
"""

from __future__ import annotations

from collections.abc import Iterable

from topology.ground import Hand

CHECKS = 1_000_000
"""Questions "may b take a's shard" that the search for chains may ask: seconds, then it stops."""
DIRECT_TRIES = 16


class _Loads:
    """Who holds whose shards, by position."""

    def __init__(self, hands: list[Hand], usable: list[int]) -> None:
        self.hands = hands
        self.usable = usable
        ground = hands[0].ground
        widest = ground.wide_first[:1]
        self.kinds = [signature[widest[0]] if widest else 0 for signature in ground.signatures]
        self.holds: dict[int, list[int]] = {at: [] for at in usable}
        for owner, hand in enumerate(hands):
            for at in hand.nodes:
                self.holds[at].append(owner)
        self.checks = CHECKS

    def load(self, at: int) -> int:
        return len(self.holds[at])

    def move(self, owner: int, old: int, new: int) -> None:
        self.hands[owner].swap(old, new)
        self.holds[old].remove(owner)
        self.holds[new].append(owner)

    def direct(self, low: int, high: int) -> None:
        """Move shards from nodes above ``high`` to nodes below it, those below ``low`` first."""
        empty = self._takers(at for at in self.usable if self.load(at) < low)
        some = self._takers(at for at in self.usable if low <= self.load(at) < high)
        for full in self.usable:
            for owner in tuple(self.holds[full]):
                if self.load(full) <= high:
                    break
                self._give(owner, full, empty, low) or self._give(owner, full, some, high)
        for full in self.usable:
            for owner in tuple(self.holds[full]):
                if self.load(full) <= low:
                    break
                self._give(owner, full, empty, low)

    def _takers(self, nodes: Iterable[int]) -> dict[int, list[int]]:
        """Nodes by their widest domain: within it, a move keeps that level's rule."""
        takers: dict[int, list[int]] = {}
        for at in nodes:
            takers.setdefault(self.kinds[at], []).append(at)
        return takers

    def _give(self, owner: int, full: int, takers: dict[int, list[int]], until: int) -> bool:
        fits, kind = self.hands[owner].fits, self.kinds[full]
        for _, nodes in sorted(takers.items(), key=lambda item: item[0] != kind):
            for i in range(len(nodes) - 1, max(-1, len(nodes) - 1 - DIRECT_TRIES), -1):
                if fits(nodes[i], full):
                    self.move(owner, full, nodes[i])
                    if self.load(nodes[i]) >= until:
                        nodes.pop(i)
                    return True
        return False

    def chain(self, from_load: int) -> bool:
        """One chain from a node with at least ``from_load`` to one with two less; False: none."""
        starts = [at for at in self.usable if self.load(at) >= from_load]
        came: dict[int, tuple[int, int]] = {}  # node: (whose shard, from which node)
        left = dict.fromkeys(at for at in self.usable if self.load(at) < from_load)
        while starts:
            reached = []
            for full in starts:
                for owner in self.holds[full]:
                    fits = self.hands[owner].fits
                    self.checks -= len(left)
                    if self.checks < 0:
                        return False
                    found = [at for at in left if fits(at, full)]
                    for at in found:
                        came[at] = owner, full
                        del left[at]
                        if self.load(at) <= from_load - 2:
                            return self._follow(at, came)
                    reached += found
            starts = reached
        return False

    def _follow(self, at: int, came: dict[int, tuple[int, int]]) -> bool:
        moved = False
        while at in came:
            owner, full = came[at]
            if not self.hands[owner].fits(at, full):
                break
            self.move(owner, full, at)
            at, moved = full, True
        return moved


def balance(hands: list[Hand], usable: list[int]) -> None:
    """Move shards of ``hands`` among the positions ``usable`` until none can be moved downhill.

    ``hands`` are in the order of their owners' positions; all their holders are usable.
    """
    total = sum(len(hand.nodes) for hand in hands)
    if not total:
        return
    loads = _Loads(hands, usable)
    low, high = total // len(usable), -(-total // len(usable))
    loads.direct(low, high)
    while True:
        heights = {loads.load(at) for at in usable}
        if max(heights) - min(heights) <= 1 or not any(
            loads.chain(height) for height in sorted(heights, reverse=True)
        ):
            return
