"""Closed forms about time and loss, against brute force, against each other, and played."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulations.papers import trials as t
from simulations.study import durability as d
from simulations.study import formulas as f

TIMES = st.floats(0.5, 50.0)


# -- time ------------------------------------------------------------------------------------------


def test_rates():
    assert f.job_mtbf_h(2048, 6.5) == pytest.approx(24 / (2048 * 0.0065))
    rate = f.failures_per_1000_node_days(419, 2048, 54)
    assert f.job_mtbf_h(2048, rate) == pytest.approx(54 * 24 / 419)


@given(st.integers(1, 60), st.floats(0.001, 0.9), st.floats(0.01, 0.999))
@settings(max_examples=60, deadline=None)
def test_the_binomial_quantile_is_the_smallest_that_suffices(trials, p, share):
    x = f.binomial_quantile(share, trials, p)

    def below(limit):
        return sum(math.comb(trials, i) * p**i * (1 - p) ** (trials - i) for i in range(limit + 1))

    assert below(x) >= share - 1e-12
    assert x == 0 or below(x - 1) < share + 1e-12


def test_young_and_daly():
    assert f.young(5, 1440) == pytest.approx(120)
    assert f.daly(5, 1440) == pytest.approx(116.69, abs=0.005)
    assert f.daly(100, 40) == 40  # a save takes longer than two failures are apart
    assert f.daly(1e-6, 1e3) == pytest.approx(f.young(1e-6, 1e3), rel=1e-4)
    assert f.availability_cycle(1e-6, 1e6, 1) == pytest.approx(f.young(1e-6, 1e6), rel=1e-5)


@given(TIMES, st.floats(0.0, 5.0), st.floats(0.0, 20.0), st.floats(5.0, 500.0))
@settings(max_examples=60, deadline=None)
def test_renewals_of_shape_1_are_dalys_cost(interval, save, restart, mtbf):
    exact = f.daly_cost(interval, save, restart, mtbf)
    assert f.renewal_cost(interval, save, restart, mtbf) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("shape", [1.0, 0.7, 0.5])
def test_renewals_played_by_hand(shape):
    rng, interval, save, restart, mtbf = np.random.default_rng(5), 40.0, 5.0, 10.0, 360.0
    gaps = mtbf / math.gamma(1 + 1 / shape) * rng.weibull(shape, 300_000)
    kept = np.floor(np.maximum(gaps - restart, 0) / (interval + save)) * interval
    ratio = kept.sum() / gaps.sum()
    se = (kept - ratio * gaps).std() / gaps.mean() / math.sqrt(len(gaps))
    assert abs(ratio - 1 / f.renewal_cost(interval, save, restart, mtbf, shape)) < 4 * se


@pytest.mark.parametrize(("save", "mtbf"), [(5, 1440), (5, 360), (1, 15)])
def test_the_search_finds_the_least_cost(save, mtbf):
    def cost(interval):
        return f.daly_cost(interval, save, 10, mtbf)

    best = f.best(cost, save / 10, 10 * mtbf)
    assert all(cost(best) <= cost(best * by) for by in (0.5, 0.99, 1.01, 2))
    assert cost(f.daly(save, mtbf)) == pytest.approx(cost(best), rel=1e-3)


def test_metas_form_is_the_exact_one_to_first_order():
    for mtbf in (100.0, 1000.0, 10000.0):
        interval = f.young(5, mtbf)
        exact = 1 / f.daly_cost(interval, 5, 5, mtbf)
        assert f.ettr(interval, 5, 5, mtbf) == pytest.approx(exact, rel=10 / mtbf)


def test_what_a_failure_wastes():
    assert f.transfer_s(2e12, 20) == 800
    assert f.wasted(8, 180, 8) == 106
    assert f.store_only_loss(800, 43200) == pytest.approx(2000 / 43200)
    for save in (1.0, 10.0, 100.0):
        assert f.store_only_loss_exact(save, 1e5) == pytest.approx(
            f.store_only_loss(save, 1e5), rel=2 * save / 1e5
        )
    assert f.save_speedup(16, 100, 20) == 80


# -- who is lost -----------------------------------------------------------------------------------


def enumerated(nodes, groups, tolerated, dead):
    """Share of all choices of the dead that hit a group more often than it tolerates."""
    choices = list(combinations(range(nodes), dead))
    bad = sum(
        any(len(set(choice) & set(g)) > tolerated(len(g)) for g in groups) for choice in choices
    )
    return bad / len(choices)


def cut(nodes, size):
    return [range(start, min(start + size, nodes)) for start in range(0, nodes, size)]


@pytest.mark.parametrize(("nodes", "copies"), [(8, 2), (9, 3), (12, 2)])
def test_group_survival_counts_all_choices(nodes, copies):
    for dead in range(nodes // 2 + 1):
        exact = 1 - enumerated(nodes, cut(nodes, copies), lambda _: copies - 1, dead)
        assert d.group_survival(nodes, copies, dead) == pytest.approx(exact, abs=1e-12)
        bound = d.group_survival_bound(nodes, copies, dead)
        assert bound <= exact + 1e-12
        if dead < 2 * copies:
            assert bound == pytest.approx(exact, abs=1e-12)


def test_groups_must_divide_the_nodes():
    with pytest.raises(ValueError, match="16 nodes are not divided into groups of 3"):
        d.group_survival(16, 3, 2)


@pytest.mark.parametrize(
    ("nodes", "size", "tolerated"), [(10, 3, 2), (11, 4, 1), (10, 5, 2), (12, 4, 3), (9, 4, 2)]
)
def test_grouped_loss_counts_all_choices_and_the_smaller_rest(nodes, size, tolerated):
    for dead in range(1, 7):
        exact = enumerated(nodes, cut(nodes, size), lambda n: min(tolerated, n - 1), dead)
        assert d.grouped_loss(nodes, size, tolerated, dead) == pytest.approx(exact, abs=1e-12)


@given(st.integers(2, 40), st.data())
@settings(max_examples=60, deadline=None)
def test_pairs_are_groups_of_two(half, data):
    dead = data.draw(st.integers(0, half))
    assert d.pair_loss(2 * half, dead) == pytest.approx(
        d.grouped_loss(2 * half, 2, 1, dead), abs=1e-12
    )


def test_more_dead_than_pairs_lose_one_surely():
    assert d.pair_loss(10, 6) == 1
    assert d.grouped_loss(10, 2, 1, 6) == 1


def test_copysets():
    assert d.set_loss(5, 3, 3) == pytest.approx(1 / 10)
    assert d.any_set_loss(0.1, 3) == pytest.approx(1 - 0.9**3)
    assert d.random_copysets(5000, 10, 3) == 275_000
    assert d.permuted_copysets(5000, 10, 3) == pytest.approx(5 * 5000 / 3)
    assert d.mean_loss([(9, 0.0), (1, 0.5)]) == pytest.approx(0.05)


# -- chains ----------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.data(), st.floats(0.01, 10), st.floats(0.0, 1000))
@settings(max_examples=60, deadline=None)
def test_the_recursion_is_fords_double_sum(pieces, data, fail, repair):
    needed = data.draw(st.integers(1, pieces))
    exact = d.chain_mttdl_sum(pieces, needed, fail, repair)
    assert d.chain_mttdl(pieces, needed, fail, repair) == pytest.approx(exact, rel=1e-12)


def solved(pieces, needed, fail, repair, bursts):
    """Mean time to absorption, by solving the chain's equations."""
    states = pieces - needed + 1
    rates = np.zeros((states, states + 1))
    for lost in range(states):
        living = pieces - lost
        rates[lost, lost + 1] += living * fail
        if lost:
            rates[lost, lost - 1] += repair
        for more in range(1, living + 1):
            p = math.comb(living, more) * bursts.hit**more * (1 - bursts.hit) ** (living - more)
            rates[lost, min(lost + more, states)] += bursts.rate * p
    generator = rates[:, :states] - np.diag(rates.sum(axis=1))
    return np.linalg.solve(generator, -np.ones(states))[0]


@given(
    st.integers(1, 8), st.data(), st.floats(0.1, 2), st.floats(0.0, 20), st.floats(0, 2),
    st.floats(0.01, 0.9),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_bursts_solve_the_chain(pieces, data, fail, repair, rate, hit):
    needed = data.draw(st.integers(1, pieces))
    bursts = d.Bursts(rate, hit)
    found = d.burst_mttdl(pieces, needed, fail, repair, bursts)
    assert found == pytest.approx(solved(pieces, needed, fail, repair, bursts), rel=1e-8)


def test_no_bursts_leave_the_chain_as_it_was():
    for pieces, needed in ((2, 1), (6, 4), (13, 9)):
        plain = d.chain_mttdl(pieces, needed, 0.008, 66)
        assert d.burst_mttdl(pieces, needed, 0.008, 66, d.Bursts(0, 0.5)) == pytest.approx(
            plain, rel=1e-12
        )


def test_fitted_bursts_give_what_they_were_fitted_to():
    bursts = d.fit_bursts(0.008, 66, 1.5e5, 7e6)
    assert d.burst_mttdl(2, 1, 0.008, 66, bursts) == pytest.approx(1.5e5, rel=1e-6)
    assert d.burst_mttdl(3, 1, 0.008, 66, bursts) == pytest.approx(7e6, rel=1e-6)


def test_the_leading_term_leads():
    for pieces, needed in ((2, 1), (3, 1), (6, 4)):
        args = (pieces, needed, 1.0, 1e7)
        assert d.chain_mttdl_leading(*args) == pytest.approx(d.chain_mttdl(*args), rel=1e-5)


# -- trials ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "dead"), [(6, 2), (6, 4), (40, 3)])
def test_the_dead_are_distinct_and_all_alike(nodes, dead):
    rows = t.dead_sets(np.random.default_rng(1), nodes, dead, 30_000)
    assert rows.shape == (30_000, dead)
    assert all(len(set(row)) == dead for row in rows[:500].tolist())
    assert not (np.diff(np.sort(rows, axis=1), axis=1) == 0).any()
    share = np.bincount(rows.ravel(), minlength=nodes) / 30_000
    p = dead / nodes
    assert np.abs(share - p).max() < 4.5 * math.sqrt(p * (1 - p) / 30_000)


@given(st.lists(st.lists(st.integers(0, 4), min_size=5, max_size=5), min_size=1), st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_overfull_counts(rows, tolerated):
    found = t.overfull(np.array(rows), tolerated)
    assert found.tolist() == [any(row.count(x) > tolerated for x in row) for row in rows]


def near(found, exact, trials):
    return abs(found.mean - exact) < 4 * math.sqrt(exact * (1 - exact) / trials)


def test_group_loss_is_what_is_counted():
    groups = np.arange(24) // 4
    found = t.group_loss(np.random.default_rng(2), groups, 1, 5, trials=20_000)
    assert near(found, d.grouped_loss(24, 4, 1, 5), 20_000)


def test_one_permutation_is_groups_and_two_lose_more():
    rng = np.random.default_rng(3)
    one = t.permutation_loss(rng, 30, 3, 1, 6, trials=20_000)
    assert near(one, d.grouped_loss(30, 3, 2, 6), 20_000)
    two = t.permutation_loss(rng, 30, 3, 2, 6, trials=20_000)
    assert two.mean > 1.5 * one.mean


def test_a_rest_of_a_permutation_holds_nothing():
    found = t.permutation_loss(np.random.default_rng(4), 5, 3, 1, 3, trials=20_000)
    assert near(found, 1 / 10, 20_000)  # one set of three among five nodes; the rest of two: none


def test_random_sets_are_lost_as_often_as_their_number_says():
    rng, nodes, sets, dead = np.random.default_rng(6), 60, 30, 12
    found = t.random_set_loss(rng, nodes, sets, dead, trials=10_000)
    exact = d.any_set_loss(d.set_loss(nodes, 3, dead), sets)
    assert found.mean == pytest.approx(exact, rel=0.15)  # sets that overlap: not quite independent
    all_dead = t.random_set_loss(rng, nodes, 1, nodes, trials=10)
    assert all_dead.mean == 1
    assert t.random_set_loss(rng, nodes, 50, 2, trials=100).mean == 0


def test_a_chain_lives_as_long_as_the_formula_says():
    found = t.chain_life(np.random.default_rng(7), 6, 4, 1.0, 10.0, trials=20_000)
    assert abs(found.mean - 137 / 60) < 4 * found.se
