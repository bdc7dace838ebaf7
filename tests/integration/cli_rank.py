"""One small training rank for the tests of the commands: saves some steps, then ends or waits."""

import os
import sys

import torch

import p2pckpt

job, layout, steps, wait = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "wait"
torch.set_num_threads(1)
rank = int(os.environ["RANK"])
state = {
    "w": torch.full((300_000,), float(rank)),
    "half": torch.ones(3, 5, dtype=torch.bfloat16) * rank,
    "c": torch.complex(torch.ones(7), torch.ones(7)).to(torch.complex64),
    "step": 0,
}
with p2pckpt.Checkpointer(job, layout=layout, on_error="raise") as c:
    for step in range(1, steps + 1):
        state["w"] += 1
        state["step"] = step
        c.save(step, state, meta={"rank": rank, "lr": 0.1}).wait(30)
    if wait:
        print("waiting", flush=True)
        sys.stdin.readline()
