"""A campaign: the options of each seed, many seeds in several processes, and what they add up to.

    seed -> draw -> Options -> story.run -> Result -> Tally

Every seed draws its own cluster, layout, jobs and faults; a replay needs the seed only. Seeds run
in worker processes with different PYTHONHASHSEED, one line a seed each way; every 100th runs in two
of them and must give the same digest. A worker that says nothing for long, or dies, is a finding.

Contract: the tally is the same whatever the number of processes, but for how many seeds fit into
the given time. What never happened in a campaign, though it should, is told: fault kinds, legal
moves of a checkpoint's life, restore sources.
"""

from __future__ import annotations

import gc
import json
import selectors
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from random import Random
from time import monotonic
from typing import Any, TextIO

from simulations.world.lives import ALL_MOVES
from simulations.world.story import FAULTS, Options, run

SOURCES = ("local", "peers", "s3", "mixed", "nothing")
RARE = ("restore mixed", "move encoded->sealed", "move offloaded->abandoned")
"""What a short campaign need not see."""

LONG = 300
"""Seeds from which on nothing may be at 0."""

TWICE_EVERY = 100
SILENT_S = 600.0
"""A worker whose seed takes longer hangs in code that never awaits; else `MAX_TURNS` ends it."""

EXIT_CODES = {"wrong": 1, "crash": 5, "stuck": 6}
EXIT_NEVER = 7
LAYOUTS = (
    "rs:2,1", "rs:2,1", "rs:2,2", "rs:3,1", "rs:4,2", "rs:4,1", "rs:6,2", "copies:1", "copies:2",
    "copies:3",
)  # fmt: skip
BUCKET = ("bucket_outage", "bucket_slow", "bucket_errors", "bucket_damage", "power_lost")
BUSY = "busy_cores"
FAULTS_OF_A_SEED = 10


def draw(seed: int) -> Options:
    """The options of a seed, from nothing else."""
    rng = Random(f"campaign {seed}")
    nodes = rng.choice((4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 8, 8, 9, 10, 12, 16))
    layout = rng.choice([text for text in LAYOUTS if _shards(text) < nodes])
    racks = rng.choice((nodes, max(2, nodes // 2), max(3, nodes // 2 + 1)))
    offload_every = rng.choice((0, 2, 3))
    kinds = [k for k in sorted(FAULTS) if offload_every or k not in BUCKET]
    kinds.remove(BUSY)
    chosen = rng.sample(kinds, rng.randint(4, 9))
    faults = chosen + [rng.choice(chosen) for _ in range(FAULTS_OF_A_SEED - len(chosen))]
    rng.shuffle(faults)
    options = Options(
        seed=seed,
        nodes=nodes,
        racks=racks,
        switches=rng.choice((2, 3, 3)),
        spread=rng.choice(("rack", "rack", "rack,switch", "")),
        layout=layout,
        ranks=rng.choice((1, 2, 3, 4, 4, 5, 6)),
        jobs=rng.choice((1, 1, 1, 2)) if nodes < 10 else 1,
        saves=rng.randint(30, 36),
        quiet_saves=8,
        every=rng.randint(3, 6),
        keep_last=rng.choice((1, 1, 2, 3)),
        step_s=1.0,
        offload_every=offload_every,
        overlap=rng.random() < 0.3,
        faults=tuple(faults),
        auto=bool(offload_every) and rng.random() < 0.4,
    )
    if rng.random() < 0.25:  # after all else: three worlds of four stay what they were
        faults[rng.randrange(FAULTS_OF_A_SEED)] = BUSY
    return replace(options, faults=tuple(faults))


def _shards(layout: str) -> int:
    kind, _, numbers = layout.partition(":")
    k, _, m = numbers.partition(",")
    return int(k) + int(m) if kind == "rs" else int(k)


@dataclass
class Tally:
    """What the seeds of a campaign add up to."""

    seeds: int = 0
    crash: int = 0
    stuck: int = 0
    wrong: int = 0
    lost: int = 0
    commits: int = 0
    due: int = 0
    virtual_h: float = 0.0
    twice: int = 0
    faults_fired: dict[str, int] = field(default_factory=lambda: dict.fromkeys(sorted(FAULTS), 0))
    moves_taken: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ALL_MOVES, 0))
    restores: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    failures: list[dict[str, Any]] = field(default_factory=list)
    never: list[str] = field(default_factory=list)

    def add(self, found: dict[str, Any]) -> None:
        """One seed's result."""
        self.seeds += 1
        self.commits += found["commits"]
        self.due += found["due"]
        self.virtual_h += found["virtual_s"] / 3600
        for name, into in (
            ("faults", self.faults_fired),
            ("moves", self.moves_taken),
            ("restores", self.restores),
        ):
            for what, times in found[name].items():
                into[what] = into.get(what, 0) + times
        self.ended(found["seed"], found["end"], found["why"])

    def ended(self, seed: int, end: str, why: str) -> None:
        """How a seed ended, if not well."""
        if end != "ok":
            setattr(self, end, getattr(self, end) + 1)
        if end in EXIT_CODES:
            self.failures.append({"seed": seed, "end": end, "why": why})

    def close(self) -> int:
        """Sort, say what never happened; the exit code."""
        self.failures.sort(key=lambda f: (f["seed"], f["end"]))
        counted = (("fault", self.faults_fired), ("move", self.moves_taken))
        self.never = [
            f"{kind} {what}"
            for kind, counts in (*counted, ("restore", self.restores))
            for what, times in counts.items()
            if not times and f"{kind} {what}" not in RARE
        ]
        for end, code in EXIT_CODES.items():
            if getattr(self, end):
                return code
        return EXIT_NEVER if self.never and self.seeds >= LONG else 0


def work(lines: TextIO, out: TextIO) -> None:
    """A worker: a seed a line in, its result as a line of JSON out."""
    gc.disable()  # a run ends before it matters
    for line in lines:
        gc.collect()
        asked = json.loads(line)
        options = replace(draw(asked["seed"]), **asked["options"])
        result = run(options, keep_log=False)
        found = {k: v for k, v in asdict(result).items() if k not in ("options", "log")}
        out.write(json.dumps({"seed": asked["seed"], **found}) + "\n")
        out.flush()


@dataclass
class _Worker:
    """A process that runs seeds, and what it is at."""

    process: subprocess.Popen[str]
    seed: int = -1
    since: float = 0.0


def _start(number: int, environ: Mapping[str, str]) -> _Worker:
    process = subprocess.Popen(
        [sys.executable, "-m", "simulations.world.campaign"],
        env={**environ, "PYTHONHASHSEED": str(1 + number * 4241)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    return _Worker(process)


def _end(worker: _Worker) -> None:
    worker.process.kill()
    worker.process.communicate()


class Campaign:
    """Seeds handed out to workers until they, or the time, are used up.

    ``environ`` is the workers' environment, but for PYTHONHASHSEED; ``options`` take the place of
    drawn ones.
    """

    def __init__(
        self,
        seeds: Iterator[int],
        processes: int,
        limit_s: float,
        tell: Callable[[str], None],
        environ: Mapping[str, str],
        **options: Any,
    ) -> None:
        self.tally = Tally()
        self._seeds = seeds
        self._ends_at = monotonic() + limit_s
        self._tell = tell
        self._options = options
        self._environ = environ
        self._workers = [_start(i, environ) for i in range(max(2, processes))]
        self._again: dict[int, list[int]] = {i: [] for i in range(len(self._workers))}
        self._digests: dict[int, str] = {}
        self._told_at = monotonic()

    def run(self) -> Tally:
        """All of it; the workers are gone afterwards."""
        try:
            busy = [w for i, w in enumerate(self._workers) if self._next(i)]
            while busy:
                self._hear(busy)
                busy = [w for w in self._workers if w.seed >= 0]
                if monotonic() - self._told_at > 30.0:
                    self._told_at = monotonic()
                    self._tell(self.told())
        finally:
            for worker in self._workers:
                _end(worker)
        return self.tally

    def told(self) -> str:
        """How it stands, in a line."""
        t = self.tally
        return (
            f"{t.seeds} seeds, {t.commits} commits of {t.due} due saves, "
            f"{sum(t.faults_fired.values())} faults, {t.virtual_h:.1f} virtual hours: "
            f"{t.crash} crash, {t.stuck} stuck, {t.wrong} wrong, "
            f"{t.lost} lost more than can be survived"
        )

    def _next(self, number: int) -> bool:
        """Give a worker its next seed; False: there is none."""
        worker = self._workers[number]
        if self._again[number]:
            seed = self._again[number].pop(0)
        elif monotonic() < self._ends_at and (seed := next(self._seeds, -1)) >= 0:
            if seed % TWICE_EVERY == 0:
                self._again[(number + 1) % len(self._workers)].append(seed)
        else:
            worker.seed = -1
            return False
        worker.seed, worker.since = seed, monotonic()
        assert worker.process.stdin is not None
        worker.process.stdin.write(json.dumps({"seed": seed, "options": self._options}) + "\n")
        worker.process.stdin.flush()
        return True

    def _hear(self, busy: list[_Worker]) -> None:
        """Wait for the next result; end workers that hang."""
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                assert worker.process.stdout is not None
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
            ready = [key.data for key, _ in selector.select(timeout=5.0)]
        for worker in ready:
            assert worker.process.stdout is not None
            line = worker.process.stdout.readline()
            if line:
                self._take(json.loads(line))
            else:
                self._replace(worker, "crash", "the process of this seed died")
            self._next(self._workers.index(worker) if line else self._last_replaced)
        for worker in busy:
            if worker not in ready and monotonic() - worker.since > SILENT_S:
                self._replace(worker, "stuck", f"no result within {SILENT_S:.0f} s of real time")
                self._next(self._last_replaced)

    def _replace(self, worker: _Worker, end: str, why: str) -> None:
        number = self._last_replaced = self._workers.index(worker)
        _end(worker)
        self.tally.seeds += 1
        self.tally.ended(worker.seed, end, why)
        self._tell(f"seed {worker.seed}: {end}: {why}")
        self._workers[number] = _start(number, self._environ)

    def _take(self, found: dict[str, Any]) -> None:
        seed, digest = found["seed"], found["digest"]
        if seed % TWICE_EVERY == 0 and seed in self._digests:
            self.tally.twice += 1
            if digest != self._digests[seed]:
                why = f"two processes, two runs: {self._digests[seed][:12]} and {digest[:12]}"
                self.tally.ended(seed, "wrong", why)
            return
        self._digests[seed] = digest
        self.tally.add(found)
        if found["end"] in EXIT_CODES:
            self._tell(f"seed {seed}: {found['end']}: {found['why'][:300]}")


if __name__ == "__main__":
    work(sys.stdin, sys.stdout)
