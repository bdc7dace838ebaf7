"""The story of a campaign: train under faults drawn from a seed, then compare every bit.

    plan -> services, nodes, ranks up -> [due fault -> may it strike? -> blow -> made good] ...
         -> quiet: redundancy full again -> training ends -> agents end
         -> the same training without store and faults -> verdict

Who strikes tells nobody. The launcher sees exit codes and starts all ranks again; the operator
starts killed agents on their memory and replaces lost nodes under new names. A fault that takes
nodes waits for what is promised to cover it (`campaign.may_strike`); others overtake it.

Contract: ends in bounded time with a Verdict, also when something does not hold. What counts as
wrong: a loss or a restored state that differs, a rank that trains from nothing or from less than
was committed, an agent or rank that ends by itself, a failure inside an agent, redundancy that does
not return, anything left behind.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from p2pckpt.backends.etcd_server import EtcdOptions
from p2pckpt.demo.campaign import Options, count, may_strike
from p2pckpt.demo.cluster import Launch, Machine
from p2pckpt.demo.journal import Journal, losses_identical
from p2pckpt.demo.leavings import behind, end_agents, tail, troubles
from p2pckpt.demo.promise import Promise
from p2pckpt.demo.report import Timeline
from p2pckpt.demo.room import Room
from p2pckpt.demo.strikes import Blow, Scene, Strikes
from p2pckpt.demo.verdict import Fired, Recovery, Verdict, sources
from p2pckpt.errors import MissingDependency

STALL_S = 180.0
"""Longest time without anything new: a step, a ready node, a restore."""
FULL_S = 180.0
"""From the last fault until redundancy is full again, training going on."""
LOOK_S = 0.25
"""How often files and status are looked at; a rank's death wakes at once."""
TERM_S = 30.0
"""Ranks that got SIGTERM end by then, or are killed."""
RELAUNCHES = 6
"""Launches that may die in a row before all of their ranks train."""
PACE_S = 0.15
"""Of a training step, at least: the same steps are trained again, at full speed, to compare."""
BUDGET_BYTES = 128 << 20
SCRUB_S = 20.0
ETCD = EtcdOptions(
    durable=False,
    # etcd 3.5.1 can lose a transaction for good if it is killed while it commits to its backend
    # (etcd-io/etcd#13766); so it commits almost never and replays its log instead.
    flags=(
        "--backend-batch-interval=1h",
        "--backend-batch-limit=1000000",
        "--auto-compaction-retention=0",  # a compaction commits as well
    ),
)


class ChaosFailedError(Exception):
    """The campaign cannot go on; the message is for people."""


def play(options: Options, console: Console) -> Verdict:
    """The whole campaign. Raises UsageError, MissingDependency."""
    layout, plan = options.check(), options.plan()
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency("chaos trains with torch: pip install 'p2pckpt[torch,trial]'")
    shape = (options.nodes, options.racks, str(layout), options.groups(layout))
    verdict = Verdict(options.seed, options.minutes, *shape, count(plan))
    run = Path(tempfile.mkdtemp(prefix="p2pckpt-chaos-"))
    room: Room | None = None
    try:
        room = Room(run / "ram", 2 * options.nodes * BUDGET_BYTES)
    except OSError as e:
        verdict.notes.append(f"no tmpfs of our own, so none that is full: {e}")
    memory = Path("/dev/shm") if room is None else room.place
    try:
        with (
            Timeline(console, time.monotonic, 0) as timeline,
            Machine(run, options.racks, memory) as machine,
        ):
            chaos = Chaos(options, machine, room, timeline, verdict)
            try:
                chaos.play()
            except ChaosFailedError as e:
                verdict.why.append(str(e))
                timeline.say(f"FAILED: {e}")
            chaos.conclude()
        verdict.left_behind = behind(run, machine.ram)
        verdict.seconds = round(timeline.seconds, 1)
    finally:
        if room is not None:
            room.close()
        if options.keep:
            verdict.run_directory = str(shutil.move(run, options.keep))
        else:
            shutil.rmtree(run, ignore_errors=True)
    return verdict


@dataclass
class Broken:
    """A launch that ended too early: when, at which step, by which faults; starts since."""

    at: float
    step: int
    faults: list[int]
    starts: int = 0


class Chaos:
    """One campaign."""

    def __init__(
        self,
        options: Options,
        machine: Machine,
        room: Room | None,
        timeline: Timeline,
        verdict: Verdict,
    ) -> None:
        self.options, self.layout = options, options.check()
        self.machine, self.timeline, self.verdict = machine, timeline, verdict
        self.strikes = Strikes(machine, room)
        self.promise = Promise(machine, self.layout.k)
        self.journal = Journal(machine.run / "main")
        self.reference = Journal(machine.run / "reference")
        self.finish = machine.run / "finish"
        self.pending = list(options.plan())
        self.waits_for: dict[int, str] = {}
        self.began_at: float | None = None
        self.quiet_at: float | None = None
        self.moved_at = time.monotonic()
        self.up = -1
        """The newest launch of which all ranks train."""
        self.must_restore = 0
        self.broken: Broken | None = None
        self.failures = 0

    def play(self) -> None:
        """Everything up to the comparison. Raises ChaosFailedError."""
        self.machine.start_services(self.options.s3, BUDGET_BYTES, ETCD, 3)
        with (self.machine.run / "agent.toml").open("a") as f:
            f.write(f"scrub_period_s = {SCRUB_S}\n")
        for _ in range(self.options.nodes):
            self.machine.start_node()
        self._until(lambda: all(n.ready_at is not None for n in self.machine.nodes), "nodes")
        self.timeline.say(
            "nodes: " + ", ".join(f"{n.name} in {n.rack}" for n in self.machine.nodes)
        )
        launch = self._launch()
        while not (launch.succeeded and self.finish.exists()):
            launch = self._supervise(launch)
        self.timeline.say(f"training ended at step {self.journal.newest()}")
        self._until(lambda: not self.strikes.under_way, "all that was struck")
        self.verdict.why += end_agents(self.machine.nodes)
        self.machine.close_nodes()
        self._compare()

    def conclude(self) -> None:
        """Fill in what was written down, however the campaign ended."""
        verdict = self.verdict
        verdict.left_out += [
            {"number": f.number, "kind": f.kind, "why": self.waits_for.get(f.number, "no time")}
            for f in self.pending
        ]
        verdict.notes += self.strikes.notes
        verdict.why += self.strikes.wrong + troubles(self.machine.run)
        verdict.tell(self.journal)

    # -- launcher and operator ---------------------------------------------------------------------

    def _supervise(self, launch: Launch) -> Launch:
        """One look; the launch that runs afterwards."""
        ended = launch.wait(LOOK_S)
        self._look()
        self._follow(launch)
        if ended and not (launch.succeeded and self.finish.exists()):
            return self._relaunch(launch)
        if not ended:
            self._fire(launch)
            self._end_late(launch)
            self._rest(launch)
            self._stalled("a training step")
        waits = f"{len(self.pending)} faults to come" if self.quiet_at is None else "quiet"
        self.timeline.step(self.journal.newest(launch.number), waits)
        return launch

    def _look(self) -> None:
        """What is new; who is away is started again."""
        if self.machine.look() or self.journal.read():
            self.moved_at = time.monotonic()
        self.strikes.mend(self.up)
        for node in self.machine.nodes:
            if not node.alive and node.name not in self.strikes.away:
                code = node.agent.returncode
                ended = f"the agent of {node.name} ended by itself with {code}: {tail(node.log)}"
                self.verdict.why.append(ended)
                self.timeline.say(ended)
                self.machine.revive(node)

    def _follow(self, launch: Launch) -> None:
        """When all ranks of a launch train: how did it begin?"""
        steps = self.journal.of("step", launch.number)
        if self.up == launch.number or {e["rank"] for e in steps} != set(range(len(launch.ranks))):
            return
        self.up, self.failures = launch.number, 0
        self.began_at = self.began_at or time.monotonic()
        restored = self.journal.of("restored", launch.number)
        at = {e["step"] for e in restored} or {0}
        wrong = len(at) > 1 or (restored and len(restored) != len(launch.ranks))
        if wrong or min(at) < self.must_restore:
            told = [(e["rank"], e["step"], e["source"]) for e in restored]
            self.verdict.why.append(
                f"launch {launch.number} began with (rank, step, source) {told}, and step "
                f"{self.must_restore} was committed"
            )
        if (broken := self.broken) is not None:
            self.broken = None
            back_s = min(e["time"] for e in steps) - broken.at
            recovery = Recovery(
                broken.faults, max(at), max(0, broken.step - max(at)), round(back_s, 2),
                broken.starts, sources(restored, self.journal.of("save")),
            )  # fmt: skip
            self.verdict.recoveries.append(recovery)
            self.timeline.say(
                f"back at step {max(at)} after {back_s:.1f} s, steps lost: {recovery.steps_lost}; "
                f"ranks by source: {recovery.sources}"
            )

    def _relaunch(self, launch: Launch) -> Launch:
        """Ranks ended: end the rest, and start all again."""
        blows = [b for b in self.strikes.under_way if b.ends_launch and b.launch == launch.number]
        codes = [rank.poll() for rank in launch.ranks]
        for rank in launch.ranks:
            rank.kill()
        launch.stop()
        self._look()
        failed = self.journal.of("failed", launch.number)
        self.verdict.refused += [f"rank {e['rank']}: {e['error']}: {e['reason']}" for e in failed]
        if self.broken is None:
            at = min((b.began_at for b in blows), default=time.monotonic())
            newest = self.journal.newest(launch.number)
            self.broken = Broken(at, newest, [b.fault.number for b in blows])
        if not blows:
            what = f"launch {launch.number}: exit codes {codes}; {launch.last_words()}"
            self.timeline.say(f"ranks ended by themselves: {what}")
            if self.up == launch.number:
                self.verdict.why.append(f"ranks ended by themselves while they trained: {what}")
            elif not failed:
                self.verdict.refused.append(what)
        if self.up != launch.number:
            self.failures += 1
            if self.failures >= RELAUNCHES:
                raise ChaosFailedError(f"{RELAUNCHES} launches died in a row; {codes}, {failed}")
        return self._launch()

    def _launch(self) -> Launch:
        """Seat all ranks on ready nodes and start them."""
        self._until(self._seated, "nodes for all ranks")
        self.must_restore = max(self.journal.committed(), default=0)
        arguments = ["--layout", str(self.layout), "--every", str(self.options.every)]
        arguments += ["--seed", str(self.options.seed), "--finish", str(self.finish)]
        arguments += ["--pace-s", str(PACE_S), "--preemption"]
        launch = self.machine.launch(arguments, 1)
        self.verdict.launches = launch.number + 1
        self.moved_at = time.monotonic()
        if self.broken is not None:
            self.broken.starts += 1
        seats = ", ".join(node.name for node in self.machine.seats)
        self.timeline.say(f"launch {launch.number}: {len(launch.ranks)} ranks on {seats}")
        return launch

    def _seated(self) -> bool:
        seated = self.machine.seat(self.options.groups(self.layout))
        return seated and all(node.ready_at is not None for node in self.machine.seats)

    # -- faults: they tell nobody ------------------------------------------------------------------

    def _fire(self, launch: Launch) -> None:
        """The first fault that is due and may strike, if there is one."""
        if self.began_at is None or self.quiet_at is not None:
            return
        now_s = time.monotonic() - self.began_at
        committed = max(self.journal.committed(), default=0)
        scene = Scene(launch, self.up == launch.number, committed, 1)
        for fault in self.pending:
            if fault.at_s > now_s:
                return
            blow = self.strikes.aim(fault, scene)
            why = blow if isinstance(blow, str) else self._may(blow)
            if isinstance(blow, Blow) and not why:
                self.pending.remove(fault)
                newest = self.journal.newest()
                words = f"fault {fault.number:3} {fault.kind}: {blow.words}"
                self.timeline.say(f"{words}, at step {newest}")
                at_s = round(now_s, 1)
                fired = Fired(fault.number, fault.kind, at_s, newest, blow.words)
                self.verdict.faults.append(fired)
                self.strikes.strike(blow, launch)
                return
            self.waits_for[fault.number] = why

    def _may(self, blow: Blow) -> str:
        """ "" if what is promised covers the blow, else why it may not strike."""
        if not blow.takes:
            return ""
        standing = self.promise.now(self.strikes.busy)
        since = 0.0 if standing is None else self._saved_at(standing.step)
        return may_strike(standing, self.strikes.hurt(since), blow.takes)

    def _saved_at(self, step: int) -> float:
        """When the first rank began to save a step, for the last time; 0 if none did."""
        saved = [e for e in self.journal.of("save") if e["step"] == step]
        newest = max((e["launch"] for e in saved), default=0)
        return min((float(e["time"]) for e in saved if e["launch"] == newest), default=0.0)

    def _end_late(self, launch: Launch) -> None:
        """Ranks that were told to end, and do not, are killed."""
        for blow in self.strikes.under_way:
            late = time.monotonic() - blow.began_at > TERM_S and blow.launch == launch.number
            if blow.fault.kind == "trainer_term" and late:
                codes = [rank.poll() for rank in launch.ranks]
                self.verdict.notes.append(f"ranks ran {TERM_S:g} s after SIGTERM: {codes}")
                for rank in launch.ranks:
                    rank.kill()

    # -- the end ----------------------------------------------------------------------------------

    def _rest(self, launch: Launch) -> None:
        """After the last minute: until a step that was saved since is as safe as it can be, and
        training is further than ever; then it may end."""
        now = time.monotonic()
        if self.quiet_at is None:
            if self.began_at is not None and now - self.began_at >= self.options.minutes * 60:
                self.quiet_at = now
                self.strikes.mend_all()
                self.timeline.say("quiet: no more faults")
            return
        if self.finish.exists() or self.up != launch.number:
            return
        standing = self.promise.now() if not self.strikes.under_way else None
        on = self.journal.newest(launch.number) > max(
            (f.step for f in self.verdict.faults), default=0
        )
        anew = standing is not None and self._saved_at(standing.step) > self.quiet_at
        if standing is not None and standing.is_full and on and anew:
            self.verdict.full_again_s = round(now - self.quiet_at, 1)
            self.finish.touch()
        elif now - self.quiet_at > FULL_S:
            under_way = [blow.words for blow in self.strikes.under_way]
            self.verdict.why.append(
                f"redundancy was not full {FULL_S:g} s after the last fault: {standing}, "
                f"under way: {under_way}, job: {self.promise.job()}"
            )
            self.finish.touch()

    def _compare(self) -> None:
        """Train the same steps without store and faults; every loss must be the same."""
        last = self.journal.newest()
        self.timeline.say(f"the same {last} steps without faults, to compare every loss")
        arguments = ["--last", str(last), "--seed", str(self.options.seed)]
        launch = self.machine.launch(arguments, 1, store=False)
        self.moved_at = time.monotonic()
        while not launch.wait(LOOK_S):
            if self.reference.read():
                self.moved_at = time.monotonic()
            self.timeline.step(self.reference.newest(), "to compare", "no faults")
            self._stalled("a step of the training without faults")
        if not launch.succeeded:
            raise ChaosFailedError(f"training without faults ended badly: {launch.last_words()}")
        self.reference.read()
        self.verdict.losses_compared = len(self.journal.of("step"))
        self.verdict.losses_bit_identical = losses_identical(self.journal, self.reference)
        if not self.verdict.losses_bit_identical:
            self.verdict.why.append("losses differ from those of training without faults")

    # -- small things ------------------------------------------------------------------------------

    def _until(self, done: Callable[[], bool], what: str) -> None:
        """Look until `done`, at most STALL_S."""
        self.moved_at = time.monotonic()
        while not done():
            self._look()
            self._stalled(what)
            time.sleep(LOOK_S / 5)

    def _stalled(self, what: str) -> None:
        if time.monotonic() - self.moved_at > STALL_S:
            raise ChaosFailedError(f"waited {STALL_S:g} s for {what}")
