"""Traces: three forms of files, what is wrong in them by line and column, fits, and driving."""

import asyncio
import csv
import json
import math
from itertools import pairwise

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from lanl_records import lanl_file

from p2pckpt.cli.simulate import simulate
from p2pckpt.errors import ConfigError, FormatError, UsageError
from simulations.study import replays, traces
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
from simulations.world import clock
from simulations.world.story import Options, World, run

COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=30)


def steps(counts, gap_s=100):
    """A step curve: two rows at each change."""
    lines, before = [f"0,{counts[0]}"], counts[0]
    for i, count in enumerate(counts[1:], 1):
        lines += [f"{i * gap_s},{before}", f"{i * gap_s},{count}"]
        before = count
    return "\n".join(lines) + "\n"


def samples(counts, head="index,Time,GPUs", each=1):
    rows = [f"{i + 1},{1652434464.406314 + 63 * i},{n * each}" for i, n in enumerate(counts)]
    return "\n".join([head, *rows])  # no newline at the end, as in the wild


def loaded(tmp_path, text, **options):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return traces.load(path, **options)


def changes(counts):
    return [(max(0, a - b), max(0, b - a)) for a, b in pairwise(counts) if a != b]


# -- both forms of counts --------------------------------------------------------------------------


@given(COUNTS)
@settings(max_examples=50, deadline=None)
def test_both_forms_give_the_same_changes(tmp_path_factory, counts):
    folder = tmp_path_factory.mktemp("t")
    curve, sampled = loaded(folder, steps(counts)), loaded(folder, samples(counts))
    assert (curve.form, sampled.form) == ("step curve", "samples")
    for trace in (curve, sampled):
        assert [(e.lost, e.returned) for e in trace.events] == changes(counts)
        assert trace.most == max(counts)
        lost, back = (
            (sum(x) for x in zip(*changes(counts), strict=True)) if trace.events else (0, 0)
        )
        assert counts[0] - lost + back == counts[-1]
        assert len(trace.repairs_s) <= min(lost, back)
    times = [e.at_s / 100 * 63 for e in curve.events]
    assert [e.at_s for e in sampled.events] == pytest.approx(times, abs=1e-3)


def test_first_gone_first_back(tmp_path):
    trace = loaded(tmp_path, steps([5, 3, 4, 2, 5, 8]))
    assert trace.repairs_s == (100.0, 300.0, 100.0, 100.0)
    assert trace.losses() == [(100.0, 2), (300.0, 2)]
    assert trace.duration_s == 500


def test_units_headers_and_gpus_of_a_node(tmp_path):
    assert loaded(tmp_path, steps([2, 1]), time_unit="h").duration_s == 360_000
    trace = loaded(tmp_path, samples([3, 1], head=",Time,GPUs", each=8), gpus_per_node=8)
    assert (trace.most, trace.events[0].lost) == (3, 2)
    assert loaded(tmp_path, "0,4\n").events == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,4\n10,4\n10,x\n", "line 3, column 2: needs a whole number from 0 on"),
        ("0,4\n10,4\n10,-1\n", "line 3, column 2"),
        ("0,4\n10,4\n10,3.5\n", "line 3, column 2"),
        ("0,4\n\n10,3\n", "line 3, column 2: needs the count before the change, 4, found '3'"),
        ("0,4\n10,4\n9,4\n", "line 3, column 1: needs a time from 10 on, found '9'"),
        ("0,4\nnan,4\n", "line 2, column 1: needs a number of seconds"),
        ("0,4\n-5,4\n", "line 2, column 1"),
        ("0,4\n10,4,7\n", "line 2, column 3: needs 2 cells, found '3 cells'"),
        ("0,4\n10\n", "line 2, column 2: needs 2 cells"),
        ("index,Time,GPUs\n1,100,4\n2,100,4\n", "line 3, column 2: needs a time after 100"),
        ("index,Time,GPUs\n1,100,4\n2,163,four\n", "line 3, column 3"),
        ("index,Time,GPUs\nfirst,100,4\n", "line 2, column 1"),
        ("index,Time,GPUs\n1,inf,4\n", "line 2, column 2"),
        ("when,what\n1,2\n", "line 1, column 1: needs a row `seconds,count`"),
        ("", "line 1, column 1"),
    ],
)
def test_what_is_wrong_is_named_by_line_and_column(tmp_path, text, message):
    with pytest.raises(FormatError) as caught:
        loaded(tmp_path, text)
    assert message in str(caught.value)
    assert "trace.csv" in str(caught.value)


def test_gpus_that_make_no_whole_node_and_bytes_that_are_no_text(tmp_path):
    with pytest.raises(FormatError, match="line 3, column 3: needs a multiple of 8"):
        loaded(tmp_path, "index,Time,GPUs\n1,1,16\n2,2,12\n", gpus_per_node=8)
    (tmp_path / "trace.csv").write_bytes(b"0,4\n\xff\xfe")
    with pytest.raises(FormatError, match="byte 4 is no UTF-8"):
        traces.load(tmp_path / "trace.csv")


# -- incidents -------------------------------------------------------------------------------------


def test_records_of_incidents(tmp_path):
    head = f"System,nodenumz,{traces.LANL_BEGAN},{traces.LANL_FIXED}\n"
    path = tmp_path / "lanl.csv"
    path.write_text(head + "2,7,1/2/2001 10:00,1/2/2001 11:30\n2,3,1/2/2001 09:00,\n")
    trace = traces.load(path)
    assert trace.form == "incidents"
    assert [(e.at_s, e.lost, e.returned, e.names) for e in trace.events] == [
        (0, 1, 0, ("2/3",)), (3600, 1, 0, ("2/7",)), (9000, 0, 1, ("2/7",)),
    ]  # fmt: skip
    assert trace.repairs_s == (5400,)
    path.write_text(head + "2,7,1/2/2001 10:00,tomorrow\n")
    with pytest.raises(FormatError, match="line 2, column 4: needs a date"):
        traces.load(path)
    path.write_text(head + "2,7,,\n")
    with pytest.raises(FormatError, match="line 2, column 3: needs a date"):
        traces.load(path)


# -- statistics ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [0.5, 0.735, 1.0, 2.5])
def test_the_weibull_fit_finds_the_shape(shape):
    rng = np.random.default_rng(1)
    fit = traces.fit_weibull(1e6 * rng.weibull(shape, 20_000))
    assert fit.low < shape < fit.high
    assert fit.shape == pytest.approx(shape, rel=0.02)
    assert fit.scale == pytest.approx(1e6, rel=0.05)


def test_its_interval_holds_the_truth_95_times_in_100():
    rng = np.random.default_rng(2)
    fits = [traces.fit_weibull(rng.weibull(0.7, 100)) for _ in range(400)]
    share = np.mean([fit.low < 0.7 < fit.high for fit in fits])
    assert abs(share - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 400)


@given(st.lists(st.floats(0.01, 1e6), min_size=3, max_size=40, unique=True), st.floats(0.1, 10))
@settings(max_examples=60, deadline=None)
def test_it_is_the_likelihoods_maximum(gaps, by):
    fit = traces.fit_weibull(gaps)
    x = np.array(gaps)

    def likelihood(k):
        scale = np.mean((x / x.max()) ** k) ** (1 / k) * x.max()
        return float(np.sum(np.log(k / scale) + (k - 1) * np.log(x / scale) - (x / scale) ** k))

    if fit.shape * by < 900:
        assert likelihood(fit.shape) >= likelihood(fit.shape * by) - 1e-6


def test_too_little_tells_nothing():
    assert traces.fit_weibull([]) is None
    assert traces.fit_weibull([1, 0, 2]) is None
    assert traces.fit_weibull([3, 3, 3]) is None
    assert traces.fit_lognormal([60, 60]) is None


def test_lognormal_repairs():
    rng = np.random.default_rng(3)
    fit = traces.fit_lognormal(60 * np.exp(rng.normal(4.144, 1.413, 50_000)))
    assert fit.mu == pytest.approx(4.144, abs=0.03)
    assert fit.sigma == pytest.approx(1.413, abs=0.03)
    assert fit.median_min == pytest.approx(63, rel=0.03)


def test_fords_rule():
    losses = [(0, "a"), (120, "b"), (240, "c"), (361, "d"), (1000, "e"), (1010, "e")]
    assert traces.find_bursts(losses) == traces.Bursts(0.5, 3)  # a, b, c; the same node is none
    assert traces.find_bursts(losses, 1e9) == traces.Bursts(1.0, 5)
    assert traces.find_bursts([]) == traces.Bursts(0.0, 0)


def test_a_trace_described(tmp_path):
    facts = traces.describe(loaded(tmp_path, steps([9, 7, 9, 8, 9, 6, 9], gap_s=3600)))
    assert (facts.losses, facts.nodes_lost, facts.nodes_returned) == (3, 6, 6)
    assert facts.mtbf_s == pytest.approx(2 * 3600)
    assert facts.node_rate_per_1000_days == pytest.approx(6 / (9 * 0.25) * 1000)
    assert facts.bursts == traces.Bursts(5 / 6, 3)
    assert facts.repair.median_min == pytest.approx(60)
    assert facts.shape is None
    nothing = traces.describe(loaded(tmp_path, "0,4\n50,4\n"))
    assert (nothing.losses, nothing.mtbf_s, nothing.repair) == (0, None, None)


# -- driving ---------------------------------------------------------------------------------------


def job(nodes=12):
    cause = Cause("lost", Fate.LOST, share=1.0, detect_s=60.0, away_s=600.0)
    return Scenario(
        "small", "", 1.0, 1e10, Fleet(nodes, spares=nodes), Links(1e9, s3_bytes_per_s=1e8),
        Saving(interval_s=30.0, s3_interval_s=600.0), Recovery(), Hazards(3600.0, (cause,)),
    )  # fmt: skip


def test_a_trace_drives_the_model(tmp_path):
    trace = loaded(tmp_path, steps([12, 11, 12, 10, 12, 11, 12], gap_s=3000))
    peers, store = replays.drive(job(), trace, ("copies:1", "s3"), runs=10, seed=1)
    assert (peers.failures, peers.incidents) == (30, 30)  # three losses, ten times
    assert (store.failures, store.fallbacks) == (30, 0)
    assert 0.9 < store.ettr.value < peers.ettr.value < 1
    assert peers.lost_work_s < store.lost_work_s
    assert 0 <= peers.fallbacks < 10  # only the loss of two can hit a pair
    again = replays.drive(job(), trace, ("copies:1",), runs=10, seed=1)
    assert again == [peers]


def test_what_cannot_drive_it(tmp_path):
    with pytest.raises(UsageError, match="has 0 losses"):
        replays.drive(job(), loaded(tmp_path, "0,4\n50,4\n"), ("s3",), 2, 1)
    trace = loaded(tmp_path, steps([20, 1]))
    trace = loaded(tmp_path, steps([20, 1, 1]))
    with pytest.raises(ConfigError, match="19 nodes lost"):
        replays.drive(job(), trace, ("s3",), 2, 1)


# -- the command -----------------------------------------------------------------------------------


def invoke(*arguments):
    return CliRunner().invoke(simulate, ["trace", *map(str, arguments)])


def test_the_command(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(steps([9, 7, 9, 8, 9, 6, 9, 8, 9, 5], gap_s=1))
    text = invoke(path).output
    assert "MTBF" in text
    assert "is the unit right?" in text
    assert "is the unit right?" not in invoke(path, "--time-unit", "h").output
    document = json.loads(invoke(path, "--json", "-", "--time-unit", "min").stdout)
    assert document["trace"]["duration_s"] == 540
    assert document["statistics"]["bursts"] == {"share": 1.0, "largest": 9}
    assert document["statistics"]["shape"] is None


def test_the_command_drives_a_scenario(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(steps([9, 8, 9, 7, 9], gap_s=7200))
    drive = ("--scenario", "mission-10k", "--scheme", "s3", "--scheme", "local", "--runs", 3)
    document = json.loads(invoke(path, "--json", "-", *drive).stdout)["driven"]
    assert (document["scenario"], document["runs"]) == ("mission-10k", 3)
    assert [row["scheme"] for row in document["rows"]] == ["s3", "local"]
    assert all(row["failures"] == 6 for row in document["rows"])
    assert "driven by the trace" in invoke(path, *drive).output


def test_the_command_reads_records(tmp_path):
    path = lanl_file(tmp_path / "lanl.csv", (("2", "22"), ("2", "7")))
    shape = json.loads(invoke(path, "--json", "-").stdout)["statistics"]["shape"]
    assert shape["low"] < 0.735 < shape["high"]
    with path.open() as file:
        assert shape["gaps"] <= len(list(csv.reader(file)))


def test_a_file_in_no_form_is_an_error(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("hello\n")
    assert isinstance(invoke(path).exception, FormatError)


# -- it drives the world ---------------------------------------------------------------------------


def curve(tmp_path, *changes):
    """A step curve of (seconds, count), each change as two rows."""
    rows, before = [], changes[0][1]
    for at, count in changes:
        rows += [(at, before), (at, count)]
        before = count
    file = tmp_path / "curve.csv"
    file.write_text("".join(f"{at},{count}\n" for at, count in rows))
    return traces.load(file)


def test_absences_keep_their_gaps_and_who_was_first_is_back_first(tmp_path):
    trace = curve(tmp_path, (0, 6), (100, 5), (200, 3), (300, 4), (1100, 2), (2000, 4))
    found = replays.absences(trace, 6, 10)
    gone, back = zip(*found, strict=True)
    assert gone == pytest.approx((0.05, 0.14, 0.14, 0.95, 0.95))
    assert back == pytest.approx((0.23, 1.0, 1.0, 1.0, 1.0))
    assert replays.absences(trace, 6, 2) == (pytest.approx((0.05, 1.0)), pytest.approx((0.95, 1.0)))
    halved = replays.absences(trace, 3, 10)
    assert [at for at, _ in halved] == pytest.approx([0.05, 0.14, 0.95])
    with pytest.raises(UsageError, match="no node was lost"):
        replays.absences(curve(tmp_path, (0, 1), (50, 3)), 3, 10)


def test_a_trace_drives_the_membership_of_the_world(tmp_path):
    """The machines that live, over the time of the run, are as many as the trace says."""
    trace = curve(tmp_path, (0, 6), (100, 5), (400, 6), (500, 5), (900, 6), (1000, 5), (1090, 6))
    absences = replays.absences(trace, 6, 12)
    options = Options(3, nodes=6, racks=6, saves=16, quiet_saves=4, absences=absences)
    world = World(options)
    seen = []

    async def watched():
        running = asyncio.ensure_future(world.main())
        while not running.done():
            seen.append((asyncio.get_running_loop().time(), len(world.living)))
            await asyncio.wait((running,), timeout=0.25)
        await running

    clock.run(watched(), limit_s=options.limit_s)
    assert world.result.end == "ok"
    assert world.result.faults == {"crash_lose": 3}
    assert [what for checkers in world.checkers for what in checkers.objections] == []
    span_s = (16 - 4) * options.every * options.step_s
    for at_s, living in seen[1:]:
        due = 6 - sum(gone * span_s < at_s <= back * span_s for gone, back in absences)
        near = any(abs(at_s - edge * span_s) < 0.3 for pair in absences for edge in pair)
        assert living == due or near, (at_s, living, due)
    assert min(living for _, living in seen[1:]) == 5
    assert run(options).digest == run(options).digest


def test_the_command_drives_the_world(tmp_path):
    curve(tmp_path, (0, 5), (100, 4), (400, 5), (500, 4), (600, 5))
    chosen = ["world", "--trace", str(tmp_path / "curve.csv"), "--nodes", "6", "--saves", "8"]
    chosen += ["--jobs", "1", "--layout", "rs:2,1", "--json"]
    result = CliRunner().invoke(simulate, chosen)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["faults"] == {"crash_lose": 2}
    assert found["options"]["faults"] == []
    assert len(found["options"]["absences"]) == 2
