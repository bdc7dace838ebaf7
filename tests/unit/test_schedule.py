"""The decider of save intervals: published optima, bounds, reasons, and the flat valley."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pckpt.agent.tuning import Cost, Costs, decide_intervals
from p2pckpt.config import Config
from p2pckpt.errors import UsageError
from p2pckpt.save.schedule import (
    FLAT,
    Standing,
    Tier,
    decide_schedule,
    deep_share_of,
    failure_rate,
    interval_overhead,
    optimum_s,
)
from simulations.study.plan import prepare
from simulations.study.scenario import load
from simulations.study.schemes import parse


@pytest.mark.parametrize(("mtbf_min", "printed"), [(1440, 117), (360, 57), (15, 9.1)])
def test_dalys_printed_optima(mtbf_min, printed):
    # Daly, FGCS 2006: dump time 5 min.
    assert optimum_s(5, mtbf_min) == pytest.approx(printed, abs=0.5 if printed > 10 else 0.05)


def test_a_save_dearer_than_two_failures_is_made_once_a_failure():
    assert optimum_s(100, 50) == 50


def test_two_clocks_have_two_optima():
    ram, store = Tier(0.2, 0.1, 1, 3600), Tier(20, 100, 60, 86400)
    found = decide_schedule(ram, store, 1 / 10_000, 0.01)
    assert found.ram.interval_s == pytest.approx(optimum_s(0.2, 10_000 / 0.99))
    assert found.store.interval_s == pytest.approx(optimum_s(20, 1e6), rel=0.02)
    assert found.store.interval_s == found.offload_every * found.ram.interval_s
    assert "Daly" in found.reasons[0]
    assert len(found.reasons) == 2


def test_bounds_are_said():
    slow = decide_schedule(Tier(0.1, 300, 1, 3600), None, 1 / 3600, 0)
    assert slow.ram.interval_s == 300
    assert "settle" in slow.ram.reason
    assert "lower bound" in decide_schedule(Tier(0, 0, 7, 90), None, 1e-4, 0).ram.reason
    high = decide_schedule(Tier(9, 0, 1, 10), None, 1e-6, 0).ram
    assert high.interval_s == 10
    assert "upper bound" in high.reason
    never = decide_schedule(Tier(1, 0, 1, 500), None, 0, 0).ram
    assert never.interval_s == 500
    assert "no failure" in never.reason


def test_an_upload_longer_than_the_wish_bounds_the_store():
    found = decide_schedule(Tier(1, 1, 10, 10), Tier(0, 95, 1, 1000), 1e-3, 0.5)
    assert found.offload_every == 10


@given(
    st.floats(1e-3, 100), st.floats(0, 100), st.floats(1e-7, 1e-2), st.floats(1, 100),
    st.floats(1, 100),
)  # fmt: skip
def test_nothing_within_the_bounds_is_much_better(block, settle, rate, low, times):
    tier = Tier(block, settle, low, low * times)
    found = decide_schedule(tier, None, rate, 0).ram
    least, most = max(low, settle), max(low * times, settle)
    assert least <= found.interval_s <= most
    assert found.flat_s[0] <= found.interval_s <= found.flat_s[1]
    mtbf = 1 / rate
    # The model is of first order: it judges Daly's higher-order optimum only where saves are cheap.
    if block < 0.01 * mtbf:
        grid = [least * (most / least) ** (i / 50) for i in range(51)]
        best = min(interval_overhead(tier, rate, t) for t in grid)
        assert found.overhead <= best * 1.02 + 1e-12
        for end in found.flat_s:
            assert interval_overhead(tier, rate, end) <= found.overhead + FLAT * 1.001


def test_a_rate_is_learned():
    assert failure_rate(1e-4, 1e5, 0, 0) == pytest.approx(1e-4)
    assert failure_rate(1e-4, 1e5, 0, 1e6) < 1e-4
    assert failure_rate(1e-4, 1e5, 1000, 1e6) == pytest.approx(1e-3, rel=0.1)
    with pytest.raises(UsageError, match="longer than 0"):
        failure_rate(1, 0, 0, 0)


@pytest.mark.parametrize("bad", [(-1, 0, 1, 2), (0, 0, 0, 2), (0, 0, 3, 2)])
def test_bad_tiers_are_refused(bad):
    with pytest.raises(UsageError, match="tier"):
        Tier(*bad)


@pytest.mark.parametrize(("rate", "share"), [(-1, 0), (1, 2), (math.inf * 0, 0)])
def test_bad_rates_are_refused(rate, share):
    with pytest.raises(UsageError, match="schedule"):
        decide_schedule(Tier(1, 1, 1, 2), None, rate, share)


# -- two clocks ------------------------------------------------------------------------------------


def test_what_a_restore_takes_is_lost_with_every_failure_and_moves_no_interval():
    quick, slow = Tier(0.2, 0.1, 1, 3600), Tier(0.2, 0.1, 1, 3600, restore_s=90)
    store, far = Tier(20, 100, 60, 86400), Tier(20, 100, 60, 86400, restore_s=800)
    rate, deep = 1 / 10_000, 0.01
    without = decide_schedule(quick, store, rate, deep)
    found = decide_schedule(slow, far, rate, deep)
    assert (found.ram.interval_s, found.offload_every) == (
        without.ram.interval_s,
        without.offload_every,
    )
    assert found.ram.flat_s == pytest.approx(without.ram.flat_s)
    assert found.overhead - without.overhead == pytest.approx(rate * (0.99 * 90 + 0.01 * 800))
    with pytest.raises(UsageError, match="restore"):
        Tier(1, 1, 1, 2, -1)


def test_daly_s_complete_model_has_the_same_optimum_whatever_a_restore_takes():
    def cost(tau, restore, delta=5, mtbf=60):  # FGCS 2006, eq. 20: wall time of one second's work
        return mtbf * math.exp(restore / mtbf) * (math.exp((tau + delta) / mtbf) - 1) / tau

    taus = [1 + 0.01 * i for i in range(10_000)]
    best = [min(taus, key=lambda tau, r=r: cost(tau, r)) for r in (0, 10, 600)]
    assert best == [best[0]] * 3
    assert optimum_s(5, 60) == pytest.approx(best[0], rel=0.01)


RAM, STORE = Tier(0.2, 0.1, 1, 3600), Tier(20, 100, 60, 86400)
RATE, DEEP = 1 / 1000, 0.1


def test_a_running_job_saves_whole_steps_and_uploads_whole_saves():
    found = decide_schedule(RAM, STORE, RATE, DEEP, Standing(step_s=3.0, every=1000))
    assert found.every == round(optimum_s(0.2, 1 / RATE / 0.9) / 3.0)
    assert found.ram.interval_s == found.every * 3.0
    assert found.store.interval_s == found.offload_every * found.ram.interval_s
    assert found.store.interval_s == pytest.approx(optimum_s(20, 10_000), rel=0.02)


def test_what_stands_and_is_as_good_is_left_alone():
    best = decide_schedule(RAM, STORE, RATE, DEEP)
    for at, way in ((0, math.ceil), (1, math.floor)):
        every = way(best.ram.flat_s[at] / 0.5)
        saves = way(best.store.flat_s[at] / (every * 0.5))
        found = decide_schedule(RAM, STORE, RATE, DEEP, Standing(0.5, every, saves))
        assert (found.every, found.offload_every) == (every, saves)
    beyond = math.floor(best.store.flat_s[1] / (every * 0.5)) + 1
    found = decide_schedule(RAM, STORE, RATE, DEEP, Standing(0.5, every, beyond))
    assert (found.every, found.offload_every) != (every, beyond)


def test_the_uploads_follow_the_interval_that_stands_and_not_the_best_one():
    """Twice the RAM interval, and as good: half as many saves make the same interval of uploads."""
    flat = Tier(0.0, 0.0, 10, 3600)
    store = Tier(0.0, 0.0, 400, 86400)
    found = decide_schedule(flat, store, 1e-5, 0.5, Standing(1.0, 20))
    assert (found.every, found.offload_every) == (20, 20)


@given(
    st.floats(0, 50), st.floats(0, 500), st.floats(1e-7, 1e-2), st.floats(0, 1),
    st.floats(0.01, 50), st.integers(1, 5000), st.integers(0, 500),
)  # fmt: skip
def test_no_interval_is_below_what_a_save_takes_to_settle_and_none_hunts(
    b, settle, rate, deep, step, every, n
):
    ram, store = Tier(b / 10, settle / 10, 1, 1800), Tier(b, settle, 600, 21600)
    found = decide_schedule(ram, store, rate, deep, Standing(step, every, n))
    assert found.every >= 1
    assert found.offload_every >= 1
    assert found.ram.interval_s >= ram.least_s * (1 - 1e-9)
    assert found.store.interval_s >= store.least_s * (1 - 1e-9)
    stands = Standing(step, found.every, found.offload_every)
    assert decide_schedule(ram, store, rate, deep, stands) == found, "it does not hunt"


def test_a_deep_share_is_learned():
    assert deep_share_of(0.01, 10, 0, 0) == pytest.approx(0.01)
    assert deep_share_of(0.01, 10, 1, 1) == pytest.approx(0.1)
    assert deep_share_of(0.01, 10, 0, 90) == pytest.approx(0.001)
    assert deep_share_of(0.01, 10, 500, 1000) == pytest.approx(0.5, abs=0.01)
    for bad in ((0.1, 10, 2, 1), (0.1, 10, -1, 1), (0.1, 0, 0, 0)):
        with pytest.raises(UsageError, match="deep share"):
            deep_share_of(*bad)


@pytest.mark.parametrize("store", [{}, {"s3_interval_s": 0.0, "s3_stall_s": 20.0}])
@pytest.mark.parametrize("name", ["mission-10k", "llama3", "rsc1"])
def test_the_product_and_the_simulator_choose_alike(name, store):
    """A job whose costs are those of a study's scenario is given the study's two intervals."""
    scenario = load(name)
    scenario = replace(scenario, saving=replace(scenario.saving, **store))
    plan, saving = prepare(scenario, parse("rs:8,2")), scenario.saving
    costs = Costs(
        step_s=0.01,
        ram=Cost(saving.stall_s, plan.push_s, plan.single_s),
        store=Cost(saving.s3_stall_s, plan.push_s + plan.upload_s, plan.store_s),
        failures_per_s=plan.failures_per_s,
        deep_share=plan.deep_share,
    )
    config = Config(  # an interval that the scenario gives bounds it from both sides
        every_low_s=saving.interval_s or saving.low_s,
        every_high_s=saving.interval_s or saving.high_s,
        offload_low_s=saving.s3_interval_s or saving.s3_low_s,
        offload_high_s=saving.s3_interval_s or saving.s3_high_s,
    )
    found = decide_intervals(costs, 10**9, 10**9, config).schedule
    assert found.every * costs.step_s == pytest.approx(plan.interval_s, abs=costs.step_s)
    assert found.offload_every == plan.every
    assert found.overhead == pytest.approx(plan.overhead, rel=1e-3)
