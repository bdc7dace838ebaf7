"""The odds of a loss: closed forms, published checks, and what is refused."""

import math
import random

import pytest
from test_topology import racks

from topology import Cluster, Level, Node, Policy, Rules, Share, TopologyError, odds, place_all

HOURS = 8766.0
N = 1250
RATES = {  # per domain and hour: MTBF 12 h over all nodes, racks by Ford, the others assumed
    "node": 1 / (12 * N),
    "rack": 1 / (10.2 * HOURS),
    "leaf": 1 / (20 * HOURS),
    "power": 1 / (10 * HOURS),
}
TRIALS = 8


def shuffled(seed):
    """1,250 nodes at random in racks of 4, leafs of 32, power domains of 125."""
    seats = list(range(N))
    random.Random(seed).shuffle(seats)
    return Cluster(
        tuple(
            Node(
                f"n{i}",
                f"n{i}",
                {"rack": f"{p // 4}", "leaf": f"{p // 32}", "power": f"{p // 125}"},
            )
            for i, p in enumerate(seats)
        ),
        ("rack", "leaf", "power"),
    )


def groups(size, k):
    """Groups of ``size`` without own copies, which may lose ``size - k``; the last is smaller."""
    names = [[f"n{i}" for i in range(a, min(a + size, N))] for a in range(0, N, size)]
    lost = size - k
    return [Share(g[0], tuple(g), max(1, len(g) - lost), own_copy=False) for g in names]


def averages(make):
    """Mean chance by level, and fraction recovered from peers, over random clusters."""
    sums = {}
    for seed in range(TRIALS):
        found = make(shuffled(seed))
        for key, value in (*((h.level, h.chance) for h in found.hazards), ("", found.from_peers)):
            sums[key] = sums.get(key, 0.0) + value / TRIALS
    return sums


@pytest.mark.parametrize(
    ("size", "k", "published", "sigma"),
    [
        (2, 1, 0.99765, 9e-5),
        (3, 1, 0.99955, 7e-5),
        (8, 7, 0.99503, 9e-5),
        (10, 8, 0.99822, 6e-5),
        (12, 8, 0.99954, 7e-5),
    ],
)
def test_fraction_from_peers_is_the_published_one(size, k, published, sigma):
    """PC-25: copies in pairs and triples, XOR of 8, RS(8,2), RS(8,4), within 3 standard errors."""
    shares = groups(size, k)
    mean = averages(lambda cluster: odds(shares, cluster, RATES))[""]
    assert abs(mean - published) < 3 * sigma


def test_random_pairs_die_with_a_domain_as_the_closed_form_says():
    """PC-23: 1 - prod_{i<s} (N-s-i)/(N-1-2i) for s nodes; the product's own group policy."""
    rules = Rules(1, 0)

    def make(cluster):
        placed = place_all(cluster, rules, policy=Policy("group"))
        return odds([Share(o, p.nodes, 1) for o, p in placed.items()], cluster, RATES)

    mean = averages(make)
    for level, size, domains in (("rack", 4, 312), ("leaf", 32, 39), ("power", 125, 10)):
        live = math.prod((N - size - i) / (N - 1 - 2 * i) for i in range(min(size, N // 2)))
        closed = 1 - live
        error = math.sqrt(closed * (1 - closed) / (TRIALS * domains))
        assert abs(mean[level] - closed) < 3 * error + 1e-3
    assert mean["node"] == 0


def test_closed_form_values_of_pc_23():
    for size, published in ((2, 0.0008), (4, 0.0048), (8, 0.0223), (16, 0.0926), (32, 0.334)):
        live = math.prod((N - size - i) / (N - 1 - 2 * i) for i in range(size))
        assert abs(1 - live - published) < 6e-4


def test_domains_that_kill_are_named_and_rates_add_up():
    cluster = racks(2, 2, 2)
    shares = [Share("n00", ("n01",), 1), Share("n10", ("n20",), 1)]
    found = odds(shares, cluster, {"node": 1e-3, "rack": 1e-4})
    node, rack = found.hazards
    assert (node.chance, node.deadly, node.domains) == (0.0, (), 6)
    assert rack.deadly == ("r0",)
    assert rack.chance == pytest.approx(1 / 3)
    assert rack.per_hour == pytest.approx(3e-4)
    assert found.losses_per_hour == pytest.approx(1e-4)
    assert found.from_peers == pytest.approx(1 - 1e-4 / 6.3e-3)
    assert found.loss_within(1000) == pytest.approx(1 - math.exp(-0.1))


def test_a_window_counts_who_is_not_yet_replaced():
    """A pair: the partner is down with p = 1 - exp(-rate * window)."""
    cluster = racks(1, 1, 1)
    pair = [Share("n00", ("n10",), 1)]
    down = 1 - math.exp(-1e-2 * 0.5)
    (node,) = odds(pair, cluster, {"node": 1e-2}, window_h=0.5).hazards
    assert node.chance == pytest.approx(2 * down / 3)
    triple = [Share("n00", ("n10", "n20"), 1)]
    (node,) = odds(triple, cluster, {"node": 1e-2}, window_h=0.5).hazards
    assert node.chance == pytest.approx(3 * down**2 / 3)


def test_no_rates_no_loss():
    shares = [Share("n00", ("n10",), 1)]
    for rates in ({}, {"rack": 0.0}):
        found = odds(shares, racks(1, 1), rates)
        assert found.from_peers == 1.0
        assert found.loss_within(1e9) == 0.0


def test_domain_aware_placement_makes_domain_losses_harmless():
    cluster = racks(4, 4, 4, 4)
    placed = place_all(cluster, Rules(2, 2, (Level("rack"),)))
    shares = [Share(o, p.nodes, 2) for o, p in placed.items()]
    assert odds(shares, cluster, {"node": 1.0, "rack": 1.0}).losses_per_hour == 0


def test_unlabelled_nodes_count_as_one_domain():
    cluster = Cluster(tuple(Node(n, n) for n in "abc"))
    (rack,) = odds([Share("a", ("b",), 1)], cluster, {"rack": 1.0}).hazards
    assert (rack.domains, rack.deadly, rack.chance) == (1, (None,), 1.0)


@pytest.mark.parametrize(
    ("rates", "window", "says"),
    [
        ({"node": -1.0}, 0.0, "node: needs a rate"),
        ({"node": math.nan}, 0.0, "node: needs a rate"),
        ({"node": 1.0}, math.inf, "window_h: needs a rate or time"),
        ({"row": 1.0}, 0.0, "level 'row' is unknown"),
    ],
)
def test_wrong_rates_are_refused(rates, window, says):
    with pytest.raises(TopologyError) as caught:
        odds([Share("n00", ("n10",), 1)], racks(1, 1), rates, window)
    assert says in str(caught.value)


def test_a_share_that_is_lost_has_no_odds():
    with pytest.raises(TopologyError, match="share of n00 is lost already"):
        odds([Share("n00", ("n10",), 2, own_copy=False)], racks(1, 1), {"node": 1.0})
