"""Training ranks for the tests of kills, which die in any way a test likes.

Importing torch takes seconds, so this process does it once: each line on stdin is an order for a
new rank, which is forked, connects to the Unix socket in the order and does what that end says,
line by line, until it closes. A rank has no other tie to this process or to its siblings.

Contract: every value of a rank's state changes in every `prepare`, by chance, so that bytes of two
saves cannot be taken for each other; the digest is taken before the save and by a walk that is not
the product's. What a call of the hook raised goes back as `raised`, and the rank lives on.
"""

import gc
import json
import os
import signal
import socket
import sys
import time
import warnings
import weakref

import numpy
import torch

import p2pckpt
from p2pckpt.checkpointer import Launch
from p2pckpt.demo.train import digest

PIECE = 1 << 20
"""Most elements of one float tensor: 4 MiB."""


class Rank:
    """One rank: its state, its hook, its handles."""

    def __init__(self, rank, mib):
        self.rank = rank
        self.chance = torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "little"))
        self.state = {
            "layers": [
                torch.rand(min(PIECE, int(mib * 2**18)), generator=self.chance)
                for _ in range(max(1, int(mib) // 4))
            ],
            "moments": {"m": torch.zeros(1000, dtype=torch.int64), "half": torch.zeros(7).half()},
            "chance": self.chance,
            "step": 0,
            "words": [rank, "a rank", None, 0.1],
        }
        self.hook = None
        self.handles = {}

    def join(self, job, size, token, agent, layout, on_error="log"):
        """A new hook, in place of an old one."""
        self.leave()
        self.hook = p2pckpt.Checkpointer(
            job,
            launch=Launch(self.rank, size, token),
            layout=layout,
            agent=agent,
            on_error=on_error,
            join_timeout_s=60.0,
        )
        return {"generation": self.hook.generation}

    def leave(self):
        """Close the hook."""
        if self.hook is not None:
            self.hook.close()
        self.hook, self.handles = None, {}
        return {}

    def restore(self, timeout_s=60.0):
        """Step 0 if there was provably nothing."""
        step = self.hook.restore(self.state, default=0, timeout_s=timeout_s)
        back = self.hook.restored
        self.hook.restored = None
        told = {"source": "", "bytes": 0, "bytes_from": {}}
        if back:
            told = {"source": back.source, "bytes": back.snapshot_bytes}
            told["bytes_from"] = back.bytes_from
        return {"step": step, "sha": digest(self.state), **told}

    def prepare(self, step):
        """Train: all values become others."""
        by = torch.rand(1, generator=self.chance).item() + 0.5
        for layer in self.state["layers"]:
            layer.add_(by)
        self.state["moments"]["m"].add_(1)
        self.state["moments"]["half"].view(torch.int16).add_(1)
        self.state["step"] = step
        return {"sha": digest(self.state)}

    def save(self, step):
        """What `save` did, and for how long it blocked."""
        begun = time.monotonic()
        handle = self.handles[step] = self.hook.save(step, self.state, meta={"rank": self.rank})
        blocking_s = time.monotonic() - begun
        return {"status": handle.status, "reason": handle.reason, "blocking_s": blocking_s}

    def wait(self, step, timeout_s):
        """How a save ended, or that it is still in flight."""
        handle = self.handles.pop(step)
        try:
            handle.wait(timeout_s)
        except (p2pckpt.errors.SaveAborted, TimeoutError):
            pass
        return {"status": handle.status, "reason": handle.reason, "errors": self.hook.errors}

    def steps(self):
        """As the agent knows them."""
        return {"steps": self.hook.steps()}

    def mark(self):
        """Put a tensor into the state whose memory can be asked for: `let_go`."""
        memory = numpy.random.default_rng().random(1000, numpy.float32)
        self.marked = weakref.ref(memory)
        self.state["layers"][-1] = torch.from_numpy(memory)
        return {}

    def let_go(self):
        """Put another tensor in its place: is its memory free then?"""
        self.state["layers"][-1] = self.state["layers"][-1].clone()
        gc.collect()
        return {"free": self.marked() is None}

    def epoch(self, workers):
        """Load data by forked workers, which call `save` themselves; what each of them was told."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This DataLoader will create")  # more than the cores
            loader = torch.utils.data.DataLoader(
                [step + 1 for step in range(workers)],
                batch_size=1,
                num_workers=workers,
                collate_fn=lambda step: self.hook.save(step[0], self.state).reason,
                multiprocessing_context="fork",
            )
            return {"told": list(loader)}

    def collect(self):
        """Rid this process of its garbage, before its memory is looked at."""
        gc.collect()
        return {}


def obey(order):
    """Be a rank."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(order["socket"])
        rank = Rank(order["rank"], order["mib"])
        with line.makefile("r") as told:
            for text in told:
                call = json.loads(text)
                try:
                    answer = getattr(rank, call.pop("do"))(**call)
                except Exception as e:
                    answer = {"raised": f"{type(e).__name__}: {e}"}
                line.sendall(json.dumps(answer).encode() + b"\n")


def fork_ranks(obey):
    """Fork a rank for each line, which does as that says; the kernel reaps them."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for text in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            code = 1
            try:
                obey(json.loads(text))
                code = 0
            except BrokenPipeError:
                pass
            finally:
                os._exit(code)


if __name__ == "__main__":
    fork_ranks(obey)
