"""`p2pckpt simulate run|compare|recommend`, and what a study says about itself."""

import csv
import json
from dataclasses import replace
from itertools import combinations

import pytest
from click.testing import CliRunner

from p2pckpt.cli.main import cli
from p2pckpt.errors import CheckpointError
from simulations.study import recommend, report, story
from simulations.study.hazards import node_rate
from simulations.study.plan import placed
from simulations.study.relocate import on_cluster
from simulations.study.scenario import Fleet, load
from simulations.study.schemes import parse
from topology.discover import parse_cluster


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
    rows = story.compare(load("rsc1"), ("rs:8,2", "local"), 12, 1)
    assert rows[1].gain.high < 0
    assert rows[1].gain.half_width < 0.7 * rows[1].ettr.half_width
    assert rows[0].counts["failures"] == rows[1].counts["failures"]


def test_a_study_stops_when_it_knows_enough():
    found = story.replicate(load("small"), ("copies:1",), 200, 1, half_width=0.05)
    assert len(found["copies:1"]) == story.FIRST_BATCH


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


TWO_RACKS = 'nodes = "n[01-12]"\n[domains.rack]\na = "n[01-06]"\nb = "n[07-12]"\n'
CLUSTERS = {
    "racks.toml": TWO_RACKS,
    "three.toml": 'nodes = "n[1-3]"\n',
    "one.toml": 'nodes = "n[01-12]"\n[domains.rack]\na = "n[01-12]"\n',
    "topology.conf": "SwitchName=a Nodes=g[01-32]\nSwitchName=b Nodes=g[33-64]\n"
    "SwitchName=c Nodes=g[65-96]\nSwitchName=top Switches=a,b,c\n",
    "hosts": "r1n[1-6],r2n[1-6],spare[1-2]",
}


def advised(tmp_path, name, *more):
    file = tmp_path / name
    file.write_text(CLUSTERS[name])
    result = ask("recommend", "mission-10k", "--cluster", str(file), *more, "--json")
    assert result.exit_code in (0, 4), result.output
    return json.loads(result.stdout)


def test_advice_for_a_cluster_that_a_file_describes(tmp_path):
    """Two racks of six: half of all shards stay in a rack's loss, so only copies keep a margin."""
    found = advised(tmp_path, "racks.toml", "--state-bytes", "5e11", "--set", "fleet.spares=1")
    assert (found["layout"], found["margin"], found["beside"]) == ("copies:3", 1, "rack")
    assert found["ram_bytes_per_node"] == pytest.approx(2 * 4 * 5e11 / 12)
    margins = {option["layout"]: option["margin"] for option in found["options"]}
    assert (margins["rs:8,2"], margins["copies:2"]) == (-1, 0)
    (warning,) = found["warnings"]
    assert "not counted" in warning
    assert "power feed" in warning
    told = {note["key"]: note for note in found["inputs"]}
    assert told["fleet.nodes"]["value"] == 12
    assert told["state_bytes"]["value"] == 5e11
    assert "fleet.spares" not in told
    assert told["hazards.mtbf_s"]["guess"]


def test_advice_says_what_a_cluster_cannot_keep(tmp_path):
    three = advised(tmp_path, "three.toml")
    assert three["layout"] == "copies:2"
    text = " ".join(three["warnings"])
    for word in ("no node has a label", "needs all 3 nodes", "spares: 1 advised, 0 there"):
        assert word in text
    one = advised(tmp_path, "one.toml")
    assert one["margin"] >= 1  # what no layout can survive does not choose between layouts
    assert "all nodes are in one rack: its loss takes all" in " ".join(one["warnings"])
    assert one["store_interval_s"] == one["interval_s"]  # the rack comes back from the store
    slurm = advised(tmp_path, "topology.conf")
    assert slurm["beside"] == "leaf"
    assert "all nodes are in one spine" in " ".join(slurm["warnings"])
    names = advised(tmp_path, "hosts", "--pattern", r"(?:(?P<rack>r\d+)n\d+|spare\d+)")
    assert "2 of 14 nodes have no label for rack" in names["warnings"]


def test_a_node_fails_as_often_on_another_cluster(tmp_path):
    base = load("mission-10k")
    cluster = parse_cluster(TWO_RACKS, "racks.toml", "toml")
    moved = on_cluster(base, cluster, "racks.toml")
    assert node_rate(moved) / 12 == pytest.approx(node_rate(base) / 1250)
    assert moved.saving.stall_s / moved.node_bytes == pytest.approx(
        base.saving.stall_s / base.node_bytes
    )
    assert {cause.level for cause in moved.hazards.causes} == {"node", "rack"}
    assert [list(domain) for domain in moved.fleet.members("rack")] == [
        list(range(6)), list(range(6, 12))
    ]  # fmt: skip
    regular = Fleet(12, domains=(("rack", 6),))
    for name in ("rs:4,2", "copies:3", "rs:2,1"):
        where = placed(moved.fleet, parse(name))
        assert where == placed(replace(regular, places=cluster), parse(name))
        assert recommend.margin_of(moved.fleet, where) == by_hand(moved.fleet, where)


def by_hand(fleet, where):
    """The margin by trying out: any domain, and any set of nodes beside it."""
    found = []
    for level in ("node", "rack"):
        domains = [frozenset(domain) for domain in fleet.members(level)]
        most = -1
        while most < 3 and all(
            not where.lost(domain | {*beside})
            for domain in domains
            for beside in combinations(sorted({*range(fleet.nodes)} - domain), most + 1)
        ):
            most += 1
        found.append((most, level))
    return min(found, key=lambda pair: pair[0])


def test_too_little_ram_is_said():
    advice = recommend.recommend(load("small").varied("fleet.ram_bytes", 1e9))
    assert any("needs 250 GB of RAM on a node, it has 1 GB" in w for w in advice.warnings)


def test_every_figure_is_drawn(tmp_path):
    figures = pytest.importorskip("simulations.study.figures", exc_type=ImportError)
    scenario = load("small").varied("mtbf_sweep_s", (360_000.0, 720_000.0))
    written = figures.draw(story.study(scenario, 4, 1), tmp_path)
    assert len(written) >= 5
    assert all(0 < (tmp_path / file).stat().st_size < 200_000 for file in written)


def test_a_headline_is_a_sentence_with_numbers():
    found = story.study(load("small"), 2, 1)
    text = report.text(found)
    assert "job trains 9" in text
    assert "With the store alone" in text
