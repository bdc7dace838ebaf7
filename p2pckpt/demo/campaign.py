"""A campaign of faults as a plan: which fault when, drawn from a seed, and when it may strike.

The plan is decks of cards: each deck holds every kind, the cheap ones often, and is shuffled by the
seed; a card says whom by a fraction (of those who can be hit then) and for how long. So one seed is
one plan, and each kind comes early. What really runs meanwhile is not up to the seed.

A fault that takes nodes away may strike only where what is promised covers it: every share of the
newest committed step survives it, together with all that other faults have taken and that was not
yet made good. That is worked out from where the shares lie (`topology.survive`), or from the number
of losses that the status document promises for any nodes.

Contract: pure; chance comes from the seed only. Times in seconds from the first step.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2pckpt.errors import UsageError
from p2pckpt.records import Layout
from topology.survive import Share, survives, why_not


@dataclass(frozen=True)
class Kind:
    """One kind of fault. ``cards``: in a deck. ``apart_s``: mean pause after it in the plan.

    ``lasts_s``: shortest and longest; of a kill, until what was killed is started again.
    """

    what: str
    cards: int
    apart_s: float
    lasts_s: tuple[float, float] = (0.0, 0.0)


LIGHT_S, HEAVY_S = 3.5, 14.0
"""A relaunch costs seconds of starting Python and torch; all other faults cost little."""

KINDS: dict[str, Kind] = {
    "trainer_kill": Kind("a rank is killed", 1, HEAVY_S),
    "trainer_term": Kind("all ranks get SIGTERM", 1, HEAVY_S),
    "trainer_pause": Kind("a rank is stopped for a while", 2, LIGHT_S, (0.5, 4.0)),
    "agent_kill": Kind("an agent is killed, and restarts on its memory", 2, LIGHT_S, (0.0, 3.0)),
    "agent_pause": Kind("an agent is stopped, for less than its lease", 2, LIGHT_S, (0.3, 2.0)),
    "agent_away": Kind("an agent is stopped until it is lost", 1, LIGHT_S, (6.0, 10.0)),
    "mover_kill": Kind("a mover is killed", 2, LIGHT_S),
    "mover_pause": Kind("a mover is stopped for a while", 2, LIGHT_S, (0.5, 3.0)),
    "node": Kind("a node and its memory are lost", 1, HEAVY_S, (0.0, 2.0)),
    "rack": Kind("a rack and its memory are lost", 1, HEAVY_S, (0.0, 2.0)),
    "etcd_pause": Kind("an etcd member is stopped for a while", 2, LIGHT_S, (0.5, 5.0)),
    "etcd_kill": Kind("an etcd member is killed, and restarts", 1, LIGHT_S, (0.0, 2.0)),
    "etcd_outage": Kind("etcd has no majority for a while", 1, LIGHT_S, (0.5, 4.0)),
    "flip": Kind("bits of a file in RAM are flipped", 2, LIGHT_S),
    "flip_kill": Kind("bits of a rank's own copy are flipped, and it is killed", 1, HEAVY_S),
    "full": Kind("the tmpfs is full for a while", 1, LIGHT_S, (2.0, 6.0)),
    "s3_kill": Kind("the object store is killed, and restarts", 1, LIGHT_S, (0.0, 3.0)),
    "s3_pause": Kind("the object store is stopped for a while", 1, LIGHT_S, (0.5, 5.0)),
}
OF_S3 = frozenset({"s3_kill", "s3_pause"})


@dataclass(frozen=True)
class Fault:
    """One card. ``victim``: from 0 to below 1, of those who can be hit."""

    number: int
    at_s: float
    kind: str
    victim: float
    lasts_s: float

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return (
            f"{self.at_s:7.1f} s  {self.number:3}  {self.kind:13} victim {self.victim:.3f}{lasts}"
        )


def draw(
    seed: int, minutes: float, s3: bool = False, only: Collection[str] = ()
) -> tuple[Fault, ...]:
    """The plan of a seed, in order of time; with faults of the object store if there is one.

    ``only``: of these kinds; all, if there are none.
    """
    chance = random.Random(seed)
    plan: list[Fault] = []
    at_s, deck = 0.0, list[str]()
    while True:
        if not deck:
            deck = [name for name, kind in KINDS.items() for _ in range(kind.cards)]
            deck = [n for n in deck if (s3 or n not in OF_S3) and (not only or n in only)]
            chance.shuffle(deck)
        name = deck.pop()
        kind = KINDS[name]
        victim, lasts_s = chance.random(), round(chance.uniform(*kind.lasts_s), 2)
        if at_s >= minutes * 60:
            return tuple(plan)
        plan.append(Fault(len(plan) + 1, at_s, name, victim, lasts_s))
        at_s = round(at_s + kind.apart_s * chance.uniform(0.5, 1.5), 1)


@dataclass(frozen=True)
class Options:
    """What to do. ``only``: kinds of faults, all if there are none. ``keep``: a directory for logs
    and journals, "" to remove them."""

    minutes: float = 5.0
    seed: int = 1
    nodes: int = 6
    racks: int = 3
    layout: str = "rs:2,1"
    every: int = 5
    s3: bool = False
    only: tuple[str, ...] = ()
    keep: str = ""

    def check(self) -> Layout:
        """The layout; raises UsageError for what cannot be played."""
        layout = Layout.parse(self.layout)
        if self.nodes < layout.shards + 1:
            raise UsageError(
                f"--nodes {self.nodes}: {self.layout} needs {layout.shards + 1} or more"
            )
        if not 1 <= self.racks <= self.nodes:
            raise UsageError(f"--racks {self.racks}: needs 1 to {self.nodes}")
        if not self.minutes > 0 or self.every < 1:
            raise UsageError(f"--minutes {self.minutes:g} --every {self.every}: need more than 0")
        if not self.s3 and (vain := OF_S3 & set(self.only)):
            raise UsageError(f"--fault {', '.join(sorted(vain))}: needs --s3")
        if self.keep and Path(self.keep).exists():
            raise UsageError(f"--keep {self.keep}: is there already")
        return layout

    def groups(self, layout: Layout) -> int:
        """Nodes that have ranks; the rest are spares, as many as one fault takes."""
        rack = -(-self.nodes // self.racks)
        return max(min(2, self.nodes), self.nodes - max(layout.m + 1, rack))

    def plan(self) -> tuple[Fault, ...]:
        """The faults, by the seed."""
        return draw(self.seed, self.minutes, self.s3, self.only)


def count(plan: tuple[Fault, ...]) -> dict[str, int]:
    """Faults of each kind in a plan."""
    return dict(Counter(fault.kind for fault in plan))


# -- may it strike? --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Standing:
    """What is promised now of the newest committed step.

    ``survivable``: losses of any nodes, by the status document. ``shares``: where they lie, None
    where that is not known.
    """

    step: int
    survivable: int
    full: int
    shares: tuple[Share, ...] | None = None

    @property
    def is_full(self) -> bool:
        """All that the layout promises."""
        return self.survivable >= self.full


def standing_of(
    job: Mapping[str, Any], sealed: Mapping[str, tuple[str | None, ...]], k: int
) -> Standing | None:
    """Of a job in the status document; None if that says nothing of redundancy.

    ``sealed``: {owner: nodes of its shards, None for one that is gone} of just that step, empty if
    it is not known of every owner. What the document says is missing is missing.
    """
    redundancy = job["redundancy"]
    if redundancy is None:
        return None
    lacking = {gap["share"]: gap for gap in redundancy["missing"]}
    shares = []
    for owner, holders in sealed.items():
        gap = lacking.get(owner, {"shards": [], "own_copy": True})
        left = tuple(None if i in gap["shards"] else name for i, name in enumerate(holders))
        shares.append(Share(owner, left, k, own_copy=gap["own_copy"]))
    return Standing(
        redundancy["step"],
        redundancy["survivable_node_losses"],
        redundancy["full"],
        tuple(shares) or None,
    )


def may_strike(standing: Standing | None, wounded: Set[str], takes: Set[str]) -> str:
    """ "" if a fault may take these nodes, else why not.

    ``wounded``: nodes that other faults have taken or hurt since the step was saved.
    """
    if not takes:
        return ""
    if standing is None:
        return "what is redundant is not known"
    gone = wounded | takes
    if len(gone) <= standing.survivable:
        return ""
    if standing.shares is None:
        return f"{len(gone)} nodes gone, step {standing.step} survives {standing.survivable}"
    if all(survives(share, gone) for share in standing.shares):
        return ""
    return why_not(standing.shares, gone)[0]
