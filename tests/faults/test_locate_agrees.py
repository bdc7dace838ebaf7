"""What placement promises and what a restore finds are the same thing, for every loss.

Nine nodes in three racks, rs:4,2, one committed step. For all 84 triples and 126 quadruples of
lost nodes, `topology.survive` on the recorded placement and `restore.locate` on what the other
nodes say they hold must give the same answer; ten of each are then killed for real.
"""

from itertools import combinations
from random import Random

import pytest
from stage import JOB, play

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.errors import CheckpointError
from p2pckpt.restore.locate import Facts, unprovable
from topology.survive import Share, survives

NODES = [f"n{i}" for i in range(9)]


async def committed(stage):
    for i, name in enumerate(NODES):
        stage.add(name, domains={"rack": f"r{i % 3}"})
    launch = await stage.launch(*NODES)
    await launch.saved(1)
    launch.kill()
    return launch


def answers(stage):
    query = w.HeldQuery(JOB)
    return {name: stage.agents[name].serving.held(query) for name in NODES}


def records(stage):
    state = stage.state()
    (commit,) = state.commits.values()
    entries = stage.etcd.list(r.JobKeys(JOB).groups_of(commit.attempt)).entries
    return state, commit, [w.unpack(e.value, r.GroupRecord) for e in entries]


def placed(stage, groups, k):
    stores = {stage.nodes[name].store.store_id: name for name in NODES}
    return [
        Share(share.node, tuple(stores[h] for h in share.holders), k)
        for group in groups
        for share in group.shares
    ]


@pytest.mark.parametrize(("count", "losses", "both"), [(3, 84, False), (4, 126, True)])
def test_every_loss_is_judged_alike(count, losses, both):
    async def story(stage):
        await committed(stage)
        state, commit, groups = records(stage)
        held, shares = answers(stage), placed(stage, groups, commit.layout.k)
        verdicts = []
        for lost in combinations(NODES, count):
            left = {name: reply for name, reply in held.items() if name not in lost}
            facts = Facts(state, left, (), {commit.attempt.key: groups}, False)
            found = not unprovable(commit, facts)
            promised = all(survives(share, set(lost)) for share in shares)
            assert found == promised, (lost, unprovable(commit, facts))
            verdicts.append(found)
        assert len(verdicts) == losses
        assert set(verdicts) == ({True, False} if both else {True})

    play(story, nodes=0, layout="rs:4,2", spread="rack", budget_bytes=1 << 25)


@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("seed", range(10))
def test_and_so_it_is_when_nodes_are_killed(count, seed):
    lost = Random(f"{count} {seed}").sample(NODES, count)

    async def story(stage):
        await committed(stage)
        _, commit, groups = records(stage)
        shares = placed(stage, groups, commit.layout.k)
        promised = all(survives(share, set(lost)) for share in shares)
        stage.crash(*lost)
        for i, name in enumerate(lost):
            stage.add(f"m{i}", domains={"rack": f"r{NODES.index(name) % 3}"})
        living = [name for name in NODES if name not in lost]
        launch = await stage.launch(*living, *(f"m{i}" for i in range(count)))
        if promised:
            assert await launch.restore() == 1
        else:
            with pytest.raises(CheckpointError, match="needs 4"):
                await launch.restore()

    play(story, nodes=0, layout="rs:4,2", spread="rack", budget_bytes=1 << 25, decide_wait_s=1.0)
