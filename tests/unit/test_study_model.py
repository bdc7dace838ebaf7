"""The engine of one run: by hand for single incidents, by closed forms for many."""

import math
from dataclasses import replace

import numpy as np
import pytest

from simulations.study import model
from simulations.study.hazards import Failure, History, draw
from simulations.study.scenario import (
    DAY_S,
    Cause,
    Fate,
    Fleet,
    Hazards,
    Links,
    Recovery,
    Saving,
    Scenario,
)
from simulations.study.schemes import Pieces, parse
from simulations.study.story import replicate

CAUSES = (
    Cause("process", Fate.PROCESS, share=1),
    Cause("gpu", Fate.GPU, share=1),
    Cause("away", Fate.UNREACHABLE, share=1),
    Cause("lost", Fate.LOST, share=1),
    Cause("planned", Fate.PROCESS, planned=True, evict=False),
)
PROCESS, GPU, AWAY, LOST, PLANNED = range(5)


def job(**changes):
    """16 nodes of 10 bytes each, every way 1 byte/s unless said otherwise; 10,000 s."""
    plain = Scenario(
        "job", "", 10_000, 160, Fleet(16, spares=4), Links(100, 100, s3_bytes_per_s=1.6),
        Saving(interval_s=100, stall_s=10, s3_interval_s=1000), Recovery(7, 3),
        Hazards(1e6, CAUSES),
    )  # fmt: skip
    for key, value in changes.items():
        plain = plain.varied(key.replace("__", "."), value)
    return plain


def failure(at_s, cause, *nodes, readable=True, away_s=0.0):
    return Failure(at_s, cause, nodes or (0,), readable, 20, 30, 7, 3, away_s)


def outcome(scheme, *failures, **changes):
    plan = model.prepare(job(**changes), parse(scheme))
    found = model.run(plan, History(CAUSES, failures))
    assert sum(found.seconds) == pytest.approx(plan.horizon_s)
    return found, dict(zip(model.STAGES, found.seconds, strict=True)), plan


def test_nothing_happens():
    found, seconds, _ = outcome("copies:2")
    assert seconds["productive"] == 9100  # 90 cycles of 100 + 10, then 100 of training
    assert seconds["stall"] == 900
    assert found.snapshots == 90


def test_a_process_crash_loses_what_came_after_the_last_commit():
    # Snapshot 9 is taken from 980 to 990 and committed 0.2 s later: 2 x 10 bytes at 100 a second.
    found, seconds, plan = outcome("copies:2", failure(1000, PROCESS))
    assert plan.push_s == pytest.approx(0.2)
    assert found.lost_work_s == [pytest.approx(10)]
    assert (seconds["detect"], seconds["diagnose"], seconds["allocate"]) == (20, 30, 7)
    assert seconds["restore"] == pytest.approx(0.1)
    assert found.recovered[0][model.LOCAL] == 1


def test_a_snapshot_that_is_not_committed_is_none():
    found, _, _ = outcome("copies:2", failure(990.1, PROCESS))
    assert found.lost_work_s == [pytest.approx(100.1)]


@pytest.mark.parametrize(
    ("scheme", "cause", "source"),
    [
        ("copies:2", GPU, model.OLD_HOST),
        ("copies:2", AWAY, model.PEERS),
        ("copies:2", LOST, model.PEERS),
        ("local", GPU, model.OLD_HOST),
        ("local", LOST, model.STORE),
        ("s3", PROCESS, model.STORE),
    ],
)
def test_each_fate_has_its_source(scheme, cause, source):
    found, _, _ = outcome(scheme, failure(5000, cause, away_s=500))
    assert [sum(column) for column in zip(*found.recovered, strict=True)][source] == 1
    assert found.fallbacks == (scheme == "local" and source == model.STORE)


def test_too_deep_a_loss_goes_back_to_the_last_finished_upload():
    # Uploads begin at every 10th snapshot (1100 s) and take 100 s: at 5000 that of 4400 is there.
    found, _, plan = outcome("copies:1", failure(5000, LOST, *range(16), away_s=1))
    assert (plan.every, plan.upload_s) == (10, 100)
    trained = 45 * 100 + 50
    assert found.lost_work_s == [pytest.approx(trained - 4000)]
    assert found.fallbacks == 1


def test_an_upload_in_flight_does_not_count():
    found, _, _ = outcome("copies:1", failure(4450, LOST, *range(16), away_s=1))
    assert found.lost_work_s == [pytest.approx(40 * 100 + 50 - 3000)]


def test_a_failure_during_recovery_joins_the_incident():
    # Alone each is survived; the second strikes a holder of the first one's only copy.
    plan = model.prepare(job(), parse("copies:1"))
    partner = plan.pieces.rows[0][0]
    apart, _, _ = outcome("copies:1", failure(5000, LOST, 0), failure(6000, LOST, partner))
    assert (apart.incidents, apart.fallbacks, apart.merged) == (2, 0, 0)
    together, seconds, _ = outcome("copies:1", failure(5000, LOST, 0), failure(5040, LOST, partner))
    assert (together.incidents, together.fallbacks, together.merged) == (1, 1, 1)
    assert seconds["detect"] == 40
    assert seconds["diagnose"] == 50  # 20 of the first, then 30 again


def test_a_node_that_is_gone_cannot_fail_again():
    found, _, _ = outcome("copies:1", failure(5000, LOST, 0), failure(5010, LOST, 0))
    assert (found.failures, found.incidents, found.merged) == (1, 1, 0)


def test_pieces_that_are_not_rebuilt_are_missing():
    # The rebuild takes 1000 s here, the next commit is 200 s away.
    slow = {"links__nic_bytes_per_s": 0.1, "saving__interval_s": 500}
    plan = model.prepare(job(**slow), parse("copies:1"))
    partner = plan.pieces.rows[0][0]
    back = 5000 + 60 + plan.single_s
    soon, _, _ = outcome(
        "copies:1", failure(5000, LOST, 0), failure(back + 50, LOST, partner), **slow
    )
    late, _, _ = outcome(
        "copies:1", failure(5000, LOST, 0), failure(back + 900, LOST, partner), **slow
    )
    assert (soon.fallbacks, late.fallbacks) == (1, 0)


def test_hosts_that_are_away_are_waited_for_a_little():
    both = tuple(range(16))
    soon, seconds, _ = outcome("copies:1", failure(5000, AWAY, *both, away_s=80), fleet__spares=16)
    assert seconds["return"] == pytest.approx(20)  # back at 5080, restore could begin at 5060
    assert soon.fallbacks == 0
    late, _, _ = outcome("copies:1", failure(5000, AWAY, *both, away_s=800), fleet__spares=16)
    assert late.fallbacks == 1


def test_without_spares_the_job_waits_for_repairs():
    found, seconds, _ = outcome("copies:2", failure(5000, LOST, 0, away_s=600), fleet__spares=0)
    assert seconds["spares"] == 550  # asked for at 5050, back at 5600
    assert found.spares_waited == 1
    again, seconds, _ = outcome(
        "copies:2", failure(2000, LOST, 0, away_s=600), failure(5000, LOST, 1, away_s=600),
        fleet__spares=1,
    )  # fmt: skip
    assert seconds["spares"] == 0
    assert again.incidents == 2


def test_a_planned_stop_loses_no_work():
    found, seconds, _ = outcome("copies:2", Failure(1000, PLANNED, (3,), True, 0, 0, 7, 3, 0))
    assert seconds["recompute"] == 0
    assert (found.planned, found.incidents, found.lost_work_s) == (1, 0, [])


def test_before_the_first_commit_there_is_the_store_only():
    found, _, _ = outcome("copies:2", failure(50, PROCESS))
    assert found.recovered[0][model.STORE] == 1
    assert found.fallbacks == 0  # nothing was lost that RAM had held


def test_evicting_a_group_takes_healthy_nodes_too():
    _, seconds, _ = outcome(
        "copies:2", failure(5000, LOST, 0, away_s=9000), recovery__evict_group=4,
        recovery__check_s=500.0, fleet__spares=3,
    )  # fmt: skip
    assert seconds["spares"] == 450  # 4 wanted, 3 there, a healthy one is checked by 5500


def test_the_horizon_may_end_in_an_incident():
    found, seconds, _ = outcome("copies:2", failure(9990, LOST))
    assert seconds["detect"] == 10
    assert found.incidents == 1
    assert not any(map(any, found.recovered))


# -- many incidents, against closed forms --------------------------------------------------------


def meta(nodes, rate_per_1000_days, write_s):
    """PC-03: restart 5 min, a blocking write, nothing else."""
    rate = nodes * rate_per_1000_days / 1000 / DAY_S
    interval = math.sqrt(2 * write_s / rate)
    scenario = Scenario(
        "meta", "", 90 * DAY_S, 0, Fleet(nodes, spares=nodes), Links(1, s3_bytes_per_s=1),
        Saving(interval, write_s, s3_interval_s=1e6), Recovery(allocate_s=300),
        Hazards(1 / rate, (Cause("any", Fate.PROCESS, share=1),)),
    )  # fmt: skip
    return scenario, (1 - rate * (300 + interval / 2)) / (1 + write_s / interval)


@pytest.mark.parametrize(
    ("rate", "write_s", "closed"), [(6.5, 300, 0.7398), (6.5, 10, 0.9205), (1.0, 300, 0.8979)]
)
def test_ettr_of_meta(rate, write_s, closed):
    scenario, formula = meta(1500, rate, write_s)
    assert formula == pytest.approx(closed, abs=1e-4)
    outcomes = replicate(scenario, ("copies:1",), 12, 1)["copies:1"]
    assert np.mean([o.ettr for o in outcomes]) == pytest.approx(formula, rel=0.01)


def test_share_of_peers_by_total_probability():
    # PC-25: MTBF 12 h; rack of 4 every 10.2 y, leaf of 32 every 20 y, power of 125 every 10 y;
    # random pairs. Closed form 0.99765.
    domains = (("rack", 4), ("leaf", 32), ("power", 125))
    causes = (
        Cause("node", Fate.LOST, share=1),
        Cause("rack", Fate.LOST, "rack", per_year=1 / 10.2),
        Cause("leaf", Fate.LOST, "leaf", per_year=1 / 20),
        Cause("power", Fate.LOST, "power", per_year=1 / 10),
    )
    scenario = Scenario(
        "pairs", "", 90 * DAY_S, 0, Fleet(1250, domains=domains, spares=1250),
        Links(1, s3_bytes_per_s=1), Saving(10, 0, s3_interval_s=600), Recovery(),
        Hazards(12 * 3600, causes),
    )  # fmt: skip
    plan = model.prepare(scenario, parse("copies:1"))
    rng = np.random.default_rng(5)
    incidents = fallbacks = 0
    for number in range(120):
        order = rng.permutation(1250).reshape(-1, 2)
        rows = [()] * 1250
        for a, b in order.tolist():
            rows[a], rows[b] = (b,), (a,)
        pairs = replace(plan, pieces=Pieces(tuple(rows), (0,) * 1250))
        found = model.run(pairs, draw(scenario, np.random.SeedSequence(7, spawn_key=(number,))))
        incidents += found.incidents
        fallbacks += found.fallbacks
    share, expected = fallbacks / incidents, 1 - 0.99765
    assert abs(share - expected) < 4 * math.sqrt(expected / incidents)
