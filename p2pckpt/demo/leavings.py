"""What is left when a cluster has ended, and what its agents' logs say of trouble inside them.

Contract: `end_agents` asks every agent to end, bounded, and tells who did not end well. `behind`
looks at the whole machine: processes by what they inherited, memory, sockets. `troubles` finds what
no agent should ever write: a traceback, a task of its own that failed.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from p2pckpt.demo.cluster import Node

END_S = 30.0
GONE_S = 5.0
TROUBLES = ("crash", "task_failed")


def end_agents(nodes: Sequence[Node]) -> list[str]:
    """SIGTERM to all; a sentence for each that did not end with 0 in time, or left its socket."""
    wrong = []
    for node in nodes:
        node.agent.terminate()
    end = time.monotonic() + END_S
    for node in nodes:
        try:
            code = node.agent.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            wrong.append(f"the agent of {node.name} did not end within {END_S:g} s of SIGTERM")
            continue
        if code:
            wrong.append(f"the agent of {node.name} ended on SIGTERM with {code}: {tail(node.log)}")
        elif node.socket.exists():
            wrong.append(f"the agent of {node.name} left its socket {node.socket.name}")
    return wrong


def behind(run: Path, ram: Path) -> list[str]:
    """Processes of the nodes and ranks of this run, and memory, that are still there."""
    end = time.monotonic() + GONE_S  # a process that was killed takes a moment to be reaped
    while (left := _processes(run)) and time.monotonic() < end:
        time.sleep(0.05)
    return left + ([f"memory: {ram}"] if ram.exists() else [])


def _processes(run: Path) -> list[str]:
    mark, left = f"DEMO_RUN={run}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                left.append(f"process {process.name}: {command[:160]}")
    return left


def troubles(run: Path) -> list[str]:
    """A sentence for each agent's log that tells of a failure inside the agent."""
    out = []
    for log in sorted(run.glob("n*.log")):
        lines = log.read_text(errors="replace").splitlines()
        for at, line in enumerate(lines):
            with contextlib.suppress(ValueError):
                note = json.loads(line)
                if isinstance(note, dict) and note.get("event") in TROUBLES:
                    out.append(f"{log.name}: {line[-500:]}")
            if line.startswith("Traceback"):
                out.append(f"{log.name}: {' | '.join(lines[at : at + 40])[-500:]}")
    return out


def tail(log: Path) -> str:
    """The end of a log, in one line."""
    return " | ".join(log.read_text(errors="replace")[-600:].splitlines())
