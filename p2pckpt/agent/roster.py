"""Which nodes a generation has, in order: read once, asked again and again.

Groups, who leads, and where a rank is all follow from the order of the nodes, which is that of
their lowest ranks.

Contract: immutable; every question is answered in constant time, also at a thousand nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from p2pckpt import records as r


@dataclass(frozen=True)
class Roster:
    """The nodes of a generation, in order of their lowest rank."""

    generation: r.Generation
    nodes: tuple[r.RosterNode, ...]

    def group(self, number: int) -> tuple[r.RosterNode, ...]:
        """The nodes of one group."""
        return self.nodes[number * r.GROUP_NODES : (number + 1) * r.GROUP_NODES]

    def find(self, node: str) -> tuple[int, r.RosterNode] | None:
        """Group number and entry of a node."""
        return self._places.get(node)

    def of_ranks(self, ranks: Iterable[int]) -> list[r.RosterNode]:
        """The nodes on which these ranks are."""
        return [self._seats[rank] for rank in sorted(ranks) if rank in self._seats]

    @cached_property
    def _seats(self) -> dict[int, r.RosterNode]:
        return {rank: entry for entry in self.nodes for rank in entry.ranks}

    @cached_property
    def _places(self) -> dict[str, tuple[int, r.RosterNode]]:
        return {entry.node: (i // r.GROUP_NODES, entry) for i, entry in enumerate(self.nodes)}

    def leads(self, node: str) -> bool:
        """Has this node rank 0, so that it decides at once while others wait?"""
        return bool(self.nodes) and self.nodes[0].node == node
