"""`python -m tests.soak [--fast] [--saves N] [--mib M] [--replace-every R] [--json F]`: leaks?

Four nodes, three ranks, rs:2,1. Every R saves a node is lost with all it holds and a new one takes
its place: in turn the spare one, with training going on, and that of rank 2, after which all ranks
join and restore anew (ranks 0 and 1 in the same process). Every restored state is compared, bit for
bit, with what was saved. Exit code 0 if nothing has grown.

With --fast time goes fast: two nodes, `copies:1`, states of 64 KB, 10,000 saves one after the other
and no loss; etcd has a quota of 16 MiB and compacts itself. Then slopes are judged as well.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from kill_rig import Cluster, Job

from p2pckpt.backends.etcd_server import EtcdOptions
from tests.soak.watch import Verdict, judge, largest, sample, slopes

QUOTA_BYTES = 16 << 20


@dataclass(frozen=True)
class Plan:
    """What is done. ``nodes`` 4: the last one has no rank."""

    nodes: int
    ranks: int
    layout: str
    saves: int
    mib: float
    replace_every: int
    sample_every: int
    history: str
    """What etcd keeps of the past: far less than a user's does, as time goes faster here."""


USUAL = Plan(4, 3, "rs:2,1", 500, 64, 100, 10, "10s")
FAST = Plan(2, 2, "copies:1", 10_000, 1 / 16, 0, 50, "10s")


def main(arguments: list[str]) -> int:
    """Save, replace, look; 0 if nothing has grown."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--fast", action="store_true", help="many small saves")
    parser.add_argument("--saves", type=int)
    parser.add_argument("--mib", type=float, help="of a rank")
    parser.add_argument("--replace-every", type=int, help="saves between losses; 0: none")
    parser.add_argument("--json", type=Path, help="write samples and verdicts here as well")
    options = parser.parse_args(arguments)
    usual = FAST if options.fast else USUAL
    plan = Plan(
        **vars(usual)
        | {k: v for k, v in vars(options).items() if k in vars(usual) and v is not None}
    )
    if plan.saves < 3 * plan.sample_every:
        parser.error(f"--saves {plan.saves}: needs {3 * plan.sample_every} or more")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    begun = time.monotonic()
    samples = run(plan)
    verdicts = judged(plan, samples, options.fast)
    took_s = time.monotonic() - begun
    print(f"\n{plan.saves} saves in {took_s:.0f} s")
    for v in verdicts:
        word = "pass" if v.passed else "FAIL"
        if v.most is not None:
            print(f"{word}  {v.name:28} {v.last:10.3f}, at most {v.most:.3g}")
        else:
            print(f"{word}  {v.name:28} {v.second:10.1f} -> {v.last:10.1f}")
    if options.json:
        found = [{"name": v.name, "second": v.second, "last": v.last, "passed": v.passed}
                 for v in verdicts]  # fmt: skip
        document = {"samples": samples, "verdicts": found, "seconds": round(took_s)}
        options.json.write_text(json.dumps(document, indent=1))
    return 0 if all(v.passed for v in verdicts) else 1


def judged(plan: Plan, samples: dict[int, dict[str, float]], fast: bool) -> list[Verdict]:
    """What has grown. In fast motion a database that fills to its usual size has not."""
    verdicts = judge(samples, plan.saves)
    if not fast:
        return verdicts
    kept = [v for v in verdicts if "RSS" not in v.name and v.name != "etcd MB"]
    return [*kept, *slopes(samples), largest(samples, "etcd MB", QUOTA_BYTES / 1e6)]


def run(plan: Plan) -> dict[int, dict[str, float]]:
    """All samples, by the number of saves before them."""
    place = Path(tempfile.mkdtemp(prefix="soak-"))
    quota = f"--quota-backend-bytes={QUOTA_BYTES}"
    flags = (quota, f"--auto-compaction-retention={plan.history}")
    try:
        budget_mib = int(16 * plan.mib) + 256
        options = EtcdOptions(durable=False, flags=flags)
        with Cluster(place, plan.nodes, budget_mib, options) as cluster:
            return soak(cluster, plan)
    finally:
        shutil.rmtree(place)


def soak(cluster: Cluster, plan: Plan) -> dict[int, dict[str, float]]:
    """Save again and again."""
    job = Job(cluster, "soak", cluster.nodes[: plan.ranks], plan.mib, plan.layout)
    samples: dict[int, dict[str, float]] = {}
    job.launch()
    for seated in (False, True) if plan.replace_every else ():
        job.commit()  # so that every node has held what it holds in such a time
        replace(cluster, job, seated)
    uncommitted, begun = 0, time.monotonic()
    for number in range(1, plan.saves + 1):
        uncommitted += job.commit_soon() - 1
        job.forget()
        if number % plan.sample_every == 0:
            job.ask("collect")
            samples[number] = sample(cluster, job.seats[0].pid, job.nodes[0])
        if number % (5 * plan.sample_every) == 0:
            told = ", ".join(f"{name} {value:.1f}" for name, value in samples[number].items())
            took = f"{number} saves in {time.monotonic() - begun:.0f} s"
            print(f"{took} ({uncommitted} more not committed): {told}", flush=True)
        every = plan.replace_every
        if every and number % every == 0 and number < plan.saves:
            replace(cluster, job, (number // every) % 2 == 0)
    job.close()
    return samples


def replace(cluster: Cluster, job: Job, seated: bool) -> None:
    """Lose a node, the spare one or that of the last rank; have a new one in its place."""
    lost = job.nodes[-1] if seated else next(n for n in cluster.nodes if n not in job.nodes)
    if seated:
        job.kill([len(job.seats) - 1])
    cluster.destroy([lost])
    cluster.take_dead()
    fresh = cluster.start_node(lost.rack)
    if seated:
        cluster.await_ready()
        job.nodes = [*job.nodes[:-1], fresh]
        before = job.step
        assert job.launch(keep=True) == before, (before, job.step)
    else:
        job.commit_soon()  # while the new one starts
        cluster.await_ready()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
