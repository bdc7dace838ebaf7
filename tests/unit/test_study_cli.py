"""`p2pckpt simulate run|compare|recommend`, and what a study says about itself."""

import csv
import json

import pytest
from click.testing import CliRunner

from p2pckpt.cli.main import cli
from p2pckpt.errors import CheckpointError
from simulations import recommend, report, study
from simulations.scenario import load


def ask(*arguments):
    return CliRunner().invoke(cli, ["simulate", *arguments])


def test_a_run_writes_a_table_and_a_document(tmp_path):
    result = ask(
        "run", "small", "--runs", "4", "--seed", "7", "--no-figures", "--out", str(tmp_path)
    )
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "small.json").read_text())
    assert (document["runs"], document["seed"]) == (4, 7)
    assert document["version"]
    assert document["guesses"] == sum(note["guess"] for note in document["inputs"])
    rows = list(csv.DictReader((tmp_path / "small.csv").read_text().splitlines()))
    assert [row["scheme"] for row in rows] == list(load("small").schemes)
    for row in rows:
        assert float(row["ettr_low"]) <= float(row["ettr"]) <= float(row["ettr_high"])
        assert int(row["events"]) > 0
    assert "inputs are guesses" in result.output
    assert "failures," in result.output


def test_the_same_seed_is_the_same_study():
    arguments = ("compare", "small", "copies:1", "local", "--runs", "3", "--json")
    one, two = ask(*arguments), ask(*arguments)
    assert one.exit_code == 0
    assert one.stdout == two.stdout
    found = json.loads(one.stdout)
    assert [row["scheme"] for row in found["rows"]] == ["copies:1", "local"]
    first = found["rows"][0]
    assert first["gain_over_first"] == {"value": 0, "low": 0, "high": 0}
    assert sum(e["value"] for e in first["time"].values()) == pytest.approx(1)


def test_common_failures_make_differences_sharp():
    rows = study.compare(load("rsc1"), ("rs:8,2", "local"), 12, 1)
    assert rows[1].gain.high < 0
    assert rows[1].gain.half_width < 0.7 * rows[1].ettr.half_width
    assert rows[0].counts["failures"] == rows[1].counts["failures"]


def test_a_study_stops_when_it_knows_enough():
    found = study.replicate(load("small"), ("copies:1",), 200, 1, half_width=0.05)
    assert len(found["copies:1"]) == study.FIRST_BATCH


def test_an_input_is_changed_and_a_trace_replayed(tmp_path):
    trace = tmp_path / "curve.csv"
    trace.write_text("0,16\n3600,16\n3600,14\n7200,14\n7200,16\n86400,16\n")
    result = ask("compare", "small", "copies:1", "--trace", str(trace), "--runs", "2",
                 "--set", "recovery.init_s=100", "--json")  # fmt: skip
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)["rows"][0]
    assert row["counts"]["failures"] == 2  # one in each of two runs
    assert row["time"]["init"]["value"] > 50 / 86400


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("compare", "small", "rs:8"), "scheme 'rs:8'"),
        (("compare", "small", "local", "local"), "different schemes"),
        (("run", "nowhere"), "none of the bundled"),
        (("recommend", "small", "--set", "fleet=3"), "no key"),
        (("recommend", "small", "--set", "recovery.init_s=x"), "KEY=NUMBER"),
    ],
)
def test_what_is_wrong_is_said(arguments, says):
    result = ask(*arguments)
    assert isinstance(result.exception, CheckpointError)
    assert says in str(result.exception)


def test_advice_for_the_mission():
    advice = recommend.recommend(load("mission-10k"))
    chosen = advice.chosen
    assert (chosen.name, chosen.margin) == ("rs:8,2", 1)
    assert advice.spares == 5
    assert "rs:4,2" in advice.as_good
    assert chosen.plan.schedule.ram.flat_s[0] < 30 < chosen.plan.interval_s < 200
    assert advice.warnings == ()


def test_advice_is_honest_on_small_clusters():
    racks = recommend.recommend(load("small"))
    assert racks.chosen.margin >= 0
    assert "rack" in racks.reasons[0]
    nobody_knows = recommend.recommend(load("three"))
    assert nobody_knows.chosen.name == "copies:2"
    assert any("no node has a label" in warning for warning in nobody_knows.warnings)
    result = ask("recommend", "three", "--json", "-")
    assert json.loads(result.stdout)["layout"] == "copies:2"
    assert result.exit_code == 4


def test_too_little_ram_is_said():
    advice = recommend.recommend(load("small").varied("fleet.ram_bytes", 1e9))
    assert any("needs 250 GB of RAM on a node, it has 1 GB" in w for w in advice.warnings)


def test_every_figure_is_drawn(tmp_path):
    figures = pytest.importorskip("simulations.figures", exc_type=ImportError)
    scenario = load("small").varied("mtbf_sweep_s", (360_000.0, 720_000.0))
    written = figures.draw(study.study(scenario, 4, 1), tmp_path)
    assert len(written) >= 5
    assert all(0 < (tmp_path / file).stat().st_size < 200_000 for file in written)


def test_a_headline_is_a_sentence_with_numbers():
    found = study.study(load("small"), 2, 1)
    text = report.text(found)
    assert "job trains 9" in text
    assert "With the store alone" in text
