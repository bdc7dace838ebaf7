"""The nouns of topology: a :class:`Node`, its failure domains, and the :class:`Cluster` they form.

Intuition: machines fail together when they share something. A node runs on a host, a host stands
in a rack, a rack hangs off a switch, a switch belongs to a pod. A cluster is nothing but the list
of its nodes and of the names of its levels, narrow to wide; everything else is derived from that.

Contract: a cluster is immutable, and two clusters with the same nodes are equal whatever order
the nodes were given in. What is derived is computed once and kept on the object, in O(n log n).
A domain is its label: the same rack name under two pods is one rack, and the levels then do not
nest. Two nodes with an equal ``host`` are one host, the lowest domain.

Consequence: a label that is missing is a fact, not a domain. :meth:`Cluster.domain` answers None
for it, and who reads that must treat the node as possibly sharing a domain with any other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any, TypeVar

NODE = "node"
HOST = "host"
LEVELS = ("rack", "switch", "pod")

T = TypeVar("T")
Path = tuple[str, ...]  # labels from wide to narrow


class TopologyError(ValueError):
    """A cluster, a rule or a share is described wrongly, or a required rule cannot be met."""


@dataclass(frozen=True, slots=True)
class Node:
    """One agent: its name, its host, and its label at each level that is known.

    ``domains`` may be given as a mapping or as pairs, e.g. ``{"rack": "r1", "pod": "p0"}``; it is
    kept as pairs sorted by level. ``seat`` is the (host, name) by which placing orders the nodes:
    its own, or that of the node it took over from (:meth:`Cluster.swapped`).
    Raises TopologyError for an empty name or a level given twice.
    """

    name: str
    host: str
    domains: tuple[tuple[str, str], ...] = ()
    seat: tuple[str, str] = ("", "")

    def __post_init__(self) -> None:
        given: Any = self.domains
        pairs = sorted(given.items() if isinstance(given, Mapping) else given)
        object.__setattr__(self, "domains", tuple((level, label) for level, label in pairs))
        if not self.name or not self.host:
            raise TopologyError(
                f"a node needs a name and a host, got name {self.name!r}, host {self.host!r}"
            )
        if not any(self.seat):
            object.__setattr__(self, "seat", (self.host, self.name))
        if len(dict(pairs)) != len(pairs):
            raise TopologyError(f"node {self.name!r}: a level is labelled twice in {pairs}")
        for level, label in pairs:
            if not label:
                raise TopologyError(f"node {self.name!r}: empty label at level {level!r}; omit it")

    def domain(self, level: str) -> str | None:
        """Label at ``level`` ("node" and "host" included), or None where it is unknown."""
        if level == NODE:
            return self.name
        if level == HOST:
            return self.host
        return next((label for name, label in self.domains if name == level), None)


@dataclass(frozen=True)
class Cluster:
    """An immutable set of nodes with unique names, and its levels from narrow to wide.

    Raises TopologyError for a name or seat given twice, a label at a level that the cluster does
    not have, or a host whose nodes are labelled differently.
    """

    nodes: tuple[Node, ...]
    levels: tuple[str, ...] = LEVELS
    _memo: dict[Any, Any] = field(
        default_factory=dict, init=False, repr=False, compare=False, hash=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(sorted(self.nodes, key=lambda node: node.name)))
        object.__setattr__(self, "levels", tuple(self.levels))
        if len(set(self.levels)) != len(self.levels) or {"", NODE, HOST} & set(self.levels):
            raise TopologyError(
                f"levels must be distinct names other than 'node' and 'host', got {self.levels}"
            )
        hosts: dict[str, Node] = {}
        seats: dict[tuple[str, str], str] = {}
        previous = None
        for node in self.nodes:
            if node.name == previous:
                raise TopologyError(f"node {node.name!r} is given twice")
            previous = node.name
            if seats.setdefault(node.seat, node.name) != node.name:
                raise TopologyError(
                    f"nodes {seats[node.seat]!r} and {node.name!r} have one seat, {node.seat}"
                )
            for level, _ in node.domains:
                if level not in self.levels:
                    raise TopologyError(
                        f"node {node.name!r} is labelled at level {level!r}, "
                        f"the cluster has {self.levels}"
                    )
            first = hosts.setdefault(node.host, node)
            if first.domains != node.domains:
                raise TopologyError(
                    f"host {node.host!r}: node {first.name!r} says {dict(first.domains)}, "
                    f"node {node.name!r} says {dict(node.domains)}; one host has one place"
                )

    def __len__(self) -> int:
        return len(self.nodes)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    @cached_property
    def _by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    def node(self, name: str) -> Node:
        """The node called ``name``; TopologyError where there is none."""
        try:
            return self._by_name[name]
        except KeyError:
            raise TopologyError(
                f"node {name!r} is not one of the cluster's {len(self.nodes)} nodes"
            ) from None

    def domain(self, name: str, level: str) -> str | None:
        """Domain of node ``name`` at ``level`` ("node", "host" or one of the levels).

        None: the node has no label there. Raises TopologyError for an unknown node or level.
        """
        if level not in (NODE, HOST) and level not in self.levels:
            raise TopologyError(
                f"level {level!r} is unknown, the cluster has "
                f"{', '.join((NODE, HOST, *self.levels))}"
            )
        return self.node(name).domain(level)

    def members(self, level: str) -> Mapping[str | None, tuple[str, ...]]:
        """Node names by domain at ``level``; those without a label stand under None."""

        def group() -> dict[str | None, tuple[str, ...]]:
            found: dict[str | None, list[str]] = {}
            for node in self.nodes:
                found.setdefault(self.domain(node.name, level), []).append(node.name)
            return {label: tuple(names) for label, names in found.items()}

        return self.derived(("members", level), group)

    def without(self, names: Collection[str]) -> Cluster:
        """This cluster less the nodes in ``names``; names that it does not have are no error."""
        gone = frozenset(names)
        return Cluster(tuple(node for node in self.nodes if node.name not in gone), self.levels)

    def with_node(self, node: Node) -> Cluster:
        """This cluster and one node more; TopologyError where the name is taken."""
        return Cluster((*self.nodes, node), self.levels)

    def swapped(self, old: str, new: Node) -> Cluster:
        """This cluster with ``new`` in the seat of node ``old``: whatever its name, each policy
        gives it what ``old`` would get, and no other shard moves if its labels are alike.
        """
        seat = self.node(old).seat
        return self.without({old}).with_node(replace(new, seat=seat))

    def nests(self, levels: tuple[str, ...]) -> bool:
        """Whether ``levels`` form a tree: who shares a domain shares every wider one.

        Nodes that lack one of two labels say nothing about how these two levels lie.
        """
        ordered = [level for level in self.levels if level in levels]
        for narrow, wide in combinations(ordered, 2):
            above: dict[str, str] = {}
            for node in self.nodes:
                below, parent = node.domain(narrow), node.domain(wide)
                if below and parent and above.setdefault(below, parent) != parent:
                    return False
        return True

    @cached_property
    def ring(self) -> tuple[str, ...]:
        """All node names in an order in which neighbours lie as far apart as the tree allows.

        The narrowest domains take turns, in an order that in turn lets pods, then switches, take
        turns. A domain of n nodes has its node j at (2j+1)/(2n) of the way round, so a large
        domain is met more often, never in a row. With equal domains this is a plain round robin:
        position i lies in pod i mod P, switch (i div P) mod S, and so on, so whether two nodes
        share a domain depends on the distance between their positions alone. A node that comes or
        goes moves the nodes of its narrowest domain only. Levels that no node is labelled at change
        nothing. Quotients of small integers are rounded
        alike on every machine, so the order is the same anywhere.
        """
        cells: dict[Path, list[Path]] = {}
        used = {level for node in self.nodes for level, _ in node.domains}
        levels = [level for level in reversed(self.levels) if level in used]
        for node in self.nodes:
            labels = dict(node.domains)
            path = tuple(labels.get(level, "") for level in levels)
            cells.setdefault(path, []).append(node.seat)
        named = {node.seat: node.name for node in self.nodes}
        placed: list[tuple[float, int, str]] = []
        for turn, cell in enumerate(_take_turns(list(cells))):
            order = _take_turns(cells[cell])
            placed += [
                ((2 * j + 1) / (2 * len(order)), turn, named[host, name])
                for j, (host, name) in enumerate(order)
            ]
        return tuple(name for _, _, name in sorted(placed))

    def derived(self, key: Any, make: Callable[[], T]) -> T:
        """``make()``, computed once per ``key`` and kept; for what follows from the cluster."""
        if key not in self._memo:
            self._memo[key] = make()
        found: T = self._memo[key]
        return found


def _take_turns(paths: list[Path]) -> list[Path]:
    """Distinct paths of one length, so ordered that each subtree is spread evenly over the list."""
    if not paths or not paths[0]:
        return paths
    children: dict[str, list[Path]] = {}
    for head, *rest in paths:
        children.setdefault(head, []).append(tuple(rest))
    placed: list[tuple[float, bytes, Path]] = []
    for head, below in children.items():
        order, tie = _take_turns(below), _digest(len(paths[0]), head)
        placed += [
            ((2 * j + 1) / (2 * len(order)), tie, (head, *rest)) for j, rest in enumerate(order)
        ]
    return [path for _, _, path in sorted(placed)]


def _digest(depth: int, name: str) -> bytes:
    """A fixed pseudo-random order, so that names in a row (which often stand in a row) part."""
    return hashlib.blake2b(f"{depth}\0{name}".encode(), digest_size=16).digest()
