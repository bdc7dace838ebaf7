"""Which rank starts where: as many as can be on their own copy, spares near the bytes."""

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pckpt.errors import UsageError
from p2pckpt.restore.place_ranks import RankSources, decide_restart
from topology.cluster import Cluster, Node


def cluster(names, racks=2):
    return Cluster(
        tuple(Node(n, n, (("rack", f"r{int(n[1:]) % racks}"),)) for n in names), ("rack",)
    )


def on(rank, *own, shards=(), k=2):
    return RankSources(rank, own, {i: (node,) for i, node in enumerate(shards)}, k)


def hosts_of(plan):
    return [place.host for place in plan.places]


NAMES = [f"n{i}" for i in range(8)]


def test_blocks_go_where_their_slots_are_and_the_order_is_the_launchers():
    ranks = [on(0, "n3"), on(1, "n3"), on(2, "n1"), on(3, "n1"), on(4, "n7"), on(5, "n7")]
    plan = decide_restart(ranks, cluster(NAMES), NAMES, 2, blocks=True)
    assert plan.order == ("n3", "n1", "n7")
    assert all(place.own for place in plan.places)
    assert plan.spares == ("n0", "n2", "n4", "n5", "n6")


def test_a_host_that_is_gone_is_replaced_by_a_spare_in_the_rack_of_the_bytes():
    """Rank 2's node is gone; two of its three shards lie in rack r1, one on n4 of rack r0."""
    ranks = [on(0, "n0"), on(1, "n1"), on(2, shards=("n1", "n3", "n4"))]
    plan = decide_restart(ranks, cluster(NAMES), [n for n in NAMES if n != "n3"], 1, blocks=True)
    assert hosts_of(plan)[:2] == ["n0", "n1"]
    place = plan.places[2]
    assert place.host in ("n5", "n7")
    assert not place.own
    assert [holder.node for holder in place.holders] == ["n1", "n3", "n4"]  # the same rack first
    assert place.holders[0].shards == (0,)


def test_of_hosts_as_near_one_that_holds_a_shard_is_taken():
    ranks = [on(0, shards=("n1", "n5", "n4"))]
    plan = decide_restart(ranks, cluster(NAMES), ["n3", "n5", "n7"], 1, blocks=True)
    assert hosts_of(plan) == ["n5"]


def test_ranks_that_do_not_come_in_blocks_are_placed_one_by_one_where_the_launcher_can():
    ranks = [on(i, f"n{i % 3}") for i in range(6)]
    free = decide_restart(ranks, cluster(NAMES), NAMES, 2, blocks=False)
    assert hosts_of(free) == ["n0", "n1", "n2"] * 2
    assert all(place.own for place in free.places)
    blocks = decide_restart(ranks, cluster(NAMES), NAMES, 2, blocks=True)
    assert sum(place.own for place in blocks.places) == 3


def test_a_copy_that_repair_made_drives_nobody_from_home():
    """n2 is gone, and n3 has rank 2's copy as well as rank 3's own: rank 3 stays."""
    own = {0: ("n0",), 1: ("n1",), 2: ("n3",), 3: ("n3", "n1")}
    ranks = [RankSources(i, own[i], {}, 2, home=f"n{i}") for i in range(4)]
    living = ["n0", "n1", "n3", "n4"]
    plan = decide_restart(ranks, cluster(living), living, 1, blocks=True)
    assert hosts_of(plan) == ["n0", "n1", "n4", "n3"]
    ranks = ranks[:1] + ranks[2:]  # without rank 1 there is room for all
    plan = decide_restart(ranks, cluster(living), living, 1, blocks=True)
    assert hosts_of(plan) == ["n0", "n3", "n1"]


def test_too_few_hosts_are_counted():
    ranks = [on(i, "n0") for i in range(5)]
    with pytest.raises(UsageError, match="5 ranks, 2 on a host: needs 3 hosts, 2 can be had"):
        decide_restart(ranks, cluster(NAMES), ["n0", "n1"], 2, blocks=True)


def test_hosts_without_an_agent_are_used_last():
    ranks = [on(0, "n0"), on(1, shards=("n1", "n2"))]
    plan = decide_restart(ranks, cluster(NAMES), ["new", "n0", "n6"], 1, blocks=True)
    assert hosts_of(plan) == ["n0", "n6"]
    assert plan.spares == ("new",)


def test_what_cannot_be_had_says_so():
    assert on(0, "n1").lacks == ""
    assert on(0, shards=("n1", "n2")).lacks == ""
    assert on(3, shards=("n1",)).lacks == "rank 3: no own copy, 1 shards, it needs 2"
    assert RankSources(3, (), {}, 2, stored=True).lacks == ""


@st.composite
def worlds(draw):
    """Up to 6 ranks whose slots lie anywhere, on up to 5 hosts of which each has room."""
    count, per_host = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    need = -(-count // per_host)
    hosts = [
        f"n{i}"
        for i in range(draw(st.integers(need, min(5, need + 2)) if need < 5 else st.just(need)))
    ]
    lies = st.lists(st.sampled_from([*hosts, "x9"]), max_size=3, unique=True)
    return [on(rank, *draw(lies)) for rank in range(count)], hosts, per_host


@given(worlds(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_no_other_plan_lets_more_ranks_find_their_own_copy(world, blocks):
    ranks, hosts, per_host = world
    plan = decide_restart(ranks, cluster(hosts), hosts, per_host, blocks)
    chosen = hosts_of(plan)
    assert max(map(chosen.count, chosen)) <= per_host
    assert [place.own for place in plan.places] == [
        host in one.own for host, one in zip(chosen, ranks, strict=True)
    ]
    if blocks:
        size = per_host
        for at in range(0, len(ranks), size):
            assert len(set(chosen[at : at + size])) == 1
        units = [ranks[at : at + size] for at in range(0, len(ranks), size)]
        seats = list(hosts)
    else:
        units, seats = [[one] for one in ranks], [host for host in hosts for _ in range(per_host)]
    best = most(units, seats)
    assert sum(place.own for place in plan.places) == best


def most(units, seats):
    """By trying out: over all ways to seat the units."""
    found: dict = {}

    def go(at, left):
        if at == len(units):
            return 0
        key = at, left
        if key not in found:
            found[key] = max(
                sum(seat in one.own for one in units[at]) + go(at + 1, without(left, seat))
                for seat in set(left)
            )
        return found[key]

    return go(0, tuple(sorted(seats)))


def without(seats, seat):
    at = seats.index(seat)
    return seats[:at] + seats[at + 1 :]


def test_a_chain_of_moves_is_found():
    """Each rank has its copy on two hosts; given out in the order of ranks, the last finds both
    taken, and only if all move up is there room for it."""
    names = [f"n{i}" for i in range(6)]
    ranks = [on(i, names[i], names[i + 1]) for i in range(5)] + [on(5, "n0")]
    for order in list(permutations(range(6)))[::97]:
        shuffled = [on(new, *ranks[old].own) for new, old in enumerate(order)]
        plan = decide_restart(shuffled, cluster(names), names, 1, blocks=True)
        assert all(place.own for place in plan.places)


def test_a_large_cluster_is_planned_at_once():
    """1,250 hosts of 8 ranks, 20 of them gone; a rank map that was shuffled, and one in blocks."""
    names = [f"n{i}" for i in range(1270)]
    living = [n for i, n in enumerate(names) if i not in range(100, 120)]
    where = cluster(living, racks=40)
    shards = [[names[(i * 37 + j * 41) % 1250] for j in range(10)] for i in range(1250)]
    for shuffled in (False, True):
        ranks = []
        for rank in range(10000):
            host = names[(rank * 7919) % 10000 // 8] if shuffled else names[rank // 8]
            own = (host,) if host in where else ()
            held = [n for n in shards[int(host[1:])] if n in where]
            ranks.append(on(rank, *own, shards=held, k=8))
        plan = decide_restart(ranks, where, living, 8, blocks=not shuffled)
        assert sum(place.own for place in plan.places) == 10000 - 160
        assert len(plan.order) == 1250
