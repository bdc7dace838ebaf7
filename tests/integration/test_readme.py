"""The README is true: its hook runs as printed, its commands and files exist."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from p2pckpt.cli.main import cli
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


def test_every_command_named_is_there():
    named = set(re.findall(r"`p2pckpt ([a-z]+)", README)) | set(
        re.findall(r"^p2pckpt ([a-z]+)", README, re.M)
    )
    assert named <= set(cli.commands), named - set(cli.commands)


def test_every_make_target_named_is_there():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`?make ([a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, re.M), target


@pytest.mark.parametrize("page", ["README.md", "p2pckpt/README.md", "CONTRIBUTING.md"])
def test_every_link_leads_somewhere(page):
    place = ROOT / page
    for link in re.findall(r"\]\(([^)#]+)\)", place.read_text()):
        assert (place.parent / link).exists(), link
