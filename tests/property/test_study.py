"""The engine's arithmetic between failures against a run that takes every snapshot one by one, and
what holds for any history: all time is booked once, no node is lost or made."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from simulations.study import model
from simulations.study.hazards import Failure, History
from simulations.study.scenario import (
    Cause,
    Fate,
    Fleet,
    Hazards,
    Links,
    Recovery,
    Saving,
    Scenario,
)
from simulations.study.schemes import parse

CAUSES = tuple(Cause(fate.value, fate, share=1) for fate in Fate) + (
    Cause("planned", Fate.PROCESS, planned=True),
)
NODES, SPARES, HORIZON_S = 12, 3, 5000.0


def plan_of(interval, stall, bytes_each, every, scheme):
    scenario = Scenario(
        "any", "", HORIZON_S, bytes_each * NODES, Fleet(NODES, spares=SPARES),
        Links(10, 10, s3_bytes_per_s=20), Saving(interval, stall, s3_interval_s=interval * every),
        Recovery(5, 5), Hazards(1e5, CAUSES),
    )  # fmt: skip
    return model.prepare(scenario, parse(scheme))


def one_by_one(plan, span):
    """Snapshots taken, committed, uploaded by ``span``, and time trained, step by step."""
    now = trained = 0.0
    taken = committed = uploaded = 0
    while now + plan.interval_s <= span:
        now += plan.interval_s
        trained += plan.interval_s
        if now + plan.stall_s > span:
            return taken, committed, uploaded, trained
        now += plan.stall_s
        taken += 1
        if now + plan.push_s <= span:
            committed = taken
            if plan.every and taken % plan.every == 0 and now + plan.push_s + plan.upload_s <= span:
                uploaded = taken
    return taken, committed, uploaded, trained + span - now


whole = st.integers(1, 60).map(float)


@given(whole, st.integers(0, 9).map(float), whole, st.integers(1, 9), st.integers(1, 4999))
def test_snapshots_are_counted_as_if_each_were_taken(interval, stall, size, every, eighths):
    # Times are halves and eighths, so that sums are exact and the comparisons mean something.
    plan = plan_of(interval, stall, size, every, "copies:1")
    span = eighths / 8
    job = model._Job(plan, History(CAUSES, ()))
    job.train_until(span)
    taken, committed, uploaded, trained = one_by_one(plan, span)
    assert (job.taken, job.committed) == (taken, committed)
    assert abs(job.trained_s - trained) < 1e-9
    assert job.store_work_s == uploaded * plan.interval_s


events = st.lists(
    st.tuples(
        st.floats(0, HORIZON_S), st.integers(0, len(CAUSES) - 1),
        st.sets(st.integers(0, NODES - 1), min_size=1, max_size=5), st.booleans(),
        st.floats(0, 100), st.floats(0, 2000),
    ),
    max_size=25,
)  # fmt: skip


@settings(max_examples=80)
@given(events, st.sampled_from(["copies:2", "rs:2,1", "local", "s3"]), st.integers(1, 3))
def test_time_is_booked_once_and_nodes_are_neither_lost_nor_made(drawn, scheme, group):
    failures = sorted(
        Failure(at, cause, tuple(sorted(nodes)), readable, stage, stage / 2, 5, 5, away)
        for at, cause, nodes, readable, stage, away in drawn
    )
    plan = replace(plan_of(50, 2, 20, 4, scheme), evict_group=group)
    job = model._Job(plan, History(CAUSES, failures))
    while job.next < len(failures) and failures[job.next].at_s < plan.horizon_s:
        job.stop(failures[job.next])
        out_of_place = 0 if job.now_s < plan.horizon_s else NODES
        assert job.spares >= 0
        assert SPARES <= job.spares + len(job.repairs) <= SPARES + out_of_place
        assert 0 <= job.store_work_s <= job.work_s or scheme == "s3"
    found = model.run(plan, History(CAUSES, failures))
    assert abs(sum(found.seconds) - HORIZON_S) < 1e-6
    assert min(found.seconds) >= -1e-9
    assert min(found.lost_work_s, default=0) >= -1e-9
    assert found.incidents + found.merged <= len(failures)
    assert 0 <= found.ettr <= 1
