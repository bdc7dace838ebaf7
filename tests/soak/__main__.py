"""`python -m tests.soak [--saves N] [--mib M] [--replace-every R] [--json FILE]`: does it leak?

Four nodes, three ranks, rs:2,1. Every R saves a node is lost with all it holds and a new one takes
its place: in turn the spare one, with training going on, and that of rank 2, after which all ranks
join and restore anew (ranks 0 and 1 in the same process). Every restored state is compared, bit for
bit, with what was saved. Exit code 0 if nothing has grown.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from kill_rig import Cluster, Job

from p2pckpt.backends.etcd_server import EtcdOptions
from tests.soak.watch import judge, sample

NODES, RANKS, LAYOUT = 4, 3, "rs:2,1"
SAMPLE_EVERY, PRINT_EVERY = 10, 50


def main(arguments: list[str]) -> int:
    """Save, replace, look; 0 if nothing has grown."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--saves", type=int, default=500)
    parser.add_argument("--mib", type=int, default=64, help="of a rank")
    parser.add_argument("--replace-every", type=int, default=100, help="saves between losses")
    parser.add_argument("--json", type=Path, help="write samples and verdicts here as well")
    options = parser.parse_args(arguments)
    if options.saves < 3 * SAMPLE_EVERY:
        parser.error(f"--saves {options.saves}: needs {3 * SAMPLE_EVERY} or more")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    run = Path(tempfile.mkdtemp(prefix="soak-"))
    begun = time.monotonic()
    try:
        budget_mib = 16 * options.mib + 256
        with Cluster(run, NODES, budget_mib, EtcdOptions(durable=False)) as cluster:
            samples = soak(cluster, options)
    finally:
        shutil.rmtree(run)
    verdicts = judge(samples, options.saves)
    print(f"\n{options.saves} saves in {time.monotonic() - begun:.0f} s")
    for v in verdicts:
        word = "pass" if v.passed else "FAIL"
        print(f"{word}  {v.name:24} {v.second:10.1f} -> {v.last:10.1f}")
    if options.json:
        found = [{"name": v.name, "second": v.second, "last": v.last, "passed": v.passed}
                 for v in verdicts]  # fmt: skip
        options.json.write_text(json.dumps({"samples": samples, "verdicts": found}, indent=1))
    return 0 if all(v.passed for v in verdicts) else 1


def soak(cluster: Cluster, options: argparse.Namespace) -> dict[int, dict[str, float]]:
    """All samples, by the number of saves before them."""
    job = Job(cluster, "soak", cluster.nodes[:RANKS], options.mib, LAYOUT)
    samples: dict[int, dict[str, float]] = {}
    job.launch()
    for seated in (False, True):  # so that every node has held what it holds in such a time
        job.commit()
        replace(cluster, job, seated)
    uncommitted = 0
    for number in range(1, options.saves + 1):
        uncommitted += job.commit_soon() - 1
        job.forget()
        if number % SAMPLE_EVERY == 0:
            job.ask("collect")
            samples[number] = sample(cluster, job.seats[0].pid, job.nodes[0])
        if number % PRINT_EVERY == 0:
            told = ", ".join(f"{name} {value:.0f}" for name, value in samples[number].items())
            print(f"{number} saves ({uncommitted} more not committed): {told}", flush=True)
        if number % options.replace_every == 0 and number < options.saves:
            replace(cluster, job, (number // options.replace_every) % 2 == 0)
    job.close()
    return samples


def replace(cluster: Cluster, job: Job, seated: bool) -> None:
    """Lose a node, the spare one or that of the last rank; have a new one in its place."""
    lost = job.nodes[-1] if seated else next(n for n in cluster.nodes if n not in job.nodes)
    if seated:
        job.kill([RANKS - 1])
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
