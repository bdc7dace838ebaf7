"""Loads against brute force: every choice of hands that the rules allow, on small clusters."""

import itertools
from collections import Counter
from random import Random

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from topology import Cluster, Level, Node, Rules, place, place_all
from topology.balance import balance
from topology.ground import UNKNOWN, Caps, Hand, is_regular, survey

LEVELS = ("rack", "pod")


def cluster_of(rows):
    """Rows are (labels, agents): one host each."""
    return Cluster(
        tuple(
            Node(f"n{host}{agent}", f"h{host}", labels)
            for host, (labels, agents) in enumerate(rows)
            for agent in range(agents)
        ),
        LEVELS,
    )


@st.composite
def clusters(draw, kind):
    """3 to 6 nodes in unequal racks. In pods if ``kind`` is "nested"; "crossing": each node
    is in any pod; "blind": some lack a label besides. Some hosts run two agents."""
    pods = draw(st.lists(st.integers(0, 2), min_size=4, max_size=4))
    rows, left = [], 6
    for _ in range(draw(st.integers(3, 6))):
        rack = draw(st.integers(0, 3))
        pod = draw(st.integers(0, 2)) if kind == "crossing" else pods[rack]
        labels = {"rack": f"r{rack}", "pod": f"p{pod}"}
        if kind == "blind":
            for level in draw(st.sampled_from(((), (), ("rack",), ("pod",), LEVELS))):
                del labels[level]
        agents = min(left, draw(st.sampled_from((1, 1, 1, 2))))
        rows.append((labels, agents))
        left -= agents
    return cluster_of(rows)


@st.composite
def spreads(draw):
    names = draw(st.permutations(LEVELS))[: draw(st.integers(0, 2))]
    return tuple(Level(name) for name in names)


def hand_of(ground, owner, rules, caps, order, target):
    """What the caps let in of ``order``, up to ``target``."""
    hand = Hand(ground, owner, rules, caps)
    for at in order:
        if len(hand.nodes) < target and hand.fits(at):
            hand.take(at)
    return hand


def levellest(size, options):
    """The loads, greatest first, of the levellest choice of one option for each owner."""
    seen = {(0,) * size}
    for option in options:
        seen = {
            tuple(load + (at in nodes) for at, load in enumerate(loads))
            for loads in seen
            for nodes in option
        }
    return min(sorted(loads, reverse=True) for loads in seen)


def loads_of(hands, size):
    held = Counter(at for nodes in hands for at in nodes)
    return sorted((held[at] for at in range(size)), reverse=True)


@settings(max_examples=150, deadline=None)
@given(st.data(), clusters("nested"), spreads())
def test_no_choice_of_hands_within_the_caps_is_leveller(data, cluster, spread):
    """Any caps, a hand of its own for each owner, dealt at random; greatest loads compared first,
    so neither the fullest node could hold less nor the emptiest more."""
    ground = survey(cluster, tuple(level.name for level in spread))
    size, rules, cap = len(cluster), Rules(2, 1, spread), st.integers(0, 3)
    hands, options = [], []
    for owner in range(size):
        caps = tuple(Caps(data.draw(cap), data.draw(cap), 0) for _ in spread)
        order = data.draw(st.permutations(range(size)))
        hand = hand_of(ground, owner, rules, caps, order, data.draw(cap))
        hands.append(hand)
        count = len(hand.nodes)
        options.append(
            [
                nodes
                for nodes in itertools.combinations(range(size), count)
                if len(hand_of(ground, owner, rules, caps, nodes, count).nodes) == count
            ]
        )
    counts = [len(hand.nodes) for hand in hands]
    balance(hands)
    assert [len(hand.nodes) for hand in hands] == counts
    for hand, option in zip(hands, options, strict=True):
        assert tuple(sorted(hand.nodes)) in option
    assert loads_of([hand.nodes for hand in hands], size) == levellest(size, options)


def within_rules(cluster, owner, rules):
    """Every set of k+m nodes, by position among the names, that meets all rules."""
    names = [node.name for node in cluster.nodes]
    domain = {level: [cluster.domain(n, level) for n in names] for level in ("host", *LEVELS)}
    own = names.index(owner)
    for nodes in itertools.combinations(range(len(names)), rules.count):
        hosts = {domain["host"][at] for at in (own, *nodes)}
        used = [Counter(domain[level.name][at] for at in nodes) for level in rules.spread]
        if len(hosts) == rules.count + 1 and all(
            None not in held
            and max(held.values()) <= rules.most
            and (rules.m or not held[domain[level.name][own]])
            for held, level in zip(used, rules.spread, strict=True)
        ):
            yield nodes


def loads_and_least(cluster, rules):
    """The loads of the default policy and the levellest; None where rules cannot be met."""
    placements = place_all(cluster, rules)
    if any(placement.degraded for placement in placements.values()):
        return None
    names = [node.name for node in cluster.nodes]
    hands = [[names.index(name) for name in p.nodes] for p in placements.values()]
    options = [list(within_rules(cluster, owner, rules)) for owner in placements]
    return loads_of(hands, len(names)), levellest(len(names), options)


small_rules = st.builds(Rules, st.integers(1, 2), st.integers(0, 2), spreads())


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(("nested", "blind")).flatmap(clusters), small_rules)
def test_the_default_is_as_level_as_the_rules_allow(cluster, rules):
    """Where all rules can be met and the levels asked for nest."""
    found = loads_and_least(cluster, rules)
    assume(found is not None)
    loads, least = found
    assert loads == least


@st.composite
def fleets(draw):
    """20 to 100 nodes, racks of any size in pods of any size, some hosts of two agents."""
    racks, pods = draw(st.integers(4, 12)), draw(st.integers(3, 8))
    host = st.tuples(st.integers(0, racks - 1), st.sampled_from((1, 1, 1, 2)))
    return cluster_of(
        [
            ({"rack": f"r{rack}", "pod": f"p{rack % pods}"}, agents)
            for rack, agents in draw(st.lists(host, min_size=20, max_size=50))
        ]
    )


def within_their_share(cluster, rules):
    """Whether no level's biggest domain has more nodes than the shards that it may hold: m of the
    k+m of every owner; a host, one of every owner but its own."""
    biggest = max(len(names) for level in LEVELS for names in cluster.members(level).values())
    agents = max(len(names) for names in cluster.members("host").values())
    size, count = len(cluster), rules.count
    return biggest * count <= rules.m * size and agents * count <= size - agents


def assert_all_hold_the_same(cluster, rules):
    placements = place_all(cluster, rules)
    assert not any(placement.degraded for placement in placements.values())
    held = Counter(name for placement in placements.values() for name in placement.nodes)
    assert {held[node.name] for node in cluster.nodes} == {rules.count}


LAYOUTS = ((4, 2), (2, 1), (8, 2), (1, 2), (6, 3))
BOTH = tuple(Level(level) for level in LEVELS)


@settings(max_examples=60, deadline=None)
@given(fleets(), st.sampled_from(LAYOUTS))
def test_all_hold_the_same_where_no_domain_has_more_than_its_share(cluster, layout):
    rules = Rules(*layout, BOTH)
    assume(within_their_share(cluster, rules))
    assert_all_hold_the_same(cluster, rules)


def test_so_they_do_where_racks_cross_power_feeds():
    """The same 100 fleets each time: where levels cross, that is what is seen, no theorem."""
    tried = 0
    for seed in itertools.count():
        chance = Random(seed)
        racks, feeds = chance.randint(8, 20), chance.randint(6, 10)
        rows = [
            (
                {"rack": f"r{chance.randrange(racks)}", "pod": f"f{chance.randrange(feeds)}"},
                chance.choice((1, 1, 1, 2)),
            )
            for _ in range(chance.randint(20, 100))
        ]
        cluster, rules = cluster_of(rows), Rules(*chance.choice(LAYOUTS), BOTH)
        if within_their_share(cluster, rules):
            assert_all_hold_the_same(cluster, rules)
            tried += 1
        if tried == 100:
            return


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 12), st.integers(0, 2))
def test_regular_is_what_turning_the_ring_does_not_change(data, size, levels):
    """By definition: neighbours of any two nodes share a domain if and only if the two do."""
    period = data.draw(st.sampled_from([p for p in range(1, size + 1) if size % p == 0]))
    label = st.integers(0, size)
    columns = []
    for _ in range(levels + 1):
        block = data.draw(st.lists(label, min_size=period, max_size=period)) * (size // period)
        if data.draw(st.integers(0, 3)) == 0:
            block[data.draw(st.integers(0, size - 1))] = data.draw(label)
        columns.append(block)
    hosts, *codes = columns
    blind = data.draw(st.integers(0, size))
    codes = [[UNKNOWN if code == blind else code for code in column] for column in codes]
    turned = [
        ((i + 1) % size, (j + 1) % size, i, j) for i in range(size) for j in range(size)
    ]  # fmt: skip
    truth = all(
        (column[i1] == column[j1]) == (column[i] == column[j])
        for column in (hosts, *codes)
        for i1, j1, i, j in turned
    ) and all(UNKNOWN not in column or {*column} == {UNKNOWN} for column in codes)
    signatures = list(zip(*codes, strict=True)) if codes else [()] * size
    assert is_regular([f"h{host}" for host in hosts], signatures) == truth


@settings(max_examples=200, deadline=None)
@given(st.data(), *[st.integers(1, 3)] * 3, st.integers(1, 2), small_rules)
def test_every_node_of_a_regular_cluster_holds_the_same(data, pods, racks, hosts, agents, rules):
    """Equal domains are regular; where one host is changed or gone, the ring may still be."""
    shape = list(itertools.product(*map(range, (pods, racks, hosts))))
    kept = data.draw(st.sampled_from((LEVELS, LEVELS, ("pod",), ())))
    rows = [
        ({n: lb for n, lb in (("pod", f"p{p}"), ("rack", f"r{p}{r}")) if n in kept}, agents)
        for p, r, _ in shape
    ]
    change = data.draw(st.sampled_from(("", "", "gone", "moved", "agents")))
    at = data.draw(st.integers(0, len(rows) - 1))
    if change:
        moved = rows[data.draw(st.integers(0, len(rows) - 1))][0]
        rows[at] = {"gone": ({}, 0), "moved": (moved, agents), "agents": (rows[at][0], 3)}[change]
    cluster = cluster_of(rows)
    ground = survey(cluster, tuple(level.name for level in rules.spread))
    assert ground.regular or change
    if ground.regular:
        placements = [place(cluster, node.name, rules).nodes for node in cluster.nodes]
        held = Counter(name for nodes in placements for name in nodes)
        assert len({held[node.name] for node in cluster.nodes}) <= 1
