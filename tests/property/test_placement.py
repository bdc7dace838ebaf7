"""Placement and survival against brute force on small random clusters."""

import itertools
import math
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from topology import (
    POLICIES,
    Cluster,
    Level,
    Node,
    Policy,
    Rules,
    Share,
    TopologyError,
    odds,
    place,
    place_all,
    survivable_losses,
    survives,
    why_not,
    worst_case,
)
from topology.ground import survey

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
    regular = survey(cluster, tuple(level.name for level in rule.spread)).regular
    if len(rule.spread) == 1 and met and regular:  # in the owner's own domain as few as suffice
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


# -- all policies ---------------------------------------------------------------------------------

others = st.one_of(
    st.sampled_from([Policy(name) for name in POLICIES[1:]]),
    st.builds(lambda seed: Policy("random", seed=seed), st.integers(0, 99)),
    st.builds(lambda scatter: Policy("copysets", scatter=scatter), st.integers(1, 2)),
)


def preferred(rule):
    return Rules(rule.k, rule.m, tuple(Level(level.name) for level in rule.spread))


@settings(max_examples=150, deadline=None)
@given(st.data(), clusters(), rules(), others)
def test_every_policy_keeps_the_rules_that_it_does_not_call_degraded(data, cluster, rule, policy):
    rule = preferred(rule)
    names = [node.name for node in cluster.nodes]
    excluded = frozenset(data.draw(st.sets(st.sampled_from(names), max_size=2)))
    placements = place_all(cluster, rule, excluded, policy)
    assert placements == place_all(Cluster(cluster.nodes, LEVELS), rule, excluded, policy)
    for owner, placement in placements.items():
        default = place(cluster, owner, rule, excluded)
        hosts = [cluster.domain(name, "host") for name in placement.nodes]
        assert len({*hosts, cluster.domain(owner, "host")}) == len(hosts) + 1
        assert len(hosts) == len(default.nodes)
        assert excluded.isdisjoint(placement.nodes)
        said = {sentence.split(":")[0] for sentence in placement.degraded}
        for level in rule.spread:
            assert level.name in said or meets(cluster, owner, placement.nodes, rule, level.name)
        if policy.name not in ("ring", "random"):  # the rules that the default meets are met
            assert said <= {sentence.split(":")[0] for sentence in default.degraded}
        else:
            assert ("policy" in said) == bool(rule.spread)


def least_spread(cluster, rule):
    """The least (max - min load) over all placements that meet the host rule, by brute force."""
    names = [node.name for node in cluster.nodes]
    options = [
        list(choices(cluster, owner, len(place(cluster, owner, rule).nodes), ())) for owner in names
    ]
    seen = {(0,) * len(names)}
    at = {name: i for i, name in enumerate(names)}
    for option in options:
        after = set()
        for load in seen:
            for choice in option:
                new = list(load)
                for name in choice:
                    new[at[name]] += 1
                after.add(tuple(new))
        seen = after
    return min(max(load) - min(load) for load in seen)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 2), min_size=2, max_size=4), st.integers(1, 2), others)
def test_loads_differ_by_no_more_than_they_must(agents, count, policy):
    """With two agents on some hosts, loads cannot always be equal: brute force says how near."""
    cluster = Cluster(
        tuple(Node(f"n{h}{a}", f"h{h}") for h, n in enumerate(agents) for a in range(n)), LEVELS
    )
    rule = Rules(count, 0)
    held = Counter(n for p in place_all(cluster, rule, policy=policy).values() for n in p.nodes)
    load = [held[node.name] for node in cluster.nodes]
    assert max(load) - min(load) <= max(1, least_spread(cluster, rule))


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(2, 4), rules(), others)
def test_every_policy_loads_equal_domains_alike(pods, racks, hosts, rule, policy):
    nodes = [
        Node(f"{p}{r}{h}", f"h{p}{r}{h}", {"pod": f"p{p}", "rack": f"r{p}{r}"})
        for p, r, h in itertools.product(*map(range, (pods, racks, hosts)))
    ]
    cluster = Cluster(tuple(nodes), LEVELS)
    placements = place_all(cluster, preferred(rule), policy=policy)
    held = Counter(n for placement in placements.values() for n in placement.nodes)
    load = [held[node.name] for node in nodes]
    assert max(load) - min(load) <= 1


@settings(max_examples=100, deadline=None)
@given(st.data(), clusters(), rules(), st.sampled_from([Policy(name) for name in POLICIES]))
def test_who_takes_a_seat_takes_its_shards_and_nothing_else_moves(data, cluster, rule, policy):
    rule = preferred(rule)
    old = data.draw(st.sampled_from(cluster.nodes))
    if sum(node.host == old.host for node in cluster.nodes) > 1:
        return
    new = Node(data.draw(st.sampled_from(("a", "n0", "zz"))), "fresh", old.domains)
    before = place_all(cluster, rule, policy=policy)
    after = place_all(cluster.swapped(old.name, new), rule, policy=policy)
    rename = {old.name: new.name}
    assert {owner: placement.nodes for owner, placement in after.items()} == {
        rename.get(owner, owner): tuple(rename.get(name, name) for name in placement.nodes)
        for owner, placement in before.items()
    }


# -- what survives, surely and probably -----------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.data(), clusters(), st.sampled_from(("node", "host", "rack", "pod")))
def test_odds_against_brute_force(data, cluster, level):
    """Every set of nodes that may be down besides: exact without a window, never below the truth
    with one, and above it by no more than one share's chance for another's."""
    shares = [s for s in data.draw(checkpoints(cluster)) if survives(s, frozenset())]
    if not shares:
        return
    (exact,) = odds(shares, cluster, {level: 0.5}).hazards
    domains = cluster.members(level)
    deadly = {d for d, names in domains.items() if why_not(shares, set(names))}
    assert set(exact.deadly) == deadly
    assert abs(exact.chance - len(deadly) / len(domains)) < 1e-12
    assert exact.per_hour == 0.5 * len(domains)

    down = 0.02
    rate = {"node": -math.log1p(-down), level: 0.5}
    hazard = odds(shares, cluster, rate, 1.0).hazards[-1]
    if level == "node":
        down = -math.expm1(-0.5)
    truth = each = 0.0
    for lost in domains.values():
        touched = [
            s for s in shares if {*s.holders, *([s.owner] if s.own_copy else [])} & set(lost)
        ]
        rest = [node.name for node in cluster.nodes if node.name not in lost]
        for gone in (c for n in range(len(rest) + 1) for c in itertools.combinations(rest, n)):
            chance = down ** len(gone) * (1 - down) ** (len(rest) - len(gone)) / len(domains)
            dead = len(why_not(touched, {*lost, *gone}))
            truth += chance * bool(dead)
            each += chance * dead
    assert truth - 1e-9 <= hazard.chance <= each + 1e-9


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
