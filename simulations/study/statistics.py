"""How sure a simulated number is.

A fraction has Wilson's interval (JASA 1927), which does not collapse at 0 or 1; a fraction of which
nothing was seen has the rule of three. A mean over replications has Student's t. A ratio of sums
over replications (losses per failure) is resampled. `enough` is the rule to stop by.

Contract: pure; chance comes in as a generator. An `Estimate` is a value and its interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from p2pckpt.errors import UsageError

CONFIDENCE = 0.95
RESAMPLES = 1000


@dataclass(frozen=True)
class Estimate:
    """A value, and between which bounds the true one lies in 95 of 100 studies."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the interval's width."""
        return (self.high - self.low) / 2


def fraction(hits: int, trials: int, confidence: float = CONFIDENCE) -> Estimate:
    """A fraction with Wilson's interval. Raises UsageError without a trial."""
    if not 0 <= hits <= trials or not trials:
        raise UsageError(f"fraction: needs 0 <= hits <= trials and a trial, got {hits} of {trials}")
    z, p = NormalDist().inv_cdf(0.5 + confidence / 2), hits / trials
    middle = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(p * (1 - p) / trials + (z / (2 * trials)) ** 2)
    low = 0.0 if hits == 0 else middle - half
    return Estimate(p, low, 1.0 if hits == trials else middle + half)


def never_seen(trials: int, confidence: float = CONFIDENCE) -> float:
    """Upper bound of a chance of which ``trials`` saw nothing: 3/n, exactly 1 - (1-c)^(1/n)."""
    return float(-np.expm1(math.log1p(-confidence) / trials))


def mean(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """A mean with Student's interval; of one value the interval is all numbers."""
    data = np.asarray(values, dtype=float)
    if not len(data):
        raise UsageError("mean: needs at least one value")
    middle = float(data.mean())
    if len(data) == 1:
        return Estimate(middle, -math.inf, math.inf)
    half = t_quantile(0.5 + confidence / 2, len(data) - 1) * float(
        data.std(ddof=1) / math.sqrt(len(data))
    )
    return Estimate(middle, middle - half, middle + half)


def ratio(tops: Sequence[float], bottoms: Sequence[float], rng: np.random.Generator) -> Estimate:
    """sum(tops) / sum(bottoms) over replications, with a percentile bootstrap over them."""
    top, bottom = np.asarray(tops, dtype=float), np.asarray(bottoms, dtype=float)
    if not bottom.sum():
        raise UsageError("ratio: the denominators sum to 0")
    picks = rng.integers(len(top), size=(RESAMPLES, len(top)))
    below = bottom[picks].sum(axis=1)
    found = top[picks].sum(axis=1)[below > 0] / below[below > 0]
    low, high = np.quantile(found, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(float(top.sum() / bottom.sum()), float(low), float(high))


def enough(values: Sequence[float], half_width: float, at_least: int = 10) -> bool:
    """Whether the mean is known to ``half_width``; never before ``at_least`` values."""
    return len(values) >= at_least and mean(values).half_width <= half_width


def t_quantile(p: float, degrees: int) -> float:
    """Student's quantile for p > 1/2: bisection on the distribution function."""
    if not 0.5 <= p < 1 or degrees < 1:
        raise UsageError(f"t quantile: needs 0.5 <= p < 1 and a degree, got {p}, {degrees}")
    low, high = 0.0, 1.0
    while t_cdf(high, degrees) < p:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, degrees) < p else (low, middle)
    return (low + high) / 2


def t_cdf(t: float, degrees: int) -> float:
    """P(T <= t) for t >= 0, by the finite sums for whole degrees (Abramowitz, Stegun 26.7.3/4)."""
    theta = math.atan2(t, math.sqrt(degrees))
    cos2, total = math.cos(theta) ** 2, 0.0
    if degrees % 2:
        term = math.cos(theta)
        for i in range(1, (degrees - 1) // 2 + 1):
            total += term
            term *= cos2 * 2 * i / (2 * i + 1)
        inside = 2 / math.pi * (theta + math.sin(theta) * total)
    else:
        term = 1.0
        for i in range(1, degrees // 2 + 1):
            total += term
            term *= cos2 * (2 * i - 1) / (2 * i)
        inside = math.sin(theta) * total
    return 0.5 + inside / 2
