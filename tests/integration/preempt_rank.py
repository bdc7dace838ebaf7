"""Training ranks for the tests of preemption: real loops in step by gloo, ended by SIGTERM only.

Importing torch takes seconds, so this process does it once: each line on stdin is an order for a
new rank, which is forked. A rank trains until `should_stop`, and writes what it did, as JSON, into
the file that the order names; the file that says "began" is made at its first step.

Contract: the state is a function of rank and step, so a restored one is checked without memory of
who saved it. Whatever is raised ends in the result's `raised`.
"""

import datetime
import json
import os
import random
import signal
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import distributed

import p2pckpt
from p2pckpt.checkpointer import Launch


def fill(state, rank, step):
    """What the state must be."""
    state["w"].fill_(rank * 1000.0 + step)
    state["step"] = step


def right(state, rank, step):
    """Is it?"""
    return state["step"] == step and bool((state["w"] == rank * 1000.0 + step).all())


def train(order):
    """One rank; what it did."""
    rank, size = order["rank"], order["size"]
    patience = datetime.timedelta(seconds=30)
    distributed.init_process_group(
        "gloo", init_method=f"file://{order['meet']}", rank=rank, world_size=size, timeout=patience
    )
    state = {"w": torch.zeros(order["values"]), "step": 0}
    loop = p2pckpt.Checkpointer(
        order["job"],
        launch=Launch(rank, size, order["token"]),
        layout="copies:1",
        every=order["every"],
        agent=order["agent"],
        preemption=True,
        join_timeout_s=60.0,
    )
    begin = loop.restore(state, default=0, timeout_s=60.0)
    told = {"begin": begin, "right": begin == 0 or right(state, rank, begin), "saves": {}}
    chance, end = random.Random(), time.monotonic() + 60
    step, handles, asked_s = begin, {}, []
    while time.monotonic() < end:
        time.sleep(chance.uniform(0.0, 2 * order["pace_s"]))
        distributed.all_reduce(torch.ones(1))
        step += 1
        fill(state, rank, step)
        Path(order["result"]).with_suffix(".began").touch()
        begun = time.perf_counter()
        due = loop.should_save(step)
        asked_s.append(time.perf_counter() - begun)
        if due:
            handles[step] = loop.save(step, state)
        if loop.should_stop(step):
            told["ended"] = step
            break
    loop.close()
    told["saves"] = {str(s): (h.status, h.reason) for s, h in handles.items()}
    told |= {"errors": loop.errors, "ask_us": statistics.median(asked_s) * 1e6}
    return told


def obey(order):
    """Be a rank."""
    try:
        told = train(order)
    except Exception as e:
        told = {"raised": f"{type(e).__name__}: {e}"}
    result = Path(order["result"])
    result.with_suffix(".tmp").write_text(json.dumps(told))
    result.with_suffix(".tmp").rename(result)


def main():
    """Fork a rank for each line; the kernel reaps them."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for text in sys.stdin:
        order = json.loads(text)
        if (child := os.fork()) == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                obey(order)
            finally:
                os._exit(0)
        print(child, flush=True)


if __name__ == "__main__":
    main()
