"""The job's side of the simulated world: a launcher as torchrun is one, and ranks that train.

    launch -> all ranks join -> restore -> step together, save when due -> leave
       any rank fails: all are ended, and the launcher starts again on whatever nodes live

Ranks do what `p2pckpt.checkpointer` does, call by call: a save that fails is no reason to stop
training, a restarted agent gets its rank back by TrainerRejoin. A launch may be told to restore an
older step (roll back), to overlap the one before (takeover or not), or to go on as a zombie for a
while after it was fenced off.

Contract: everything that is told to ranks goes to the checkers. A launch ends whole when every rank
reached the last step: the planned one, but some saves after the last fault at the earliest.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Protocol

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.backends.inproc.cluster import FakeCluster, FakeNode
from p2pckpt.backends.inproc.net import true_time
from p2pckpt.board import PAGE_BYTES, Board
from p2pckpt.coding.checksum import verify_chunks
from p2pckpt.errors import (
    AgentUnreachable,
    CheckpointError,
    IntegrityError,
    NotSeated,
    RestoreFailed,
    SaveAborted,
    StaleGenerationError,
    UsageError,
)
from p2pckpt.save.due import Loop
from simulations.world.checkers import Checkers, content
from simulations.world.training import COPY_S, Due, Training

MAX_LAUNCHES = 100
REFUSALS = 3
"""Launches in a row, without a fault at work, whose restore refuses: then it is for good."""

ZOMBIE_STEPS = 3


class HasWorld(Protocol):
    """What a launcher needs of the world."""

    cluster: FakeCluster
    calm_since: float | None
    restores: dict[str, int]

    @property
    def usable(self) -> list[str]:
        """Nodes on which a trainer finds a running agent."""
        ...


class Launcher:
    """Starts all ranks of a job, and when one fails, ends all and starts again."""

    def __init__(self, world: HasWorld, training: Training, checkers: Checkers) -> None:
        self.world = world
        self.training = training
        self.checkers = checkers
        self.launches = 0
        self.due: list[Due] = []
        self.lost = ""
        self.crashed = ""
        self.current: Launch | None = None
        self.successor: Launch | None = None
        self.wanted_step: int | None = None
        self.left: list[str] = []
        """Nodes that the next launch does not go to, if others live."""
        self._target: int | None = None
        self._refused = 0

    async def run(self) -> None:
        """Launch until a launch reaches the last step, or nothing can be restored any more."""
        while not self.lost:
            launch = self.successor or self.launch()
            self.successor, self.current = None, launch
            await launch.task
            if self._superseded():
                continue
            if launch.whole:
                return
            self._judge(launch)
            if self.launches >= MAX_LAUNCHES:
                self.checkers.object(f"the job failed {MAX_LAUNCHES} times; last: {launch.whys}")
                return
            await asyncio.sleep(3.0)

    def _superseded(self) -> bool:
        return self.successor is not None

    def launch(self, takeover: bool = False, stubborn: bool = False) -> Launch:
        """Start one now, on nodes that live."""
        self.launches += 1
        step, self.wanted_step = self.wanted_step, None
        launch = Launch(self, f"{self.training.job}-{self.launches}", step, takeover, stubborn)
        launch.task = asyncio.create_task(launch.run(), name=launch.token)
        return launch

    def end(self) -> None:
        """Kill all ranks of all launches."""
        for launch in (self.current, self.successor):
            if launch is not None:
                launch.kill()

    def roll_back(self) -> None:
        """Stop, and go on from the oldest step of the present lineage that is committed."""
        tip = self.checkers.tip
        kept = self.checkers.kept.values()
        steps = [
            k.commit.attempt.step for k in kept if tip and k.commit.lineage == tip.commit.lineage
        ]
        self.wanted_step = min(steps, default=None)
        self.end()

    def last_step(self, step: int) -> bool:
        """Is this the last one? Asked once a step and launch."""
        training = self.training
        if self.world.calm_since is None:
            return False
        if self._target is None:
            after = (step // training.every + training.quiet_saves) * training.every
            self._target = max(training.saves * training.every, after)
        return step >= self._target

    def _judge(self, launch: Launch) -> None:
        """A launch failed: is that to be expected?"""
        for why in launch.whys:
            if isinstance(why, UsageError) or not isinstance(why, CheckpointError):
                self.crashed = self.crashed or f"{launch.token}: {why!r}"
        refused = any(isinstance(why, RestoreFailed) for why in launch.whys)
        self._refused = self._refused + 1 if refused and self.checkers.calm else 0
        if self._refused >= REFUSALS:
            self.lost = self.checkers.refused_for_good()
            if not self.lost:
                self.checkers.object(f"restore refuses, and all bytes are there: {launch.whys}")
                self.lost = "refused"


class Launch:
    """All ranks of one start of the job."""

    task: asyncio.Task[None]

    def __init__(
        self, launcher: Launcher, token: str, step: int | None, takeover: bool, stubborn: bool
    ) -> None:
        self.launcher = launcher
        self.token = token
        self.step = step
        self.takeover = takeover
        self.stubborn = stubborn
        self.joined = asyncio.Event()
        self.whole = False
        self.whys: list[BaseException] = []
        self.ranks: list[Rank] = []
        self.barrier = asyncio.Barrier(launcher.training.ranks)
        self._last: dict[int, bool] = {}

    async def run(self) -> None:
        """Start the ranks, wait until all have ended or one has failed, and end the others."""
        world, training = self.launcher.world, self.launcher.training
        while not (nodes := world.usable):
            await asyncio.sleep(1.0)
        nodes = [name for name in nodes if name not in self.launcher.left] or nodes
        first = training.first_node % len(nodes)
        nodes = (nodes[first:] + nodes[:first])[: training.ranks]
        for rank in range(training.ranks):
            node = world.cluster.nodes[nodes[rank % len(nodes)]]
            self.ranks.append(Rank(self, node, rank))
        tasks = [
            asyncio.create_task(k.main(), name=f"{self.token} rank {k.rank}") for k in self.ranks
        ]
        watch = asyncio.create_task(self._watch(tasks), name=f"{self.token} watch")
        await asyncio.wait((*tasks, watch), return_when=asyncio.FIRST_EXCEPTION)
        watch.cancel()
        self.whole = all(_ended_well(task) for task in tasks)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, watch, return_exceptions=True)
        self.whys = [e for e in ended if isinstance(e, Exception)]
        self.kill()
        facts = {"token": self.token, "whole": self.whole, "why": [repr(e) for e in self.whys]}
        world.cluster.log.add("launcher", "launch.ended", facts)

    def kill(self) -> None:
        """All its processes."""
        for rank in self.ranks:
            rank.trainer.kill()

    def is_last(self, step: int) -> bool:
        """The same answer for all ranks, whenever they ask."""
        if step not in self._last:
            self._last = {step: self.launcher.last_step(step)}
        return self._last[step]

    async def _watch(self, tasks: list[asyncio.Task[None]]) -> None:
        """Notice a dead rank, a little later, and end the launch."""
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.5)
            if not all(rank.trainer.alive for rank in self.ranks):
                raise CheckpointError("a rank died")


def _ended_well(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


class Rank:
    """A training process."""

    def __init__(self, launch: Launch, node: FakeNode, rank: int) -> None:
        self.launch = launch
        self.node = node.name
        self.trainer = node.trainer()
        self.copy_s = COPY_S
        self.copying = False
        self.loop: Loop | None = None
        self.rank = rank
        self.generation, self.nonce = 0, ""
        self.who = f"{launch.token} rank {rank}"

    async def main(self) -> None:
        """The user's training script."""
        training, checkers = self.launch.launcher.training, self.launch.launcher.checkers
        self._seated(await self.trainer.call(self._join()))
        checkers.joined(self.launch.token, self.generation, self.launch.step)
        self.launch.joined.set()
        step = await self.restore()
        ordinal = 0
        while not self.launch.is_last(step):
            await asyncio.sleep(training.step_s)
            async with asyncio.timeout(600.0):
                await self.launch.barrier.wait()
            step += 1
            if self.loop is not None:
                self.loop.due(step)  # which tells how far it is
            if step % training.every == 0:
                await self.save(ordinal, step)
                ordinal += 1
        await self.settled(ordinal - 1, step)
        await self.trainer.call(w.Leave())

    def _join(self) -> w.TrainerJoin:
        training = self.launch.launcher.training
        return w.TrainerJoin(
            job=training.job,
            rank=self.rank,
            world_size=training.ranks,
            run_token=self.launch.token,
            layout=r.Layout.parse(training.layout),
            keep_last=training.keep_last,
            takeover=self.launch.takeover,
            timeout_s=120.0,
        )

    async def call(self, request: r.Record) -> r.Record:
        """Ask the agent; after it was restarted, take the seat there first."""
        try:
            return await self.trainer.call(request)
        except NotSeated:
            job = self.launch.launcher.training.job
            again = w.TrainerRejoin(job, self.rank, self.generation, self.nonce)
            self._seated(await self.trainer.call(again))
            return await self.trainer.call(request)

    def _seated(self, joined: r.Record) -> None:
        """A page of shared memory for each seat, where agents look how far the ranks are."""
        assert isinstance(joined, w.Joined)
        self.generation, self.nonce = joined.generation, joined.nonce
        training = self.launch.launcher.training
        if training.auto and joined.board:
            self.loop = self.loop or Loop(self.generation, training.every, True, true_time)
            self.loop.board = Board(self.trainer.view(joined.board, PAGE_BYTES))

    # -- save ------------------------------------------------------------------------------------

    async def save(self, ordinal: int, step: int) -> None:
        """Write the snapshot of this rank and step, if a slot is to be had; look around."""
        if self.rank == 0:
            attempt = f"{self.generation:010d}.{ordinal:010d}.{step:020d}"
            self.launch.launcher.due.append(Due(true_time(), attempt))
        try:
            await self._write(ordinal, step)
            await self._look(ordinal, step)
        except (AgentUnreachable, SaveAborted):
            return  # the save of this rank failed, and training goes on
        except StaleGenerationError:
            if not self.launch.stubborn:
                raise
            await self._haunt(ordinal, step)
            raise

    async def _write(self, ordinal: int, step: int) -> None:
        image = content(self.rank, step, self.launch.token)
        meta = json.dumps({"launch": self.launch.token, "step": step})
        reply = await self.call(w.OpenSlot(ordinal, step, len(image)))
        if isinstance(reply, w.Slot):
            await self._copy(reply.file, image)
            await self.call(w.SlotDone(ordinal, step, len(image), meta))

    async def _copy(self, file: str, image: bytes) -> None:
        """Piece by piece, so that much may happen in the middle of it."""
        promises, half = self.launch.launcher.checkers.promises, len(image) // 2
        with promises.writing(self.node, file, self.who, self.trainer):
            self.trainer.view(file, half)[:] = image[:half]
            self.copying = True
            await asyncio.sleep(self.copy_s)
            self.copying = False
            self.trainer.view(file, len(image))[half:] = image[half:]

    async def _look(self, ordinal: int, step: int) -> None:
        """Rule 4: what this node's agent says is committed; one rank a save asks."""
        training, checkers = self.launch.launcher.training, self.launch.launcher.checkers
        if ordinal % training.ranks != self.rank:
            return
        listed = await self.call(w.ListSteps())
        assert isinstance(listed, w.Steps)
        checkers.told.listed(self.who, listed.committed)
        if ordinal:
            state = await self.call(w.SaveStatus(ordinal - 1, step - training.every, 0.0))
            assert isinstance(state, w.SaveState)
            checkers.told.listed(self.who, (), state.outcome)

    async def _haunt(self, ordinal: int, step: int) -> None:
        """A zombie: it was told that it is fenced off, and goes on all the same."""
        training = self.launch.launcher.training
        for later in range(1, ZOMBIE_STEPS + 1):
            await asyncio.sleep(training.step_s)
            try:
                await self._write(ordinal + later, step + later * training.every)
            except CheckpointError:
                continue

    async def settled(self, ordinal: int, step: int) -> None:
        """Wait for the last save's outcome, so that the end of the run is quiet."""
        if ordinal >= 0:
            await self.call(w.SaveStatus(ordinal, step - step % self._every, 60.0))

    @property
    def _every(self) -> int:
        return self.launch.launcher.training.every

    # -- restore ---------------------------------------------------------------------------------

    async def restore(self) -> int:
        """The step to go on from; checks every byte."""
        checkers, restores = self.launch.launcher.checkers, self.launch.launcher.world.restores
        while True:
            reply = await self.call(w.RestoreCall(0, self.launch.step))
            if isinstance(reply, w.RestoreNothing):
                checkers.told.nothing(self.launch.token)
                restores["nothing"] = restores.get("nothing", 0) + 1
                return 0
            if isinstance(reply, w.RestoreFile) and await self.load(reply):
                restores[reply.source] = restores.get(reply.source, 0) + 1
                checkers.promises.returned(self.who, self.generation, reply.ballot)
                return reply.step

    async def load(self, reply: w.RestoreFile) -> bool:
        """Verify, compare with what was saved, and report."""
        failure: CheckpointError | None = None
        try:
            image = await self._verified(reply)
        except CheckpointError as e:
            failure = e
        else:
            checkers = self.launch.launcher.checkers
            which = f"{self.launch.token}, ballot {reply.ballot}"
            checkers.told.restored(which, self.rank, reply.step, reply.meta, image)
        done = w.RestoreDone(
            ballot=reply.ballot,
            failed="" if failure is None else f"{type(failure).__name__}: {failure}",
            retryable=not isinstance(failure, IntegrityError),
        )
        closed: Any = await self.call(done)
        assert isinstance(closed, w.RestoreClosed)
        if failure is not None and not isinstance(failure, IntegrityError):
            raise failure
        return closed.closed.close is r.Close.OK

    async def _verified(self, reply: w.RestoreFile) -> bytes:
        """The image, mended where it was wrong. Raises IntegrityError."""
        image, size = self.trainer.view(reply.file, reply.length), reply.chunk_bytes
        table = list(memoryview(reply.table).cast("I"))
        if bad := verify_chunks(image, size, table):
            start, stop = bad[0] * size, min((bad[-1] + 1) * size, reply.length)
            await self.call(w.MendChunk(reply.ballot, start, stop - start))
            if bad := verify_chunks(image, size, table):
                raise IntegrityError(f"step {reply.step}: chunks {bad[:5]} are wrong")
        return bytes(image)
