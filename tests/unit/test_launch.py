"""Who may install a generation: one launch, and only over the dead.

`decide_install` is judged alone; the race of two launches is played on the real transaction engine
with the product's own `Launches`, one of them installing while the other looks.
"""

import asyncio

import pytest
from ledger_world import KEYS, RS, generation_record
from msgspec import structs

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent import launch as launching
from p2pckpt.agent.context import Home, JobContext, Roster
from p2pckpt.agent.holdings import Holdings
from p2pckpt.agent.installing import Waited, check_call, decide_install, roster_pieces
from p2pckpt.agent.launch import Launches
from p2pckpt.backends.inproc.cluster import FakeCluster
from p2pckpt.config import Config
from p2pckpt.errors import CheckpointError, UsageError
from p2pckpt.ports import Put, TrainerId, Txn
from p2pckpt.wire import pack
from simulations.world import clock

PATIENT = Waited(launch_s=1e9, absent_s={}, grace_s=5.0, holder_s=15.0)


def join(node, ranks, world=4, layout=RS, keep_last=1, takeover=False):
    return r.Join(
        node, f"store-{node}", f"ses-{node}", f"join-{node}", world, tuple(ranks), layout,
        keep_last, takeover,
    )  # fmt: skip


JOINS = [join("a", [0, 1]), join("b", [2, 3])]


def roster(*nodes, number=1):
    entries = tuple(r.RosterNode(n, f"store-{n}", "s", "j", (i,)) for i, n in enumerate(nodes))
    return Roster(generation_record(number, world_size=len(nodes)), entries)


def alive(**ranks):
    return {node: r.LivingTrainers(node, tuple(rs)) for node, rs in ranks.items()}


def waited(launch_s=0.0, grace_s=5.0, holder_s=15.0, **absent_s):
    return Waited(launch_s, absent_s, grace_s, holder_s)


# -- the launch itself -----------------------------------------------------------------------------


def test_a_first_launch_installs_when_all_ranks_are_there():
    assert decide_install(JOINS, None, {}, waited()).install
    for joins in (JOINS[:1], JOINS[1:], [join("a", [])], [join("a", [0, 2, 3])]):
        ruling = decide_install(joins, None, {}, PATIENT)
        assert (ruling.install, ruling.refuse) == (False, False)
        assert "have not joined" in ruling.reason


def test_the_missing_ranks_are_named_and_bounded():
    ruling = decide_install([join("a", [1], world=3)], None, {}, PATIENT)
    assert "[0, 2]" in ruling.reason
    assert len(decide_install([join("a", [0], world=100_000)], None, {}, PATIENT).reason) < 300


@pytest.mark.parametrize("other", [{"world": 5}, {"layout": r.Layout(3, 1)}, {"keep_last": 2}])
def test_ranks_that_disagree_are_named(other):
    with pytest.raises(UsageError, match=r"a .*b "):
        decide_install([join("a", [0, 1]), join("b", [2, 3], **other)], None, {}, PATIENT)


def test_a_rank_on_two_nodes_is_an_error_that_names_both():
    joins = [join("a", [0, 1]), join("b", [1, 2, 3]), join("c", [])]
    with pytest.raises(UsageError, match=r"\[1\].*'a', 'b'"):
        decide_install(joins, None, {}, PATIENT)


def test_a_rank_outside_of_the_world_is_an_error():
    with pytest.raises(UsageError):
        decide_install([join("a", [0, 1, 2, 3, 4])], None, {}, PATIENT)


def test_roster_is_in_order_of_ranks_in_pieces_of_64():
    joins = [join(f"n{i:03d}", [2 * i, 2 * i + 1], world=260) for i in reversed(range(130))]
    pieces = roster_pieces(joins)
    assert [len(p.nodes) for p in pieces] == [64, 64, 2]
    assert [n.ranks[0] for p in pieces for n in p.nodes] == list(range(0, 260, 2))
    assert all(len(pack(p)) <= w.MAX_RECORD_BYTES for p in pieces)


# -- the one before --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reports", "wait", "expected"),
    [
        (alive(a=[], b=[]), waited(), "install"),
        (alive(a=[0], b=[]), waited(launch_s=14.9), "wait"),
        (alive(a=[0], b=[]), waited(launch_s=15.0), "refuse"),
        (alive(a=[], b=[1]), PATIENT, "refuse"),
        (alive(a=[]), waited(), "wait"),
        (alive(a=[]), waited(b=4.9), "wait"),
        (alive(a=[]), waited(b=5.0), "install"),
        (alive(a=[]), waited(a=99.0), "wait"),
        ({}, waited(a=5.0, b=5.0), "install"),
        ({}, waited(a=5.0), "wait"),
        (alive(a=[0]), waited(launch_s=99.0, b=1.0), "refuse"),
        (alive(a=[0], c=[7]), waited(launch_s=1.0, b=99.0), "wait"),
    ],
)
def test_a_launch_takes_the_place_of_the_dead_only(reports, wait, expected):
    ruling = decide_install(JOINS, roster("a", "b"), reports, wait)
    assert ("install" if ruling.install else "refuse" if ruling.refuse else "wait") == expected
    assert not (ruling.install and ruling.refuse)
    if expected == "refuse":
        assert "takeover" in ruling.reason
        assert "generation 1" in ruling.reason


def test_strangers_to_the_old_roster_hold_nothing():
    assert decide_install(JOINS, roster("a"), alive(a=[], z=[9]), waited()).install


def test_takeover_by_any_rank_overrides_the_living_but_not_the_grace_of_the_absent():
    joins = [join("a", [0, 1]), join("b", [2, 3], takeover=True)]
    assert decide_install(joins, roster("a", "b"), alive(a=[0], b=[1]), waited()).install
    ruling = decide_install(joins, roster("a", "b"), alive(a=[0]), waited(b=1.0))
    assert (ruling.install, ruling.refuse) == (False, False)


# -- two launches ----------------------------------------------------------------------------------


def call(rank, world, token):
    return w.TrainerJoin("1000.job", rank, world, token, RS, 1)


def home_of(node, tasks):
    doors = node.doors()
    member = r.Member(node.name, node.name, doors.arena.store_id, f"ses-{node.name}", "", "")

    def spawn(name, work):
        tasks.append(asyncio.create_task(work, name=name))
        return tasks[-1]

    return Home(node.name, Config(), doors, Holdings(doors.arena, doors.ids.new), spawn, member)


async def launcher(node, tasks):
    """A `Launches` on a node, with a session and a mirror that follows."""
    home = home_of(node, tasks)
    home.session = await home.doors.membership.open(home.member, 1e6)
    ctx = JobContext(home, "1000.job")
    home.spawn("follow", ctx.follow())
    return Launches(ctx)


def play(story, names="abc", seed=1):
    async def main():
        cluster, tasks = FakeCluster(seed), []
        nodes = [cluster.node(name, budget_bytes=1 << 20) for name in names]
        try:
            return await story(cluster, *[await launcher(n, tasks) for n in nodes])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    return clock.run(main(), limit_s=3600)


def test_one_launch_on_two_nodes_is_one_generation():
    async def story(cluster, a, b, c):
        one, two = await asyncio.gather(
            a.join(TrainerId(1, 0.0), call(0, 2, "t")), b.join(TrainerId(2, 0.0), call(1, 2, "t"))
        )
        assert one.generation == two.generation
        assert one.generation.number == 1
        await asyncio.sleep(1.0)
        listing = cluster.etcd.list(KEYS.join("t", ""))
        assert not listing.entries, "joins are taken away"
        reports = cluster.etcd.list(KEYS.trainers(1, "")).entries
        assert [w.unpack(e.value, r.LivingTrainers).ranks for e in reports] == [(0,), (1,)]

    play(story)


@pytest.mark.parametrize("seed", range(8))
def test_of_two_launches_at_once_one_wins_and_the_other_is_told(seed):
    async def story(cluster, a, b, c):
        results = await asyncio.gather(
            a.join(TrainerId(1, 0.0), call(0, 1, "one")),
            b.join(TrainerId(2, 0.0), call(0, 1, "two")),
            return_exceptions=True,
        )
        won = [x for x in results if not isinstance(x, Exception)]
        lost = [x for x in results if isinstance(x, CheckpointError)]
        assert (len(won), len(lost)) == (1, 1), results
        assert "takeover" in str(lost[0])

    play(story, seed=seed)


def test_a_launch_that_looked_at_the_old_generation_does_not_replace_the_new_one(monkeypatch):
    # Generation 1 is dead. Launch "two" reads its reports; in that moment launch "one" installs
    # generation 2 (its ranks report a little later) and the mirror of "two" sees it.
    async def story(cluster, a, b, c):
        first = await a.join(TrainerId(1, 0.0), call(0, 1, "zero"))
        await a.trainer_gone(TrainerId(1, 0.0))
        assert first.generation.number == 1
        reports = launching.read_living

        async def slow(ctx, roster):
            found = await reports(ctx, roster)
            if b.ctx.state.generation.number == 1:
                winner = generation_record(2, world_size=1)
                put = Put(KEYS.generation, pack(winner))
                assert cluster.etcd.apply("c", Txn(puts=(put,)))
                assert await b.ctx.until(lambda: b.ctx.state.generation.number == 2, 10.0)
                return found[0], cluster.etcd.revision
            return found

        monkeypatch.setattr(launching, "read_living", slow)
        joining = asyncio.create_task(b.join(TrainerId(2, 0.0), call(0, 1, "two")))
        await asyncio.sleep(2.0)  # of the grace of 5 s that generation 2 has to report
        joining.cancel()
        await asyncio.gather(joining, return_exceptions=True)
        installed = w.unpack(cluster.etcd.get(KEYS.generation).value, r.Generation)
        assert installed.number == 2, f"{installed.run_token} replaced a generation it never judged"

    play(story)


def test_living_trainers_are_reported_even_if_the_first_answer_is_lost():
    async def story(cluster, a, b, c):
        joining = asyncio.create_task(a.join(TrainerId(1, 0.0), call(0, 1, "t")))
        assert await a.ctx.until(lambda: a.ctx.state.generation is not None, 30.0)
        cluster.etcd.ambiguous_next("a")
        launch = await joining
        await asyncio.sleep(30.0)
        assert launch.generation.number == 1
        return cluster.etcd.get(KEYS.trainers(1, "a")) is not None

    assert all(play(story, seed=seed) for seed in range(6))


def test_a_launch_whose_roster_was_swept_writes_it_again():
    # The agent of rank 0 of an older generation sweeps between the roster and the swap.
    swept = []

    async def story(cluster, a, b, c):
        transact = a.ctx.transact

        async def after_a_sweep(txn, **how):
            if not swept and KEYS.generation in [put.key for put in txn.puts]:
                swept.extend(e.key for e in cluster.etcd.list(KEYS.root + "roster/").entries)
                cluster.etcd.apply("b", Txn(deletes=tuple(swept)))
            return await transact(txn, **how)

        a.ctx.transact = after_a_sweep
        launch = await a.join(TrainerId(1, 0.0), call(0, 1, "t"))
        assert launch.generation.number == 1
        assert [e.key for e in cluster.etcd.list(KEYS.root + "roster/").entries] == swept
        assert len(swept) == launch.generation.pieces == 1

    play(story)


@pytest.mark.parametrize(
    "wrong",
    [{"rank": -1}, {"rank": 2}, {"keep_last": 0}, {"keep_last": -1},
     {"keep_last": r.MAX_KEEP_LAST + 1}, *({"run_token": t} for t in
     ("", "exp/7", "../x", "a b", "a\n", "\u00e4", "x" * 65, "a\0"))],
    ids=str,
)  # fmt: skip
def test_a_join_that_cannot_be_meant_is_a_usage_error(wrong):
    right = call(0, 2, "exp-7_a.0")
    check_call(right)
    check_call(structs.replace(right, keep_last=r.MAX_KEEP_LAST, run_token="x" * 64))
    with pytest.raises(UsageError):
        check_call(structs.replace(right, **wrong))


def test_a_rank_that_died_before_the_install_is_not_installed():
    async def story(cluster, a, b, c):
        dead = TrainerId(1, 0.0)
        forming = asyncio.create_task(a.join(dead, call(0, 2, "t")))
        async with asyncio.timeout(30):
            while cluster.etcd.get(KEYS.join("t", "a")) is None:
                await asyncio.sleep(0.01)
        forming.cancel()
        await asyncio.gather(forming, return_exceptions=True)
        await a.trainer_gone(dead)
        late = asyncio.create_task(b.join(TrainerId(2, 0.0), call(1, 2, "t")))
        await asyncio.sleep(20.0)
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        assert cluster.etcd.get(KEYS.generation) is None

    play(story)
