"""Clusters from files: what each format says; every mistake is named, none is guessed over."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from topology import Cluster, Node, TopologyError
from topology.discover import FORMATS, parse_cluster, read_cluster, tell_format
from topology.hostlist import expand, fold

TOML = """
nodes = ["n[01-04]", "x9"]
levels = ["chassis", "rack", "power", "eviction"]
[domains.rack]
r1 = "n[01-02]"
r2 = ["n03", "n04"]
[domains.power]
A = "n[01,03],x9"
[domains.chassis]
c1 = "n01"
[hosts]
h = "n[01-02]"
"""
TOML = TOML.replace('c1 = "n01"', 'c1 = "n[01-02]"').replace("n[01,03],x9", "n[01-03],x9")

CONF = """
# two leafs, one spine
SwitchName=s0 Nodes=tux[0-1] LinkSpeed=100   # comment
switchname=s1 NODES=tux[2,7-8]
SwitchName=top \\
  Switches=s[0-1]
"""

YAML = """
---
- topology: flat1
  cluster_default: false
  flat: true
- topology: old
  tree:
    switches:
      - switch: gone
        nodes: dead[1-9]
- topology: topo1   # the one in use
  cluster_default: true
  tree:
    switches:
      - switch: sw_root
        children: s[1-2]
      - switch: s1
        nodes: node[01-02]
      - switch: s2
        nodes: "node[03-04]"
- topology: topo2
  cluster_default: false
  block:
    block_sizes:
      - 4
      - 16
    blocks:
      - block: b1
        nodes: node[01-03]
      - block: b2
        nodes: node04
"""


def kubernetes(*nodes):
    return json.dumps(
        {
            "kind": "List",
            "items": [{"metadata": {"name": name, "labels": labels}} for name, labels in nodes],
        }
    )


# -- host lists ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ["a"]),
        ("n[001-003,140]", ["n001", "n002", "n003", "n140"]),
        ("a, b[1-2]c,d", ["a", "b1c", "b2c", "d"]),
        ("r[1-2]n[8-10]", ["r1n8", "r1n9", "r1n10", "r2n8", "r2n9", "r2n10"]),
        ("h100-[0-1]", ["h100-0", "h100-1"]),
    ],
)
def test_a_host_list_is_expanded(text, names):
    assert list(expand(text)) == names


@pytest.mark.parametrize(
    "text", ["", "a,,b", "n[3-1]", "n[]", "n[1", "n]", "n[1-x]", "n[1-9999999999]", "a b", "n[[1]]"]
)
def test_what_is_no_host_list_is_refused(text):
    with pytest.raises(TopologyError):
        expand(text)


def test_a_host_list_cannot_fill_the_memory():
    with pytest.raises(TopologyError, match="more than 1000000 names"):
        expand("a[1-1000]b[1-1000]c[1-1000]")


def test_names_are_folded():
    names = [*(f"n{i:03d}" for i in (1, 2, 3, 140)), "t8", "t9", "t10", "x-1-ib", "login"]
    assert fold(names) == "n[001-003,140],t[8-10],x-1-ib,login"


@given(st.sets(st.from_regex(r"[a-z]{1,2}[0-9]{0,4}(-[a-z])?[0-9]{0,3}", fullmatch=True)))
def test_folded_names_are_the_same_names(names):
    assert set(expand(fold(names)) if names else ()) == names


# -- each format -----------------------------------------------------------------------------------


def test_toml_says_all():
    cluster = parse_cluster(TOML, "c.toml", "toml")
    assert cluster.levels == ("chassis", "rack", "power", "eviction")
    assert cluster.node("n01") == Node("n01", "h", {"rack": "r1", "power": "A", "chassis": "c1"})
    assert cluster.node("n04") == Node("n04", "n04", {"rack": "r2"})
    assert cluster.members("rack") == {"r1": ("n01", "n02"), "r2": ("n03", "n04"), None: ("x9",)}
    assert cluster.domain("n04", "eviction") is None


def test_slurm_trees_become_tiers():
    cluster = parse_cluster(CONF, "topology.conf", "slurm")
    assert cluster.levels == ("leaf", "spine")
    assert cluster.members("leaf") == {"s0": ("tux0", "tux1"), "s1": ("tux2", "tux7", "tux8")}
    assert list(cluster.members("spine")) == ["top"]


def test_slurm_switches_of_unequal_depth():
    text = "\n".join(
        [
            "SwitchName=core1 Switches=agg1,s3",
            "SwitchName=agg1 Switches=s[1-2]",
            "SwitchName=s1 Nodes=a",
            "SwitchName=s2 Nodes=b",
            "SwitchName=s3 Nodes=c",
        ]
    )
    cluster = parse_cluster(text, "t", "slurm")
    assert cluster.levels == ("leaf", "spine", "core")
    assert dict(cluster.node("a").domains) == {"leaf": "s1", "spine": "agg1", "core": "core1"}
    assert dict(cluster.node("c").domains) == {"leaf": "s3", "core": "core1"}


def test_slurm_blocks():
    text = "BlockName=b1 Nodes=n[1-18]\nBlockName=b2 Nodes=n[19-36]\nBlockSizes=18,36\n"
    cluster = parse_cluster(text, "t", "slurm")
    assert cluster.levels == ("block",)
    assert len(cluster.members("block")["b2"]) == 18


def test_slurm_yaml_takes_the_default_tree_and_the_blocks():
    cluster = parse_cluster(YAML, "topology.yaml", "slurm-yaml")
    assert cluster.levels == ("block", "leaf", "spine")
    assert [node.name for node in cluster.nodes] == ["node01", "node02", "node03", "node04"]
    assert dict(cluster.node("node03").domains) == {"block": "b1", "leaf": "s2", "spine": "sw_root"}


def test_kubernetes_labels_of_the_clouds_mean_the_same_levels():
    text = kubernetes(
        ("eks", {
            "topology.k8s.aws/network-node-layer-1": "nn-1",
            "topology.k8s.aws/network-node-layer-2": "nn-2",
            "topology.k8s.aws/network-node-layer-3": "nn-3",
            "topology.kubernetes.io/zone": "us-east-1a",
            "topology.kubernetes.io/region": "us-east-1",
        }),
        ("gke", {
            "cloud.google.com/gce-topology-block": "block",
            "cloud.google.com/gce-topology-subblock": "subblock",
            "cloud.google.com/gce-topology-host": "machine",
        }),
        ("oke", {
            "oci.oraclecloud.com/rdma.hpc_island_id": "island",
            "oci.oraclecloud.com/rdma.network_block_id": "network",
            "oci.oraclecloud.com/rdma.local_block_id": "local",
        }),
        ("own", {"network.topology.nvidia.com/leaf": "l", "example.com/pdu": "p7"}),
    )  # fmt: skip
    cluster = parse_cluster(text, "nodes.json", "kubernetes", labels={"power": "example.com/pdu"})
    assert cluster.levels == ("leaf", "spine", "core", "power", "zone", "region")
    assert [cluster.domain(n, "leaf") for n in ("eks", "gke", "oke", "own")] == [
        "nn-3", "subblock", "local", "l",
    ]  # fmt: skip
    assert [cluster.domain(n, "spine") for n in ("eks", "gke", "oke")] == [
        "nn-2",
        "block",
        "network",
    ]
    assert cluster.domain("oke", "core") == "island"
    assert cluster.domain("gke", "host") == "machine"
    assert cluster.domain("eks", "host") == "eks"
    assert cluster.domain("own", "power") == "p7"


def test_names_say_where_they_are():
    pattern = r"p(?P<pod>\d+)r(?P<rack>\d+)n(?P<host>\d+)(-a\d)?"
    text = "# ours\np1r[1-2]n[1-2]\np2r1n1-a0  # two agents\np2r1n1-a1\n"
    cluster = parse_cluster(text, "hosts", "hosts", pattern)
    assert cluster.levels == ("rack", "pod")
    assert cluster.node("p2r1n1-a1") == Node("p2r1n1-a1", "p2r1n1", {"rack": "p2r1", "pod": "p2"})
    assert len(cluster.members("rack")) == 3


def test_the_format_is_told_from_the_file(tmp_path):
    for name, text, levels in (
        ("a.toml", TOML, 4),
        ("topology.conf", CONF, 2),
        ("topology.yaml", YAML, 3),
        ("nodes", kubernetes(("a", {"topology.kubernetes.io/zone": "z"})), 1),
        ("hosts.txt", "r1n1", 1),
    ):
        (tmp_path / name).write_text(text)
        cluster = read_cluster(tmp_path / name, pattern=r"r(?P<rack>\d+)")
        assert len(cluster.levels) == levels
    assert tell_format("x", "  switchName=a Nodes=b") == "slurm"


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "text", "says"),
    [
        ("toml", "nodes = 3", "nodes: needs a host list as 'n[001-128]', or several, got 3"),
        ("toml", "x = [", "no TOML: Invalid value (at end of document)"),
        ("toml", "nodes = 'a,a'", "nodes: 'a' is given twice"),
        ("toml", "nodes = 'a'\nracks = 1", "has racks too"),
        (
            "toml",
            "nodes = 'a'\n[domains.rack]\nr1 = 'b'",
            "domains.rack.r1: 'b' is not among nodes",
        ),
        (
            "toml",
            "nodes = 'a'\n[domains.rack]\nr1 = 'a'\nr2 = 'a'",
            "domains.rack.r2: 'a' is in 'r1' already",
        ),
        ("toml", "nodes = 'a'\nlevels=['x']\n[domains.rack]\nr='a'", "['x'] lacks rack of domains"),
        ("toml", "nodes = 'a'\n[domains]\nrack = 'r1'", "domains.rack: needs a table, got 'r1'"),
        ("toml", "nodes = 'n[2-1]'", "nodes: host list 'n[2-1]': range '2-1' must rise"),
        ("toml", "nodes = 'a'\n[domains.host]\nh = 'a'", "hosts are described under [hosts]"),
        (
            "toml",
            "nodes = 'a,b'\n[hosts]\nh = 'a,b'\n[domains.rack]\nr = 'a'",
            "host 'h': node 'a' says {'rack': 'r'}, node 'b' says {}",
        ),
        ("slurm", "SwitchName=a Nodes=n1\nfoo", "line 2: needs Key=Value once each, got 'foo'"),
        ("slurm", "SwitchName=a Ports=n1", "line 1: switch 'a' has unknown ['ports']"),
        ("slurm", "NodeName=a", "line 1: needs SwitchName= or BlockName=, got ['nodename']"),
        ("slurm", "SwitchName=a Nodes=n[1-", "line 1: switch 'a': host list"),
        (
            "slurm",
            "SwitchName=a Nodes=n\nSwitchName=a Nodes=m",
            "line 2: switch 'a' stands on line 1",
        ),
        (
            "slurm",
            "SwitchName=a Nodes=n\nSwitchName=b Nodes=n",
            "line 2: node 'n' is in 'b' and, by line 1, in 'a'",
        ),
        ("slurm", "SwitchName=a Switches=b", "line 1: switch 'b' is nowhere described"),
        ("slurm", "SwitchName=a Switches=b\nSwitchName=b Switches=a", "is below itself"),
        (
            "slurm",
            "SwitchName=a Nodes=n\nSwitchName=b Switches=a\nSwitchName=c Switches=a",
            "line 3: switch 'a' is below 'c' and, by line 2, below 'b'",
        ),
        ("slurm", "# nothing", "needs at least one switch or block, found none"),
        ("slurm-yaml", "- topology: t\n  tree: {a: b}", "line 2: needs plain text after tree:"),
        (
            "slurm-yaml",
            "- topology: t\n  nodes: a",
            "line 2: nodes belongs to a switch or block, found none",
        ),
        ("slurm-yaml", "switches:", "line 1: needs '- topology: NAME' first"),
        ("slurm-yaml", "- topology: t\n  ???", "line 2: needs 'key: value', got '???'"),
        ("kubernetes", "[]", "needs a list of nodes under 'items'"),
        ("kubernetes", "{", "needs JSON: "),
        ("kubernetes", '{"items": [3]}', "item 0: needs metadata with a name and labels"),
        ("kubernetes", kubernetes(("a", {}), ("a", {})), "item 1: node 'a' is given twice"),
        (
            "kubernetes",
            kubernetes(("a", {"topology.kubernetes.io/zone": 3})),
            "item 0: node 'a': label 3 is no text",
        ),
        ("hosts", "r1\nx", "line 2: 'x' does not match"),
        ("hosts", "r1\nr[1-2]", "line 2: 'r1' is given twice"),
        ("hosts", "", "needs at least one name"),
        ("nodes", "", "format 'nodes' is none of toml, slurm, slurm-yaml, kubernetes, hosts"),
    ],
)
def test_a_mistake_is_named(format, text, says):
    with pytest.raises(TopologyError) as caught:
        parse_cluster(text, "FILE", format, r"r(?P<rack>\d+)")
    assert says in str(caught.value)
    assert format not in FORMATS or str(caught.value).startswith("FILE: ")


@pytest.mark.parametrize(
    ("pattern", "says"),
    [("", "names alone say no places"), (r"r\d", "names alone"), ("(", "pattern '('")],
)
def test_a_pattern_without_groups_is_refused(pattern, says):
    with pytest.raises(TopologyError) as caught:
        parse_cluster("r1", "FILE", "hosts", pattern)
    assert says in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(TopologyError, match="cannot be read as text"):
        read_cluster(tmp_path / "none.toml")
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(TopologyError, match="cannot be read as text"):
        read_cluster(tmp_path / "b.toml")
    (tmp_path / "c.toml").write_text("nodes = 'a'")
    with pytest.raises(TopologyError, match="labels are for format kubernetes, this is toml"):
        read_cluster(tmp_path / "c.toml", labels={"rack": "x"})


words = st.sampled_from(
    [
        *("SwitchName=", "Switches=", "Nodes=", "BlockName=", "n[1-3]", "s1", "s[1-2]", ",", "\n"),
        *(
            "\\",
            "#",
            "-",
            "topology:",
            "switch:",
            "block:",
            "nodes:",
            "children:",
            "true",
            "=",
            ":",
        ),
        *("{", "}", "[", "]", '"', "items", "metadata", "name", "labels", "nodes", "domains", "x"),
    ]
)


def ours(text, format):
    """The message of the TopologyError that the text gives, or "" for a cluster; nothing else."""
    try:
        assert isinstance(parse_cluster(text, "FILE", format, r"(?P<rack>.)"), Cluster)
    except TopologyError as e:
        return str(e)
    return ""


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(FORMATS), st.one_of(st.text(), st.lists(words).map(" ".join)))
@example("toml", "a=" + "[" * 3000)
@example("kubernetes", "[" * 100000)
def test_garbage_is_a_cluster_or_an_error_of_ours(format, text):
    message = ours(text, format)
    assert not message or message.startswith("FILE: ")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(("items", "metadata", "name", "labels", "topology.kubernetes.io/zone")),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(json_values)
def test_any_json_is_a_cluster_or_an_error_of_ours(document):
    message = ours(json.dumps(document), "kubernetes")
    assert not message or message.startswith("FILE: ")
