"""One run of one job: failures come, stages pass, work is kept or done again.

Intuition: between two failures nothing random happens, so nothing has to be simulated: how many
snapshots were taken, committed and uploaded by a moment is arithmetic. The engine jumps from
failure to failure. An incident runs through DETECT, DIAGNOSE, (wait for SPARES), ALLOCATE, INIT,
(wait for the RETURN of hosts that are away) and RESTORE; a failure during an incident joins it,
with the dead of both, and the stages begin again. Then the job runs on from what it restored.

Contract: `run` is a pure function of a `Plan` and a `History`. Every second of the horizon is
booked once, so that the stages sum to it. A snapshot counts only when all of its pieces are in
place (commit); the store has a second, slower clock, and is what remains when RAM has lost too
much.
Replaced nodes hold no pieces until they are rebuilt or the next snapshot commits, whichever is
first; until then another failure meets fewer. After a restore from the store RAM holds nothing
until the next commit.

Simplifications: a spare takes the place of the node that it replaces, with its domains. An upload
that a failure cuts short is lost. A job that stops once trains as fast as before when it is back.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from simulations.study.hazards import Failure, History
from simulations.study.plan import Plan, prepare
from simulations.study.scenario import Fate

__all__ = ["FATES", "SOURCES", "STAGES", "Outcome", "Plan", "prepare", "run"]

STAGES = (
    "productive", "stall", "recompute", "detect", "diagnose", "spares", "allocate", "init",
    "return", "restore",
)  # fmt: skip
PRODUCTIVE, STALL, RECOMPUTE, DETECT, DIAGNOSE, SPARES, ALLOCATE, INIT, RETURN, RESTORE = range(10)
SOURCES = ("local", "old host", "peers", "store")
LOCAL, OLD_HOST, PEERS, STORE = range(4)
FATES = tuple(Fate)
_SEVERITY = {fate: i for i, fate in enumerate(FATES)}


@dataclass
class Outcome:
    """What happened in one run. ``seconds`` by stage sum to the horizon.

    ``lost_work_s``: of each unplanned incident, the training that had to be done again.
    ``recovered[fate][source]``: incidents by their worst failure. ``fallbacks``: incidents in which
    RAM lost too much of what it held. ``events``: steps of the engine; ``snapshots`` are counted,
    not stepped.
    """

    seconds: list[float] = field(default_factory=lambda: [0.0] * len(STAGES))
    lost_work_s: list[float] = field(default_factory=list)
    recovered: list[list[int]] = field(default_factory=lambda: [[0] * len(SOURCES) for _ in FATES])
    failures: int = 0
    incidents: int = 0
    planned: int = 0
    merged: int = 0
    fallbacks: int = 0
    events: int = 0
    snapshots: int = 0
    uploads: int = 0
    spares_waited: int = 0

    @property
    def ettr(self) -> float:
        """Effective training time ratio: productive seconds by all seconds."""
        return self.seconds[PRODUCTIVE] / sum(self.seconds)


# -- one run -----------------------------------------------------------------------------------


def run(plan: Plan, history: History) -> Outcome:
    """The whole horizon of ``plan`` under the failures of ``history``."""
    job = _Job(plan, history)
    failures = history.failures
    while job.next < len(failures) and failures[job.next].at_s < plan.horizon_s:
        job.stop(failures[job.next])
    if job.now_s < plan.horizon_s:
        job.train_until(plan.horizon_s)
        job.seconds[PRODUCTIVE] += job.trained_s
    return job.out


class _Job:
    """The state of the job between incidents, and how it changes."""

    def __init__(self, plan: Plan, history: History) -> None:
        self.plan = plan
        self.causes = history.causes
        self.failures = history.failures
        self.out = Outcome()
        self.seconds = self.out.seconds
        self.next = 0  # failure to look at
        self.now_s = 0.0  # training runs since then, or an incident ended the horizon
        self.work_s = 0.0  # training kept at that moment
        self.store_work_s = 0.0  # training in the newest finished upload
        self.since_upload = 0  # snapshots since the one that was due for the store
        self.bare = True  # RAM holds nothing before the first commit
        self.missing: frozenset[int] = frozenset()  # replaced nodes, their pieces not yet rebuilt
        self.missing_until_s = 0.0
        self.spares = plan.fleet.spares
        self.repairs: list[float] = []  # when nodes come back as spares
        self.trained_s = 0.0  # by train_until: trained since now_s
        self.committed = 0  # snapshots of them that a restore can use
        self.taken = 0

    def train_until(self, at_s: float) -> None:
        """Train from now_s to ``at_s``: what was done, stalled, committed, uploaded."""
        plan, span = self.plan, at_s - self.now_s
        cycle = plan.interval_s + plan.stall_s
        taken = int(span // cycle)
        rest = span - taken * cycle
        self.taken = taken
        self.trained_s = taken * plan.interval_s + min(rest, plan.interval_s)
        self.committed = min(taken, max(0, int((span - plan.push_s) // cycle)))
        self.seconds[STALL] += span - self.trained_s
        self.out.snapshots += taken
        if plan.every:
            first = plan.every - self.since_upload
            done = min(taken, int((span - plan.push_s - plan.upload_s) // cycle))
            if done >= first:
                uploads = (done - first) // plan.every + 1
                last = first + (uploads - 1) * plan.every
                self.store_work_s = self.work_s + last * plan.interval_s
                self.out.uploads += uploads

    def stop(self, failure: Failure) -> None:
        """A failure ends training: keep what can be kept, recover, and train on."""
        planned = self.causes[failure.cause].planned
        self.train_until(failure.at_s)
        if self.committed or planned:
            self.bare, self.missing = False, frozenset()
        elif failure.at_s >= self.missing_until_s:
            self.missing = frozenset()
        done = self.work_s + self.trained_s
        saves = self.taken + 1 if planned else self.committed
        kept = done if planned else self.work_s + saves * self.plan.interval_s
        incident = _Incident(self, failure, planned)
        source = incident.recover()
        if source == STORE:
            kept = self.store_work_s if self.plan.scheme.memory else kept
            self.since_upload, self.bare = 0, self.plan.scheme.memory
        elif self.plan.every:
            self.since_upload = (self.since_upload + saves) % self.plan.every
        self.seconds[PRODUCTIVE] += kept - self.work_s
        self.seconds[RECOMPUTE] += done - kept
        self.work_s = kept
        self._book(incident, source, done - kept)
        self.missing = frozenset(incident.evicted)
        self.missing_until_s = self.now_s + self.plan.window_s

    def _book(self, incident: _Incident, source: int, lost_s: float) -> None:
        out = self.out
        if incident.planned:
            out.planned += 1
            return
        out.incidents += 1
        out.lost_work_s.append(lost_s)
        if source >= 0:
            out.recovered[incident.severity][source] += 1
            out.fallbacks += source == STORE and self.plan.scheme.memory and incident.held


class _Incident:
    """From the first failure until training runs again; failures on the way join."""

    def __init__(self, job: _Job, failure: Failure, planned: bool) -> None:
        self.job = job
        self.planned = planned
        self.held = not job.bare  # RAM had something to lose
        self.severity = 0
        self.evicted: set[int] = set()
        self.granted = 0  # of the evicted, those that have a spare
        self.dead: set[int] = set()  # RAM that nobody can read
        self.away: set[int] = set()  # RAM that lives out of reach
        self.back_s = 0.0  # when all of it is back
        self.hold_s = 0.0  # when hosts that are not replaced are back
        self._join(failure)

    def _join(self, failure: Failure) -> None:
        job, cause = self.job, self.job.causes[failure.cause]
        job.next += 1
        job.out.events += 1
        job.out.failures += not cause.planned
        fate, back = cause.fate, failure.at_s + failure.away_s
        self.last = failure
        self.severity = max(self.severity, _SEVERITY[fate])
        if cause.planned or fate is Fate.PROCESS:
            pass
        elif fate is Fate.UNREACHABLE:
            self.away.update(failure.nodes)
            self.back_s = max(self.back_s, back)
        elif fate is Fate.LOST or not failure.readable:
            self.dead.update(failure.nodes)
        if cause.evict and fate is not Fate.PROCESS:
            self._evict(failure.nodes, back, failure.at_s)
        else:
            self.hold_s = max(self.hold_s, back)

    def _evict(self, nodes: tuple[int, ...], back_s: float, at_s: float) -> None:
        size, plan = self.job.plan.evict_group, self.job.plan
        for node in nodes:
            start = node - node % size
            for one in range(start, min(start + size, plan.fleet.nodes)):
                if one not in self.evicted:
                    self.evicted.add(one)
                    back = back_s if one in nodes else at_s + plan.check_s
                    heapq.heappush(self.job.repairs, back)

    def recover(self) -> int:
        """Pass through the stages until they were not interrupted; where the state came from.

        -1: the horizon ended first.
        """
        job, failures, horizon = self.job, self.job.failures, self.job.plan.horizon_s
        while True:
            stages, source, granted_s = self._stages()
            end = self.last.at_s + sum(stages)
            job.out.events += len(stages)
            while (
                job.next < len(failures)
                and failures[job.next].at_s < end
                and not self._joins(failures[job.next])
            ):
                job.next += 1
            upcoming = failures[job.next].at_s if job.next < len(failures) else horizon
            limit = min(end, upcoming, horizon)
            if granted_s <= limit:
                self._grant(granted_s)
            self._spend(stages, limit)
            job.now_s = limit
            if limit == end:
                return source
            if limit >= horizon:
                return -1
            job.out.merged += 1
            self._join(failures[job.next])

    def _joins(self, failure: Failure) -> bool:
        """Whether a failure during the incident changes it: not one of nodes that are gone."""
        planned = self.job.causes[failure.cause].planned
        return not planned and not self.evicted.issuperset(failure.nodes)

    def _stages(self) -> tuple[tuple[float, ...], int, float]:
        """Lengths of DETECT to RESTORE from the last failure on, the source, the spares' moment."""
        failure, plan = self.last, self.job.plan
        detect, diagnose = failure.detect_s, failure.diagnose_s
        ask = failure.at_s + detect + diagnose
        granted = max(ask, self._spares_at(ask), self.hold_s)
        start = granted + failure.allocate_s + failure.init_s
        source, wait = self._decide(start)
        if source == LOCAL:
            restore = plan.local_s
        elif source == STORE:
            restore = plan.store_s
        else:
            restore = plan.pull_s(tuple(self.evicted or self.dead | self.away))
        lengths = (detect, diagnose, granted - ask, failure.allocate_s, failure.init_s, wait)
        return (*lengths, restore), source, granted

    def _decide(self, start_s: float) -> tuple[int, float]:
        """Where the state comes from, and how long to wait for hosts that are away."""
        job, plan = self.job, self.job.plan
        if not plan.scheme.memory or job.bare:
            return STORE, 0.0
        dead = self.dead | job.missing if job.missing else self.dead
        gone = dead | self.away
        if not gone:
            return (OLD_HOST if self.evicted else LOCAL), 0.0
        if not plan.pieces.lost(gone):
            return PEERS, 0.0
        wait = max(0.0, self.back_s - start_s)
        if self.away and wait <= plan.return_wait_s and not plan.pieces.lost(dead):
            return (PEERS if dead else OLD_HOST), wait
        return STORE, 0.0

    def _spares_at(self, ask_s: float) -> float:
        """When there are spares for all who need one."""
        job = self.job
        self._take_back(self.last.at_s)
        short = len(self.evicted) - self.granted - job.spares
        return ask_s if short <= 0 else max(ask_s, heapq.nsmallest(short, job.repairs)[-1])

    def _take_back(self, at_s: float) -> None:
        """Repaired nodes become spares."""
        job = self.job
        while job.repairs and job.repairs[0] <= at_s:
            heapq.heappop(job.repairs)
            job.spares += 1
            job.out.events += 1

    def _grant(self, at_s: float) -> None:
        """Spares take the places of the evicted."""
        self._take_back(at_s)
        self.job.spares -= len(self.evicted) - self.granted
        self.granted = len(self.evicted)

    def _spend(self, stages: tuple[float, ...], limit_s: float) -> None:
        """Book the stages up to ``limit_s``."""
        left, seconds = limit_s - self.last.at_s, self.job.seconds
        self.job.out.spares_waited += stages[SPARES - DETECT] > 0
        for i, length in enumerate(stages):
            part = length if length < left else left
            seconds[DETECT + i] += part
            left -= part
