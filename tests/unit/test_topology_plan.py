"""Plans, findings, pictures, and the command that shows them."""

import itertools
import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
from click.testing import CliRunner
from test_topology import racks, tree

from p2pckpt.cli.main import cli
from p2pckpt.errors import MissingDependency, UsageError
from topology import Cluster, Level, Node, Policy, Rules, TopologyError, draw, place
from topology.plan import make_plan

RACK = (Level("rack"),)
CLUSTER = """
nodes = "n[01-16]"
[domains.rack]
r1 = "n[01-04]"
r2 = "n[05-08]"
r3 = "n[09-12]"
r4 = "n[13-16]"
[domains.power]
A = "n[01-02,05-06,09-10,13-14]"
B = "n[03-04,07-08,11-12,15-16]"
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return str(tmp_path / "cluster.toml")


def run(*arguments):
    return CliRunner().invoke(cli, ["topology", *arguments])


def weak(cluster, rules, policy="domain-aware"):
    findings = make_plan(cluster, rules, Policy.parse(policy)).findings()
    return [finding.text for finding in findings if finding.weak]


# -- findings --------------------------------------------------------------------------------------


def test_a_good_cluster_has_no_weak_point():
    cluster = racks(4, 4, 4, 4)
    assert make_plan(cluster, Rules(2, 2, RACK), Policy()).findings() == ()


@pytest.mark.parametrize(
    ("cluster", "rules", "says"),
    [
        (racks(3, 3), Rules(4, 2), "host: k=4, m=2 needs 7 hosts (k+m and the owner's), has 6"),
        (racks(4, 4, 4), Rules(2, 0), "m=0: the owner and any one holder"),
        (
            Cluster((*racks(2, 2, 2).nodes, Node("stray", "s"))),
            Rules(2, 1, RACK),
            "rack: 1 of 7 nodes have no label: stray",
        ),
        (
            Cluster(racks(9).nodes),
            Rules(2, 2, RACK),
            "rack: r0 holds all nodes, with it everything",
        ),
        (racks(3, 3), Rules(3, 1, RACK), "losing the owner and rack r1 kills (6 of 6 placements"),
        (
            Cluster(tuple(Node(f"n{i}", f"n{i}") for i in range(9)), ()),
            Rules(2, 2),
            "no level above the host is known",
        ),
        (
            Cluster(tuple(Node(f"n{i}", f"n{i}") for i in range(9))),
            Rules(2, 2, RACK),
            "rack: no node has a label, nothing can be spread over it",
        ),
    ],
)
def test_a_weak_point_is_named(cluster, rules, says):
    assert any(says in text for text in weak(cluster, rules))


def test_a_domain_that_kills_alone_is_named_for_blind_policies():
    found = weak(tree(1, 1, 4, 4), Rules(2, 1, RACK), "ring")
    assert any(text.startswith("rack: losing p0s0r") and "alone kills" in text for text in found)


def test_uneven_loads_are_a_remark():
    """More than a third of the nodes in one rack, which may hold a third of the shards."""
    findings = make_plan(racks(10, 4, 4, 4), Rules(4, 2, RACK), Policy()).findings()
    says = "loads differ: 4 to 8 shards a node"
    assert any(says in f.text and not f.weak for f in findings)
    findings = make_plan(racks(5, 6, 4, 3), Rules(4, 2, RACK), Policy()).findings()
    assert not any("loads differ" in f.text for f in findings)


def test_a_plan_is_what_the_agents_do():
    cluster = tree(2, 2, 2, 3)
    rules = Rules(2, 2, RACK)
    plan = make_plan(cluster, rules, Policy())
    assert plan.placements == {n.name: place(cluster, n.name, rules) for n in cluster.nodes}
    assert set(plan.loads.values()) == {4}
    assert {level: len(case.domains) - 1 for level, case in plan.worst.items()} == {
        "node": 3, "host": 3, "rack": 3, "switch": 2, "pod": 1,
    }  # fmt: skip


# -- pictures --------------------------------------------------------------------------------------


def test_levels_that_nest_are_boxes_and_one_that_does_not_is_a_foot():
    cells = [(rack, power) for rack in range(4) for power in (0, 0, 1, 1)]
    cluster = Cluster(
        tuple(
            Node(f"n{i:02}", f"n{i:02}", {"rack": f"r{r}", "pod": f"p{r // 2}", "power": f"f{p}"})
            for i, (r, p) in enumerate(cells)
        ),
        ("rack", "pod", "power"),
    )
    assert draw.levels_drawn(cluster) == (("rack", "pod"), "power")
    assert draw.levels_drawn(Cluster((Node("a", "a"),))) == ((), "")


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 1, 4, 4), (5, 5, 10, 5)])
def test_a_picture_shows_every_node_inside_the_frame_and_none_on_another(shape):
    cluster = tree(*shape)
    marks = {cluster.nodes[0].name: draw.Mark("owner", "own", "a <tip> & more")}
    story = draw.Story("A & B", "sub" * 90, [("1", "fact")], [("owner", "<it>")], ["careful"])
    picture = draw.draw(cluster, story, marks)
    document = draw.svg(picture)
    root = ElementTree.fromstring(document)
    titles = [e.text for e in root.iter("{http://www.w3.org/2000/svg}title")]
    cells = [b for b in picture.boxes if b.kind in ("cell", "owner") and b.tip]
    assert sum(title.split(";")[0] in cluster for title in titles) == len(cluster) == len(cells)
    assert any("a <tip> & more" in title for title in titles)
    for b in picture.boxes:
        assert b.x >= 0
        assert b.y >= 0
        assert b.x + b.width <= picture.width + 1e-6
        assert b.y + b.height <= picture.height + 1e-6
    for t in picture.texts:
        assert 0 <= t.x <= picture.width
        assert 0 < t.y <= picture.height
    spots = sorted((round(b.x, 3), round(b.y, 3)) for b in cells)
    assert len(set(spots)) == len(spots)
    size = cells[0].width
    columns = {}
    for x, y in spots:
        columns.setdefault(x, []).append(y)
    for ys in columns.values():
        assert all(b - a >= size for a, b in itertools.pairwise(ys))
    assert draw.svg(draw.draw(cluster, story, marks)) == document


def test_a_picture_has_colours_for_light_and_dark_of_every_kind():
    cluster = racks(2, 2)
    document = draw.svg(draw.draw(cluster, draw.Story("t"), {}))
    used = set(re.findall(r'class="(\w+)"', document))
    light, dark = document.split("@media(prefers-color-scheme:dark)")
    for kind in used:
        assert f".{kind}{{fill:{draw.STYLES[kind][0]}}}" in light
        assert f".{kind}{{fill:{draw.STYLES[kind][1]}}}" in dark


def test_letters_that_xml_forbids_do_not_break_a_picture():
    cluster = Cluster((Node("a\x00<b>", "h", {"rack": 'r"&\x1b'}), Node("b", "g", {"rack": "r2"})))
    ElementTree.fromstring(draw.svg(draw.draw(cluster, draw.Story("t"), {})))


# -- the command -----------------------------------------------------------------------------------


def test_show_is_a_tree_with_counts(file, tmp_path):
    result = run("show", file, "--svg", str(tmp_path / "p.svg"))
    assert result.exit_code == 0
    assert "rack r2 4 nodes  n[05-08]" in result.stdout
    assert re.search(r"power +2 +8 +8 +0", result.stdout)
    assert "power does not nest" in result.stdout
    ElementTree.parse(tmp_path / "p.svg")
    document = json.loads(run("show", file, "--json=-").stdout)
    assert document["nodes"]["n05"]["domains"] == {"power": "A", "rack": "r2"}


def test_check_ends_with_0_or_4_and_says_why(file):
    good = run("check", file, "--layout", "rs:2,2")
    assert good.exit_code == 0
    assert "any one domain of each level asked for may go" in good.stdout
    bad = run("check", file, "--layout", "rs:4,2")
    assert bad.exit_code == 4
    assert "power: needs at most 2 in one power, has up to 4 in B" in " ".join(bad.stdout.split())
    assert "1 weak point" in bad.stderr
    document = json.loads(run("check", file, "--layout", "rs:4,2", "--json=-").stdout)
    assert document["exit_code"] == 4
    assert document["weak"] == 1


def test_plan_gives_holders_loads_worst_case_and_odds(file, tmp_path):
    picture = tmp_path / "p.svg"
    result = run("plan", file, "--layout", "rs:2,2", "--svg", str(picture), "--rows", "2")
    assert result.exit_code == 0
    assert "14 owners more" in result.stdout
    assert "loads: 4 shards on each node" in result.stdout
    assert "chance of losing a checkpoint in 90 days" in result.stdout
    assert "holders of its 4 shards" in picture.read_text()
    document = json.loads(
        run("plan", file, "--layout", "rs:2,2", "--rate", "power=1h", "--json=-").stdout
    )
    assert document["survives"] == {"node": 3, "host": 3, "rack": 2, "power": 1}
    assert set(document["loads"].values()) == {4}
    hazard = next(h for h in document["odds"]["hazards"] if h["level"] == "power")
    assert hazard["per_hour"] == 2.0
    assert hazard["deadly"] == []
    one = run("plan", file, "--layout", "rs:2,2", "--owner", "n07")
    assert "n07" in one.stdout
    assert "n01 " not in one.stdout.split("n07")[0]


def test_plan_by_a_blind_policy_is_degraded_and_says_so(file):
    result = run("plan", file, "--policy", "ring", "--layout", "rs:2,1")
    assert result.exit_code == 4
    assert "16 placements weaker than asked for: policy: ring ignores domains" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan", "FILE", "--policy", "best"], "policy 'best' is none of"),
        (["plan", "FILE", "--spread", "row"], "level 'row' is unknown"),
        (["plan", "FILE", "--spread", "power!"], "level power is required"),
        (["plan", "FILE", "--layout", "rs:2"], "layout 'rs:2'"),
        (["plan", "FILE", "--rate", "rack=soon"], "--rate 'soon': needs a time above 0"),
        (["plan", "FILE", "--rate", "row=1h"], "--rate 'row=1h': needs LEVEL=TIME"),
        (["plan", "FILE", "--within", "0d"], "--within '0d': needs a time above 0"),
        (["plan", "FILE", "--owner", "zz"], "--owner zz: is not one of the 16 nodes"),
        (["show", "FILE", "--label", "rack"], "--label 'rack': needs LEVEL=KEY"),
        (["show", "FILE", "--format", "kubernetes"], "needs JSON"),
        (["show", "/nowhere/none.toml"], "cannot be read as text"),
        (["show", "FILE", "--svg", "/nowhere/p.svg"], "picture: cannot be written"),
    ],
)
def test_wrong_use_is_named(file, arguments, says):
    result = run(*(file if a == "FILE" else a for a in arguments))
    assert isinstance(result.exception, UsageError)
    assert says in str(result.exception)


def test_png_is_drawn_or_says_what_it_needs(file, tmp_path):
    result = run("show", file, "--png", str(tmp_path / "p.png"))
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert isinstance(result.exception, MissingDependency)
        assert "matplotlib" in str(result.exception)
    else:
        assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_of_the_wrong_kind_is_no_cluster():
    with pytest.raises(TopologyError):
        make_plan(racks(2), Rules(1, 1, (Level("row"),)), Policy())
