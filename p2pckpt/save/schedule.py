"""Costs and failure rates -> how often to save to RAM and to the store, with the reasons.

Intuition: a save costs its block of training, each failure costs the work since the last save that
a restore can use. Saves too often waste time surely, saves too seldom waste it by chance; between
them lies a flat valley. There are two clocks, as there are two kinds of failure (SCR: Moody et al.,
SC'10): what peers bring back costs work since the last snapshot in RAM, what they cannot bring back
("deep") costs work since the last finished upload. Each clock has its own valley.

    overhead(T, U) = b/T + B/U + l (1-q) (T/2 + s + r) + l q (U/2 + S + R)

with block b, settle s, restore r of RAM; B, S, R of the store; l failures a second, of which a
share q is deep. To first order the two minima are Young's (CACM 1974), sqrt(2 b / l); Daly's
higher-order optimum (FGCS 2006) is used, which matters only where saves are dear against the time
between failures. What a restore takes is lost with every failure, however often was saved: it is
part of the overhead and moves neither minimum, in Daly's complete model no more than to first
order (there it is the factor exp(R l) before what depends on the interval).

Contract: pure; nothing is read, nothing is remembered. Every answer says which rule or bound set
it, and the range of intervals that are worse by at most one per cent of useful time: a number from
within it is as good. The simulator and the product ask the same functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from p2pckpt.errors import UsageError

FLAT = 0.01
"""Useful time that an interval may lose against the best one and still be called as good."""


@dataclass(frozen=True)
class Tier:
    """What one kind of save costs, and between which intervals it may be chosen.

    ``block_s``: training stands still; ``settle_s``: from the end of the block until a restore can
    use it; ``restore_s``: what a restore from it takes. A save is not begun while the one before
    settles, so no interval is below ``settle_s``.
    """

    block_s: float
    settle_s: float
    low_s: float
    high_s: float
    restore_s: float = 0.0

    def __post_init__(self) -> None:
        costs = (self.block_s, self.settle_s, self.restore_s)
        if min(costs) < 0 or not 0 < self.low_s <= self.high_s:
            raise UsageError(
                "tier: needs costs of 0 or more and 0 < low_s <= high_s, got block, settle, "
                f"restore of {costs} s, bounds {self.low_s} to {self.high_s}"
            )

    @property
    def least_s(self) -> float:
        """No interval is shorter: by its bound, or as the save before is still settling."""
        return max(self.low_s, self.settle_s)


@dataclass(frozen=True)
class Standing:
    """What a running job saves now: every so manieth step of ``step_s`` seconds to RAM, every so
    manieth of these saves to the store (0: none)."""

    step_s: float
    every: int
    offload_every: int = 0


@dataclass(frozen=True)
class Interval:
    """One clock: seconds of training between saves, as good from ``flat_s[0]`` to ``[1]``, why."""

    interval_s: float
    flat_s: tuple[float, float]
    overhead: float
    reason: str


@dataclass(frozen=True)
class Schedule:
    """Both clocks; ``store`` None without a store; every ``offload_every``-th save goes there.
    ``every``: the RAM interval in steps, of a running job; else 0."""

    ram: Interval
    store: Interval | None
    offload_every: int
    every: int = 0

    @property
    def overhead(self) -> float:
        """Share of time that saves, work done again and restores cost, as the model sees it."""
        return self.ram.overhead + (self.store.overhead if self.store else 0.0)

    @property
    def reasons(self) -> tuple[str, ...]:
        """A sentence for each clock."""
        found = [f"RAM: {self.ram.reason}"]
        if self.store:
            found.append(f"store: {self.store.reason}; every {self.offload_every} saves")
        return tuple(found)


def decide_schedule(
    ram: Tier,
    store: Tier | None,
    failures_per_s: float,
    deep_share: float,
    standing: Standing | None = None,
) -> Schedule:
    """The intervals of both tiers.

    ``deep_share``: of the failures, those that RAM cannot recover. The store's interval is a whole
    number of RAM intervals. With ``standing`` the RAM interval is a whole number of steps, and what
    stands is left alone where it is as good as the best: within the flat valley. Raises UsageError
    for a rate below 0 or a share outside of 0 to 1.
    """
    if not failures_per_s >= 0 or not 0 <= deep_share <= 1:
        raise UsageError(
            f"schedule: needs a rate of 0 or more and a share of 0 to 1, got "
            f"{failures_per_s} failures a second, deep share {deep_share}"
        )
    shallow = failures_per_s * (1 - deep_share if store else 1)
    often, every = _choose(ram, shallow), 0
    if standing is not None:
        every = _whole(often, often.flat_s[0], standing.step_s, standing.every)
        often = _moved(ram, often, shallow, every * standing.step_s)
    if store is None:
        return Schedule(often, None, 0, every)
    deep = failures_per_s * deep_share
    seldom = _choose(store, deep)
    known = standing.offload_every if standing is not None else 0
    saves = _whole(seldom, store.least_s, often.interval_s, known)
    return Schedule(often, _moved(store, seldom, deep, saves * often.interval_s), saves, every)


def _whole(best: Interval, least_s: float, unit_s: float, known: int) -> int:
    """How many units make the interval: ``known`` if that is as good, at least ``least_s``."""
    if known and best.flat_s[0] <= known * unit_s <= best.flat_s[1]:
        return known
    count = max(1, round(best.interval_s / unit_s), math.floor(least_s / unit_s))
    return count if count * unit_s >= least_s else count + 1


def _moved(tier: Tier, best: Interval, failures_per_s: float, interval_s: float) -> Interval:
    """What is really done in place of the best, and what that costs."""
    cost = interval_overhead(tier, failures_per_s, interval_s)
    return Interval(interval_s, best.flat_s, cost, best.reason)


def _choose(tier: Tier, failures_per_s: float) -> Interval:
    """The best interval of one tier, its flat valley, and what set it."""
    low, high = tier.least_s, max(tier.high_s, tier.settle_s)
    best = optimum_s(tier.block_s, 1 / failures_per_s) if failures_per_s else math.inf
    chosen = min(max(best, low), high)
    if not failures_per_s:
        why = f"no failure is expected here, so as seldom as allowed: {chosen:.4g} s"
    else:
        why = (
            f"a save blocks {tier.block_s:.3g} s, a failure every {1 / failures_per_s:.4g} s: "
            f"best {best:.4g} s (Daly)"
        )
        if chosen > best:
            bound = "the time a save takes to settle" if low == tier.settle_s else "the lower bound"
            why += f", held up to {chosen:.4g} s by {bound}"
        elif chosen < best:
            why += f", held down to {chosen:.4g} s by the upper bound"
    valley = _flat(tier, failures_per_s, chosen)
    return Interval(chosen, valley, interval_overhead(tier, failures_per_s, chosen), why)


def optimum_s(block_s: float, mtbf_s: float) -> float:
    """Daly's optimum (FGCS 2006, eq. 37): training seconds between saves."""
    if block_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = block_s / (2 * mtbf_s)
    return math.sqrt(2 * block_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - block_s


def interval_overhead(tier: Tier, failures_per_s: float, interval_s: float) -> float:
    """Share of time lost to blocks, to work done again and to restores, to first order."""
    lost_s = interval_s / 2 + tier.settle_s + tier.restore_s
    return tier.block_s / interval_s + failures_per_s * lost_s


def _flat(tier: Tier, failures_per_s: float, chosen: float) -> tuple[float, float]:
    """Intervals within bounds whose overhead is at most FLAT above the chosen one's.

    b/T + l T/2 <= x is a quadratic in T.
    """
    low, high = tier.least_s, max(tier.high_s, tier.settle_s)
    x = tier.block_s / chosen + failures_per_s * chosen / 2 + FLAT
    if not failures_per_s:
        return min(max(low, tier.block_s / x), chosen), high
    root = math.sqrt(max(0.0, x * x - 2 * tier.block_s * failures_per_s))
    least, most = (x - root) / failures_per_s, (x + root) / failures_per_s
    return min(max(low, least), chosen), max(min(high, most), chosen)


def failure_rate(
    prior_per_s: float, prior_span_s: float, failures: int, observed_span_s: float
) -> float:
    """Failures a second, from a prior and what was seen since.

    The mean of a gamma posterior: the prior counts as ``prior_span_s`` seconds of observation, so
    a job without failures drifts down slowly, and one that fails more often is believed soon.
    Raises UsageError where both spans are 0.
    """
    span = prior_span_s + observed_span_s
    if span <= 0:
        raise UsageError("failure rate: needs a prior or an observation longer than 0 s")
    return (prior_per_s * prior_span_s + failures) / span


def deep_share_of(prior: float, weight: float, deep: int, restores: int) -> float:
    """Of all failures, the share that RAM cannot recover, from a prior and what was seen since.

    The mean of a beta posterior: the prior counts as ``weight`` restores of which it was so large
    a part. Of ``restores`` that were seen, ``deep`` needed the store. (Conjugate prior of a
    binomial: Gelman et al., Bayesian Data Analysis, 2.4.) Raises UsageError where nothing counts.
    """
    if not 0 <= deep <= restores or weight + restores <= 0:
        raise UsageError(
            f"deep share: needs a prior or restores, and of these as many or fewer deep ones; got "
            f"a weight of {weight}, {restores} restores, {deep} deep"
        )
    return (prior * weight + deep) / (weight + restores)
