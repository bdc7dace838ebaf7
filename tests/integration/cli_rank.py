"""A training rank for the tests of the commands: each line on stdin is a job, done by "done".

One process does them all, because importing torch takes longer than the rest of a test.
"""

import json
import sys

import torch

import p2pckpt
from p2pckpt.checkpointer import Launch

torch.set_num_threads(1)
for line in sys.stdin:
    order = json.loads(line)
    rank = order["rank"]
    state = {
        "w": torch.full((300_000,), float(rank)),
        "half": torch.ones(3, 5, dtype=torch.bfloat16) * rank,
        "c": torch.complex(torch.ones(7), torch.ones(7)),
        "step": 0,
    }
    launch = Launch(rank, order["size"], order["token"])
    options = {"layout": order["layout"], "agent": order["agent"], "on_error": "raise"}
    with p2pckpt.Checkpointer(order["job"], launch=launch, **options) as c:
        for step in range(1, order["steps"] + 1):
            state["w"] += 1
            state["step"] = step
            c.save(step, state, meta={"rank": rank, "lr": 0.1}).wait(30)
        if order["hold"]:
            print("done", flush=True)
            sys.stdin.readline()
    print("done", flush=True)
