"""How fast saves, repair, drain, offload and scrub may go beside a job that trains on this node.

    what is under way, until when -+
                                   +-> decide_rates -> Transport.limit, and the offload's own pace
    step times, as ranks tell them -> decide_level -+

Two decisions. The *level* is how much of the budget (`nic_bytes_s` * `background_share`) may be
used now: halved when steps take longer while bytes move than while none do, a step more each time
they do not (additive increase, multiplicative decrease: Chiu and Jain, Computer Networks and ISDN
Systems 17, 1989). The *rates* divide that among the kinds that have something to move: as their
weights, but to none less than its floor (weighted max-min fairness: Bertsekas and Gallager, Data
Networks, 6.5.2). The floor of a save is what its transfers need to be in time; of others, WAITS_AT
of the slowest link, so that they get on. A scrub takes no network, but cores and memory: it has the
level's part of its own rate, and its floor. A restore is in none of this: its job stands still.

Contract: `decide_rates` and `decide_level` are pure and say why. No rate is below its floor, and
together they are above the budget only where the floors are. Every transfer of the agent goes
through `Governed`, so the rates hold before its first byte. A step counts as slow only against
others of the same job that ran here without any transfer; with too few of either nothing changes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from p2pckpt import records as r
from p2pckpt.config import WAITS_AT, Config
from p2pckpt.ports import Expected, Region, Transport
from p2pckpt.traffic import Pace, Rates, Traffic

WEIGHTS = {Traffic.SAVE: 8, Traffic.REPAIR: 4, Traffic.DRAIN: 4, Traffic.OFFLOAD: 2}
"""Of the network. A save holds the job's memory; until a repair is done less may be lost; the
store can wait."""

HEADROOM = 1.25
"""A floor is so much above what the deadline needs: turns and requests take time, too."""

LOOK_EVERY_S = 0.5
SLOWDOWN = 0.10
"""Steps that take longer by this part are slowed by what moves beside them."""
IDLE_LEAST, BUSY_LEAST = 5, 3
"""Steps without and with transfers that a judgement needs."""
IDLE_PART, BUSY_PART = 0.02, 0.25
"""A step is one without transfers if they took no more of it, one with if they took so much; in
between it says nothing."""
DOWN, UP, LOWEST, QUIET_S = 0.5, 0.1, 1 / 16, 10.0
"""The level is multiplied by the first, or rises by the second, between the third and 1; it rises
as well where nothing moves for so long: what was busy then may not be now."""


# -- decisions -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """Bytes on their way: at ``needs_bytes_s`` they are in time (0: they may wait)."""

    traffic: Traffic
    needs_bytes_s: float = 0.0
    inward: bool = False


def floors_of(loads: Iterable[Load], least_bytes_s: float) -> dict[Traffic, float]:
    """What each kind that is under way must have in either direction."""
    needs: dict[tuple[Traffic, bool], float] = {}
    for load in loads:
        key = (load.traffic, load.inward)
        needs[key] = needs.get(key, 0.0) + load.needs_bytes_s * HEADROOM
    floors: dict[Traffic, float] = {}
    for (traffic, _), need in needs.items():
        floors[traffic] = max(floors.get(traffic, least_bytes_s), need)
    return floors


def decide_rates(budget_bytes_s: float, floors: Rates) -> dict[Traffic, float]:
    """Bytes a second of each kind in ``floors``: all of the budget, by weight.

    A kind whose floor is above its part has its floor; the others divide what is left.
    """
    held: dict[Traffic, float] = {}
    while True:
        free = [kind for kind in floors if kind not in held]
        left = max(0.0, budget_bytes_s - sum(held.values()))
        total = sum(WEIGHTS[kind] for kind in free)
        parts = {kind: left * WEIGHTS[kind] / total for kind in free}
        short = {kind: floors[kind] for kind in free if parts[kind] < floors[kind]}
        if not short:
            return {**held, **parts}
        held |= short


@dataclass
class Steps:
    """Seconds of one job's newest steps here, without and with transfers beside them."""

    idle_s: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    busy_s: deque[float] = field(default_factory=lambda: deque(maxlen=15))
    upload_s: deque[float] = field(default_factory=lambda: deque(maxlen=15))
    """Those beside uploads to the object store, whatever the level was."""


@dataclass(frozen=True)
class Verdict:
    """Are steps slowed? None: nothing can be said yet."""

    slowed: bool | None
    reason: str


def judge(steps: Steps) -> Verdict:
    """Compare medians. Where steps vary by themselves, those with transfers must be among the
    slowest tenth, too: a median of few is as likely as not above that of many."""
    idle, busy = len(steps.idle_s), len(steps.busy_s)
    if idle < IDLE_LEAST or busy < BUSY_LEAST:
        need = f"needs {IDLE_LEAST} steps without transfers and {BUSY_LEAST} with"
        return Verdict(None, f"{need}, has {idle} and {busy}")
    usual, found = median(steps.idle_s), median(steps.busy_s)
    slow = sorted(steps.idle_s)[idle * 9 // 10]
    slowed = found > max(usual * (1 + SLOWDOWN), slow)
    return Verdict(slowed, f"steps take {found:.3g} s with transfers, {usual:.3g} s without")


def decide_level(level: float, verdicts: Mapping[str, Verdict]) -> tuple[float, str]:
    """The next level, by what is known of each job here; the same, and why, if it is nothing."""
    known = {job: v for job, v in verdicts.items() if v.slowed is not None}
    for job, verdict in known.items():
        if verdict.slowed:
            return max(LOWEST, level * DOWN), f"job {job}: {verdict.reason}: backs off"
    if known:
        job, verdict = next(iter(known.items()))
        return min(1.0, level + UP), f"job {job}: {verdict.reason}"
    return level, "; ".join(f"job {job}: {v.reason}" for job, v in verdicts.items())


# -- what is seen ----------------------------------------------------------------------------------


@dataclass
class Clock:
    """How long bytes have been on their way here, looked at now and then."""

    busy_s: float = 0.0
    _seen: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=1200))
    _at: float | None = None

    def advance(self, now: float, busy: bool) -> None:
        """So it was since the last call."""
        if self._at is not None and busy:
            self.busy_s += now - self._at
        self._at = now

    def look(self, now: float) -> None:
        """Remember where it stands; then `busy_part` can tell of a time that began here."""
        self._seen.append((now, self.busy_s))

    def busy_part(self, now: float, window_s: float) -> float | None:
        """For which part of the last seconds, or a little more; None: not known so far back."""
        for at, busy_s in reversed(self._seen):
            if at <= now - window_s:
                return (self.busy_s - busy_s) / (now - at)
        return None


@dataclass
class Governing:
    """The governor of one agent. ``progress`` tells how far the ranks here are, by job."""

    config: Config
    transport: Transport
    progress: Callable[[], Mapping[str, r.Progress]] = dict
    nic: str = "as configured"
    """How `nic_bytes_s` is known."""
    level: float = 1.0
    why: str = "nothing has slowed training yet"
    rates: dict[Traffic, float] = field(default_factory=dict)
    _loads: list[Load] = field(default_factory=list)
    _pace: Pace = field(default_factory=Pace)
    _clock: Clock = field(default_factory=Clock)
    _uploads: Clock = field(default_factory=Clock)
    _steps: dict[str, Steps] = field(default_factory=dict)
    _told: dict[str, tuple[int, int]] = field(default_factory=dict)
    _changed_at: float = 0.0

    @property
    def budget_bytes_s(self) -> float:
        """What all kinds together may take now; 0: the network is not known, nothing is held."""
        return self.config.nic_bytes_s * self.config.background_share * self.level

    # -- what is under way ------------------------------------------------------------------------

    def begin(self, traffic: Traffic, length: int, timeout_s: float, inward: bool) -> Load:
        """Bytes are to move, from now on. A save has until `timeout_s` from now."""
        load = Load(traffic, 0.0 if traffic.can_wait else length / timeout_s, inward)
        self._advance()
        self._loads.append(load)
        self._apply()
        return load

    def end(self, load: Load) -> None:
        """They have, or never will."""
        self._advance()
        self._loads.remove(load)
        self._apply()

    @contextmanager
    def moving(self, traffic: Traffic) -> Iterator[None]:
        """While the block runs there may be bytes on their way that no transport sees, or, for a
        SCRUB, through a core."""
        load = self.begin(traffic, 0, 1.0, inward=False)
        try:
            yield
        finally:
            self.end(load)

    async def take(self, traffic: Traffic, size_bytes: int) -> None:
        """Wait until so many bytes may go, that no transport sees."""
        now = asyncio.get_running_loop().time()
        wait_s = self._pace.wait_s(traffic, now)
        self._pace.spend(traffic, size_bytes, now)  # in line: others wait for this one
        if wait_s:
            await asyncio.sleep(wait_s)

    def reading_bytes_s(self, usual_bytes_s: float, needs_bytes_s: float) -> float:
        """How fast a SCRUB may read that in time needs so much."""
        return max(self.level * usual_bytes_s, HEADROOM * needs_bytes_s)

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        kinds = {load.traffic for load in self._loads}
        self._clock.advance(now, bool(kinds))
        self._uploads.advance(now, Traffic.OFFLOAD in kinds)

    def _apply(self) -> None:
        """Let the rates be those that are right now."""
        least = self.config.floor_bytes_per_s * WAITS_AT
        loads = (load for load in self._loads if load.traffic in WEIGHTS)
        rates = decide_rates(self.budget_bytes_s, floors_of(loads, least))
        if self.config.nic_bytes_s and rates != self.rates:
            self.rates = rates
            self._pace.limit(rates)
            self.transport.limit(rates)

    # -- what comes of it -------------------------------------------------------------------------

    async def loop(self) -> None:
        """For ever: look at the steps, and choose the level."""
        while self.config.nic_bytes_s:
            await asyncio.sleep(LOOK_EVERY_S)
            self.look(asyncio.get_running_loop().time())

    def look(self, now: float) -> None:
        """One look."""
        self._advance()
        told = self.progress()
        for job, progress in told.items():
            self._learn(job, progress, now)
        self._clock.look(now)
        self._uploads.look(now)
        for job in self._steps.keys() - told.keys():
            del self._steps[job]
            self._told.pop(job, None)
        if not self._steps:
            self._set(1.0, "no job trains here", now)
            return
        verdicts = {job: judge(steps) for job, steps in self._steps.items()}
        level, why = decide_level(self.level, verdicts)
        if any(v.slowed is not None for v in verdicts.values()):
            self._set(level, why, now)
        elif not self._loads and self.level < 1 and now - self._changed_at >= QUIET_S:
            self._set(min(1.0, self.level + UP), "nothing moved for a while", now)

    def _learn(self, job: str, progress: r.Progress, now: float) -> None:
        """A step that is over: with transfers, without, or neither."""
        steps = self._steps.setdefault(job, Steps())
        at = (progress.generation, progress.step)
        if self._told.get(job) == at or not progress.last_s:
            return
        known, self._told[job] = self._told.get(job), at
        if known is not None and known[0] != at[0]:
            self._steps[job] = steps = Steps()  # another launch, perhaps of another shape
        span_s = progress.last_s + LOOK_EVERY_S
        busy = self._clock.busy_part(now, span_s)
        if (self._uploads.busy_part(now, span_s) or 0.0) >= BUSY_PART:
            steps.upload_s.append(progress.last_s)
        if busy is not None and busy <= IDLE_PART:
            steps.idle_s.append(progress.last_s)
        elif busy is not None and busy >= BUSY_PART:
            steps.busy_s.append(progress.last_s)

    def _set(self, level: float, why: str, now: float) -> None:
        for steps in self._steps.values():
            steps.busy_s.clear()  # they tell of the level before
        self.level, self.why, self._changed_at = level, why, now
        self._apply()

    def facts(self) -> dict[str, Any]:
        """For the status document."""
        return {
            "nic_bytes_s": self.config.nic_bytes_s,
            "nic": self.nic,
            "budget_bytes_s": round(self.budget_bytes_s),
            "level": round(self.level, 4),
            "rates_bytes_s": {kind.value: round(rate) for kind, rate in self.rates.items()},
            "why": self.why,
        }

    # -- what uploads cost ------------------------------------------------------------------------

    @property
    def uploading_s(self) -> float:
        """So long bytes were on their way to the object store, as far as they are over."""
        return self._uploads.busy_s

    def upload_slowdown(self, job: str) -> float | None:
        """The part of a job's time that is lost while they are, by the medians of its steps here;
        None: too few were seen of either kind."""
        steps = self._steps.get(job, Steps())
        if len(steps.idle_s) < IDLE_LEAST or len(steps.upload_s) < BUSY_LEAST:
            return None
        return max(0.0, 1 - median(steps.idle_s) / median(steps.upload_s))


class Governed:
    """`ports.Transport`: as the one inside, with what is under way told to the governor."""

    def __init__(self, transport: Transport, governing: Governing) -> None:
        self._transport = transport
        self._governing = governing

    @property
    def address(self) -> str:
        """See ports.Transport."""
        return self._transport.address

    async def expect(
        self, region: Region, traffic: Traffic = Traffic.RESTORE, timeout_s: float = float("inf")
    ) -> Expected:
        """See ports.Transport. The bytes count as under way until received or cancelled."""
        expected = await self._transport.expect(region, traffic, timeout_s)
        if traffic is Traffic.RESTORE or not region.length:
            return expected
        load = self._governing.begin(traffic, region.length, timeout_s, inward=True)
        return _Awaited(expected, self._governing, load)

    async def send(
        self,
        address: str,
        nonce: str,
        region: Region,
        timeout_s: float,
        traffic: Traffic = Traffic.RESTORE,
    ) -> None:
        """See ports.Transport."""
        if traffic is Traffic.RESTORE:
            return await self._transport.send(address, nonce, region, timeout_s)
        load = self._governing.begin(traffic, region.length, timeout_s, inward=False)
        try:
            await self._transport.send(address, nonce, region, timeout_s, traffic)
        finally:
            self._governing.end(load)

    def limit(self, rates: Rates) -> None:
        """See ports.Transport."""
        self._transport.limit(rates)

    async def close(self) -> None:
        """See ports.Transport."""
        await self._transport.close()


class _Awaited:
    """`ports.Expected`, which ends its load."""

    def __init__(self, expected: Expected, governing: Governing, load: Load) -> None:
        self._expected = expected
        self._governing = governing
        self._load: Load | None = load

    @property
    def nonce(self) -> str:
        return self._expected.nonce

    async def received(self, timeout_s: float) -> None:
        await self._expected.received(timeout_s)
        self._over()

    async def cancel(self) -> None:
        self._over()
        await self._expected.cancel()

    def _over(self) -> None:
        if self._load is not None:
            self._governing.end(self._load)
            self._load = None
