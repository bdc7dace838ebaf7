"""Simulator, placement and agents say the same of every loss, with twelve real agents.

Twelve nodes in four racks, an agent, a UCX mover and a rank on each, rs:2,1, an etcd. One step is
committed; a real agent is asked for it, and tells the records of the ledger and what each agent
answered over gRPC that it holds. From that, with the answers of the lost ones left out, `locate`
decides as it does in a restore, for all 66 pairs and 200 random triples: it must be what
`topology.survives` says of the recorded placement, and what the simulator's own table says of the
placement that it works out from the labels alone. That leaving answers out is what a loss looks
like is shown with SIGSTOP; some sets are killed for good and restored.
"""

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from itertools import combinations
from pathlib import Path
from random import Random

import pytest
from kill_rig import PATIENCE_S, ROOT, Cluster, Job, until
from test_kill_sets import key_of, kill

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.jobstate import JobState
from p2pckpt.restore.locate import Facts, unprovable
from simulations.study.schemes import parse, pieces
from topology import Cluster as Places
from topology import Node as Place
from topology.survive import Share, survives

NODES, RACKS, LAYOUT, K, M = 12, 4, "rs:2,1", 2, 1
TRIPLES, SEED = 200, 4


@pytest.fixture(scope="module")
def cluster():
    place = Path(tempfile.mkdtemp(prefix="losses-"))
    try:
        with Cluster(place, NODES, budget_mib=64, racks=RACKS) as cluster:
            yield cluster
    finally:
        shutil.rmtree(place)


VISITOR = """
import sys
from p2pckpt import wire as w
from p2pckpt.backends.agent_link import AgentLink
for line in sys.stdin:
    socket, job = line.split()
    with AgentLink([socket]) as link:
        print(w.pack(link.call(w.StepQuery(job), 60.0)).hex(), flush=True)
"""


class Visitor:
    """A process that asks agents for steps; while it lives they keep the steps for it, so that
    soon no save finds room: one a step."""

    def __enter__(self):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, "-c", VISITOR], cwd=ROOT, **pipes)
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait(PATIENCE_S)
        self.process.stdin.close()
        self.process.stdout.close()

    def ask(self, node, job):
        """What a real agent knows of the newest step: records, and who says that it holds what."""
        self.process.stdin.write(f"{node.socket} {key_of(job)}\n".encode())
        self.process.stdin.flush()
        assert select.select([self.process.stdout], [], [], PATIENCE_S)[0], job.cluster.story()
        return w.unpack(bytes.fromhex(self.process.stdout.readline().decode()), w.StepReply)

    def full(self, job):
        """The agents' answers when nothing is missing."""

        def whole():
            told = self.ask(job.nodes[0], job)
            held = Counter(f.kind for reply in told.held.values() for f in reply.files)
            full = {r.FileKind.SLOT: NODES, r.FileKind.SHARD: NODES * (K + M)}
            return told if len(told.held) == NODES and held == full else None

        return until(whole, job.cluster.story)


def committed(job):
    """Start, save a step; what an agent says of it."""
    job.launch()
    job.commit()
    with Visitor() as visitor:
        return visitor.full(job)


def found_by_locate(told, lost):
    """Can the step be proven without these?"""
    commit = told.commit
    left = {name: reply for name, reply in told.held.items() if name not in lost}
    facts = Facts(JobState(r.JobKeys(told.job)), left, (), {commit.attempt.key: told.groups}, False)
    return not unprovable(commit, facts)


def recorded(told):
    """The placement, as the ledger has it."""
    names = {member.store_id: member.node for member in told.members}
    return [
        Share(share.node, tuple(names[h] for h in share.holders), K)
        for group in told.groups
        for share in group.shares
    ]


def simulated(cluster):
    """The placement that the simulator works out, from names and racks alone."""
    nodes = tuple(Place(n.name, f"host-{n.name}", (("rack", n.rack),)) for n in cluster.nodes)
    places = Places(nodes, ("rack",))
    return [node.name for node in places.nodes], pieces(places, parse(LAYOUT))


def sets():
    """All pairs, and 200 of the 220 triples."""
    triples = list(combinations(range(NODES), 3))
    return [*combinations(range(NODES), 2), *Random(SEED).sample(triples, TRIPLES)]


def test_every_loss_is_judged_alike(cluster):
    with Job(cluster, "judged", cluster.nodes[:], 1, LAYOUT) as job:
        told = committed(job)
        shares, (names, table) = recorded(told), simulated(cluster)
        rows = {share.owner: share.holders for share in shares}
        assert rows == {names[i]: tuple(names[j] for j in row) for i, row in enumerate(table.rows)}
        verdicts = Counter()
        for chosen in sets():
            lost = {names[i] for i in chosen}
            promised = all(survives(share, lost) for share in shares)
            assert found_by_locate(told, lost) == promised, lost
            assert table.lost({*chosen}) == (not promised), lost
            verdicts[len(chosen), promised] += 1
        assert verdicts[2, True] == 66
        assert verdicts[3, True] + verdicts[3, False] == TRIPLES
        assert min(verdicts[3, True], verdicts[3, False]) > 10
        print(f"\n  {dict(verdicts)}")


def test_a_loss_is_that_answers_are_missing(cluster):
    """Nodes stand still; the agent that asks gets the answers of all others, and no more."""
    chance = Random(SEED)
    with Job(cluster, "stopped", cluster.nodes[:], 1, LAYOUT) as job:
        job.launch()
        for _ in range(3):
            job.commit_soon()
            with Visitor() as visitor:
                told = visitor.full(job)
                lost = chance.sample(cluster.nodes[1:], 3)
                for node in lost:
                    os.kill(node.agent.pid, signal.SIGSTOP)
                try:
                    seen = visitor.ask(cluster.nodes[0], job)
                finally:
                    for node in lost:
                        os.kill(node.agent.pid, signal.SIGCONT)
            names = {node.name for node in lost}
            assert set(seen.held) == set(told.held) - names
            promised = all(survives(share, names) for share in recorded(told))
            assert found_by_locate(seen, ()) == found_by_locate(told, names) == promised
            until(cluster.settled, cluster.story)


def lose(cluster, number, wanted, chance):
    """Kill a pair or triple that the placement survives, or a triple that it does not."""
    with Job(cluster, f"lost-{number}", cluster.nodes[:], 1, LAYOUT) as job:
        told = committed(job)
        shares, names = recorded(told), sorted(n.name for n in cluster.nodes)
        count = 2 if wanted and number % 4 == 0 else 3
        ends = {
            lost: all(survives(share, {*lost}) for share in shares)
            for lost in combinations(names, count)
        }
        lost = chance.choice([lost for lost, good in ends.items() if good == wanted])
        assert found_by_locate(told, lost) == wanted
        doomed = {share.owner for share in shares if not survives(share, {*lost})}
        kill(job, lost)
        if wanted:
            assert job.launch() == 1
            return
        for answer in job.refused():
            named = re.findall(r"ranks \[\d+\] of (\w+): own copy gone, (\d) of 3", answer)
            assert {owner for owner, _ in named} == doomed, (answer, doomed)
            assert all(int(left) < K for _, left in named)


@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_and_so_it_is_when_nodes_are_killed(cluster, rounds):
    chance = Random(f"{SEED} {rounds}")
    for number in range(rounds):
        lose(cluster, 100 * rounds + number, number % 2 == 0, chance)
