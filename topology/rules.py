"""The nouns of a placement: the :class:`Rules` asked for, the :class:`Policy`, the answer.

Intuition: rules say what must hold (how many shards, spread over what), a policy says by which
method nodes are chosen. The same rules may be put to any policy, so that they can be compared.

Contract: values, equal by what they say, usable as keys. A :class:`Policy` is written as
``name``, ``random:SEED`` or ``copysets:WIDTH``.

Consequence: a placement that does not meet what was asked says so itself, in ``degraded``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from topology.cluster import HOST, NODE, TopologyError

DOMAIN_AWARE, GROUP, RING = "domain-aware", "group", "ring"
RANDOM, RENDEZVOUS, COPYSETS = "random", "rendezvous", "copysets"
POLICIES = (DOMAIN_AWARE, GROUP, RING, RANDOM, RENDEZVOUS, COPYSETS)
BLIND = frozenset((RING, RANDOM))
"""Policies that ignore domains by definition: controls, to compare others with."""


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
class Policy:
    """How nodes are chosen; ``seed`` is used by "random", ``scatter`` (nodes) by "copysets".

    ``scatter`` 0: twice k+m. Raises TopologyError for a name that is none of POLICIES.
    """

    name: str = DOMAIN_AWARE
    seed: int = 0
    scatter: int = 0

    def __post_init__(self) -> None:
        if self.name not in POLICIES:
            raise TopologyError(f"policy {self.name!r} is none of {', '.join(POLICIES)}")
        if self.scatter < 0:
            raise TopologyError(f"scatter width must be at least 0, got {self.scatter}")

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Read ``name``, ``random:SEED`` or ``copysets:WIDTH``; TopologyError for anything else."""
        name, colon, number = text.partition(":")
        if not colon:
            return cls(name)
        if name not in (RANDOM, COPYSETS) or not re.fullmatch(r"[0-9]{1,9}", number):
            raise TopologyError(
                f"policy {text!r}: needs one of {', '.join(POLICIES)}, "
                "or random:SEED, or copysets:WIDTH"
            )
        return cls(name, seed=int(number)) if name == RANDOM else cls(name, scatter=int(number))

    def __str__(self) -> str:
        number = self.seed if self.name == RANDOM else self.scatter if self.name == COPYSETS else 0
        return f"{self.name}:{number}" if number else self.name


@dataclass(frozen=True, slots=True)
class Placement:
    """Holders in shard order, fewer than k+m where hosts are short; why; and what is not met."""

    nodes: tuple[str, ...]
    reason: str
    degraded: tuple[str, ...] = ()
