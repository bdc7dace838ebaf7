"""Who holds a shard whose holder failed: judged together with those that hold the others."""

from itertools import combinations

import pytest

from p2pckpt import records as r
from p2pckpt.save.send import crew_of, substitute

RACKS = 4
NODES = [f"n{i}" for i in range(12)]  # n0, n4, n8 in rack 0, and so on


def member(name, draining=False):
    return r.Member(
        node=name,
        host=name,
        store_id=name * 4,
        session=name,
        peers_address="",
        transport_address="",
        domains={"rack": str(rack(name))},
        draining=draining,
    )


def rack(name):
    return int(name[1:]) % RACKS


def crew(required=False, without=(), layout="rs:2,1", draining=()):
    members = {n: member(n, n in draining) for n in NODES if n not in without}
    return crew_of(members, members["n0"], r.Layout.parse(layout), (("rack", required),))


@pytest.mark.parametrize("owner", NODES)
def test_no_rack_gets_a_second_shard_as_long_as_another_has_none(owner):
    found = crew()
    for used in combinations([n for n in NODES if n != owner], 2):
        if rack(used[0]) == rack(used[1]):
            continue
        node = substitute(found, owner, set(used), set())
        free = set(range(RACKS)) - {rack(n) for n in used}
        assert rack(node) in free, (owner, used, node)
        if free - {rack(owner)}:
            assert rack(node) != rack(owner), "the owner's own rack comes last"


def test_a_failed_holder_is_not_asked_again_and_takes_no_place():
    node = substitute(crew(), "n0", {"n1", "n2", "n3"}, {"n1"})
    assert node in ("n5", "n9"), "the rack of the failed one is free"


def test_a_rule_that_is_required_is_not_broken():
    racks = {n for n in NODES if rack(n) == 3}
    assert rack(substitute(crew(False, racks), "n0", {"n1", "n2", "n4"}, set())) in (0, 1, 2)
    assert substitute(crew(True, racks), "n0", {"n1", "n2", "n4"}, set()) is None


def test_who_is_drained_gets_nothing():
    assert substitute(crew(draining=("n1", "n5", "n9")), "n0", {"n2", "n3"}, set()) in ("n4", "n8")
