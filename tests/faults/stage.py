"""A stage for fault stories: real agents on a fake cluster, ranks that save and restore.

A story is a coroutine that gets a Stage: start nodes, launch ranks, break something, look at what
holds. Each deed is one line: `launch.save(5)`, `stage.crash("n1")`, `launch.restore()`.

Contract: `restored` bytes are always compared with what that rank saved at that step, and one step
for all ranks. `play` fails the story if the product crashed anywhere, or if the ledger's history
breaks a rule that no fault may break: one outcome an attempt, a lineage that never goes back.
A rank does what `p2pckpt.checkpointer` does, call by call.
"""

import asyncio
import json
from dataclasses import dataclass, replace
from random import Random

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.daemon import Agent
from p2pckpt.backends.inproc.cluster import FakeCluster
from p2pckpt.coding.checksum import verify_chunks
from p2pckpt.config import Config
from p2pckpt.errors import AgentUnreachable, CheckpointError, IntegrityError, NotSeated, SaveAborted
from p2pckpt.jobstate import JobState
from p2pckpt.save.encode import encode_rank
from p2pckpt.traffic import Traffic
from p2pckpt.wire import unpack
from simulations.world import clock

JOB = r.Job(owner_uid=1000, name="train").key
CHUNK = 1024
COMMIT, ABORT = r.Verdict.COMMIT, r.Verdict.ABORT


def content(rank, step, job=JOB):
    """The snapshot of a rank: of a length that fits no chunk, other bytes for every job."""
    return Random(f"{job} {rank} {step}").randbytes(9000 + 37 * rank + step % 13)


def play(story, *, seed=1, nodes=5, layout="rs:2,1", limit_s=3600.0, **settings):
    """Run `story(stage)` under virtual time and check the history; its stage."""
    held = []

    async def main():
        stage = Stage(seed, layout, settings)
        held.append(stage)
        for i in range(nodes):
            stage.add(f"n{i}")
        await story(stage)

    try:
        clock.run(main(), limit_s=limit_s)
    except BaseException as e:
        e.add_note(f"seed {seed}, {nodes} nodes, {layout}, {settings}")
        raise
    held[0].check_history()
    return held[0]


def now():
    return asyncio.get_running_loop().time()


async def until(ready, timeout_s=120.0, every_s=0.05):
    """Wait for something that a story looks at from outside."""
    deadline = now() + timeout_s
    while not ready():
        assert now() < deadline, "what the story waits for did not happen"
        await asyncio.sleep(every_s)


class Heard(list):
    """The events of a log; the story may act right after one, before the next message arrives."""

    def __init__(self):
        super().__init__()
        self.traps = []

    def append(self, event):
        super().append(event)
        _, who, what, facts = event
        for trap in list(self.traps):
            if trap in self.traps and trap[0](who, what, facts):
                self.traps.remove(trap)
                asyncio.get_running_loop().call_later(1e-5, trap[1])


class ToldLedger:
    """A ledger door that tells of a transaction before it is sent, and may have to hold it."""

    def __init__(self, door, tell):
        self._door, self._tell = door, tell

    def __getattr__(self, name):
        return getattr(self._door, name)

    async def transact(self, txn):
        for gate in self._tell(txn):
            await gate.wait()
        return await self._door.transact(txn)


class StoppedEncoder:
    """A node's workers, which encode a snapshot when its gate is opened, and not before."""

    def __init__(self, workers):
        self.workers, self.gates = workers, {}

    async def run(self, work, cost_bytes, traffic=Traffic.RESTORE):
        if getattr(work, "func", None) is encode_rank:
            _, image, *_ = work.args
            gate = self.gates[bytes(image)] = asyncio.Event()
            await gate.wait()
        return await self.workers.run(work, cost_bytes, traffic)


class Stage:
    """The cluster, its agents, and the deeds of a story."""

    def __init__(self, seed, layout, settings):
        budget = settings.pop("budget_bytes", 1 << 24)
        speed = settings.pop("bytes_per_s", 50e6)
        self.layout, self.budget_bytes, self.seed = layout, budget, seed
        self.config = Config(chunk_bytes=CHUNK, slot_round_bytes=4096, **settings)
        self.cluster = FakeCluster(seed, bytes_per_s=speed, piece_bytes=64 * 1024)
        self.heard = self.cluster.log.events = Heard()
        self.etcd, self.net = self.cluster.etcd, self.cluster.net
        self.agents, self.tasks, self.launches = {}, {}, 0
        self.before_txn = []

    # -- nodes ------------------------------------------------------------------------------------

    @property
    def nodes(self):
        return self.cluster.nodes

    def add(self, name, budget_bytes=0, **labels):
        """A new machine with a running agent."""
        self.cluster.node(name, **labels, budget_bytes=budget_bytes or self.budget_bytes)
        self.start(name)

    def start(self, name):
        """Start the agent of a machine, on the memory that it has."""
        node = self.nodes[name]
        doors = node.doors()

        def tell(txn):
            gates = [listener(name, txn) for listener in list(self.before_txn)]
            return [gate for gate in gates if gate is not None]

        doors = replace(doors, ledger=ToldLedger(doors.ledger, tell))
        member = r.Member(name, node.host, doors.arena.store_id, "", "", "", node.domains)
        self.agents[name] = agent = Agent(self.config, doors, member)
        self.tasks[name] = asyncio.create_task(agent.run(), name=f"agent {name}")

    def crash(self, *names, keep_memory=False):
        """Machines are lost with all they hold; or, with `keep_memory`, only the agents die."""
        for name in names:
            self.nodes[name].crash(keep_memory=keep_memory)
            self.tasks.pop(name).cancel()
            del self.agents[name]

    def restart(self, name):
        """The agent process is killed and started again at once."""
        self.crash(name, keep_memory=True)
        self.start(name)

    def cut_off(self, name):
        """No peer and no ledger for this node, until `cluster.heal()`."""
        self.cluster.isolate(name)
        self.cluster.cut_from_ledger(name)

    def at(self, what, do, who=None, **facts):
        """Do something at the moment of the next event like this."""

        def matches(by, name, found):
            told = name == what and who in (None, by)
            return told and all(found.get(k) == v for k, v in facts.items())

        self.heard.traps.append((matches, do))

    def before_commit(self, node, do, prefix="state/commit/"):
        """Do something when a node is about to send a COMMIT (or another record), once; if it
        returns an event, the transaction waits for that."""

        def listen(name, txn):
            if name == node and any(
                p.key.startswith(r.JobKeys(JOB).root + prefix) for p in txn.puts
            ):
                self.before_txn.remove(listen)
                return do()
            return None

        self.before_txn.append(listen)

    def hold_commit(self, node):
        """The node's next COMMIT stays on its way until the event is set."""
        gate = asyncio.Event()
        self.before_commit(node, lambda: gate)
        return gate

    def doors_of(self, name, **doors):
        """Other doors for a running agent."""
        home = self.agents[name].home
        home.doors = replace(home.doors, **doors)

    def stop_encoder(self, name):
        """A node encodes nothing from now on: see StoppedEncoder."""
        stopped = StoppedEncoder(self.agents[name].home.doors.workers)
        self.doors_of(name, workers=stopped)
        return stopped

    def fill(self, *names):
        """Somebody else takes what is left of a node's budget."""
        for name in names:
            store, node = self.nodes[name].store, self.nodes[name]
            used = sum(len(held) for held in store.files.values())
            store.files["ballast"] = bytearray(node.budget_bytes - used)

    # -- what is seen from outside ----------------------------------------------------------------

    def state(self, job=JOB):
        """The job's records as the ledger has them now."""
        keys = r.JobKeys(job)
        return JobState.listed(keys, self.etcd.list(keys.state))

    def events(self, what, who=None):
        """The facts of all events of a kind."""
        return [f for _, by, name, f in self.heard if name == what and who in (None, by)]

    def committed(self, job=JOB):
        """Every step that was ever committed, in order."""
        changes = self.etcd.changes(r.JobKeys(job).commits, 0)
        return [unpack(c.value, r.Commit).attempt.step for c in changes if c.value is not None]

    def held(self, kind=None, step=None, job=JOB):
        """(node, file) of all WHOLE files of a job, from the agents' tables."""
        return [
            (name, held)
            for name, agent in sorted(self.agents.items())
            for held in agent.home.holdings.of_job(job)
            if held.whole and kind in (None, held.kind) and step in (None, held.attempt.step)
        ]

    def holders(self, owner, step, job=JOB):
        """Node by shard index of one owner's share."""
        shards = self.held(r.FileKind.SHARD, step, job)
        return {held.part: name for name, held in shards if held.owner == owner}

    async def status(self, name, job=JOB):
        """One job in a node's status document."""
        reply = await self.nodes[name].trainer().call(w.StatusQuery())
        return json.loads(reply.document)["jobs"][job]

    async def rebuild(self, name, job=JOB):
        return await self.nodes[name].trainer().call(w.RebuildCall(job))

    def check_history(self):
        """What no fault may break."""
        for what in ("note.crash", "trainer.handler_failed"):
            assert not self.events(what), f"seed {self.seed}: {self.events(what)[:3]}"
        outcomes, newest = {}, {}
        for change in self.etcd.changes("p2pckpt/jobs/", 0):
            if change.value is None:
                continue
            if "/state/outcome/" in change.key:
                of = unpack(change.value, r.Outcome).attempt  # a cleaned job counts anew
                known = outcomes.setdefault(of, change.value)
                assert known == change.value, f"seed {self.seed}: two outcomes: {change.key}"
            elif "/state/commit/" in change.key and "rebuilt" not in self._kinds():
                lineage, step = change.key.rsplit("/", 2)[1:]
                assert int(step) > newest.get(lineage, -1), f"{lineage} went back to {step}"
                newest[lineage] = int(step)

    def _kinds(self):
        return {"rebuilt"} if self.events("note.rebuilt") else set()

    # -- ranks ------------------------------------------------------------------------------------

    async def launch(self, *names, **options):
        """One rank on each of these nodes, in this order; joined."""
        launch = self.form(*names, **options)
        await launch.join()
        return launch

    def form(self, *names, job=JOB, token="", world=0, ranks=None, **options):
        """The same, not joined yet: a subset of `ranks` if only some come."""
        self.launches += 1
        launch = Launch(self, job, token or f"launch-{self.launches}", world or len(names), options)
        launch.ranks = [
            Rank(launch, self.nodes[name].trainer(), rank, name)
            for rank, name in zip(ranks or range(len(names)), names, strict=True)
        ]
        return launch


@dataclass
class Rank:
    """A training process."""

    launch: "Launch"
    trainer: object
    rank: int
    node: str
    restores: int = 0
    nonce: str = ""

    async def call(self, request):
        """Ask the agent; after it was restarted, take the seat there first."""
        try:
            return await self.trainer.call(request)
        except NotSeated:
            generation = self.launch.generation
            await self.trainer.call(
                w.TrainerRejoin(self.launch.job, self.rank, generation, self.nonce)
            )
            return await self.trainer.call(request)

    async def join(self, **options):
        launch = self.launch
        asked = {"keep_last": 1, "timeout_s": 120.0, **launch.options, **options}
        layout = r.Layout.parse(launch.stage.layout)
        call = w.TrainerJoin(
            job=launch.job,
            rank=self.rank,
            world_size=launch.world,
            run_token=launch.token,
            layout=layout,
            **asked,
        )
        joined = await self.trainer.call(call)
        launch.generation, self.nonce = joined.generation, joined.nonce

    async def write(self, ordinal, step, image=None):
        """Snapshot a step into a slot; what came of it."""
        image = content(self.rank, step, self.launch.job) if image is None else image
        try:
            reply = await self.call(w.OpenSlot(ordinal, step, len(image)))
            if not isinstance(reply, w.Slot):
                return reply
            self.trainer.view(reply.file, len(image))[:] = image
            return await self.call(w.SlotDone(ordinal, step, len(image), f'{{"step":{step}}}'))
        except (AgentUnreachable, SaveAborted) as e:
            return e  # the save of this rank failed, and training goes on

    async def outcome(self, ordinal, step, timeout_s=120.0):
        """Wait for the end of a save, over restarts of the agent."""
        deadline = now() + timeout_s
        while True:
            assert now() < deadline, f"rank {self.rank}: step {step} is in flight for ever"
            try:
                reply = await self.call(w.SaveStatus(ordinal, step, 5.0))
                if reply.outcome is not None:
                    return reply.outcome
            except AgentUnreachable:
                await asyncio.sleep(0.2)

    async def restore(self, step=None):
        """(step, source), or None if there is provably nothing; checks every byte."""
        ordinal, self.restores = self.restores, self.restores + 1
        while True:
            reply = await self.call(w.RestoreCall(ordinal, step))
            if isinstance(reply, w.RestoreNothing):
                return None
            if isinstance(reply, w.RestoreFile) and await self._load(reply):
                return reply.step, reply.source

    async def _load(self, reply):
        failure = None
        try:
            await self._check(reply)
        except CheckpointError as e:
            failure = e
        done = w.RestoreDone(
            ballot=reply.ballot,
            failed="" if failure is None else f"{type(failure).__name__}: {failure}",
            retryable=not isinstance(failure, IntegrityError),
        )
        closed = (await self.call(done)).closed
        if failure is not None and not isinstance(failure, IntegrityError):
            raise failure
        return closed.close is r.Close.OK

    async def _check(self, reply):
        image = self.trainer.view(reply.file, reply.length)
        table, size = memoryview(reply.table).cast("I"), reply.chunk_bytes
        if bad := verify_chunks(image, size, list(table)):
            start, stop = bad[0] * size, min((bad[-1] + 1) * size, reply.length)
            await self.call(w.MendChunk(reply.ballot, start, stop - start))
            if bad := verify_chunks(image, size, list(table)):
                raise IntegrityError(f"step {reply.step}: chunks {bad[:5]} are wrong")
        wanted = content(self.rank, reply.step, self.launch.job)
        assert bytes(image) == wanted, f"rank {self.rank}, step {reply.step}: WRONG DATA"
        assert reply.meta == f'{{"step":{reply.step}}}'


class Launch:
    """All ranks of one start of the job."""

    def __init__(self, stage, job, token, world, options):
        self.stage, self.job, self.token, self.world = stage, job, token, world
        self.options, self.generation, self.ordinal = options, 0, 0
        self.ranks = []

    async def all(self, deed):
        """The results of all ranks; raises the first failure after all have ended."""
        results = await asyncio.gather(*map(deed, self.ranks), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    async def join(self):
        await self.all(lambda rank: rank.join())

    async def begin(self, step):
        """All ranks write a step; (ordinal, step) of the attempt, which goes on by itself."""
        ordinal, self.ordinal = self.ordinal, self.ordinal + 1
        await self.all(lambda rank: rank.write(ordinal, step))
        return ordinal, step

    async def outcome(self, ordinal, step, timeout_s=120.0):
        """How it ended: all living ranks are told the same."""
        waits = [rank.outcome(ordinal, step, timeout_s) for rank in self.ranks]
        told = await asyncio.gather(*waits, return_exceptions=True)
        told = [x for rank, x in zip(self.ranks, told, strict=True) if rank.trainer.alive]
        assert told, "no rank lives"
        if failures := [x for x in told if isinstance(x, BaseException)]:
            raise failures[0]
        assert len({(o.verdict, o.lineage) for o in told}) == 1, told
        assert {o.attempt.step for o in told} == {step}
        return told[0]

    async def save(self, step):
        """Save and wait; the outcome."""
        return await self.outcome(*await self.begin(step))

    async def saved(self, *steps):
        """Save steps that must commit."""
        for step in steps:
            outcome = await self.save(step)
            assert outcome.verdict is COMMIT, outcome

    async def restore(self, step=None):
        """The step that all ranks restored, None for provably nothing."""
        found = await self.all(lambda rank: rank.restore(step))
        assert len({x and x[0] for x in found}) == 1, f"different steps: {found}"
        return found[0] and found[0][0]

    async def steps(self):
        return await self.ranks[0].call(w.ListSteps())

    def kill(self):
        """All ranks die."""
        for rank in self.ranks:
            rank.trainer.kill()

    async def again(self, *names, **options):
        """Everybody dies; the same job starts on these nodes, or on the same."""
        self.kill()
        names = names or [rank.node for rank in self.ranks]
        options = {"job": self.job, **self.options, **options}
        return await self.stage.launch(*names, **options)
