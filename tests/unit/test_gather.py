"""Pieces that nodes hand in: what belongs together, and what must not meet."""

import pytest
from ledger_world import LEDGER, attempt, share

from p2pckpt import records as r
from p2pckpt.agent.gather import Gathering, topic
from p2pckpt.errors import Refused
from p2pckpt.wire import HandIn

GROUP = tuple(r.RosterNode(n, f"store-{n}", "s", "j", (i,)) for i, n in enumerate(("n0", "n1")))


def piece(node, ledger=LEDGER, holders=("s1",)):
    of = attempt(2, 15, ledger=ledger)
    sealed = share(node, (0,), holders)
    return HandIn("1000.job", ledger, node, of.generation, share=sealed, attempt=of)


def test_all_pieces_of_a_group_in_roster_order():
    gathering = Gathering()
    gathering.take(piece("n1"))
    assert gathering.complete(topic(piece("n1")), GROUP) is None
    gathering.take(piece("n0"))
    found = gathering.complete(topic(piece("n1")), GROUP)
    assert [one.node for one in found] == ["n0", "n1"]


def test_a_node_has_one_piece():
    gathering = Gathering()
    gathering.take(piece("n0"))
    gathering.take(piece("n0"))
    with pytest.raises(Refused, match="two different pieces"):
        gathering.take(piece("n0", holders=("s2",)))


def test_pieces_of_two_ledgers_never_meet():
    """Seed 739. A job was cleaned and counts anew, so an attempt has the key of one that was handed
    in before. A record of both would commit a step with bytes that were never sent."""
    gathering = Gathering()
    gathering.take(piece("n0", ledger="2" * 32))
    gathering.take(piece("n1"))
    assert gathering.complete(topic(piece("n1")), GROUP) is None
    old = HandIn("1000.job", "2" * 32, "n0", 1, report=r.NodeReport("n0", (0,)), ballot=1)
    new = HandIn("1000.job", LEDGER, "n1", 1, report=r.NodeReport("n1", (1,)), ballot=1)
    gathering.take(old)
    gathering.take(new)
    assert gathering.complete(topic(new), GROUP) is None
