"""The simulator and the product place alike: one cluster file, every owner, every scheme it has.

The simulator's way: `topology.discover` reads a file, `study.schemes.pieces` places all. The
product's: the agents announce the same labels, in any order, and `save.send` places one owner after
the other among those that live.
"""

from random import Random

import pytest

from p2pckpt import records as r
from p2pckpt.save.send import crew_of
from simulations.study.schemes import parse, pieces
from topology import place
from topology.discover import parse_cluster

RACKS = "\n".join(f'r{i}="n[{4 * i + 1:03}-{4 * i + 4:03}]"' for i in range(6))
PODS = '[domains.pod]\np0="n[001-012]"\np1="n[013-024]"\n'
FILES = {
    "no labels": "",
    "racks": f"[domains.rack]\n{RACKS}\n",
    "racks of unequal size": '[domains.rack]\na="n[001-003]"\nb="n[004-014]"\nc="n[015-024]"\n',
    "racks and pods": f"[domains.rack]\n{RACKS}\n{PODS}",
    "racks, switches, pods": f'[domains.rack]\n{RACKS}\n[domains.switch]\ns0="n[001-008]"\n'
    f's1="n[009-016]"\ns2="n[017-024]"\n{PODS}',
    "levels that are ours alone": "[domains.chassis]\n"
    + "\n".join(f'c{i}="n[{2 * i + 1:03}-{2 * i + 2:03}]"' for i in range(12))
    + f"\n[domains.rack]\n{RACKS}\n{PODS}",
    "levels that cross": f'[domains.rack]\n{RACKS}\n[domains.power]\nA="n[001-002,005-006,009-010,'
    '013-014,017-018,021-022]"\nB="n[003-004,007-008,011-012,015-016,019-020,023-024]"\n',
    "some without a label": '[domains.rack]\na="n[001-008]"\nb="n[009-016]"\n',
}


def members_of(cluster, chance):
    """As the agents announce themselves, in any order."""
    nodes = chance.sample(cluster.nodes, len(cluster))
    return {
        n.name: r.Member(n.name, n.host, f"store {n.name}", "s", "a", "t", dict(n.domains))
        for n in nodes
    }


@pytest.mark.parametrize("layout", ["rs:4,2", "rs:2,1", "copies:2"])
@pytest.mark.parametrize("name", FILES)
def test_one_file_one_placement(name, layout):
    cluster = parse_cluster(f'nodes = "n[001-024]"\n{FILES[name]}', name, "toml")
    chance = Random(name)
    placed = pieces(cluster, parse(layout))
    names = [node.name for node in cluster.nodes]
    members = members_of(cluster, chance)
    spread = tuple((level, False) for level in cluster.levels)
    for number, owner in enumerate(names):
        crew = crew_of(dict(members), members[owner], r.Layout.parse(layout), spread)
        product = place(crew.cluster, owner, crew.rules, crew.leaving).nodes
        assert product == tuple(names[i] for i in placed.rows[number]), owner
    assert len({frozenset(row) for row in placed.rows}) > 1


def test_rack_and_pod_stand_in_their_order_however_they_were_given():
    cluster = parse_cluster(f'nodes = "n[001-024]"\n{FILES["racks and pods"]}', "f", "toml")
    members = members_of(cluster, Random(1))
    layout, owner = r.Layout.parse("rs:4,2"), members["n007"]
    levels = [
        crew_of(members, owner, layout, tuple((x, False) for x in names)).cluster.levels
        for names in (("pod", "rack"), ("rack", "pod"), ("pod",), ())
    ]
    assert [[x for x in found if x in ("rack", "pod")] for found in levels[:2]] == [
        ["rack", "pod"]
    ] * 2
    rings = {
        crew_of(members, owner, layout, tuple((x, False) for x in names)).cluster.ring
        for names in (("pod", "rack"), ("rack", "pod"), ("pod", "rack"))
    }
    assert len(rings) == 1
