"""What no input may break: a pace, floors, the budget, and a level that stays in its range."""

import math

from hypothesis import assume, given
from hypothesis import strategies as st

from p2pckpt.agent.governing import (
    HEADROOM,
    LOWEST,
    WEIGHTS,
    Load,
    Steps,
    Verdict,
    decide_level,
    decide_rates,
    floors_of,
    judge,
)
from p2pckpt.traffic import LEAST_SLICE_BYTES, SLICE_S, Pace, Traffic

KINDS = st.sampled_from(sorted(WEIGHTS))
RATES = st.floats(1e3, 1e11)
FLOORS = st.dictionaries(KINDS, RATES, min_size=1)
SECONDS = st.floats(0.001, 1000.0)


# -- pace ------------------------------------------------------------------------------------------


@given(
    st.floats(1e5, 1e9),
    st.integers(1 << 22, 1 << 25),
    st.lists(st.floats(0.0, 0.5), min_size=2, max_size=20),
)
def test_no_span_of_time_sees_more_than_the_rate_and_a_little(rate, most, pauses):
    """However late somebody looks, and however often."""
    pace, now, spent = Pace(), 100.0, []
    pace.limit({Traffic.SAVE: rate})
    for pause_s in pauses:
        now += pause_s
        while not pace.wait_s(Traffic.SAVE, now):
            size = pace.slice_bytes(Traffic.SAVE, most)
            pace.spend(Traffic.SAVE, size, now)
            spent.append((now, size))
    for i, (begun, _) in enumerate(spent):
        total = 0
        for at, size in spent[i:]:
            total += size
            bound = rate * (at - begun + 2 * SLICE_S) + LEAST_SLICE_BYTES
            assert total <= bound * (1 + 1e-4)


@given(st.floats(1e5, 1e10), st.integers(20, 200))
def test_who_looks_in_time_gets_the_whole_rate(rate, looks):
    pace, now, total = Pace(), 0.0, 0
    pace.limit({Traffic.SAVE: rate})
    for _ in range(looks):
        size = pace.slice_bytes(Traffic.SAVE, 1 << 40)
        pace.spend(Traffic.SAVE, size, now)
        total += size
        now += pace.wait_s(Traffic.SAVE, now) * 1.1 + 1e-9  # a timer is late
    assert total >= 0.85 * rate * now


@given(KINDS, KINDS, st.floats(0, 1e6))
def test_kinds_do_not_wait_for_each_other_nor_without_a_rate(one, other, now):
    assume(one is not other)
    pace = Pace()
    pace.limit({one: 1e5})
    pace.spend(one, 10**9, now)
    pace.spend(other, 10**9, now)
    assert pace.wait_s(one, now) > 1000
    assert pace.wait_s(other, now) == 0
    assert math.isclose(pace.soonest_s(now), pace.wait_s(one, now))
    pace.limit({})
    assert pace.wait_s(one, now) == 0
    assert pace.soonest_s(now) == math.inf


# -- rates -----------------------------------------------------------------------------------------


@given(st.floats(0, 1e11), FLOORS)
def test_none_is_below_its_floor_and_all_keep_to_the_budget(budget, floors):
    rates = decide_rates(budget, floors)
    assert rates.keys() == floors.keys()
    assert all(rates[kind] >= floors[kind] * (1 - 1e-9) for kind in floors)
    wanted = max(budget, sum(floors.values()))
    assert math.isclose(sum(rates.values()), wanted, rel_tol=1e-9), "neither more nor less"


@given(st.floats(0, 1e11), st.floats(0, 1e11), FLOORS)
def test_more_budget_is_less_for_nobody(budget, more, floors):
    before, after = decide_rates(budget, floors), decide_rates(budget + more, floors)
    assert all(after[kind] >= before[kind] * (1 - 1e-9) for kind in floors)


@given(st.floats(0, 1e11), FLOORS, KINDS, st.floats(1, 10))
def test_a_higher_floor_is_more_for_its_kind_and_for_no_other(budget, floors, kind, factor):
    assume(kind in floors)
    before = decide_rates(budget, floors)
    after = decide_rates(budget, {**floors, kind: floors[kind] * factor})
    for each in floors:
        grows = after[each] >= before[each] * (1 - 1e-9)
        assert grows if each is kind else (after[each] <= before[each] * (1 + 1e-9))


@given(st.floats(0, 1e11), FLOORS)
def test_who_is_above_the_floor_shares_by_weight(budget, floors):
    rates = decide_rates(budget, floors)
    above = [kind for kind in floors if rates[kind] > floors[kind] * (1 + 1e-9)]
    parts = [rates[kind] / WEIGHTS[kind] for kind in above]
    assert all(math.isclose(part, parts[0], rel_tol=1e-6) for part in parts)


LOADS = st.lists(st.builds(Load, KINDS, st.floats(0, 1e10), st.booleans()), max_size=20)


@given(LOADS, RATES)
def test_a_floor_is_in_time_for_all_that_is_under_way_in_either_direction(loads, least):
    floors = floors_of(loads, least)
    assert floors.keys() == {load.traffic for load in loads}
    for kind, floor in floors.items():
        for inward in (True, False):
            needs = [x.needs_bytes_s for x in loads if (x.traffic, x.inward) == (kind, inward)]
            assert floor >= least
            assert floor >= sum(needs) * HEADROOM * (1 - 1e-9)


# -- the level -------------------------------------------------------------------------------------

VERDICTS = st.builds(Verdict, st.sampled_from([None, True, False]), st.just("why"))


@given(st.floats(LOWEST, 1), st.dictionaries(st.sampled_from("abc"), VERDICTS, max_size=3))
def test_the_level_stays_in_range_and_moves_only_for_a_reason(level, verdicts):
    found, why = decide_level(level, verdicts)
    slowed = [v.slowed for v in verdicts.values()]
    assert LOWEST <= found <= 1
    if True in slowed:
        assert found == max(LOWEST, level / 2)
        assert "backs off" in why
    elif False in slowed:
        assert level <= found <= level + 0.11
    else:
        assert found == level


@given(st.lists(SECONDS, max_size=64), st.lists(SECONDS, max_size=15))
def test_only_clearly_longer_steps_count_as_slowed(idle, busy):
    steps = Steps()
    steps.idle_s.extend(idle)
    steps.busy_s.extend(busy)
    verdict = judge(steps)
    if len(idle) < 5 or len(busy) < 3:
        assert verdict.slowed is None
        assert f"has {len(idle)} and {len(busy)}" in verdict.reason
        return
    if verdict.slowed:
        fast = sum(1 for x in idle if x < sorted(busy)[len(busy) // 2])
        assert fast >= 0.8 * len(idle)
    if all(x <= max(idle) for x in busy) and max(idle) <= 1.1 * min(idle):
        assert not verdict.slowed
