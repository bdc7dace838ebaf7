"""The quiet end of a world: with all faults over, everything comes back to where it belongs.

Rule 6, liveness: saves that were due in the quiet commit, at least every second one, and half of
all that no fault explains (none works, or has worked within a lease and its grace); the newest step
has its full redundancy again if the nodes suffice. Rule 7, steady amounts: files, documents, ledger
keys, tasks and remembered attempts are what the standing commits need and little more. Both are
waited for within a bound, as repair and clean-up take their time, then objected to.

Contract: looks at the agents from outside, when all trainers have left. What is counted is counted
exactly where a rule names it (an attempt that does not stand owns nothing), else against a bound.
Outcomes and retirements may be more than the recent ones only by those that come after an attempt
without outcome, which no agent saw: that holds the floor until it lies NEVER_OPENED behind.
"""

from __future__ import annotations

import asyncio
import re
from itertools import pairwise
from typing import Protocol

from p2pckpt import records as r
from p2pckpt.agent.daemon import Agent
from p2pckpt.agent.gather import MAX_TOPICS
from p2pckpt.agent.job import JobAgent
from p2pckpt.agent.retire import NEVER_OPENED, RECENT_OUTCOMES
from p2pckpt.backends.inproc.cluster import FakeCluster
from p2pckpt.backends.inproc.net import true_time
from p2pckpt.save.offload import KEPT_DUE
from simulations.world.checkers import Checkers
from simulations.world.contents import Kept
from simulations.world.launcher import Launcher

BOUND_S = 180.0
"""Repair looks again after 30 s; a lease and its grace take 15 s; offloads back off up to 30 s."""

EXPLAINS_S = 15.0
"""After a fault: a lease and its grace."""

ATTEMPT = re.compile(r"\d{10}\.\d{10}\.\d{20}")
PASSING = re.compile(
    r"^(save|hand in|end|incoming|ballot|report|outcome|track|reader|tell a death) ?"
)
"""Tasks that end with what they are about."""

UPLOADS = "/offload"
"""So ends the key of a reader that keeps a step for the object store: it may be at it."""

MORE_FILES = 32
"""Free files that a node may keep beside three for each that is held: prepared and just freed."""


class HasWorld(Protocol):
    """What the end of a world is judged by."""

    cluster: FakeCluster
    checkers: list[Checkers]
    launchers: list[Launcher]
    agents: dict[str, Agent]
    living: list[str]
    calm_since: float | None
    troubles: list[tuple[float, float]]


class Quiet:
    """The checks of the quiet end."""

    def __init__(self, world: HasWorld) -> None:
        self.world = world

    async def check(self) -> None:
        """Wait until all is steady, at most BOUND_S; object to what is not."""
        self._rate()
        deadline = true_time() + BOUND_S
        while (unsteady := self._unsteady()) and true_time() < deadline:
            await asyncio.sleep(1.0)
        for what in unsteady[:5]:
            self.world.checkers[0].object(f"{BOUND_S:.0f} s after the end: {what}")
        for checkers in self.world.checkers:
            checkers.at_end()

    # -- rule 6 -----------------------------------------------------------------------------------

    def _rate(self) -> None:
        """Of the saves that were due in the quiet, no two in a row stay without commit."""
        since = self.world.calm_since
        for launcher in self.world.launchers:
            saved = {key for _, key in launcher.checkers.saved}
            plain = [d.attempt_key in saved for d in launcher.due if not self._explained(d.at_s)]
            if 2 * sum(plain) < len(plain):
                what = f"{sum(plain)} of {len(plain)} saves that no fault explains committed"
                launcher.checkers.object(what)
            quiet = [d for d in launcher.due if since is not None and d.at_s > since]
            ended = [d.attempt_key in saved for d in quiet]
            for i, pair in enumerate(pairwise(ended)):
                if not any(pair):
                    at_s = [round(d.at_s) for d in quiet[i : i + 2]]
                    launcher.checkers.object(f"in the quiet, saves due at {at_s} s: none committed")
                    return

    def _explained(self, at_s: float) -> bool:
        """Did a fault work, or had it just worked: within a lease and its grace, or a lost save?"""
        return any(began - 5.0 <= at_s <= over + EXPLAINS_S for began, over in self.world.troubles)

    def _redundancy(self) -> list[str]:
        nodes = len(self.world.agents)
        out = []
        for checkers in self.world.checkers:
            tip = checkers.tip
            if tip is None or nodes < tip.commit.layout.shards + 1:
                continue
            for found in checkers.find(tip):
                if not found.full:
                    what = f"own copy: {bool(found.owners)}, missing shards {found.missing}"
                    step = tip.commit.attempt.step
                    out.append(f"step {step}, share of {found.share.node} is not full: {what}")
        return out

    # -- rule 7 -----------------------------------------------------------------------------------

    def _unsteady(self) -> list[str]:
        standing = {
            key: kept for checkers in self.world.checkers for key, kept in checkers.kept.items()
        }
        out = self._redundancy() + self._tasks(standing)
        for name, agent in sorted(self.world.agents.items()):
            out += [f"{name}: {what}" for what in _files(agent, standing, self._rebuilt_as)]
            out += [f"{name}: {what}" for what in _memory(agent)]
            out += [f"{name}: tracks {key}" for key in self._tracked(agent, standing)]
        for checkers, launcher in zip(self.world.checkers, self.world.launchers, strict=True):
            out += self._ledger(checkers, launcher)
        return out

    def _tracked(self, agent: Agent, standing: dict[str, Kept]) -> list[str]:
        keys = sorted({a.key for job in agent.jobs.values() for a in job.ctx.tracked})
        return [key for key in keys if key not in standing and key >= self._rebuilt_as]

    def _tasks(self, standing: dict[str, Kept]) -> list[str]:
        out = []
        for task in sorted(asyncio.all_tasks(), key=hash):
            name = task.get_name()
            passing, about = PASSING.match(name), ATTEMPT.search(name)
            stays = about is not None and about[0] in standing and name.startswith("track")
            if passing and not stays and not (about and about[0] < self._rebuilt_as):
                out.append(f"task {name!r} has not ended")
        return out

    @property
    def _rebuilt_as(self) -> str:
        return max(checkers.rebuilt_as for checkers in self.world.checkers)

    def _ledger(self, checkers: Checkers, launcher: Launcher) -> list[str]:
        """Keys by kind, against what the standing commits and one generation need."""
        keys, kept = checkers.keys, checkers.kept
        entries = self.world.cluster.etcd.list(keys.root).entries
        found: dict[str, list[str]] = {}
        for entry in entries:
            parts = entry.key[len(keys.root) :].split("/")
            kind = "/".join(parts[:2]) if parts[0] == "state" else parts[0]
            found.setdefault(kind, []).append(entry.key)
        offloaded = len(found.get("state/offloaded", ()))
        nodes = launcher.training.ranks
        groups = -(-nodes // r.GROUP_NODES)
        floor = next((e.value.decode() for e in entries if e.key == keys.floor), "")
        settled = 3 * RECENT_OUTCOMES + _held_up(floor, found.get("state/outcome", []))
        bounds = {
            "join": 0,
            "readers": 0,
            "trainers": 3 * nodes,  # reports on an older generation go with the next one
            "roster": groups,
            "group": (len(kept) + offloaded + 2 * RECENT_OUTCOMES) * groups,
            "report": 16 * groups,
            "state/outcome": settled,
            "state/retired": settled,
            "state/decision": 16,
            "state/closed": 16 + 2 * (len(kept) + offloaded),
            "state/commit": len(kept),
            "state/offloaded": 3,
        }
        return [
            f"ledger: {len(names)} keys {kind}, at most {bounds[kind]}: {names[:3]}"
            for kind, names in sorted(found.items())
            if kind in bounds and len(names) > bounds[kind]
        ]


def _held_up(floor: str, outcomes: list[str]) -> int:
    """How many attempts of the floor's generation came after the oldest one without an outcome."""
    generation, _, first = floor.partition(".")
    parts = [key.rsplit("/", 1)[1].split(".") for key in outcomes]
    decided = {int(part[1]) for part in parts if part[0] == generation}
    newest = max(decided, default=0)
    open_ones = (n for n in range(int(first or 0), newest) if n not in decided)
    return min(NEVER_OPENED, newest - next(open_ones, newest))


def _files(agent: Agent, standing: dict[str, Kept], rebuilt_as: str) -> list[str]:
    """Files and documents of attempts that do not stand, unless they are of a ledger that was lost;
    too many free files."""
    out = []
    held = [h for h in agent.home.holdings if h.attempt is not None]
    free = [h for h in agent.home.holdings if h.attempt is None]
    for h in held:
        assert h.attempt is not None
        if h.attempt.key < rebuilt_as:
            continue
        if h.attempt.key not in standing:
            out.append(f"{h.kind} {h.part} of {h.attempt.key}, whole: {h.whole}, is still held")
        elif not h.whole or h.kind is r.FileKind.STAGE:
            out.append(f"{h.kind} {h.part} of committed {h.attempt.key}, whole: {h.whole}")
    if len(free) > 3 * len(held) + MORE_FILES:
        out.append(f"{len(free)} free files beside {len(held)} that are held")
    digests = {f"manifest-{h.manifest_digest}" for h in held}
    for name in agent.home.doors.arena.documents():
        about = ATTEMPT.search(name)
        if name.startswith("manifest-") and name not in digests:
            out.append(f"{name[:24]} is of no file")
        elif about is not None and about[0] not in standing and about[0] >= rebuilt_as:
            out.append(f"{name} is of an attempt that does not stand")
    return out


def _memory(agent: Agent) -> list[str]:
    """What an agent remembers of calls, puts, ballots and launches."""
    counts = {"puts under way": (len(agent.serving.incoming), 0)}
    counts["visits"] = (len(agent.asking.visits), 64)
    for name, job in sorted(agent.jobs.items()):
        counts |= {f"{name}: {what}": count for what, count in _of_job(job).items()}
    return [f"{n} {what}, at most {most}" for what, (n, most) in counts.items() if n > most]


def _of_job(job: JobAgent) -> dict[str, tuple[int, int]]:
    return {
        "seats": (len(job.seats), 0),
        "launches": (len(job.launches.launches), 0),
        "own attempts": (len(job.saving.open), 80),
        "gathered topics": (len(job.gathering.pieces), MAX_TOPICS),
        "ballots": (len(job.restoring.ballots), 16),
        "reader's records": (
            sum(
                one.session is not None and not key.endswith(UPLOADS)
                for key, one in job.ctx.readings.items()
            ),
            0,
        ),
        "saves and uploads timed": (
            len(job.scheduling.tuning.begun) + len(job.scheduling.tuning.waiting),
            KEPT_DUE,
        ),
    }
