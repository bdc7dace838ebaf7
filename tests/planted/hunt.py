"""The hunt for planted bugs: seeds of the world on patched copies, until a checker objects.

    a bug -> its own copy of the tree -> seeds 1, 2, 3 ... -> the first that objects
                                             -> the same seed without the bug: must be well
                                             -> the same seed with nobody looking: must look well

The seeds are those of `make world`: the options and faults that `simulations/world/campaign.py`
draws, for all bugs the same, so nothing is arranged for a bug. Each run is in a process that
imports the patched copy, and checks that it does. Two bugs are hunted at a time; the last by both.

Contract: a bug is found at the lowest seed that objects, all lower ones having been run. A seed
that ends badly without the bug too proves nothing; it is passed over and named.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.planted.bugs import Bug, copy_tree, plant
from tests.planted.rules import rule_of

SILENT_S = 400.0
"""A seed that takes longer of real time hangs in code that never awaits."""

WORKER = """
import sys
from pathlib import Path
import p2pckpt, simulations.world.campaign, topology
for module in (p2pckpt, simulations.world.campaign, topology):
    assert Path(module.__file__).is_relative_to(sys.argv[1]), module.__file__
simulations.world.campaign.work(sys.stdin, sys.stdout)
"""


@dataclass(frozen=True)
class Plan:
    """``first`` to ``first + seeds - 1`` are run. ``options`` take the place of what is drawn."""

    seeds: int = 500
    first: int = 1
    processes: int = 2
    checkers: bool = True
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Catch:
    """How the hunt for a bug ended. ``found_after_seeds`` 0: it was not found.

    ``unseen``: the same seed ends well if nobody looks. ``passed_over``: seeds that end badly
    without the bug too. ``others``: ends that do not count for this bug, and how often.
    """

    bug: str
    expected: str
    rule: str = ""
    found_after_seeds: int = 0
    seed: int = 0
    end: str = ""
    why: str = ""
    unseen: bool | None = None
    tried: int = 0
    passed_over: list[int] = field(default_factory=list)
    others: dict[str, int] = field(default_factory=dict)


class Runner:
    """A process that runs seeds on one copy of the tree, begun anew when it dies or hangs."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self._process: subprocess.Popen[str] | None = None

    def run(self, seed: int, options: dict[str, Any]) -> dict[str, Any]:
        """The result of a seed; a process that dies is a crash, one that hangs is stuck."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        hung = threading.Event()

        def end() -> None:
            hung.set()
            process.kill()

        timer = threading.Timer(SILENT_S, end)
        timer.start()
        try:
            process.stdin.write(json.dumps({"seed": seed, "options": options}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        self.close()
        end_word = "stuck" if hung.is_set() else "crash"
        return {"end": end_word, "why": f"the process of seed {seed} died or hung"}

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", WORKER, str(self.tree)],
            cwd=self.tree,
            env={**os.environ, "PYTHONPATH": str(self.tree), "PYTHONHASHSEED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


class Chase:
    """One bug: seeds are handed out in order, and come back in any."""

    def __init__(self, bug: Bug, tree: Path, plan: Plan) -> None:
        self.bug, self.tree, self.plan = bug, tree, plan
        self.catch = Catch(bug.name, bug.rule)
        self.over = False
        self._next = plan.first
        self._running: set[int] = set()

    def hand_out(self) -> int | None:
        """The next seed, None if there is nothing to run (any more, or just now)."""
        end = self.catch.seed or self.plan.first + self.plan.seeds
        if self.over or self._next >= end:
            return None
        seed, self._next = self._next, self._next + 1
        self._running.add(seed)
        return seed

    def take(self, seed: int, found: dict[str, Any], verdict: str) -> None:
        """A seed's result. ``verdict``: found, over (it counts for nothing), or no."""
        catch, first = self.catch, self.plan.first
        self._running.discard(seed)
        catch.tried += 1
        if verdict == "over":
            catch.passed_over.append(seed)
        elif verdict == "found" and (not catch.seed or seed < catch.seed):
            catch.seed, catch.found_after_seeds = seed, seed - first + 1
            catch.end, catch.why, catch.unseen = found["end"], found["why"], found["unseen"]
            catch.rule = rule_of(found["why"]) if found["end"] == "wrong" else ""
        elif verdict == "no" and found["end"] not in ("ok", "lost"):
            catch.others[found["end"]] = catch.others.get(found["end"], 0) + 1
        end = catch.seed or first + self.plan.seeds
        if not any(running < end for running in self._running) and self._next >= end:
            self.over = True


class Hunt:
    """All bugs, by some threads that each wait for a process."""

    def __init__(self, bugs: list[Bug], plan: Plan, tell: Callable[[str], None]) -> None:
        self.plan, self.tell = plan, tell
        self.folder = Path(tempfile.mkdtemp(prefix="planted-"))
        self.whole = self.folder / "whole"
        self._lock = threading.Lock()
        self._failed: list[BaseException] = []
        copy_tree(self.whole)  # once: others may be changing the tree meanwhile
        self.chases = []
        for bug in bugs:
            tree = self.folder / bug.name
            copy_tree(tree, self.whole)
            plant(bug, tree)
            self.chases.append(Chase(bug, tree, plan))

    def run(self) -> list[Catch]:
        """Until every bug is found, or its seeds are used up; nothing is left behind."""
        workers = [
            threading.Thread(target=self._work, daemon=True) for _ in range(self.plan.processes)
        ]
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        except BaseException as e:
            self._failed.append(e)  # the threads end with the seeds that they are at
            raise
        finally:
            for worker in workers:
                worker.join()
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._failed:
            raise self._failed[0]
        return [chase.catch for chase in self.chases]

    def _work(self) -> None:
        mine: Chase | None = None
        runners: dict[Path, Runner] = {}
        try:
            while not self._failed and (ticket := self._ticket(mine)) is not None:
                chase, seed = ticket
                if mine is not None and chase is not mine and mine.tree in runners:
                    runners.pop(mine.tree).close()
                mine = chase
                self._try(chase, seed, runners)
        except BaseException as e:
            self._failed.append(e)
        finally:
            for runner in runners.values():
                runner.close()

    def _ticket(self, mine: Chase | None) -> tuple[Chase, int] | None:
        """A seed of the bug at hand, else of one that nobody hunts yet, else of any."""
        with self._lock:
            new = [c for c in self.chases if not c.catch.tried and not c._running]
            for chase in [*filter(None, [mine]), *new, *self.chases]:
                if (seed := chase.hand_out()) is not None:
                    return chase, seed
        return None

    def _try(self, chase: Chase, seed: int, runners: dict[Path, Runner]) -> None:
        def run(tree: Path, checkers: bool) -> dict[str, Any]:
            runner = runners.setdefault(tree, Runner(tree))
            return runner.run(seed, {**self.plan.options, "checkers": checkers})

        found, verdict = run(chase.tree, self.plan.checkers), "no"
        if found["end"] in chase.bug.ends:
            well = run(self.whole, self.plan.checkers)["end"] not in ("wrong", "crash", "stuck")
            verdict = "found" if well else "over"
            if well:
                found["unseen"] = run(chase.tree, False)["end"] in ("ok", "lost")
        with self._lock:
            chase.take(seed, found, verdict)
            if chase.over:
                self._told(chase)

    def _told(self, chase: Chase) -> None:
        catch, done = chase.catch, sum(c.over for c in self.chases)
        word = f"not found in {catch.tried} seeds {catch.others}"
        if catch.found_after_seeds:
            word = f"found after {catch.found_after_seeds} seeds by {catch.rule!r}: {catch.why}"
        self.tell(f"[{done}/{len(self.chases)}] {catch.bug}: {word[:300]}")
