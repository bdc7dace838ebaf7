"""What the tests of kills and the soak share: a cluster to hurt, and a job that knows its bytes.

`Cluster` is the demo's machine with agents and an etcd that can be killed and started again on what
they left. `Job` drives the ranks of one job over all its launches and remembers the digest of each
rank's state at each save, so that every restore is compared, bit for bit.

Contract: processes are signalled by pidfd or as children that are not reaped; waits are bounded.
"""

import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import p2pckpt
from p2pckpt.backends.etcd_server import EtcdOptions, find_etcd
from p2pckpt.cli.output import EXIT_DEGRADED, EXIT_NOTHING
from p2pckpt.demo.cluster import GRACE_S, LEASE_S, Machine

PATIENCE_S = 60.0
LOST_S = LEASE_S + GRACE_S
"""A silent agent is lost after this."""
HERE = Path(__file__).parent
ROOT = Path(p2pckpt.__file__).parents[1]

ETCD = EtcdOptions(
    durable=False,
    # etcd 3.5.1 can lose a transaction for good if it is killed while it commits to its backend
    # (etcd-io/etcd#13766); so it commits almost never and replays its log instead.
    flags=("--backend-batch-interval=10m", "--auto-compaction-retention=0"),
)


class Cluster(Machine):
    """See the file's head. ``run`` needs to be short: sockets lie in it."""

    def __init__(self, run, nodes, budget_mib, etcd=ETCD, racks=0):
        super().__init__(run, racks or nodes)
        self._nursery = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.settimeout(PATIENCE_S)
        try:
            self._listener.bind(str(run / "ranks.sock"))
            self._listener.listen(64)
            self._nursery = self._hatch()
            self.start_services(budget_bytes=budget_mib << 20, options=etcd)
            for _ in range(nodes):
                self.start_node()
            self.await_ready()
        except BaseException:
            self.close()
            raise

    def await_ready(self):
        """Until all agents are, and all are members."""
        until(self.settled, self.story)

    def restart(self, node):
        """A new agent in place of one that was killed, on the same directory and socket."""
        assert not node.alive
        old, self._named = self._named, int(node.name[1:])
        node.log.rename(node.log.with_suffix(f".{uuid.uuid4().hex[:6]}"))
        fresh = self.start_node(node.rack)
        self._named = old
        self.nodes.remove(fresh)
        self.nodes[self.nodes.index(node)] = fresh
        until(lambda: fresh in self.look(), self.story)
        assert fresh.store_id == node.store_id
        return fresh

    def mover(self, node):
        """The process id of a node's mover now; 0 if it has none."""
        return next((pid for pid in children(node.agent.pid) if "ucx_mover" in command(pid)), 0)

    def ram_bytes(self):
        """Of all nodes: what the arenas have given out, and what the tmpfs really holds."""
        given = sum(node.status()["ram"]["used_bytes"] for node in self.nodes)
        files = [f for f in self.ram.rglob("*") if f.is_file()]
        return given, sum(f.lstat().st_blocks * 512 for f in files), len(files)

    def keys(self, job=""):
        """The keys in etcd of one job or all, by a client that is not ours."""
        prefix = f"p2pckpt/jobs/{os.getuid()}.{job}/" if job else "p2pckpt/"
        found = self.etcdctl("get", prefix, "--prefix", "--keys-only")
        return [line.removeprefix(prefix) for line in found.split()]

    def etcdctl(self, *arguments):
        tool = [find_etcd().with_name("etcdctl"), f"--endpoints={self.etcd.endpoints[0]}"]
        return subprocess.run(
            [*tool, *arguments], capture_output=True, text=True, timeout=20, check=True
        ).stdout

    def hatch(self, rank, mib):
        """A new rank."""
        order = {"rank": rank, "mib": mib, "socket": str(self.run / "ranks.sock")}
        self._nursery.stdin.write(json.dumps(order).encode() + b"\n")
        self._nursery.stdin.flush()
        return Seat(self._listener.accept()[0])

    def _hatch(self):
        env = {k: v for k, v in os.environ.items() if not k.startswith("P2PCKPT_")}
        env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with (self.run / "ranks.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-W", "error", str(HERE / "kill_rank.py")],
                stdin=subprocess.PIPE, stdout=log, stderr=log, env=env,
            )  # fmt: skip

    def story(self):
        """The last lines of every log."""
        logs = sorted(self.run.glob("*.log"))
        return "\n".join(f"-- {log.name}\n{log.read_text()[-1500:]}" for log in logs)

    def close(self):
        try:
            super().close()
        finally:
            self._listener.close()
            if self._nursery is not None:
                self._nursery.stdin.close()
                self._nursery.kill()
                self._nursery.wait(PATIENCE_S)


class Seat:
    """A rank's process, and our end of its line."""

    def __init__(self, line):
        self._line = line
        self._heard = b""
        packed = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.pid = int.from_bytes(packed[:4], sys.byteorder)
        self._pidfd = os.pidfd_open(self.pid)

    def tell(self, do, **how):
        self._line.sendall(json.dumps({"do": do, **how}).encode() + b"\n")

    def hear(self, timeout_s=PATIENCE_S):
        """The next answer. EOFError if the rank is dead."""
        end = time.monotonic() + timeout_s
        while b"\n" not in self._heard:
            left_s = end - time.monotonic()
            assert left_s > 0, f"rank of pid {self.pid} says nothing"
            if select.select([self._line], [], [], left_s)[0]:
                try:
                    data = self._line.recv(65536)
                except ConnectionResetError:
                    data = b""
                if not data:
                    raise EOFError(f"rank of pid {self.pid} is dead")
                self._heard += data
        text, _, self._heard = self._heard.partition(b"\n")
        return json.loads(text)

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def bury(self):
        """Wait until it is gone. Did it end with nothing left to say?"""
        assert select.select([self._pidfd], [], [], PATIENCE_S)[0]
        os.close(self._pidfd)
        try:
            self.hear()
            silent = False
        except EOFError:
            silent = True
        self._line.close()
        return silent


class Job:
    """One job: its living ranks, and the digest of every (rank, step) when it was saved."""

    def __init__(self, cluster, name, nodes, mib, layout="copies:1"):
        self.cluster, self.name, self.nodes = cluster, name, nodes
        self.mib, self.layout = mib, layout
        self.seats = []
        self.wrote = {}
        self.step = 0
        self.blocking_s = 0.05

    def join(self, keep=False):
        """End the ranks that live and start new ones, with `keep` only in place of dead ones."""
        if not keep:
            self.kill()
        fresh = [s or self.cluster.hatch(r, self.mib) for r, s in enumerate(self._places())]
        self.seats, token = fresh, uuid.uuid4().hex
        for seat, node in zip(self.seats, self.nodes, strict=True):
            where = {"agent": str(node.socket), "layout": self.layout, "size": len(self.nodes)}
            seat.tell("join", job=self.name, token=token, **where)
        self.hear()

    def launch(self, keep=False):
        """Join, and restore; the step that all are at, after what they restored was compared."""
        self.join(keep)
        found = self.ask("restore")
        steps = {answer["step"] for answer in found}
        assert len(steps) == 1, found
        self.step = steps.pop()
        for rank, answer in enumerate(found):
            if self.step:
                assert answer["sha"] == self.wrote[rank, self.step], (rank, self.step, "torn")
        return self.step

    def refused(self):
        """Join, and fail to restore; what each rank was told."""
        self.join()
        for seat in self.seats:
            seat.tell("restore")
        answers = [seat.hear() for seat in self.seats]
        assert all("raised" in answer for answer in answers), (answers, self.cluster.story())
        return [answer["raised"] for answer in answers]

    def _places(self):
        return self.seats or [None] * len(self.nodes)

    def ask(self, do, **how):
        for seat in self.seats:
            seat.tell(do, **how)
        return self.hear()

    def hear(self):
        """One answer of each rank; none may have raised."""
        answers = [seat.hear() for seat in self.seats]
        assert not [a for a in answers if "raised" in a], (answers, self.cluster.story())
        return answers

    def train(self):
        """One more step, not saved."""
        self.step += 1
        for rank, answer in enumerate(self.ask("prepare", step=self.step)):
            self.wrote[rank, self.step] = answer["sha"]

    def save(self):
        """Train and save; what `save` said to each rank."""
        self.train()
        found = self.ask("save", step=self.step)
        self.blocking_s = max(answer["blocking_s"] for answer in found)
        return found

    def ends(self, step=None, timeout_s=PATIENCE_S):
        """How a save ended; no rank takes for committed what another does not.

        (A rank that could not take part, because it did not reach its agent, says "failed".)
        """
        found = self.ask("wait", step=step or self.step, timeout_s=timeout_s)
        said = {a["status"] for a in found} - {"failed"}
        assert "committed" not in said or len(said) == 1, (found, self.cluster.story())
        assert "in flight" not in said, (found, self.cluster.story())
        return found

    def commit(self):
        """Save and see it committed."""
        self.save()
        found = self.ends()
        assert {a["status"] for a in found} == {"committed"}, (found, self.cluster.story())

    def commit_soon(self, within_s=PATIENCE_S):
        """Save until one is committed; how many saves it took."""
        end, tries = time.monotonic() + within_s, 0
        while True:
            self.save()
            tries += 1
            found = self.ends()
            if {a["status"] for a in found} == {"committed"}:
                return tries
            print(f"{self.name} step {self.step}: {found}")
            assert time.monotonic() < end, (found, self.cluster.story())

    def forget(self):
        """Digests of steps that nobody goes back to."""
        self.wrote = {at: sha for at, sha in self.wrote.items() if at[1] > self.step - 10}

    def kill(self, ranks=None):
        """SIGKILL some ranks, or all that live; those that had nothing left to say."""
        chosen = [r for r, s in enumerate(self.seats) if s and (ranks is None or r in ranks)]
        for rank in chosen:
            self.seats[rank].kill()
        silent = [rank for rank in chosen if self.seats[rank].bury()]
        for rank in chosen:
            self.seats[rank] = None
        if not any(self.seats):
            self.seats = []
        return silent

    def verified(self, step="latest", by=None):
        """`p2pckpt verify`, which reads every byte: is the step right, or at least restorable?

        ``by``: the node that is asked."""
        told = [sys.executable, "-m", "p2pckpt.cli.main", "verify", str(step), "--json"]
        done = subprocess.run(
            [*told, "--job", self.name, "--agent", str((by or self.nodes[-1]).socket)],
            cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
        assert done.returncode in (0, 4), (done.stdout, done.stderr, self.cluster.story())
        document = json.loads(done.stdout)
        return document["restorable"] and document["step"]

    def committed(self):
        """Steps with a commit in the ledger."""
        keys = self.cluster.keys(self.name)
        return sorted(
            int(key.rpartition("/")[2]) for key in keys if key.startswith("state/commit/")
        )

    def close(self):
        """The ranks go, and the job with all its bytes."""
        self.kill()
        told = [sys.executable, "-m", "p2pckpt.cli.main", "clean", "--job", self.name, "--yes"]
        tried = []

        def cleaned():
            done = subprocess.run(
                [*told, "--agent", str(self.nodes[0].socket)],
                cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S,
            )  # fmt: skip
            self.last = done.stderr
            gone = (
                done.returncode == EXIT_NOTHING and EXIT_DEGRADED in tried
            )  # who was slow has freed it since
            tried.append(done.returncode)
            return done.returncode == 0 or gone

        until(cleaned, lambda: self.last)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self.close()
        else:
            self.kill()


def moment(longest_s):
    """Let a random time pass, so that what comes next hits another point of a save each time."""
    time.sleep(random.uniform(0.0, longest_s))


def until(ready, story=lambda: "", within_s=PATIENCE_S):
    """Look again and again, bounded."""
    end = time.monotonic() + within_s
    while not (found := ready()):
        assert time.monotonic() < end, story()
        time.sleep(0.02)
    return found


def children(pid):
    """Process ids of a process' children."""
    with contextlib.suppress(OSError):
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def command(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def alive(pid):
    return Path(f"/proc/{pid}/stat").exists()
