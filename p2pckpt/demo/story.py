"""The demo's story: train, strike, look who notices, compare with training without failures.

    nodes up -> ranks up -> [wait for full redundancy -> strike -> ranks die, are found dead
             -> dead nodes replaced -> ranks placed and started -> restored -> training] ... -> end
             -> the same training without store and without failures -> verdict

Two parties that share nothing: `_strike` kills and tells nobody; `_supervise` is the launcher and
node manager, who sees only exit codes and what the ranks wrote down. A strike waits until every
node is up, the newest committed step was placed on all of them, and the status document says that
the step can lose as many nodes as the layout promises.

Contract: ends in bounded time with a Summary, also when something does not hold; what does not hold
is said in `why`, ranks and reason included. Whatever was started is ended on every way out.
"""

from __future__ import annotations

import importlib.util
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from p2pckpt.demo.cluster import KEEPALIVE_S, Launch, Machine, Node
from p2pckpt.demo.journal import Journal, losses_identical, wrong_digests
from p2pckpt.demo.report import Kill, Summary, Timeline
from p2pckpt.errors import MissingDependency, UsageError
from p2pckpt.records import Layout
from topology.survive import Share, survives, why_not

STALL_S = 120.0
"""Longest time without anything new: a step, a ready node, a restore."""
FULL_S = 120.0
"""From the moment that a strike is due until redundancy is full, training going on."""
LOOK_S = 0.25
"""How often files and status are looked at; a rank's death wakes at once."""
RELAUNCHES = 3
"""Launches that may die in a row without a strike and without a step."""
SETTLED_S = 2 * KEEPALIVE_S
"""Agents see a new member within one keepalive."""
DEFAULT = ("trainer", "node", "nodes", "rack")


class DemoFailedError(Exception):
    """What does not hold; the message is for people and names ranks and reason."""


@dataclass(frozen=True)
class Options:
    """What to do. ``kill``: one strike on an owner and kill - 1 of its holders, not the default
    ones; ``self_test``: one that no layout survives; ``s3``: an object store gets each step too."""

    nodes: int = 6
    racks: int = 3
    layout: str = "rs:2,1"
    ranks_per_node: int = 1
    steps: int = 120
    every: int = 5
    seed: int = 1
    kill: int = 0
    s3: bool = False
    self_test: bool = False
    keep: bool = False

    def check(self) -> Layout:
        """The layout; raises UsageError for what cannot be played."""
        layout = Layout.parse(self.layout)
        need = layout.shards + 1
        if self.nodes < need:
            raise UsageError(f"--nodes {self.nodes}: {self.layout} needs {need} or more")
        if not 1 <= self.racks <= self.nodes:
            raise UsageError(f"--racks {self.racks}: needs 1 to {self.nodes}")
        if not 0 <= self.kill <= need:
            raise UsageError(f"--kill {self.kill}: an owner and its holders are {need} nodes")
        if min(self.ranks_per_node, self.every) < 1 or self.steps < 4 * self.every:
            raise UsageError(f"--steps {self.steps}: needs {4 * self.every} or more")
        return layout

    def groups(self, layout: Layout) -> int:
        """Nodes that have ranks; the rest are spares, as many as one strike takes."""
        rack = -(-self.nodes // self.racks)
        return max(min(2, self.nodes), self.nodes - max(layout.m + 1, rack))

    def strikes(self) -> tuple[str, ...]:
        """The kinds of strike, in order."""
        if self.self_test:
            return ("trainer", "shards")
        return ("owner and holders",) if self.kill else DEFAULT


def play(options: Options, console: Console) -> Summary:
    """The whole demo. Raises UsageError, MissingDependency."""
    layout = options.check()
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency("the demo trains with torch: pip install 'p2pckpt[torch,trial]'")
    ranks = options.groups(layout) * options.ranks_per_node
    summary = Summary(options.nodes, options.racks, str(layout), ranks, options.seed)
    run = Path(tempfile.mkdtemp(prefix="p2pckpt-demo-"))
    try:
        with (
            Timeline(console, time.monotonic, options.steps) as timeline,
            Machine(run, options.racks) as machine,
        ):
            story = Story(options, layout, machine, timeline, summary)
            try:
                story.play()
            except DemoFailedError as e:
                summary.why.append(str(e))
                timeline.say(f"FAILED: {e}")
            story.conclude()
            summary.seconds = round(timeline.seconds, 1)
    finally:
        if options.keep:
            summary.run_directory = str(run)
        else:
            shutil.rmtree(run, ignore_errors=True)
    return summary


class Story:
    """One run of the demo."""

    def __init__(
        self,
        options: Options,
        layout: Layout,
        machine: Machine,
        timeline: Timeline,
        summary: Summary,
    ) -> None:
        self.options, self.layout = options, layout
        self.machine, self.timeline, self.summary = machine, timeline, summary
        self.journal = Journal(machine.run / "main")
        self.reference = Journal(machine.run / "reference")
        self.groups = options.groups(layout)
        self.strikes = list(options.strikes())
        self.spacing = options.steps // (len(self.strikes) + 1)
        self.next_at = self.spacing
        self.due_at: float | None = None
        self.struck: tuple[Kill, float, int] | None = None
        self.moved_at = time.monotonic()
        self.failures = 0
        self.finish = machine.run / "finish"

    def play(self) -> None:
        """Everything up to the comparison. Raises DemoFailedError."""
        self.machine.start_services(self.options.s3)
        store = " and SeaweedFS" * self.options.s3
        self.timeline.say(f"etcd{store} up (embedded, for trials)")
        for _ in range(self.options.nodes):
            self.machine.start_node()
        self._until(lambda: all(n.ready_at is not None for n in self.machine.nodes), "nodes")
        names = ", ".join(f"{n.name} in {n.rack}" for n in self.machine.nodes)
        self.timeline.say(f"nodes are ready: {names}")
        launch = self._launch()
        while not launch.succeeded:
            launch = self._supervise(launch)
        self.summary.steps = self.journal.newest()
        self.timeline.say(f"training ended at step {self.summary.steps}")
        self.machine.close_nodes()
        self._compare()

    def conclude(self) -> None:
        """Fill in what the ranks wrote down, however the story ended."""
        summary, journal = self.summary, self.journal
        journal.read()
        summary.steps = journal.newest()
        summary.committed = len(journal.committed())
        saved = [e["blocking_s"] for e in journal.of("saved") if e["status"] == "in flight"]
        summary.blocking_median_s = statistics.median(saved) if saved else None
        restored = journal.of("restored")
        summary.states_compared = len(restored)
        if restored:
            last = max(e["launch"] for e in restored)
            summary.snapshot_bytes = sum(
                e["snapshot_bytes"] for e in restored if e["launch"] == last
            )
            wrong = wrong_digests(journal)
            summary.state_digests_equal = not wrong
            summary.why += wrong[:4]

    # -- the launcher: it sees exit codes, ready nodes and what ranks wrote ------------------------

    def _supervise(self, launch: Launch) -> Launch:
        """One look; the launch that runs afterwards."""
        ended = launch.wait(LOOK_S)
        seen_at = time.monotonic()
        fresh = self.journal.read()
        if self.machine.look() or fresh:
            self.moved_at = time.monotonic()
        if self.struck is not None:
            self._follow(launch)
        self._show(launch)
        if ended and not launch.succeeded:
            return self._recover(launch, seen_at)
        if not ended:
            self._strike_if_due(launch)
            over = not self.strikes and self.struck is None
            if over and self.journal.newest(launch.number) >= self.options.steps:
                self.finish.touch()
            self._stalled("a training step")
        return launch

    def _recover(self, launch: Launch, seen_at: float) -> Launch:
        """Ranks died: end the rest, replace dead nodes, start all ranks again."""
        launch.stop()
        self.journal.read()
        if failed := self.journal.of("failed", launch.number):
            ranks, first = sorted({e["rank"] for e in failed}), failed[0]
            raise DemoFailedError(f"ranks {ranks}: {first['error']}: {first['reason']}")
        dead = self.machine.take_dead()
        fresh = [self.machine.start_node(node.rack) for node in dead]
        if self.struck is not None and self.struck[0].detect_s is None:
            kill, struck_at, _ = self.struck
            kill.detect_s = seen_at - struck_at
            kill.replaced_by = [node.name for node in fresh]
            self.struck = (kill, struck_at, self.journal.newest())
            self.timeline.say(
                f"noticed after {kill.detect_s:.2f} s; ended the other ranks"
                + (f"; new nodes {', '.join(kill.replaced_by)}" if fresh else "")
            )
        else:
            self.failures = 1 if self.journal.newest(launch.number) else self.failures + 1
            codes = [rank.poll() for rank in launch.ranks]
            self.timeline.say(f"ranks ended by themselves, exit codes {codes}; starting again")
            if self.failures >= RELAUNCHES:
                raise DemoFailedError(
                    f"exit codes {codes}, {RELAUNCHES} times; {launch.last_words()}"
                )
        return self._launch()

    def _launch(self) -> Launch:
        """Seat all ranks on ready nodes and start them."""
        self.moved_at = time.monotonic()
        self._until(lambda: self.machine.seat(self.groups), "nodes for all ranks")
        arguments = ["--layout", str(self.layout), "--every", str(self.options.every)]
        arguments += ["--seed", str(self.options.seed), "--finish", str(self.finish)]
        launch = self.machine.launch(arguments, self.options.ranks_per_node)
        self.moved_at = time.monotonic()
        seats = ", ".join(node.name for node in self.machine.seats)
        self.timeline.say(f"launch {launch.number}: {len(launch.ranks)} ranks on {seats}")
        return launch

    def _follow(self, launch: Launch) -> None:
        """After a strike: fill in the kill from what the new launch wrote."""
        assert self.struck is not None
        kill, struck_at, newest = self.struck
        if kill.detect_s is None:
            return
        restored = self.journal.of("restored", launch.number)
        steps = self.journal.of("step", launch.number)
        if anew := sorted({e["rank"] for e in steps} - {e["rank"] for e in restored}):
            raise DemoFailedError(f"ranks {anew} train without having restored anything")
        if len(restored) < len(launch.ranks) or not steps:
            return
        kill.tell(restored, self.journal.of("save"))
        kill.steps_lost = newest - restored[0]["step"]
        kill.back_s = steps[0]["time"] - struck_at
        up = max(e["time"] for e in self.journal.of("up", launch.number))
        kill.launch_s = up - launch.began_at
        kill.join_s = max(e["time"] for e in self.journal.of("joined", launch.number)) - up
        self.struck = None
        self.timeline.recovered(kill)

    # -- the strikes: they tell nobody -------------------------------------------------------------

    def _strike_if_due(self, launch: Launch) -> None:
        """Strike when training is far enough and redundancy is full."""
        newest = self.journal.newest(launch.number)
        if self.struck is not None or not self.strikes or newest < self.next_at:
            return
        self.due_at = self.due_at or time.monotonic()
        shares = self._full()
        if shares is None:
            if time.monotonic() - self.due_at > FULL_S:
                raise DemoFailedError(f"redundancy was not full within {FULL_S:g} s: {self._job()}")
            return
        what = self.strikes.pop(0)
        self.due_at, self.next_at = None, newest + self.spacing
        nodes, ranks = self._choose(what, shares)
        lost = {n.name for n in nodes}
        promised = not (self.options.kill or what == "shards")
        if promised and not all(survives(share, lost) for share in shares):
            why = "; ".join(why_not(shares, lost)[:2])
            self.summary.left_out.append(f"{what}: the placement does not promise it: {why}")
            return
        kill = Kill(what, [n.name for n in nodes], ranks)
        if what == "trainer":
            kill.nodes = [self.machine.seats[ranks[0] // self.options.ranks_per_node].name]
        self.summary.kills.append(kill)
        self.timeline.say(f"KILL {kill.whom} at step {newest}, redundancy full")
        self.struck = (kill, time.monotonic(), newest)
        if what == "trainer":
            launch.ranks[ranks[0]].kill()
        else:
            self.machine.destroy(nodes)

    def _choose(self, what: str, shares: list[Share]) -> tuple[list[Node], list[int]]:
        """Nodes and ranks for a strike; another owner each time."""
        done = len(self.summary.kills) + self.options.seed
        owner = self.machine.seats[done % self.groups]
        each = self.options.ranks_per_node
        if what == "trainer":
            return [], [done % self.groups * each]
        count = {"node": 1, "nodes": self.layout.m + 1, "shards": self.layout.m + 2}
        if what == "rack":
            nodes = [n for n in self.machine.nodes if n.rack == owner.rack]
        else:
            holders = next(s.holders for s in shares if s.owner == owner.name)
            wanted = (owner.name, *holders)[: count.get(what, self.options.kill)]
            nodes = [n for n in self.machine.nodes if n.name in wanted]
        ranks = [
            rank
            for group, seat in enumerate(self.machine.seats)
            if seat in nodes
            for rank in range(group * each, (group + 1) * each)
        ]
        return nodes, ranks

    def _full(self) -> list[Share] | None:
        """Where the newest committed step lies, if its redundancy is full on all nodes."""
        nodes = self.machine.nodes
        if any(n.ready_at is None for n in nodes) or len(nodes) < self.options.nodes:
            return None
        job = self._job() or {"redundancy": None}
        redundancy = job["redundancy"] or {"survivable_node_losses": -1, "full": 0}
        short = redundancy["survivable_node_losses"] != redundancy["full"]
        if short or (self.options.s3 and not job["offloaded"]):
            return None
        step, settled_at = redundancy["step"], max(n.ready_at or 0.0 for n in nodes) + SETTLED_S
        begun = [e["time"] for e in self.journal.of("save") if e["step"] == step]
        if not begun or max(begun) < settled_at:
            return None
        stores = {n.store_id: n.name for n in nodes}
        shares = []
        for node in self.machine.seats:
            sealed = [e for e in node.notes("sealed") if e["attempt"].endswith(f".{step:020d}")]
            if not sealed:
                return None
            holders = tuple(stores.get(holder) for holder in sealed[-1]["holders"])
            shares.append(Share(node.name, holders, self.layout.k))
        return shares

    def _job(self) -> dict[str, Any] | None:
        """The job by the status document."""
        return next(iter((self.machine.status() or {"jobs": {}})["jobs"].values()), None)

    # -- the same training without failures --------------------------------------------------------

    def _compare(self) -> None:
        """Train the same steps without store and failures; every loss must be the same."""
        summary, last = self.summary, self.summary.steps
        self.timeline.say(f"the same {last} steps without failures, to compare every loss")
        arguments = ["--last", str(last), "--seed", str(self.options.seed)]
        launch = self.machine.launch(arguments, self.options.ranks_per_node, store=False)
        self.moved_at = time.monotonic()
        while not launch.wait(LOOK_S):
            if self.reference.read():
                self.moved_at = time.monotonic()
            self.timeline.step(self.reference.newest(), "to compare", "no failures")
            self._stalled("a step of the training without failures")
        if not launch.succeeded:
            raise DemoFailedError(f"training without failures ended badly: {launch.last_words()}")
        self.reference.read()
        summary.losses_compared = len(self.journal.of("step"))
        summary.losses_bit_identical = losses_identical(self.journal, self.reference)
        if not summary.losses_bit_identical:
            summary.why.append("losses differ from those of training without failures")

    # -- small things ------------------------------------------------------------------------------

    def _until(self, done: Callable[[], bool], what: str) -> None:
        """Look until `done`, at most STALL_S."""
        self.moved_at = time.monotonic()
        while not done():
            self.machine.look()
            for node in self.machine.nodes:
                if not node.alive:
                    log = node.log.read_text(errors="replace")[-600:]
                    raise DemoFailedError(f"the agent of {node.name} ended: {log}")
            self._stalled(what)
            time.sleep(LOOK_S / 5)

    def _stalled(self, what: str) -> None:
        if time.monotonic() - self.moved_at > STALL_S:
            raise DemoFailedError(f"waited {STALL_S:g} s for {what}")

    def _show(self, launch: Launch) -> None:
        waits = "restarting" if self.struck else f"next: {(*self.strikes, 'end')[0]}"
        self.timeline.step(self.journal.newest(launch.number), waits)
