"""A large cluster in the deterministic world: saves, a rack that is lost, a repair, a restart.

All agents are the product's, all checkers look on. The same story is told with 48 nodes, in
seconds, and with 1,250, in minutes (slow): what is quadratic in the nodes shows there, as time or
as memory. On the command line it is

    p2pckpt simulate world --seed 16 --nodes 1250 --racks 313 --ranks 1250 --jobs 1 --layout rs:8,2
        --saves 3 --every 20 --keep-last 1 --offload-every 0 --fault rack_lost
"""

import resource
import time

import pytest

from p2pckpt.backends.inproc.net import true_time
from simulations.world import clock
from simulations.world.story import Options, World

CPU_S = 600.0
"""Twice what it takes: more is no slow machine, but something that grows with the square."""

MEMORY_BYTES = 16 * 2**30


class Witness:
    """Sees the first step being repaired, and what there is of it when the second commits."""

    def __init__(self, world):
        self.checkers = world.checkers[0]
        self.lost_at = 0.0
        self.lost, self.repaired, self.first, self.then = [], [], None, None
        world.cluster.log.listeners.append(self.heard)

    def heard(self, who, what, facts):
        if what == "fault":
            self.lost_at = true_time()
        elif what == "fault.ram.wipe":
            self.lost.append(who)
        elif what == "note.repaired":
            self.repaired.append((true_time(), facts))
        elif what == "ledger.write" and self.checkers.commits == 1:
            self.first = self.checkers.tip
        elif what == "ledger.write" and self.checkers.commits == 2 and self.then is None:
            self.then = self.checkers.find(self.first)


def is_whole(found):
    """All own copies on one node and every shard on another. (After the restart there are two such
    nodes for most shares, and `Found.full` takes the first.)"""
    every = range(found.layout.shards)
    return any(all(set(found.shards.get(i, ())) - {node} for i in every) for node in found.owners)


@pytest.mark.parametrize(
    ("nodes", "racks"), [(48, 12), pytest.param(1250, 313, marks=pytest.mark.slow)]
)
def test_a_rack_is_lost_and_every_share_becomes_whole_again(nodes, racks, capsys):
    options = Options(
        seed=16,
        nodes=nodes,
        racks=racks,
        layout="rs:8,2",
        ranks=nodes,
        saves=3,
        quiet_saves=1,
        every=20,
        faults=("rack_lost",),
    )
    world = World(options)
    witness, began_s = Witness(world), time.process_time()
    clock.run(world.main(), limit_s=options.limit_s, limit_turns=options.turns)
    took_s = time.process_time() - began_s

    assert [what for checkers in world.checkers for what in checkers.objections] == []
    assert (world.result.end, world.result.faults) == ("ok", {"rack_lost": 1})
    assert world.result.commits == world.result.due == 3
    assert len(witness.lost) == 4
    assert witness.first.at_s < witness.lost_at

    # The step that stood had lost four own copies, and shards of many more shares. When the next
    # one committed nothing of it was missing any more: neither where it lay, nor anywhere.
    assert len(witness.repaired) > 4 * 8
    assert all(facts["unplaced"] == 0 for _, facts in witness.repaired)
    assert len(witness.then) == nodes
    assert [found.share.node for found in witness.then if not is_whole(found)] == []
    assert not {n for found in witness.then for n in found.owners} & set(witness.lost)
    # And the job went on from it, on all ranks.
    assert sum(n for source, n in world.result.restores.items() if source != "nothing") == nodes

    used_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with capsys.disabled():
        healed_s = witness.repaired[-1][0] - witness.lost_at
        print(
            f"\n{nodes} nodes: {took_s:.0f} s of CPU, {used_bytes / 2**30:.1f} GiB; "
            f"{len(witness.repaired)} shares whole {healed_s:.1f} s after the loss"
        )
    assert took_s < CPU_S
    assert used_bytes < MEMORY_BYTES
