"""What an agent learns of a job's saves, uploads, restores and failures, and the intervals for it.

    saves:    last byte -> commit                         -+
    uploads:  commit -> Offloaded, what they slow training |
    restores: how long, from peers or from the store       +-> Costs -> save.schedule -> steps, N
    failures: generations that followed one another       -+

Two numbers come out, by one decider, `save.schedule.decide_schedule`, which the simulator asks too:
the steps between saves, and the saves between uploads (N). A number that was not measured yet has a
prior: a restore takes as long as what it brings back took to settle; an upload slows nothing, so
that its lower bound decides, and the reason says so; failures and their deep share have settings.

Contract: nothing here is waited for, or written down: it is lost with the agent's process, and then
the priors hold again. Medians of the newest few, so that one outage or one slow save says little. A
store that is not there, or off (`offload_every` 0), is never turned on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from p2pckpt import records as r
from p2pckpt.agent.context import JobContext
from p2pckpt.config import Config
from p2pckpt.save.offload import due, every_in_force
from p2pckpt.save.schedule import (
    Interval,
    Schedule,
    Standing,
    Tier,
    decide_schedule,
    deep_share_of,
    failure_rate,
)

MEDIAN_OF = 5
"""Saves, uploads, restores that a cost is the median of."""

PRIOR_RESTORES = 10
"""`deep_share_prior` counts as so many restores: one that the store had to do is news."""


@dataclass(frozen=True)
class Seen:
    """What the ranks here told, put together: the farthest step, the shortest iteration, the
    longest block. ``step_s`` 0: no rank has asked twice yet."""

    step: int
    stride: int
    every: int
    auto: bool
    step_s: float
    block_s: float
    restore_s: float


def look(told: list[r.Progress]) -> Seen | None:
    """Of one generation's ranks; None if none told anything."""
    if not told:
        return None
    return Seen(
        step=max(p.step for p in told),
        stride=max(p.stride for p in told),
        every=told[0].every,
        auto=all(p.auto for p in told),
        step_s=min(p.step_s for p in told),
        block_s=max(p.block_s for p in told),
        restore_s=max(p.restore_s for p in told),
    )


# -- costs to intervals ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Of one tier, in seconds, as `save.schedule.Tier` has them. ``block_s`` None: not known."""

    block_s: float | None
    settle_s: float
    restore_s: float = 0.0


@dataclass(frozen=True)
class Costs:
    """What the intervals are chosen by: seconds, failures a second of the whole job, and the share
    of them that RAM cannot recover. ``store`` None: there is none, or it is off."""

    step_s: float
    ram: Cost
    store: Cost | None
    failures_per_s: float
    deep_share: float


@dataclass(frozen=True)
class Chosen:
    """The answer of the decider, and what it was asked."""

    schedule: Schedule
    costs: Costs

    @property
    def store_reason(self) -> str:
        """Why so many saves between uploads; "" without a store."""
        store, cost = self.schedule.store, self.costs.store
        if store is None or cost is None:
            return ""
        unknown = "; what uploads slow is not known yet" if cost.block_s is None else ""
        return store.reason + unknown

    @property
    def reason(self) -> str:
        """Both, for the record."""
        found = self.schedule
        text = f"every {found.every} steps: {found.ram.reason}"
        if found.store is not None:
            text += f"; to the store one of {found.offload_every}: {self.store_reason}"
        return text


def tiers_of(costs: Costs, config: Config) -> tuple[Tier, Tier | None]:
    """RAM and the store, as the decider wants them."""

    def tier(cost: Cost, low_s: float, high_s: float) -> Tier:
        return Tier(cost.block_s or 0.0, cost.settle_s, low_s, high_s, cost.restore_s)

    ram = tier(costs.ram, config.every_low_s, config.every_high_s)
    store = None
    if costs.store is not None:
        store = tier(costs.store, config.offload_low_s, config.offload_high_s)
    return ram, store


def decide_intervals(costs: Costs, every: int, offload_every: int, config: Config) -> Chosen:
    """Steps between saves, and saves between uploads, for these costs; ``every`` and
    ``offload_every``, which hold now, where they are as good as the best."""
    ram, store = tiers_of(costs, config)
    standing = Standing(costs.step_s, every, offload_every)
    found = decide_schedule(ram, store, costs.failures_per_s, costs.deep_share, standing)
    return Chosen(found, costs)


# -- what is learned -------------------------------------------------------------------------------


def _few() -> deque[float]:
    return deque(maxlen=MEDIAN_OF)


def _median(seconds: deque[float], prior_s: float = 0.0) -> float:
    return median(seconds) if seconds else prior_s


@dataclass
class Tuning:
    """What this agent learned of one job. ``begun``: saves of ours, from their last byte on;
    ``waiting``: due commits, since when, and what uploads had taken by then."""

    ctx: JobContext
    begun: dict[r.Attempt, float] = field(default_factory=dict)
    waiting: dict[r.Attempt, tuple[float, float]] = field(default_factory=dict)
    settles_s: deque[float] = field(default_factory=_few)
    blocks_s: deque[float] = field(default_factory=_few)
    """Of training, by an upload."""
    uploaded_s: float = 0.0
    """What all uploads had taken when the last one was over."""
    stored_s: deque[float] = field(default_factory=_few)
    """From a commit to its Offloaded record."""
    restores_s: dict[bool, deque[float]] = field(
        default_factory=lambda: {True: _few(), False: _few()}
    )
    """By whether they needed the store."""
    restored: tuple[int, bool] | None = None
    """The newest generation that this agent saw begin with a restore, and the same of it."""
    earlier: tuple[int, int] = (0, 0)
    """Restores of generations before that one, and how many of them needed the store."""
    timed: int = 0
    """The newest generation whose restore is among the times."""
    chosen: Chosen | None = None
    changed: bool = False
    since_change: int = 0
    first: tuple[float, int] | None = None
    """When this agent saw the job first, and the generation then."""

    @property
    def offload_every(self) -> int:
        """N that holds now; 0: no store, or off."""
        home = self.ctx.home
        if home.doors.objects is None:
            return 0
        return every_in_force(self.ctx.state, home.config.offload_every)

    def has_news(self) -> bool:
        """Is a save or an upload of ours over, or a restore decided?"""
        return (
            any(map(self.ctx.decided, self.begun))
            or bool(self._over())
            or self._restore() not in (None, self.restored)
        )

    def learn(self) -> bool:
        """Take note of what is over. Was a save committed?"""
        ctx, now, commits = self.ctx, self.ctx.home.now(), 0
        for attempt in [a for a in self.begun if ctx.decided(a)]:
            begun = self.begun.pop(attempt)
            if (commit := ctx.state.committed(attempt)) is not None:
                self.settles_s.append(now - begun)
                commits += 1
                if commit in self._due():
                    self.waiting[attempt] = now, ctx.home.governing.uploading_s
        for attempt in self._over():
            since, before_s = self.waiting.pop(attempt)
            if attempt.key in ctx.state.offloaded:
                self.stored_s.append(now - since)
                self._uploaded(before_s)
        if (restore := self._restore()) is not None:
            if self.restored is not None and self.restored[0] != restore[0]:
                self.earlier = self.earlier[0] + 1, self.earlier[1] + self.restored[1]
            self.restored = restore
        self.since_change += commits
        return commits > 0

    def _uploaded(self, before_s: float) -> None:
        """An upload is over; uploads had taken ``before_s`` when it fell due. It cost what steps
        beside it are slowed, for as long as this node's part took, without what it waited."""
        governing = self.ctx.home.governing
        took_s = governing.uploading_s - max(before_s, self.uploaded_s)
        self.uploaded_s = governing.uploading_s
        if (slowdown := governing.upload_slowdown(self.ctx.job)) is not None:
            self.blocks_s.append(slowdown * took_s)

    def _due(self) -> list[r.Commit]:
        return due(self.ctx.state, self.ctx.home.config.offload_every)

    def _over(self) -> list[r.Attempt]:
        """Due commits that wait no more: in the store, or given up."""
        if not self.waiting:
            return []
        still = {commit.attempt for commit in self._due()}
        return [attempt for attempt in self.waiting if attempt not in still]

    def _restore(self) -> tuple[int, bool] | None:
        """The present generation, and whether its restore needs the store; None if it has none."""
        state = self.ctx.state
        number = state.generation.number if state.generation else 0
        mine = [(b, d) for (g, b), d in state.decisions.items() if g == number]
        _, newest = max(mine, key=lambda pair: pair[0], default=(0, None))
        if newest is None or newest.choice is not r.Choice.RESTORE:
            return None
        return number, newest.stored

    # -- the intervals ----------------------------------------------------------------------------

    def choose(self, seen: Seen, every: int) -> Chosen:
        """The intervals for what is known now, where ``every`` steps hold."""
        self.chosen = decide_intervals(
            self.costs(seen), every, self.offload_every, self.ctx.home.config
        )
        return self.chosen

    def costs(self, seen: Seen) -> Costs:
        """A failure is a generation that followed another one while this agent looked on."""
        ctx, config, now = self.ctx, self.ctx.home.config, self.ctx.home.now()
        number = ctx.state.generation.number if ctx.state.generation else 0
        self.first = self.first or (now, number)
        prior_s = config.mtbf_prior_s
        failures = max(0, number - self.first[1])  # a job that was cleaned begins at 1 again
        rate = failure_rate(1 / prior_s, prior_s, failures, now - self.first[0])
        restores, deep = self.earlier
        if self.restored is not None:
            restores, deep = restores + 1, deep + self.restored[1]
            if seen.restore_s and self.timed != number == self.restored[0]:
                self.restores_s[self.restored[1]].append(seen.restore_s)
                self.timed = number
        share = deep_share_of(config.deep_share_prior, PRIOR_RESTORES, deep, restores)
        settle_s = _median(self.settles_s)
        ram = Cost(seen.block_s, settle_s, _median(self.restores_s[False], settle_s))
        store = None
        if self.offload_every:
            stored_s = settle_s + _median(self.stored_s)
            block_s = _median(self.blocks_s) if self.blocks_s else None
            store = Cost(block_s, stored_s, _median(self.restores_s[True], stored_s))
        return Costs(seen.step_s, ram, store, rate, share)

    # -- for people -------------------------------------------------------------------------------

    def facts(self, decides: bool) -> dict[str, Any]:
        """For `status`: both intervals, and if this agent ``decides`` them, why and from what."""
        chosen, config = self.chosen if decides else None, self.ctx.home.config
        costs = chosen.costs if chosen else None
        store, every = None, self.offload_every
        if every:
            cost = costs.store if costs else None
            store = {
                "every": every,
                "set": config.offload_every,
                "block_s": cost.block_s if cost else None,
                "settle_s": cost.settle_s if cost else None,
                "restore_s": cost.restore_s if cost else None,
                "why": chosen.store_reason or None if chosen else None,
                **_valley(chosen.schedule.store if chosen else None),
            }
        return {
            "settle_s": _median(self.settles_s),
            "why": chosen.schedule.ram.reason if chosen else None,
            **_valley(chosen.schedule.ram if chosen else None),
            "failures_per_s": costs.failures_per_s if costs else None,
            "deep_share": costs.deep_share if costs else None,
            "overhead": chosen.schedule.overhead if chosen else None,
            "store": store,
        }


def _valley(interval: Interval | None) -> dict[str, Any]:
    return {
        "interval_s": interval.interval_s if interval else None,
        "as_good_s": list(interval.flat_s) if interval else None,
    }
