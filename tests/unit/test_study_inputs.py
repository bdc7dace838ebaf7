"""What goes into a study: scenario files, failure processes, schemes, networks, intervals."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pckpt.errors import ConfigError, UsageError
from simulations.study import network, statistics
from simulations.study.durability import pair_loss
from simulations.study.exposure import domain_deep, exposures
from simulations.study.hazards import cause_rates, draw, replay
from simulations.study.plan import placed
from simulations.study.scenario import BUNDLED, DAY_S, Cause, Fate, Fleet, Links, load, parse
from simulations.study.schemes import Pieces, pieces
from simulations.study.schemes import parse as scheme
from topology import Share, survives

SMALL = load("small")


def seed(number):
    return np.random.SeedSequence(1, spawn_key=(number,))


# -- scenario files ------------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted(path.stem for path in BUNDLED.glob("*.toml")))
def test_every_number_of_a_bundled_scenario_says_where_it_is_from(file):
    found = load(file)
    assert found.name == file
    assert len(found.notes) > 30
    assert all(note.text for note in found.notes)
    assert 0 < sum(note.guess for note in found.notes) < len(found.notes)
    assert all(scheme(name) for name in found.schemes)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("horizon_s = 5", "needs a source, or guess"),
        ("horizon_s = { value = 5 }", "needs value and one of source, guess"),
        ('horizon_s = { value = 5, guess = "a", source = "b" }', "one of source, guess"),
        ("x = [", "Cannot|Invalid|Unclosed|Expected"),
        ('name = "n"\nabout = "a"', "missing horizon_s, state_bytes|missing"),
        ('[fleet]\nnods = { value = 3, guess = "x" }', "unknown nods"),
        ('[[hazards.causes]]\nname = "c"\nfate = "eaten"', "eaten.*process, gpu"),
    ],
)
def test_a_scenario_that_is_wrong_says_where(text, says):
    with pytest.raises(ConfigError, match=says):
        parse(text, "my.toml")


def test_one_input_is_changed_by_its_name():
    assert SMALL.varied("recovery.init_s", 9.0).recovery.init_s == 9
    assert {c.readable for c in SMALL.varied("causes.readable", 0.5).hazards.causes} == {0.5}
    for key in ("recovery.nothing", "nothing", "horizon_s.more"):
        with pytest.raises(ConfigError, match="no key"):
            SMALL.varied(key, 1)
    with pytest.raises(ConfigError, match=r"none of the bundled: .*mission-10k"):
        load("nowhere")


# -- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [1.0, 0.7])
def test_failures_come_as_often_as_asked_for_from_the_first_day_on(shape):
    scenario = load("mission-10k").varied("hazards.shape", shape).varied("horizon_s", 40 * DAY_S)
    counts = np.array(
        [np.histogram([f.at_s for f in draw(scenario, seed(i)).failures
                       if not scenario.hazards.causes[f.cause].planned], 2, (0, 40 * DAY_S))[0]
         for i in range(40)]
    )  # fmt: skip
    expected = 20 * DAY_S / scenario.hazards.mtbf_s
    for half in counts.mean(axis=0):  # a renewal process is wilder: 1/k at most doubles its spread
        assert abs(half - expected) < 4 * math.sqrt(2 * expected / len(counts))


def test_causes_come_by_their_shares_and_domains_as_a_whole():
    scenario = load("mission-10k").varied("horizon_s", 4000 * DAY_S)
    history = draw(scenario, seed(0))
    counts = np.bincount([f.cause for f in history.failures], minlength=len(history.causes))
    expected = np.array(cause_rates(scenario)) * scenario.horizon_s
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected) + 1).all()
    for found in history.failures:
        cause = history.causes[found.cause]
        if cause.level != "node":
            size = dict(scenario.fleet.domains)[cause.level]
            assert found.nodes == tuple(scenario.fleet.members(cause.level)[found.nodes[0] // size])
    assert [f.at_s for f in history.failures] == sorted(f.at_s for f in history.failures)


def test_a_history_is_its_seed_and_a_change_elsewhere_leaves_it():
    scenario = load("mission-10k")
    one = draw(scenario, seed(3))
    assert one == draw(scenario, seed(3))
    assert one != draw(scenario, seed(4))
    other = draw(scenario.varied("recovery.init_s", 99.0), seed(3))
    assert [(f.at_s, f.nodes) for f in one.failures] == [(f.at_s, f.nodes) for f in other.failures]


def test_lemons_fail_again():
    scenario = load("mission-10k").varied("horizon_s", 2000 * DAY_S)

    def most(lemon):
        nodes = [
            f.nodes[0]
            for f in draw(scenario.varied("hazards.lemon_shape", lemon), seed(0)).failures
        ]
        return np.bincount(nodes).max()

    assert most(0.2) > 3 * most(0.0)


def test_a_trace_is_replayed_as_it_was():
    losses = ((10.0, 1), (50.0, 3), (1e12, 2))
    history = replay(SMALL, losses, seed(0))
    assert [(f.at_s, len(set(f.nodes))) for f in history.failures] == [(10, 1), (50, 3)]
    with pytest.raises(ConfigError, match=r"17 nodes lost.*1 to 16"):
        replay(SMALL, [(1, 17)], seed(0))


def test_shocks_that_alone_exceed_the_mtbf_are_refused():
    with pytest.raises(ConfigError, match="shocks alone"):
        draw(load("mission-10k").varied("hazards.mtbf_s", 1e7), seed(0))


# -- schemes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["copies:1", "copies:2", "rs:4,2", "copies:2@group", "rs:2,1@ring",
                                  "local"])  # fmt: skip
def test_a_loss_is_decided_as_topology_decides_it(name):
    fleet, found = Fleet(20, domains=(("rack", 4),)), scheme(name)
    where, cluster = pieces(fleet.cluster(), found), fleet.cluster()
    names = [node.name for node in cluster.nodes]
    shares = [
        Share(names[i], tuple(names[x] for x in row), found.k) for i, row in enumerate(where.rows)
    ]
    rng = np.random.default_rng(2)
    outcomes = set()
    for _ in range(300):
        dead = set(rng.choice(20, size=rng.integers(1, 9), replace=False).tolist())
        gone = {names[x] for x in dead}
        expected = [i for i, share in enumerate(shares) if not survives(share, gone)]
        mask = np.zeros(20, dtype=bool)
        mask[list(dead)] = True
        assert where.lost_nodes(mask).tolist() == expected
        assert where.lost(dead) == bool(expected)
        outcomes.add(bool(expected))
    assert outcomes == ({True} if name == "local" else {True, False})


def test_a_group_survives_what_its_parity_covers():
    where = pieces(Fleet(26, domains=(("rack", 2),)).cluster(), scheme("parity:8,2"))
    for group in {frozenset((i, *row)) for i, row in enumerate(where.rows)}:
        members = sorted(group)
        assert len(members) in (8, 9)
        assert not where.lost(set(members[:2]))
        assert where.lost(set(members[:3]))


def test_losing_a_domain_of_random_pairs_is_its_closed_form():
    rng = np.random.default_rng(1)
    found = []
    for _ in range(60):
        rows = [()] * 200
        for a, b in rng.permutation(200).reshape(-1, 2).tolist():
            rows[a], rows[b] = (b,), (a,)
        blocks = [range(i, i + 10) for i in range(0, 200, 10)]
        found.append(domain_deep(Pieces(tuple(rows), (0,) * 200), blocks))
    exact = pair_loss(200, 10)
    assert abs(np.mean(found) - exact) < 4 * math.sqrt(exact * (1 - exact) / (60 * 20))


def test_placed_by_domains_nothing_is_lost_with_one_of_them():
    scenario = load("mission-10k")
    for name in ("rs:8,2", "copies:1", "xor:8"):
        deep = exposures(scenario, scheme(name), placed(scenario.fleet, scheme(name)))
        assert [e.deep for e in deep] == [0] * len(deep), name
    ring = exposures(scenario, scheme("copies:1"), placed(scenario.fleet, scheme("copies:1@ring")))
    assert {e.cause: e.deep for e in ring}["rack"] == 1


@pytest.mark.parametrize("bad", ["", "rs", "rs:1", "rs:0,2", "copies:x", "xor:1", "parity:4,4",
                                 "rs:4,2@near", "xor:8@ring", "raid:5"])  # fmt: skip
def test_a_scheme_that_is_none_is_refused(bad):
    with pytest.raises(UsageError, match=r"needs|none of|policy"):
        scheme(bad)


def test_costs_are_told():
    assert (scheme("rs:8,2").ram, scheme("rs:8,2").sent) == (1.25, 1.25)
    assert (scheme("parity:10,2").ram, scheme("parity:10,2").sent) == (0.25, 2)
    assert [scheme(s).product for s in ("rs:8,2", "copies:2", "xor:8", "rs:8,2@random")] == [
        True, True, False, False,
    ]  # fmt: skip


# -- networks ------------------------------------------------------------------------------------

LINKS = Links(100, efficiency=0.5, training_share=0.2, uplinks=(("rack", 4),), s3_bytes_per_s=50)
FLEET = Fleet(16, domains=(("rack", 4),))


def test_times_of_uniform_flows_are_closed_forms():
    assert network.nic_bytes_per_s(LINKS) == 40
    assert network.push_s(LINKS, FLEET, 80) == 8  # a rack of 4 has the way out of one node
    assert network.pull_s(LINKS, FLEET, 80, [0]) == 2
    assert network.pull_s(LINKS, FLEET, 80, [0, 1, 2]) == 6
    assert network.pull_s(LINKS, FLEET, 80, [0, 4, 8]) == 2
    assert network.store_s(LINKS, FLEET, 1000) == 20
    assert network.store_s(Links(1), FLEET, 1000) == 0


def test_unequal_flows_share_max_min_fairly():
    capacity = {"a": 10.0, "b": 4.0}
    flows = [network.Flow(30, ("a",)), network.Flow(6, ("a", "b")), network.Flow(6, ("b",))]
    assert network.fair_rates(flows, capacity) == [8, 2, 2]
    assert network.completion_s(flows, capacity) == pytest.approx(3 + (30 - 24) / 10)
    assert network.bottleneck_s(flows, capacity) == pytest.approx(3.6)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.floats(0.1, 50), st.sets(st.sampled_from("abc"), min_size=1)), max_size=6)
)
def test_no_flow_ends_before_the_bottleneck(parts):
    capacity = {"a": 3.0, "b": 5.0, "c": 8.0}
    flows = [network.Flow(size, tuple(sorted(names))) for size, names in parts]
    least = network.bottleneck_s(flows, capacity)
    assert least * (1 - 1e-6) <= network.completion_s(flows, capacity) <= len(flows) * least + 1e-9


# -- intervals of confidence ---------------------------------------------------------------------


def test_intervals_are_the_books():
    wilson = statistics.fraction(5, 10)
    assert (wilson.low, wilson.high) == (
        pytest.approx(0.2366, abs=1e-4),
        pytest.approx(0.7634, abs=1e-4),
    )
    assert statistics.fraction(0, 10).high == pytest.approx(0.2775, abs=1e-4)
    assert statistics.never_seen(1000) == pytest.approx(0.003, rel=0.01)
    for degrees, quantile in ((1, 12.7062), (2, 4.3027), (5, 2.5706), (30, 2.0423), (100, 1.9840)):
        assert statistics.t_quantile(0.975, degrees) == pytest.approx(quantile, abs=1e-4)


def test_a_mean_is_covered_as_often_as_it_says():
    rng = np.random.default_rng(0)
    found = [statistics.mean(rng.normal(7, 2, 8)) for _ in range(400)]
    hits = sum(e.low <= 7 <= e.high for e in found)
    assert abs(hits / 400 - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 400)
    assert statistics.mean([3]).half_width == math.inf
    assert statistics.enough([1.0] * 10, 0.1)
    assert not statistics.enough([1.0] * 9, 0.1)
    ratio = statistics.ratio([1, 2, 3], [10, 20, 30], rng)
    assert (ratio.value, ratio.low, ratio.high) == (0.1, pytest.approx(0.1), pytest.approx(0.1))


def test_a_hit_of_half_a_domain_takes_some_of_its_nodes():
    half = Cause("rack", Fate.LOST, "rack", per_year=50, hit=0.5)
    scenario = SMALL.varied("hazards.causes", (*SMALL.hazards.causes, half))
    sizes = [len(f.nodes) for f in draw(scenario, seed(1)).failures
             if f.cause == len(scenario.hazards.causes) - 1]  # fmt: skip
    assert 0 < min(sizes) < max(sizes)
    assert abs(np.mean(sizes) - 4) < 1.5
