"""Real training loops over slow links: pairs of processes step together, one of each has the hook.

Data-parallel SGD by torch and gloo: each step sends and receives one gradient. Importing torch
takes seconds, so this process does it once: each line on stdin is an order for a new rank, which is
forked, enters the network namespace that the order names, and connects to the Unix socket in it.

    {"saved": true} -->   the state is in the store
                    <--   a line: train; another one: end
                    -->   {"steps": n}

Contract: the journal has a line for each step: when it ended by the machine's monotonic clock, and
its seconds. Both of a pair end at the same step. What is raised goes back as `raised`.
"""

import ctypes
import json
import select
import signal
import socket
import time

import torch
from kill_rank import fork_ranks
from torch import distributed, nn

import p2pckpt
from p2pckpt.checkpointer import Launch

CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1


class Training:
    """A small model; the state has as much ballast as the order wants."""

    def __init__(self, rank, ballast_bytes):
        torch.manual_seed(rank)
        self.model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 16))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3, momentum=0.9)
        self.state = {
            "model": self.model.state_dict(),
            "ballast": torch.rand(ballast_bytes // 4),
            "step": 0,
        }

    def step(self, stop):
        """One step; is it the last one, for both?"""
        self.model(torch.randn(32, 512)).square().mean().backward()
        parts = [p.grad.flatten() for p in self.model.parameters()]
        gradient = torch.cat([*parts, torch.tensor([float(stop)])])
        distributed.all_reduce(gradient)
        at = 0
        for p in self.model.parameters():
            p.grad.copy_(gradient[at : at + p.numel()].view_as(p) / 2)
            at += p.numel()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state["step"] += 1
        return gradient[-1].item() > 0


def train(order, line):
    """One rank, from its first line to its last; how many steps there were."""
    rank = order["rank"]
    training = Training(rank, order["ballast_bytes"])
    distributed.init_process_group(
        "gloo", init_method=f"file://{order['meet']}", rank=rank, world_size=2
    )
    if rank == 1:
        while not training.step(stop=False):
            pass
        return training.state["step"]
    where = {"launch": Launch(0, 1, order["job"]), "agent": order["agent"]}
    options = {"layout": "copies:1", "every": 10**6, "on_error": "raise", "join_timeout_s": 60.0}
    with p2pckpt.Checkpointer(order["job"], **where, **options) as hook:
        hook.restore(training.state, default=0, timeout_s=60.0)
        hook.should_save(0)
        hook.save(0, training.state).wait(60.0)
        line.sendall(b'{"saved": true}\n')
        line.recv(64)
        with open(order["journal"], "w", buffering=1) as journal:
            over = False
            while not over:
                begun = time.monotonic()
                over = training.step(stop=bool(select.select([line], [], [], 0)[0]))
                ended = time.monotonic()
                journal.write(f"{ended} {ended - begun}\n")
                hook.should_save(training.state["step"])
    return training.state["step"]


def obey(order):
    """Be a rank."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with open(f"/proc/{order['box']}/ns/net") as box:
        if libc.setns(box.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(order["socket"])
        try:
            told = {"steps": train(order, line)}
        except Exception as e:
            told = {"raised": f"{type(e).__name__}: {e}"}
        line.sendall(json.dumps(told).encode() + b"\n")


if __name__ == "__main__":
    fork_ranks(obey)
