"""Closed forms about time: failure rates, checkpoint intervals, effective training time.

Intuition: what a failure costs is the work since the last snapshot, plus what it takes to be back;
what snapshots cost is their number times the stall of each. Between the two lies an optimum, and
half a dozen papers wrote it down in slightly different words. They stand here, each with its
source, so that the simulator can be held against all of them.

Contract: pure functions of numbers. Times of one call are in one unit, whichever the caller likes,
and so is the result; a name that ends in a unit asks for that one. Nothing here is a published
*value*: those are in ``published.json``.

Consequence: a formula is an approximation where its docstring says so. `renewal_cost` is the exact
one, for any Weibull renewal process, and the others are judged by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

GOLDEN = (math.sqrt(5) - 1) / 2


# -- rates -----------------------------------------------------------------------------------------


def job_mtbf_h(nodes: float, failures_per_1000_node_days: float) -> float:
    """Mean time between failures of a job on ``nodes`` nodes, in hours (Kokolis et al., HPCA'25).

    Nodes fail independently, so rates add.
    """
    return 24.0 / (nodes * failures_per_1000_node_days / 1000.0)


def failures_per_1000_node_days(events: float, nodes: float, days: float) -> float:
    """The rate that ``events`` failures of ``nodes`` nodes within ``days`` days amount to."""
    return 1000.0 * events / (nodes * days)


def binomial_quantile(share: float, trials: int, probability: float) -> int:
    """Smallest x for which P(X <= x) >= ``share``, X ~ Binomial(trials, probability).

    The size of a pool of stand-bys that suffices on ``share`` of all days (ByteRobust, SOSP'25).
    """
    term = (1.0 - probability) ** trials
    total, x = term, 0
    while total < share and x < trials:
        term *= (trials - x) / (x + 1) * probability / (1.0 - probability)
        x += 1
        total += term
    return x


# -- intervals -------------------------------------------------------------------------------------


def young(save: float, mtbf: float) -> float:
    """First-order optimum of the work between two saves, sqrt(2 d M) (Young, CACM 1974)."""
    return math.sqrt(2.0 * save * mtbf)


def daly(save: float, mtbf: float) -> float:
    """Higher-order optimum of the work between two saves (Daly, FGCS 2006, eq. 37).

    sqrt(2 d M) [1 + (1/3) sqrt(d / 2M) + (1/9) (d / 2M)] - d for d < 2M, else M.
    """
    if save >= 2.0 * mtbf:
        return mtbf
    x = save / (2.0 * mtbf)
    return young(save, mtbf) * (1.0 + math.sqrt(x) / 3.0 + x / 9.0) - save


def availability_cycle(save: float, mttf: float, repair: float) -> float:
    """Best time from save to save, by availability: Ts + sqrt(2 (Tf + Tr) Ts + Ts^2).

    arXiv 2410.18124; tends to Young's for Ts << Tr << Tf.
    """
    return save + math.sqrt(2.0 * (mttf + repair) * save + save * save)


def daly_cost(interval: float, save: float, restart: float, mtbf: float) -> float:
    """Wall time per useful time under exponential failures (Daly, FGCS 2006, eq. 20). Exact.

    M e^(R/M) (e^((tau+d)/M) - 1) / tau: each failure, also one during a restart, costs a restart.
    """
    stretch = math.exp(restart / mtbf) * math.expm1((interval + save) / mtbf)
    return mtbf * stretch / interval


def renewal_cost(
    interval: float, save: float, restart: float, mtbf: float, shape: float = 1.0
) -> float:
    """Wall time per useful time when gaps between failures are Weibull of ``shape``. Exact.

    A gap X saves floor((X - R)+ / (tau + d)) intervals, so E[work] = tau * sum_j S(R + j (tau+d))
    with S the survival function, and the cost is M / E[work] (renewal reward theorem; Ross,
    Stochastic Processes, ch. 3). For shape 1 the sum is geometric: `daly_cost`.
    """
    scale = mtbf / math.gamma(1.0 + 1.0 / shape)
    kept, j = 0.0, 1
    while True:
        survival = math.exp(-(((restart + j * (interval + save)) / scale) ** shape))
        kept += survival
        if survival < 1e-15 * kept or survival == 0.0:
            break
        j += 1
    return mtbf / (interval * kept) if kept else math.inf


def best(cost: Callable[[float], float], low: float, high: float) -> float:
    """Argument between ``low`` and ``high`` at which a unimodal ``cost`` is least.

    Golden-section search on the logarithm (Kiefer 1953), to 1e-9 relative or to what the
    arithmetic can tell apart.
    """
    a, b = math.log(low), math.log(high)
    while b - a > 1e-9:
        left, right = b - GOLDEN * (b - a), a + GOLDEN * (b - a)
        if cost(math.exp(left)) <= cost(math.exp(right)):
            b = right
        else:
            a = left
    return math.exp((a + b) / 2.0)


# -- effective training time -----------------------------------------------------------------------


def ettr(interval: float, write: float, restart: float, mtbf: float) -> float:
    """Effective training time ratio of a long job (Kokolis et al., HPCA'25, arXiv 2410.21680).

    (1 - (u0 + dt/2) / M) / (1 + w / dt). First order in dt/M: within 1 % of `daly_cost`'s inverse
    for ETTR above 0.7.
    """
    return (1.0 - (restart + interval / 2.0) / mtbf) / (1.0 + write / interval)


def wasted(save: float, interval: float, retrieve: float) -> float:
    """Mean time that a failure wastes (Gemini, SOSP'23, eq. 1): t_ckpt + 1/(2f) + t_rtvl.

    ``interval`` = 1/f must not be shorter than ``save``: saves go one after another.
    """
    return save + interval / 2.0 + retrieve


def transfer_s(size_bytes: float, gbit_per_s: float) -> float:
    """Seconds that ``size_bytes`` take at ``gbit_per_s`` (10^9 bits per second)."""
    return size_bytes * 8.0 / (gbit_per_s * 1e9)


def save_speedup(nodes: float, nic_gbit_per_s: float, store_gbit_per_s: float) -> float:
    """How much faster N nodes save into each other than into one store (Gemini, section 7.2).

    N B / B_store, the ideal; what is measured is a fraction of it. Linear in N.
    """
    return nodes * nic_gbit_per_s / store_gbit_per_s


def store_only_loss(save: float, mtbf: float) -> float:
    """Share of time lost with back-to-back saves into a store, read back after each failure.

    `wasted` with interval = retrieve = save, per failure: 2.5 t / M, for t << M.
    """
    return wasted(save, save, save) / mtbf


def store_only_loss_exact(save: float, mtbf: float) -> float:
    """`store_only_loss` for exponential failures, to all orders in t/M.

    A gap X is spent on reading (t), then each finished save but the first keeps t: the share kept
    is t/M sum_{j>=2} exp(-(1+j) t/M), as in `renewal_cost`.
    """
    x = save / mtbf
    return 1.0 - x * math.exp(-3.0 * x) / -math.expm1(-x)
