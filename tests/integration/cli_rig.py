"""Agents, ranks and commands as processes, for the tests of the commands."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from etcd_rig import FAST, etcdctl

from p2pckpt.backends.etcd_server import EtcdServers
from p2pckpt.backends.lifeline import tied

PATIENCE_S = 60.0
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
UID = os.getuid()
P2PCKPT = (sys.executable, "-m", "p2pckpt.cli.main")
SHORT = (
    *("--lease-s", "3", "--keepalive-s", "0.7", "--lost-grace-s", "1"),
    *("--ram-budget-bytes", str(256 << 20), "--chunk-bytes", "65536", "--trial"),
)
RECORDS = "p2pckpt/jobs/"


class Cluster:
    """Agents with a host, a rack and a RAM directory each."""

    def __init__(self, root, count, options=(), environment=()):
        self.root, self.options = root, options
        self.environment = {**os.environ, **dict(environment)}
        self.names = [f"n{i}" for i in range(count)]
        self.agents, self.ranks = {}, []
        self.ram = Path(tempfile.mkdtemp(prefix="p2pckpt-test-", dir="/dev/shm"))
        self.etcd = EtcdServers.start(root / "etcd", 1, FAST)
        try:
            self.start_all()
        except BaseException:
            self.close()
            raise

    def start_all(self):
        rank = (sys.executable, str(HERE / "cli_rank.py"))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        for _ in range(min(3, len(self.names))):
            self.ranks.append(subprocess.Popen(tied(rank, signal.SIGKILL), cwd=ROOT, **pipes))
        for name in self.names:
            self.start(name)
        for name in self.names:
            self.ready(name)

    def socket(self, name):
        return str(self.root / f"{name}.sock")

    def log(self, name):
        return self.root / f"{name}.log"

    def start(self, name):
        place = ("--node", name, "--host-id", name, "--directory", str(self.ram / name))
        self.log(name).unlink(missing_ok=True)
        with self.log(name).open("wb") as log:
            agent = (*P2PCKPT, "agent", *place, "--socket", self.socket(name), *SHORT)
            agent += ("--endpoints", self.etcd.endpoints[0], *self.options)
            self.agents[name] = subprocess.Popen(
                tied(agent, signal.SIGKILL),
                cwd=ROOT,
                env=self.environment,
                stdout=log,
                stderr=log,
            )

    def ready(self, name):
        until(lambda: b'"ready"' in self.log(name).read_bytes(), self.log(name).read_text)

    def stop(self, name, wipe=False):
        agent = self.agents.pop(name)
        agent.send_signal(signal.SIGTERM)
        agent.wait(PATIENCE_S)
        if wipe:
            shutil.rmtree(self.ram / name)

    def tell(self, job, steps, nodes, layout="rs:2,0", hold=False):
        """Have one rank a node save some steps of a job; with `hold` they stay in it after."""
        token = uuid.uuid4().hex
        for rank, node in enumerate(nodes):
            order = {"job": job, "layout": layout, "steps": steps, "hold": hold, "rank": rank}
            order |= {"size": len(nodes), "token": token, "agent": self.socket(node)}
            self.ranks[rank].stdin.write(json.dumps(order).encode() + b"\n")
            self.ranks[rank].stdin.flush()
        for rank in range(len(nodes)):
            self.hear(rank)

    def hear(self, rank):
        process = self.ranks[rank]
        assert select.select([process.stdout], [], [], PATIENCE_S)[0]
        assert process.stdout.readline() == b"done\n"

    def train(self, job, steps, nodes, layout="rs:2,0"):
        self.tell(job, steps, nodes, layout)

    def keys(self, job):
        """The job's keys in etcd, by a client that is not ours."""
        prefix = f"{RECORDS}{UID}.{job}/"
        found = etcdctl(self.etcd.endpoints[0], "get", prefix, "--prefix", "--keys-only")
        return [line.removeprefix(prefix) for line in found.split()]

    def close(self):
        for process in (*self.agents.values(), *self.ranks):
            process.kill()
        for process in (*self.agents.values(), *self.ranks):
            process.wait(PATIENCE_S)
        for rank in self.ranks:
            rank.stdin.close()
            rank.stdout.close()
        self.etcd.close()
        shutil.rmtree(self.ram)


def until(what, story=lambda: "", within_s=PATIENCE_S):
    """Look again and again, bounded."""
    end = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < end, story()
        time.sleep(0.02)


def command(*arguments, code=0, agent=None, cwd=ROOT):
    """Run a command; its standard output and error, after its exit code was checked."""
    more = ("--agent", agent) if agent else ()
    found = subprocess.run(
        (*P2PCKPT, *map(str, arguments), *more),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    assert found.returncode == code, (found.returncode, found.stdout, found.stderr)
    return found.stdout, found.stderr


def document(*arguments, code=0, agent=None):
    """The document of a command, after what holds for all of them was checked."""
    text, stderr = command(*arguments, "--json", code=code, agent=agent)
    out = json.loads(text)
    assert list(out)[:5] == ["schema_version", "command", "ok", "error", "exit_code"]
    assert out["exit_code"] == code
    assert out["ok"] == (code == 0) == (out["error"] is None)
    if code:
        assert out["error"]["next"] == advice(stderr)
        assert out["error"]["message"]
        assert out["error"]["kind"]
    return out


def advice(stderr):
    return stderr.strip().splitlines()[-1]
