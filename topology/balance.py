"""Level loads: shards move from full nodes to empty ones until all hold the same, or nothing can.

Intuition: memory is granted for the fullest node, so a load that differs is memory that is wasted.
A shard may move from node a to node b if its owner's rules allow b in place of a. Where no shard of
a may go to b, a chain can: a gives to c, and c gives to b.

Contract: hands keep the number of their shards and every rule; deterministic. Shards go along
shortest chains from nodes with at least h to nodes with at most h-2, so the sum of squares falls
with each; first for the h next to the mean, then for each h from the top, until there is no such
chain. Many chains are taken after one search (blocking flows, Dinic 1970).

Consequence: where levels nest, the hands are bases of matroids, and what no chain improves is as
level as the rules allow: the fullest node holds as little, and the emptiest as much, as in any
other choice of hands (decreasing minimisation on M-convex sets, Frank and Murota 2022). Where they
cross, two moves of one owner may bar each other, so loads can end a little apart that need not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from topology.ground import Hand


class _Pool:
    """Positions by domain, wide to narrow, so that a domain without room is passed over at once."""

    def __init__(self, hands: list[Hand], positions: Iterable[int]) -> None:
        self.ground = hands[0].ground
        self.order = self.ground.wide_first[: len(hands[0].caps)]
        self.top: dict[int, Any] = {}
        for at in positions:
            place = self.top
            for i in self.order:
                place = place.setdefault(self.ground.signatures[at][i], {})
            place[at] = None

    def discard(self, at: int) -> None:
        places, place = [], self.top
        signature = self.ground.signatures[at]
        for i in self.order:
            places.append((place, signature[i]))
            place = place[signature[i]]
        del place[at]
        while not place and places:
            place, code = places.pop()
            del place[code]

    def fitting(self, hand: Hand, full: int) -> Iterator[int]:
        """Those that may take the shard that ``full`` holds of ``hand``; first those that share its
        domains, so that loads are levelled nearby and little moves when a node goes elsewhere."""
        return self._fitting(hand, full, self.top, 0)

    def _fitting(self, hand: Hand, full: int, place: dict[int, Any], depth: int) -> Iterator[int]:
        if depth == len(self.order):
            hosts = self.ground.hosts
            for at in place:
                if hosts[at] not in hand.hosts or hosts[at] == hosts[full]:
                    yield at
            return
        i = self.order[depth]
        leaving = self.ground.signatures[full][i]
        if leaving in place:
            yield from self._fitting(hand, full, place[leaving], depth + 1)
        for code, narrower in place.items():
            if code != leaving and hand.has_room(i, code):
                yield from self._fitting(hand, full, narrower, depth + 1)


class _Loads:
    """Who holds whose shards, by position."""

    def __init__(self, hands: list[Hand]) -> None:
        self.hands = hands
        self.holds: list[dict[int, None]] = [{} for _ in hands]  # owners, by who holds
        for owner, hand in enumerate(hands):
            for at in hand.nodes:
                self.holds[at][owner] = None

    def ends(self) -> tuple[int, int]:
        """The least and the greatest load."""
        loads = [len(held) for held in self.holds]
        return min(loads), max(loads)

    def level(self, height: int) -> None:
        """Take chains from nodes with ``height`` or more to nodes with ``height`` - 2 or less."""
        moved = True
        while moved:
            full = [at for at, held in enumerate(self.holds) if len(held) >= height]
            pools = self._search(full, height)
            moved = False
            for at in full if pools else ():
                while len(self.holds[at]) >= height and self._push(at, pools, height):
                    moved = True

    def _search(self, full: list[int], height: int) -> list[_Pool]:
        """Nodes by the length of the shortest chain from ``full`` to them; last, those that are to
        take. Empty if there is no chain."""
        left = _Pool(self.hands, (at for at, held in enumerate(self.holds) if len(held) < height))
        pools = []
        while full and left.top:
            reached: list[int] = []
            for giver in full:
                for owner in self.holds[giver] if left.top else ():
                    found = list(left.fitting(self.hands[owner], giver))
                    for at in found:
                        left.discard(at)
                    reached += found
            takers = [at for at in reached if len(self.holds[at]) <= height - 2]
            pools.append(_Pool(self.hands, takers or reached))
            if takers:
                return pools
            full = reached
        return []

    def _push(self, giver: int, pools: list[_Pool], height: int, depth: int = 0) -> bool:
        """Move one shard off ``giver`` along a chain through the pools from ``depth`` on."""
        pool = pools[depth]
        for owner in tuple(self.holds[giver]):
            hand = self.hands[owner]
            while (at := next(pool.fitting(hand, giver), None)) is not None:
                takes = len(self.holds[at]) <= height - 2
                if not takes and not (
                    depth + 1 < len(pools) and self._push(at, pools, height, depth + 1)
                ):
                    pool.discard(at)
                elif hand.fits(at, giver):
                    hand.swap(giver, at)
                    del self.holds[giver][owner]
                    self.holds[at][owner] = None
                    return True
                else:  # it gave a shard of the same owner away, and now waits for another's
                    break
        return False


def balance(hands: list[Hand]) -> None:
    """Move shards of ``hands``, given by the positions of their owners, downhill."""
    loads = _Loads(hands)
    total = sum(len(hand.nodes) for hand in hands)
    low, high = total // len(hands), -(-total // len(hands))
    for height in dict.fromkeys((high + 1, low + 1)):
        loads.level(height)
    least, most = loads.ends()
    for height in range(most, least + 1, -1):
        loads.level(height)
