"""Topology as stories: what is refused, where shards go, what is said when rules cannot be met."""

import itertools
import os
import subprocess
import sys
from collections import Counter

import pytest

from topology import (
    Cluster,
    Level,
    Node,
    Rules,
    Share,
    TopologyError,
    place,
    sources,
    survivable_losses,
    survives,
    why_not,
    worst_case,
)

RACK = (Level("rack"),)
RACK_REQUIRED = (Level("rack", required=True),)


def racks(*sizes):
    """One host a node, ``sizes[i]`` nodes in rack ri."""
    return Cluster(
        tuple(
            Node(f"n{r}{h}", f"h{r}{h}", {"rack": f"r{r}"})
            for r, size in enumerate(sizes)
            for h in range(size)
        )
    )


def tree(pods, switches, racks_each, hosts):
    nodes = []
    for p, s, r, h in itertools.product(*map(range, (pods, switches, racks_each, hosts))):
        name = f"p{p}s{s}r{r}h{h}"
        labels = {"pod": f"p{p}", "switch": f"p{p}s{s}", "rack": f"p{p}s{s}r{r}"}
        nodes.append(Node(name, name, labels))
    return Cluster(tuple(nodes))


def place_all(cluster, rules, excluded=frozenset()):
    return {node.name: place(cluster, node.name, rules, excluded) for node in cluster.nodes}


def loads(cluster, placements):
    held = Counter(name for placement in placements.values() for name in placement.nodes)
    return [held[node.name] for node in cluster.nodes]


def shares_of(placements, k):
    return [Share(owner, placement.nodes, k) for owner, placement in placements.items()]


# -- nouns --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Node("", "h"), "name ''"),
        (lambda: Node("a", "h", (("rack", "r1"), ("rack", "r2"))), "'a': a level is labelled"),
        (lambda: Node("a", "h", {"rack": ""}), "'a': empty label at level 'rack'"),
        (lambda: Cluster((Node("a", "h"), Node("a", "g"))), "'a' is given twice"),
        (lambda: Cluster((Node("a", "h", {"row": "1"}),)), "'a' is labelled at level 'row'"),
        (lambda: Cluster((), ("rack", "host")), "levels must be distinct names"),
        (
            lambda: Cluster((Node("a", "h", {"rack": "r1"}), Node("b", "h", {"rack": "r2"}))),
            "host 'h': node 'a' says {'rack': 'r1'}, node 'b' says {'rack': 'r2'}",
        ),
        (lambda: Cluster(()).node("a"), "'a' is not one of the cluster's 0 nodes"),
        (lambda: racks(1).domain("n00", "row"), "level 'row' is unknown"),
        (lambda: racks(1).with_node(Node("n00", "x")), "'n00' is given twice"),
        (lambda: Rules(0, 1), "k=0"),
        (lambda: Rules(1, -1), "m=-1"),
        (lambda: Rules(1, 1, (Level("host"),)), "above the host"),
        (lambda: place(racks(2), "zz", Rules(1, 0)), "'zz' is not one of"),
        (lambda: place(racks(2), "n00", Rules(1, 0, (Level("row"),))), "level 'row' is unknown"),
        (lambda: Share("a", (), 0), "'a': k must be at least 1"),
        (lambda: survivable_losses([], racks(1)), "no shares"),
        (lambda: survivable_losses([Share("n00", ("x",), 1)], racks(1)), "'x' is not one of"),
    ],
)
def test_what_is_wrong_is_named(make, says):
    with pytest.raises(TopologyError) as caught:
        make()
    assert says in str(caught.value)


def test_cluster_is_a_value():
    cluster = racks(2, 2)
    assert cluster == Cluster(tuple(reversed(cluster.nodes)))
    smaller = cluster.without({"n00", "never-there"})
    assert len(cluster) == 4
    assert "n00" in cluster
    assert "n00" not in smaller
    assert smaller.with_node(cluster.node("n00")) == cluster
    assert smaller.with_node(cluster.node("n00")).ring == cluster.ring
    assert cluster.domain("n10", "rack") == "r1"
    assert cluster.domain("n10", "pod") is None
    assert cluster.domain("n10", "host") == "h10"
    assert cluster.members("rack") == {"r0": ("n00", "n01"), "r1": ("n10", "n11")}


def test_ring_parts_neighbours():
    """In 3 pods of 2 racks, 3 nodes in a row never share a pod, 6 in a row never a rack."""
    cluster = tree(3, 1, 2, 4)
    ring = cluster.ring * 2
    assert sorted(cluster.ring) == [node.name for node in cluster.nodes]
    for start in range(len(cluster)):
        assert len({cluster.domain(n, "pod") for n in ring[start : start + 3]}) == 3
        assert len({cluster.domain(n, "rack") for n in ring[start : start + 6]}) == 6


# -- fault B113: copies of one item in one failure domain ------------------------------------------


@pytest.mark.parametrize("sizes", [(3, 3), (2, 2, 2)])
def test_b113_every_rack_may_be_lost_and_the_owner_with_it(sizes):
    cluster = racks(*sizes)
    placements = place_all(cluster, Rules(2, 2, RACK_REQUIRED))
    for owner, placement in placements.items():
        assert len(placement.nodes) == 4
        assert placement.degraded == ()
        for rack in cluster.members("rack").values():
            assert survives(Share(owner, placement.nodes, 2), {owner, *rack})
    assert loads(cluster, placements) == [4] * 6


def test_b113_too_few_racks_for_one_parity_shard():
    """rs(3, 1) over two racks: one rack alone may go, but not with the owner; that is said."""
    cluster = racks(3, 3)
    for owner, placement in place_all(cluster, Rules(3, 1, RACK)).items():
        own = cluster.domain(owner, "rack")
        other = "r1" if own == "r0" else "r0"
        (said,) = placement.degraded
        assert said.startswith("rack: needs at most 1 in one rack, has up to 3 in " + other)
        assert f"losing the owner and rack {other} kills" in said
        share = Share(owner, placement.nodes, 3)
        assert all(survives(share, set(rack)) for rack in cluster.members("rack").values())
        assert not survives(share, {owner, *cluster.members("rack")[other]})
    with pytest.raises(TopologyError) as caught:
        place(cluster, "n00", Rules(3, 1, RACK_REQUIRED))
    assert "owner n00: level rack is required: needs room for 4 shards" in str(caught.value)
    assert "has room for 2" in str(caught.value)


def test_b113_no_parity_in_the_owners_rack_is_said():
    cluster = racks(3, 1)
    (said,) = place(cluster, "n00", Rules(2, 0, RACK)).degraded
    assert "rack: needs none in the owner's r0, has 1; losing rack r0 kills" in said
    with pytest.raises(TopologyError, match="none in the owner's own rack; has room for 1"):
        place(cluster, "n00", Rules(2, 0, RACK_REQUIRED))


def test_b113_unlabelled_nodes_are_not_taken_for_distinct_racks():
    cluster = Cluster(tuple(Node(f"n{i}", f"h{i}") for i in range(6)))
    placement = place(cluster, "n0", Rules(2, 2, RACK))
    assert len(set(placement.nodes)) == 4
    (said,) = placement.degraded
    assert "owner n0 has no rack label" in said
    assert "losing one rack may kill" in said
    with pytest.raises(TopologyError, match=r"owner n0: .* has no rack label"):
        place(cluster, "n0", Rules(2, 2, RACK_REQUIRED))
    share = Share("n0", placement.nodes, 2)
    assert survivable_losses([share], cluster) == 3
    assert survivable_losses([share], cluster, "rack") == 0
    assert "no rack label" in worst_case([share], cluster, "rack").reason


def test_an_unlabelled_node_is_the_last_resort():
    labelled = racks(3, 3)
    stray = Node("stray", "hs")
    cluster = labelled.with_node(stray)
    for owner in labelled.nodes:
        placement = place(cluster, owner.name, Rules(2, 2, RACK_REQUIRED))
        assert "stray" not in placement.nodes
        assert placement.degraded == ()
    few = racks(1, 1, 1).with_node(stray)
    placement = place(few, "n00", Rules(2, 1, RACK))
    assert "stray" in placement.nodes
    assert placement.degraded == (
        "rack: no rack label on stray; losing the owner and rack r1, r2 may kill",
    )


def test_b113_one_host_with_two_agents_takes_one_shard():
    """Six nodes on five hosts: the twins never hold two shards, nor their own host's."""
    nodes = [Node(f"n{i}", f"h{max(i, 1)}") for i in range(6)]
    cluster = Cluster(tuple(nodes))
    for owner, placement in place_all(cluster, Rules(2, 2)).items():
        hosts = [cluster.domain(name, "host") for name in placement.nodes]
        assert len(set(hosts)) == len(hosts) == 4
        assert cluster.domain(owner, "host") not in hosts
        assert placement.degraded == ()


def test_too_few_hosts_place_what_they_can_and_say_what_is_missing():
    cluster = Cluster((Node("a", "h0"), Node("b", "h0"), Node("c", "h1"), Node("d", "h2")))
    placement = place(cluster, "a", Rules(2, 2))
    assert sorted(placement.nodes) == ["c", "d"]
    assert placement.degraded == (
        "host: needs 4 hosts beside the owner's, has 2; "
        "losing the owner and any 1 of the holders kills",
    )
    alone = place(Cluster((Node("a", "h0"), Node("b", "h0"))), "a", Rules(2, 2, RACK))
    assert alone.nodes == ()
    assert "losing the owner a kills" in alone.degraded[0]


def test_short_of_hosts_spreads_for_the_parity_that_is_left():
    """rs(2, 2) on three hosts can miss one shard: two in one rack would be one too many."""
    cluster = racks(2, 2, 1)
    placement = place(cluster, "n00", Rules(2, 2, RACK), excluded={"n11"})
    assert sorted(placement.nodes) == ["n01", "n10", "n20"]
    assert len(placement.degraded) == 1
    placement = place(racks(1, 2, 1), "n00", Rules(2, 2, RACK))
    assert "rack: only 3 of 4 shards have a host" in placement.degraded[1]
    assert "losing the owner and rack r1 kills" in placement.degraded[1]


def test_levels_are_served_in_order_and_the_unmet_one_is_named():
    """Two pods cannot part 8 + 2 shards; the racks still do."""
    cluster = tree(2, 1, 6, 3)
    rules = Rules(8, 2, (Level("pod"), Level("rack", required=True)))
    for placement in place_all(cluster, rules).values():
        (said,) = placement.degraded
        assert said.startswith("pod: needs at most 2 in one pod, has up to ")
        held = Counter(cluster.domain(name, "rack") for name in placement.nodes)
        assert max(held.values()) <= 2


def test_excluded_nodes_take_nothing_and_move_one_shard_each():
    cluster = tree(2, 2, 4, 4)
    rules = Rules(4, 2, RACK)
    before = place_all(cluster, rules)
    after = place_all(cluster, rules, excluded={"p0s0r0h0", "left-long-ago"})
    moved = 0
    for owner in before:
        old, new = set(before[owner].nodes), set(after[owner].nodes)
        assert "p0s0r0h0" not in new
        assert len(new - old) == ("p0s0r0h0" in old)
        moved += len(new - old)
    assert moved == 6


# -- balance, stability, size, determinism ---------------------------------------------------------


def test_12500_nodes_all_hold_the_same_and_a_swap_moves_little():
    cluster = tree(5, 10, 10, 25)
    rules = Rules(8, 2, (Level("rack"), Level("switch"), Level("pod")))
    before = place_all(cluster, rules)
    assert set(loads(cluster, before)) == {10}
    assert not any(placement.degraded for placement in before.values())
    old = cluster.node("p2s5r5h7")
    swapped = cluster.without({old.name}).with_node(Node("spare", "spare", old.domains))
    after = place_all(swapped, rules)
    assert set(loads(swapped, after)) == {10}
    moved = sum(
        len(set(after[owner].nodes) - set(before[owner].nodes) - {"spare"})
        for owner in after
        if owner in before
    )
    assert moved < 0.01 * 125_000


def test_unequal_racks_are_loaded_alike_and_none_keeps_what_is_its_own():
    sizes = [8 + (7 * i) % 33 for i in range(40)]
    cluster = Cluster(
        tuple(
            Node(f"n{r}-{h}", f"n{r}-{h}", {"rack": f"r{r}"})
            for r, size in enumerate(sizes)
            for h in range(size)
        )
    )
    placements = place_all(cluster, Rules(8, 2, RACK))
    assert set(loads(cluster, placements)) == {10}
    for owner, placement in placements.items():
        held = Counter(cluster.domain(name, "rack") for name in placement.nodes)
        assert max(held.values()) <= 2
        assert not held[cluster.domain(owner, "rack")]
        assert placement.degraded == ()


def test_same_answer_in_every_process():
    program = (
        "import hashlib\n"
        "from topology import *\n"
        "nodes = [Node(f'n{i}', f'h{i // 2}', {'rack': f'r{i // 6}', 'pod': f'p{i // 12}'})\n"
        "         for i in range(60)]\n"
        "c = Cluster(tuple(set(nodes)))\n"
        "r = Rules(4, 2, (Level('rack'), Level('pod')))\n"
        "out = [place(c, n.name, r, {'n3', 'n17'}) for n in c.nodes]\n"
        "shares = [Share(n.name, p.nodes, 4) for n, p in zip(c.nodes, out)]\n"
        "worst = worst_case(shares, c, 'rack')\n"
        "print(repr(out), worst.domains, sorted(worst.nodes), worst.reason)\n"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2", "31337")
    }
    assert len(answers) == 1
    assert b"Placement" in answers.pop()


# -- what a placement survives --------------------------------------------------------------------


def test_nine_nodes_in_three_racks_all_triples_survive_and_not_all_quadruples():
    cluster = racks(3, 3, 3)
    shares = shares_of(place_all(cluster, Rules(4, 2, RACK)), 4)
    names = [node.name for node in cluster.nodes]
    triples = list(itertools.combinations(names, 3))
    quadruples = list(itertools.combinations(names, 4))
    assert (len(triples), len(quadruples)) == (84, 126)
    assert not any(why_not(shares, set(lost)) for lost in triples)
    dead = sum(bool(why_not(shares, set(lost))) for lost in quadruples)
    assert dead == 99
    assert survivable_losses(shares, cluster) == 3
    assert survivable_losses(shares, cluster, "rack") == 1
    worst = worst_case(shares, cluster)
    assert len(worst.domains) == 4
    assert why_not(shares, worst.nodes)


def test_without_own_copies_the_count_drops_by_one():
    cluster = racks(3, 3, 3)
    shares = [
        Share(share.owner, share.holders, share.k, own_copy=False)
        for share in shares_of(place_all(cluster, Rules(4, 2, RACK)), 4)
    ]
    assert survivable_losses(shares, cluster) == 2


def test_sources_and_the_reason_of_a_loss():
    share = Share("a", ("b", None, "c", "d"), k=3)
    assert sources(share) == ("a", "b", "c", "d")
    assert sources(share, {"a", "c"}) == ("b", "d")
    assert survives(share, {"b", "c", "d"})
    assert why_not([share], {"a"}) == ()
    assert why_not([share], {"a", "c"}) == (
        "share of a: its own copy is lost, needs 3 shards, has 2 of 4; "
        "missing shards: 1 (never placed), 2 (c)",
    )


def test_a_share_that_is_lost_already_is_minus_one():
    cluster = racks(2, 2)
    lost = Share("n00", ("n10", None), k=2, own_copy=False)
    kept = Share("n01", ("n10", "n11"), k=1)
    assert survivable_losses([kept], cluster) == 2
    assert survivable_losses([kept, lost], cluster) == -1
    assert worst_case([kept, lost], cluster).reason == "share of n00 is lost already: 1 shards of 2"


def test_worst_rack_names_the_owners_first():
    cluster = racks(2, 3, 1)
    share = Share("n00", ("n10", "n11", "n20"), k=2)
    worst = worst_case([share], cluster, "rack")
    assert worst.domains == ("r0", "r1")
    assert worst.nodes == {"n00", "n01", "n10", "n11", "n12"}
    assert worst.owner == "n00"
    assert why_not([share], worst.nodes)
