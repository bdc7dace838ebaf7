"""Placement and survival against brute force on small random clusters."""

import itertools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from topology import (
    Cluster,
    Level,
    Node,
    Rules,
    Share,
    TopologyError,
    place,
    survivable_losses,
    survives,
    why_not,
    worst_case,
)

LEVELS = ("rack", "pod")


@st.composite
def clusters(draw, labelled=False):
    """Up to 9 nodes; racks nest in pods; some hosts run two agents, some lack a label or both."""
    pods = draw(st.lists(st.integers(0, 2), min_size=4, max_size=4))
    nodes = []
    for host in range(draw(st.integers(1, 7))):
        rack = draw(st.integers(0, 3))
        labels = {"rack": f"r{rack}", "pod": f"p{pods[rack]}"}
        if not labelled:
            for level in draw(st.sampled_from(((), (), (), ("rack",), ("pod",), LEVELS))):
                del labels[level]
        for agent in range(draw(st.sampled_from((1, 1, 1, 2)))):
            nodes.append(Node(f"n{host}{agent}", f"h{host}", labels))
    return Cluster(tuple(nodes[:9]), LEVELS)


@st.composite
def rules(draw):
    names = draw(st.permutations(LEVELS))[: draw(st.integers(0, 2))]
    spread = tuple(Level(name, draw(st.booleans())) for name in names)
    return Rules(draw(st.integers(1, 3)), draw(st.integers(0, 2)), spread)


def choices(cluster, owner, count, excluded):
    """Every set of ``count`` usable nodes on distinct hosts other than the owner's."""
    host = {node.name: node.host for node in cluster.nodes}
    usable = [n for n in host if host[n] != host[owner] and n not in excluded]
    for names in itertools.combinations(usable, count):
        if len({host[name] for name in names}) == count:
            yield names


def meets(cluster, owner, names, rule, level):
    """The rule of one level, as the protocol words it."""
    own = cluster.domain(owner, level)
    held = Counter(cluster.domain(name, level) for name in names)
    return (
        own is not None
        and held[None] == 0
        and max(held.values(), default=0) <= max(1, rule.m)
        and (rule.m > 0 or held[own] == 0)
    )


@settings(max_examples=300, deadline=None)
@given(st.data(), clusters(), rules())
def test_placement_is_exact_about_what_can_be_met(data, cluster, rule):
    names = [node.name for node in cluster.nodes]
    owner = data.draw(st.sampled_from(names))
    excluded = frozenset(data.draw(st.sets(st.sampled_from(names), max_size=2)))
    hosts = {cluster.domain(n, "host") for n in names if n not in excluded}
    target = min(rule.count, len(hosts - {cluster.domain(owner, "host")}))
    every = list(choices(cluster, owner, target, excluded))
    met, refused, feasible = [], False, every
    for level in sorted(rule.spread, key=lambda level: not level.required):
        better = [c for c in feasible if meets(cluster, owner, c, rule, level.name)]
        if better:
            met, feasible = [*met, level.name], better
        elif level.required:
            refused = True
            break
    try:
        placement = place(cluster, owner, rule, excluded)
    except TopologyError:
        assert refused
        return
    assert not refused
    assert tuple(sorted(placement.nodes)) in {tuple(sorted(choice)) for choice in feasible}
    said = {sentence.split(":")[0] for sentence in placement.degraded}
    assert ("host" in said) == (target < rule.count)
    if target == rule.count:
        assert said == {level.name for level in rule.spread} - set(met)
    if len(rule.spread) == 1 and met:  # and in the owner's own domain as few as suffice
        level = rule.spread[0].name

        def in_own(choice):
            own = cluster.domain(owner, level)
            return sum(cluster.domain(name, level) == own for name in choice)

        assert target < rule.count or in_own(placement.nodes) == min(map(in_own, feasible))


@settings(max_examples=300, deadline=None)
@given(st.data(), clusters(), rules())
def test_what_is_not_called_degraded_survives(data, cluster, rule):
    """Every loss that the layout promises to survive, and that now kills, is announced."""
    owner = data.draw(st.sampled_from([node.name for node in cluster.nodes]))
    rule = Rules(rule.k, rule.m, tuple(Level(level.name) for level in rule.spread))
    placement = place(cluster, owner, rule)
    share = Share(owner, placement.nodes, rule.k)
    said = {sentence.split(":")[0]: sentence for sentence in placement.degraded}
    if "host" not in said:
        assert survivable_losses([share], cluster) == rule.m + 1
    for level in rule.spread:
        for domain, members in cluster.members(level.name).items():
            lost = {*members, owner} if rule.m else set(members)
            if not survives(share, lost):
                explained = said.get(level.name) or said.get("host", "")
                assert "kill" in explained
                if domain is not None and level.name in said:
                    assert domain in explained or "one " + level.name in explained
            sentence = said.get(level.name, "")
            if f"losing {level.name} {domain} kills" in sentence:
                assert not survives(share, set(members))


@settings(max_examples=150, deadline=None)
@given(st.data(), rules())
def test_levels_that_do_not_nest_still_keep_what_is_claimed(data, rule):
    """Racks cross power feeds: a rule may be called unmet too early, never met wrongly."""
    cells = data.draw(st.lists(st.tuples(*[st.integers(0, 2)] * 2), min_size=1, max_size=9))
    cluster = Cluster(
        tuple(
            Node(f"n{i}", f"h{i}", {"rack": f"r{rack}", "pod": f"feed{feed}"})
            for i, (rack, feed) in enumerate(cells)
        ),
        LEVELS,
    )
    rule = Rules(rule.k, rule.m, tuple(Level(level.name) for level in rule.spread))
    placement = place(cluster, "n0", rule)
    said = {sentence.split(":")[0] for sentence in placement.degraded}
    assert len(set(placement.nodes) - {"n0"}) == min(rule.count, len(cells) - 1)
    for level in rule.spread:
        assert level.name in said or meets(cluster, "n0", placement.nodes, rule, level.name)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(2, 4), st.integers(1, 2), rules()
)  # fmt: skip
def test_equal_domains_are_loaded_exactly_alike(pods, racks, hosts, agents, rule):
    nodes = [
        Node(f"{p}{r}{h}{a}", f"h{p}{r}{h}", {"pod": f"p{p}", "rack": f"r{p}{r}"})
        for p, r, h, a in itertools.product(*map(range, (pods, racks, hosts, agents)))
    ]
    cluster = Cluster(tuple(nodes), LEVELS)
    rule = Rules(rule.k, rule.m, tuple(Level(level.name) for level in rule.spread))
    held = Counter(n for node in nodes for n in place(cluster, node.name, rule).nodes)
    assert len({held[node.name] for node in nodes}) == 1


def labelings(cluster, level):
    """The cluster under every way to label its unlabelled hosts, fresh domains included."""
    known = [d for d in cluster.members(level) if d is not None]
    blind = sorted({cluster.domain(n, "host") for n in cluster.members(level).get(None, ())})
    fresh = [f"new{i}" for i in range(len(blind))]
    for labels in itertools.product([*known, *fresh], repeat=len(blind)):
        guess = dict(zip(blind, labels, strict=True))
        yield {n.name: n.domain(level) or guess[n.host] for n in cluster.nodes}


@st.composite
def checkpoints(draw, cluster):
    """One to three shares, holders anywhere: twice on a node, on the owner, or missing."""
    names = [node.name for node in cluster.nodes]
    shares = []
    for _ in range(draw(st.integers(1, 3))):
        holders = draw(st.lists(st.sampled_from([*names, None]), max_size=6))
        shares.append(
            Share(
                draw(st.sampled_from(names)),
                tuple(holders),
                draw(st.integers(1, 4)),
                draw(st.booleans()),
            )
        )
    return shares


@settings(max_examples=300, deadline=None)
@given(st.data(), clusters(labelled=True), st.sampled_from(("node", "host", "rack", "pod")))
def test_survivable_losses_equal_brute_force(data, cluster, level):
    shares = data.draw(checkpoints(cluster))
    domains = cluster.members(level)

    def kills(lost):
        gone = {name for domain in lost for name in domains[domain]}
        return bool(why_not(shares, gone))

    truth = next(
        n
        for n in range(len(domains) + 1)
        if any(kills(lost) for lost in itertools.combinations(domains, n))
    )
    assert survivable_losses(shares, cluster, level) == truth - 1
    worst = worst_case(shares, cluster, level)
    assert len(worst.domains) == truth
    assert worst.nodes == {name for domain in worst.domains for name in domains[domain]}
    (victim,) = [s for s in shares if s.owner == worst.owner and not survives(s, worst.nodes)][:1]
    assert kills(worst.domains)
    assert worst.owner in worst.reason
    assert victim in shares


@settings(max_examples=150, deadline=None)
@given(st.data(), clusters())
def test_unlabelled_nodes_count_as_the_worst_labels(data, cluster):
    """The answer is that of the labelling which makes it worst, and never above the truth."""
    shares = data.draw(checkpoints(cluster))
    unlabelled_hosts = {cluster.domain(n, "host") for n in cluster.members("rack").get(None, ())}
    if len(unlabelled_hosts) > 3:  # keeps the enumeration small
        cluster = cluster.without(
            {n.name for n in cluster.nodes if n.host in sorted(unlabelled_hosts)[3:]}
        )
        kept = {node.name for node in cluster.nodes}
        shares = [
            Share(s.owner, tuple(h if h in kept else None for h in s.holders), s.k, s.own_copy)
            for s in shares
            if s.owner in kept
        ]
        if not shares:
            return

    def truth(label):
        racks = sorted(set(label.values()))
        return next(
            n - 1
            for n in range(len(racks) + 1)
            for lost in itertools.combinations(racks, n)
            if why_not(shares, {name for name, rack in label.items() if rack in lost})
        )

    assert survivable_losses(shares, cluster, "rack") == min(map(truth, labelings(cluster, "rack")))
