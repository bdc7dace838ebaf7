"""Redundancy schemes: what each keeps, what it costs, and which losses it survives.

Intuition: every scheme is one sentence, "node i is restored from its own copy, or from any k of
the n nodes in row i". Shards scattered over peers say it with n = k+m holders, copies with k = 1.
An XOR group of g says it with the other g-1 members and k = g-1: their own copies *are* the data.
So one table of holders and one test decide them all, and it is the product's own test: node i is
lost when it and more than `slack` of its row are gone, which is what `topology.survives` says.

Contract: `parse` reads "s3", "local", "copies:2", "rs:8,2", "xor:8" or "parity:10,2" (a group of
10 of which any 2 may go), each with "@policy" behind it. Policies are those of `topology.place`,
which places the pieces: "domain-aware" (default), "group" (Gemini; default of xor and parity),
"ring" (the next nodes by name: what happens without a topology), "random", "rendezvous",
"copysets:WIDTH". Consequence: a scheme whose pieces the cluster cannot hold is not an error, but
shows what it loses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from p2pckpt.errors import UsageError
from topology import Cluster, Level, Policy, Rules, TopologyError, place_all

DEFAULT, GROUP = "domain-aware", "group"
FORMS = "s3, local, copies:R, rs:K,M, xor:G or parity:G,F, with @policy behind it"


@dataclass(frozen=True)
class Scheme:
    """Any k of n pieces, or the own copy, restore a node.

    In units of one node's snapshot: ``ram`` is kept on a node beside its own copy for each held
    version, ``sent`` by a node for each save, ``read`` over the network to rebuild one node.
    ``memory``: snapshots are kept in RAM at all. ``product``: p2pckpt can do it today.
    """

    name: str
    k: int
    n: int
    policy: str
    ram: float
    sent: float
    read: float
    memory: bool = True
    product: bool = True

    @property
    def grouped(self) -> bool:
        """The pieces are the other members of one group, whose own copies are the data."""
        return self.name.startswith(("xor", "parity"))


def parse(text: str) -> Scheme:
    """The scheme that ``text`` names. Raises UsageError."""
    body, _, policy = text.partition("@")
    kind, _, rest = body.partition(":")
    try:
        numbers = [int(x) for x in rest.split(",")] if rest else []
        made = _KINDS[kind](body, policy, *numbers)
    except (KeyError, ValueError, TypeError, ZeroDivisionError):
        raise UsageError(f"scheme {text!r}: needs {FORMS}") from None
    try:
        Policy.parse(made.policy)
    except TopologyError as e:
        raise UsageError(f"scheme {text!r}: {e}") from None
    if made.k < 1 or made.n < made.k - (kind == "local"):
        raise UsageError(f"scheme {text!r}: needs {FORMS}")
    if made.grouped and made.policy != GROUP:
        raise UsageError(f"scheme {text!r}: its groups are those of policy {GROUP}")
    return made


def _named(body: str, policy: str, default: str = DEFAULT) -> dict[str, Any]:
    chosen = policy or default
    return {"name": body if chosen == default else f"{body}@{chosen}", "policy": chosen}


def _s3(body: str, policy: str) -> Scheme:
    return Scheme(**_named(body, policy), k=1, n=1, ram=0, sent=0, read=0, memory=False)


def _local(body: str, policy: str) -> Scheme:
    return Scheme(**_named(body, policy), k=1, n=0, ram=0, sent=0, read=0)


def _copies(body: str, policy: str, r: int) -> Scheme:
    product = policy in ("", DEFAULT)
    return Scheme(**_named(body, policy), k=1, n=r, ram=r, sent=r, read=1, product=product)


def _rs(body: str, policy: str, k: int, m: int) -> Scheme:
    factor, product = (k + m) / max(k, 1), policy in ("", DEFAULT)
    return Scheme(
        **_named(body, policy), k=k, n=k + m, ram=factor, sent=factor, read=1, product=product
    )


def _parity(body: str, policy: str, g: int, f: int) -> Scheme:
    if not 1 <= f < g:
        raise ValueError(f"a group of {g} with {f} lost")
    return Scheme(
        **_named(body, policy, GROUP),
        k=g - f, n=g - 1, ram=f / (g - f), sent=f, read=g - f, product=False,
    )  # fmt: skip


def _xor(body: str, policy: str, g: int) -> Scheme:
    return _parity(body, policy, g, 1)


_KINDS: dict[str, Callable[..., Scheme]] = {
    "s3": _s3, "local": _local, "copies": _copies, "rs": _rs, "xor": _xor, "parity": _parity,
}  # fmt: skip


# -- where the pieces go -------------------------------------------------------------------------


@dataclass(frozen=True)
class Pieces:
    """Who holds the pieces of each node (numbers by name order), and how many may be missing."""

    rows: tuple[tuple[int, ...], ...]
    slack: tuple[int, ...]

    def lost(self, dead: Set[int]) -> bool:
        """Whether losing ``dead`` loses any node's state; for few dead, in plain Python."""
        rows, slack = self.rows, self.slack
        return any(sum(node in dead for node in rows[owner]) > slack[owner] for owner in dead)

    def lost_nodes(self, dead: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The nodes whose state is lost with ``dead`` (N booleans): `lost`, vectorised."""
        gone = np.append(dead, False)[self._table].sum(axis=1)  # -1, no holder, is never gone
        return np.flatnonzero(dead & (gone > np.array(self.slack)))

    @cached_property
    def _table(self) -> NDArray[np.int64]:
        table = np.full((len(self.rows), max(map(len, self.rows), default=0)), -1)
        for i, row in enumerate(self.rows):
            table[i, : len(row)] = row
        return table


def pieces(cluster: Cluster, scheme: Scheme) -> Pieces:
    """Where `topology.place` puts the pieces. UsageError: groups cannot be formed."""
    if not scheme.memory or not scheme.n:
        return Pieces(((),) * len(cluster), (-1,) * len(cluster))
    rules = Rules(scheme.k, scheme.n - scheme.k, tuple(Level(name) for name in cluster.levels))
    placed = place_all(cluster, rules, policy=Policy.parse(scheme.policy))
    number = {node.name: i for i, node in enumerate(cluster.nodes)}
    rows = [tuple(number[name] for name in placed[node.name].nodes) for node in cluster.nodes]
    if scheme.grouped:
        rows = _whole_groups(rows, scheme)
        return Pieces(tuple(rows), (scheme.n - scheme.k,) * len(rows))
    return Pieces(tuple(rows), tuple(len(row) - scheme.k for row in rows))


def _whole_groups(rows: Sequence[tuple[int, ...]], scheme: Scheme) -> list[tuple[int, ...]]:
    """In groups that are a little larger than asked for, everybody's row is all the others."""
    out: list[tuple[int, ...]] = [()] * len(rows)
    for first, row in enumerate(rows):
        if out[first]:
            continue
        group = {first, *row}
        while len(group) < len(wider := group.union(*(rows[node] for node in group))):
            group = wider
        if not scheme.n < len(group) <= 2 * scheme.n + 1:
            raise UsageError(
                f"scheme {scheme.name}: {len(rows)} nodes cannot be cut into groups of "
                f"{scheme.n + 1} over these domains"
            )
        for node in group:
            out[node] = tuple(sorted(group - {node}))
    return out
