"""The README is true: its hook runs as printed, its commands and files exist."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from p2pckpt.cli.main import cli, leaves, named
from p2pckpt.demo.cluster import Machine

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

BEFORE = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer}
steps = 40
def train_step():
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
AFTER = """
print("start", start, "sum", float(model.weight.double().sum()))
"""


def hook() -> str:
    return next(
        block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "restore" in block
    )


def run_hook(node) -> str:
    """The README's code with one change: two nodes cannot hold rs:4,2."""
    code = BEFORE + hook().replace("rs:4,2", "copies:1") + AFTER
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    env |= {"P2PCKPT_AGENT": str(node.socket), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code],
        env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def until(ready, timeout_s=60.0):
    end = time.monotonic() + timeout_s
    while not (found := ready()):
        assert time.monotonic() < end, "not within its bound"
        time.sleep(0.05)
    return found


def test_the_hook_runs_as_printed(tmp_path):
    with Machine(tmp_path, racks=2) as machine:
        machine.start_services()
        nodes = [machine.start_node(), machine.start_node()]
        until(lambda: (machine.look() and False) or all(n.ready_at for n in nodes))
        first = run_hook(nodes[0])
        assert "start 0 " in first

        def committed():
            jobs = nodes[0].status()["jobs"]
            return jobs and next(iter(jobs.values()))["latest"] == 40

        until(committed)
        second = run_hook(nodes[1])  # another node: the bytes come from the first
        assert "start 40 " in second
        assert first.split("sum")[1] == second.split("sum")[1]


def blocks(kind) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", README, re.S)


def free_ports(count) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


def test_by_hand_runs_as_printed(tmp_path):
    """With ports and a RAM directory of its own, and what is installed already."""
    (block,) = (b for b in blocks("sh") if "for n in a b c" in b)
    ram = Path(tempfile.mkdtemp(prefix="p2pckpt-readme-", dir="/dev/shm"))
    clients, peers = (f"http://127.0.0.1:{port}" for port in free_ports(2))
    etcd = f"etcd --listen-client-urls {clients} --advertise-client-urls {clients}"
    etcd += f" --listen-peer-urls {peers} --initial-advertise-peer-urls {peers}"
    etcd += f" --initial-cluster default={peers}"
    changes = {
        "pip install": "true",
        "etcd --data-dir": f"{etcd} --data-dir",
        "/dev/shm/p2pckpt-": f"{ram}/",
        "mktemp -d": f"mktemp -d -p {tmp_path}",
    }
    for old, new in changes.items():
        assert block.count(old), old
        block = block.replace(old, new)
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    env |= {"P2PCKPT_ENDPOINTS": clients, "PYTHONPATH": str(ROOT)}
    env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.Popen(
        ["bash", "-e", "-c", block], cwd=tmp_path, env=env, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=180)
        assert process.returncode == 0, (out, err)
        lines = [line for line in out.splitlines() if line.startswith("starts")]
        assert lines == ["starts at step 0 with 0.0", "starts at step 10 with 10.0"], (out, err)
        told = re.findall(r"# (starts at .*)", block)
        assert told == lines, "what the comments promise"
        assert "20 (RAM)" in out
        assert "removed job" in out
        assert list(ram.iterdir()) == list(tmp_path.iterdir()) == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(ram)


def test_every_command_named_is_there_and_understands_its_options():
    shown = re.findall(r"`(p2pckpt [a-z][^`]*)`", README)
    shown += re.findall(r"^ *(?:\w+=\S+ )?(p2pckpt .*?)(?:  +#.*)?$", "\n".join(blocks("sh")), re.M)
    assert len(shown) > 12
    for line in shown:
        words = line.replace("\\", "").replace("FILE", "f").split()[1:]
        name = named(words)
        assert name, line
        command = dict(leaves(cli)).get(name)
        if command is not None:
            for option in (w for w in words if w.startswith("--") and w != "--help"):
                assert any(option in p.opts for p in command.params), (line, option)


def test_every_leaf_command_is_in_the_table():
    told = README.replace("`, `", "`, `p2pckpt ")
    for group in ("job", "config", "topology", "simulate", "ledger"):
        assert f"p2pckpt {group} " in told
    for name, _ in leaves(cli):
        if " " not in name:
            assert f"p2pckpt {name}" in told, name


def test_every_make_target_named_is_there():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`?make ([a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, re.M), target


@pytest.mark.parametrize("page", ["README.md", "p2pckpt/README.md", "CONTRIBUTING.md"])
def test_every_link_leads_somewhere(page):
    place = ROOT / page
    for link in re.findall(r"\]\(([^)#]+)\)", place.read_text()):
        assert (place.parent / link).exists(), link
