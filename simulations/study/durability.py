"""Closed forms about loss: groups, copysets, domains that die at once, chains of repair.

Intuition: copies are lost together or one by one. Together: some nodes of N die at once, and the
question is how many of the sets that hold something lie inside of the dead; that is counting. One
by one: failures race with repairs, which is a birth-death chain and its mean time to absorption.

Contract: pure functions. Counting is exact in whole numbers, and becomes a float at the end. Chains
are solved without any subtraction, so that 1e16 days come out with all their digits. Rates and
times of one call share one unit.

Consequence: mean times to data loss compare schemes; as absolute numbers they mean little (Greenan,
Plank and Wylie, HotStorage 2010), so studies report the probability of a loss within a run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

BISECTIONS = 60
"""Halvings until two floats cannot be told apart, nearly."""

# -- some nodes die at once ------------------------------------------------------------------------


def group_survival_bound(nodes: int, copies: int, dead: int) -> float:
    """Gemini's Corollary 1 (SOSP'23): 1 - N C(N-m, k-m) / (m C(N, k)), not below 0.

    Groups of m = ``copies`` nodes hold each other's copies; k = ``dead`` random nodes die. A union
    bound: exact for k < 2m, below the truth for more.
    """
    if dead < copies:
        return 1.0
    hit = Fraction(
        nodes * math.comb(nodes - copies, dead - copies), copies * math.comb(nodes, dead)
    )
    return float(max(Fraction(0), 1 - hit))


def group_survival(nodes: int, copies: int, dead: int) -> float:
    """Exact probability that no group of ``copies`` nodes is wholly among ``dead`` random ones.

    Inclusion-exclusion over the g = N/m groups: sum_j (-1)^j C(g, j) C(N - mj, k - mj) / C(N, k).
    Raises ValueError where groups do not divide the nodes.
    """
    if nodes % copies:
        raise ValueError(f"{nodes} nodes are not divided into groups of {copies}")
    total = sum(
        (-1) ** j * math.comb(nodes // copies, j) * math.comb(nodes - copies * j, dead - copies * j)
        for j in range(dead // copies + 1)
    )
    return float(Fraction(total, math.comb(nodes, dead)))


def pair_loss(nodes: int, dead: int) -> float:
    """Probability that ``dead`` random nodes contain a whole pair, all nodes being in pairs.

    1 - prod_{i<s} (N - s - i) / (N - 1 - 2i), for N even: the nodes that survive the s must be
    partners of the dead, one after the other.
    """
    alive = 1.0
    for i in range(dead):
        alive *= max(0, nodes - dead - i) / (nodes - 1 - 2 * i)
    return 1.0 - alive


def grouped_loss(nodes: int, size: int, tolerated: int, dead: int) -> float:
    """Probability that ``dead`` random nodes hit a group more than ``tolerated`` times. Exact.

    Groups of ``size`` nodes; a last, smaller one of r nodes tolerates at most r - 1. The harmless
    choices are the coefficient of x^dead in the product of the groups' generating functions,
    sum_{j <= t} C(size, j) x^j (Stanley, Enumerative Combinatorics 1, ch. 1).
    """
    whole, rest = divmod(nodes, size)
    ways = _power(_choices(size, tolerated), whole, dead)
    if rest:
        ways = _times(ways, _choices(rest, min(tolerated, rest - 1)), dead)
    harmless = ways[dead] if dead < len(ways) else 0
    return float(1 - Fraction(harmless, math.comb(nodes, dead)))


def _choices(size: int, most: int) -> list[int]:
    return [math.comb(size, j) for j in range(most + 1)]


def _times(a: Sequence[int], b: Sequence[int], degree: int) -> list[int]:
    """Product of two polynomials with whole coefficients, up to ``degree``."""
    out = [0] * (min(degree, len(a) + len(b) - 2) + 1)
    for i, x in enumerate(a[: len(out)]):
        for j, y in enumerate(b[: len(out) - i]):
            out[i + j] += x * y
    return out


def _power(a: Sequence[int], exponent: int, degree: int) -> list[int]:
    """``a`` to the ``exponent``, up to ``degree``: i b_0 c_i = sum_j (j e - i + j) b_j c_(i-j).

    The recurrence of J.C.P. Miller (Knuth, TAOCP 2, 4.7); every coefficient stays whole.
    """
    top = min(degree, exponent * (len(a) - 1))
    out = [a[0] ** exponent]
    for i in range(1, top + 1):
        terms = range(1, min(i, len(a) - 1) + 1)
        out.append(sum((j * exponent - i + j) * a[j] * out[i - j] for j in terms) // (i * a[0]))
    return out


def set_loss(nodes: int, copies: int, dead: int) -> float:
    """Probability that one given set of ``copies`` nodes lies wholly among ``dead`` random ones."""
    return math.comb(dead, copies) / math.comb(nodes, copies)


def any_set_loss(one: float, sets: float) -> float:
    """Probability that at least one of ``sets`` sets is lost, each with ``one`` (Copysets, ATC'13).

    1 - (1 - p)^sets: takes sets for independent, which is right for sets that overlap little.
    """
    return -math.expm1(sets * math.log1p(-one))


def random_copysets(nodes: int, scatter: int, copies: int) -> int:
    """Sets in use when each node's replicas go to any of ``scatter`` neighbours: N C(S+1, R-1).

    For R = 3 it is N C(S+1, 2), the count behind the 22.8 % of Cidon et al. (ATC'13).
    """
    return nodes * math.comb(scatter + 1, copies - 1)


def permuted_copysets(nodes: int, scatter: int, copies: int) -> float:
    """Sets of Copyset Replication: P = S/(R-1) permutations, each cut into N/R sets (ATC'13)."""
    return scatter / (copies - 1) * nodes / copies


def mean_loss(classes: Sequence[tuple[float, float]]) -> float:
    """Probability that a failure loses something: sum rate_c P(loss | c) / sum rate_c.

    ``classes`` are (rate, probability of loss) of each kind of failure: total probability.
    """
    return sum(rate * loss for rate, loss in classes) / sum(rate for rate, _ in classes)


# -- one by one: chains ----------------------------------------------------------------------------


def chain_mttdl(pieces: int, needed: int, fail: float, repair: float) -> float:
    """Mean time until fewer than ``needed`` of ``pieces`` live; repair one at a time.

    T_i = 1/(i l) + rho/(i l) T_{i+1} is the time from i living pieces to i - 1, MTTDL their sum
    (first passage of a birth-death chain; Ford et al., OSDI'10, section 7). No subtraction.
    """
    total = step = 0.0
    for living in range(pieces, needed - 1, -1):
        step = (1.0 + (repair * step if living < pieces else 0.0)) / (living * fail)
        total += step
    return total


def chain_mttdl_sum(pieces: int, needed: int, fail: float, repair: float) -> float:
    """The same as Ford et al. print it (OSDI'10, section 7.1), a double sum.

    1/l sum_{k=0}^{s-r} sum_{i=0}^{k} (rho/l)^i / (s-k+i)_(i+1), with falling factorials.
    """
    total = 0.0
    for k in range(pieces - needed + 1):
        for i in range(k + 1):
            total += (repair / fail) ** i / math.perm(pieces - k + i, i + 1)
    return total / fail


def chain_mttdl_leading(pieces: int, needed: int, fail: float, repair: float) -> float:
    """Its leading term for rho >> l: rho^m / (l^(m+1) n! / (n-m-1)!), m = pieces - needed."""
    spare = pieces - needed
    return float(repair**spare / (fail ** (spare + 1) * math.perm(pieces, spare + 1)))


class Bursts(NamedTuple):
    """Shocks that come at ``rate`` and take each living piece with probability ``hit``."""

    rate: float
    hit: float


def burst_mttdl(pieces: int, needed: int, fail: float, repair: float, bursts: Bursts) -> float:
    """`chain_mttdl` with bursts on top, which may take several pieces at once.

    Mean time to absorption by state elimination without subtraction (Grassmann, Taksar and Heyman,
    Operations Research 1985).
    """
    spare = pieces - needed
    lost = range(spare + 1)
    gone = spare + 1  # the absorbing state: more than `spare` pieces lost
    rates = [[0.0] * (spare + 2) for _ in lost]
    for i in lost:
        living = pieces - i
        rates[i][i + 1] += living * fail
        if i:
            rates[i][i - 1] += repair
        for more in range(1, living + 1):
            chance = (
                math.comb(living, more) * bursts.hit**more * (1 - bursts.hit) ** (living - more)
            )
            rates[i][min(i + more, gone)] += bursts.rate * chance
    stay = [1.0] * (spare + 1)
    for s in range(spare, 0, -1):
        out = sum(rate for j, rate in enumerate(rates[s]) if j < s or j == gone)
        for i in range(s):
            share = rates[i][s] / out
            stay[i] += share * stay[s]
            for j in (*range(s), gone):
                if j != i:
                    rates[i][j] += share * rates[s][j]
    return stay[0] / rates[0][gone]


def fit_bursts(fail: float, repair: float, two_copies: float, three_copies: float) -> Bursts:
    """The bursts that give copies(2) and copies(3) these mean times to loss.

    ``two_copies`` and ``three_copies`` must be below those without bursts. Bisection: at a given
    hit probability a higher rate shortens the first, and along that curve rarer but larger bursts
    shorten the second.
    """

    def rate(hit: float) -> float:
        low, high = 0.0, 1.0 / two_copies / hit**2
        for _ in range(BISECTIONS):
            middle = (low + high) / 2.0
            short = burst_mttdl(2, 1, fail, repair, Bursts(middle, hit)) < two_copies
            low, high = (low, middle) if short else (middle, high)
        return low

    small, large = 1e-6, 1.0
    for _ in range(BISECTIONS):
        hit = math.sqrt(small * large)
        short = burst_mttdl(3, 1, fail, repair, Bursts(rate(hit), hit)) < three_copies
        small, large = (small, hit) if short else (hit, large)
    return Bursts(rate(small), small)


def striped_mttdl(one_stripe: float, stripes: float) -> float:
    """Mean time to the first loss among ``stripes`` equal ones (Xorbas, VLDB'13, section 4)."""
    return one_stripe / stripes
