"""`python -m tests.bench [--json FILE] [--scale S] [--runs N] [--ram DIR]`: table and JSON.

At scale 1 a rank has 1 GiB; that takes some minutes and 16 GiB of memory. At scale 0.06 it is a
quick look. ``--ram`` names another tmpfs, for example one that was mounted with huge pages. Other
programs on the machine make figures noisy, never wrong by much: what is compared
is measured in turn.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import sys
import time
from pathlib import Path

import torch

from tests.bench import parts, rounds, state
from tests.bench.figures import Figure, table

MIB = 1 << 20
MEMORY = 16
"""Times the bytes of a rank: states, copies, slots, shards, and what else is in flight."""


def main(arguments: list[str]) -> int:
    """Measure, print, and write the JSON; 0 if all figures are there."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--scale", type=float, default=1.0, help="1.0: 1 GiB a rank")
    parser.add_argument("--runs", type=int, default=3, help="runs of each figure")
    parser.add_argument("--ram", type=Path, default=Path("/dev/shm"), help="tmpfs for RAM files")
    options = parser.parse_args(arguments)
    size = sum(t.nbytes for t in state.tensors(meta_state(options.scale)))
    if MEMORY * size + 512 * MIB > (have := available_bytes()):
        need = (MEMORY * size + 512 * MIB) // MIB
        print(f"scale {options.scale}: needs {need} MiB of memory, has {have // MIB}: less --scale")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    begun = time.monotonic()
    place = rounds.Place(options.scale, 8 * size + 256 * MIB, options.ram)
    figures = measure(place, size, options.runs)
    config = {
        "scale": options.scale,
        "ram": str(options.ram),
        "runs": options.runs,
        "ranks": rounds.RANKS,
        "rank_bytes": size,
        "tensors": len(list(state.tensors(meta_state(options.scale)))),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "seconds": round(time.monotonic() - begun),
    }
    print(", ".join(f"{key} {value}" for key, value in config.items()))
    print(table(figures))
    if options.json:
        document = {"config": config, "figures": [f.record() for f in figures]}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def meta_state(scale: float):
    """The state's shapes, without memory."""
    with torch.device("meta"):
        return state.empty(scale)


def available_bytes() -> int:
    """Memory that the machine has left."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def measure(place: rounds.Place, size: int, runs: int) -> list[Figure]:
    """All figures."""
    rows = rounds.figures()
    for run in range(runs):
        say(f"copies:1, round {run + 1} of {runs}")
        rounds.copies_round(rows, place, seed=run)
    say("rs:4,2")
    rounds.coded_round(rows, place, runs)
    say("parts")
    out = list(rows.values())
    part = max(16 * MIB, min(256 * MIB, size // 4 // MIB * MIB))
    for name, layout in (("encode_copies1", "copies:1"), ("encode_rs42", "rs:4,2")):
        row = Figure(name, f"coding and CRC of {layout} on a thread", "its kernels in the cache")
        for coded, copy, kernels in parts.encoding(layout, part, runs):
            row.add(coded / copy, kernels / copy)
        out.append(row)
    row = Figure("ucx", f"UCX moves {part // MIB} MiB", "a raw loopback socket", "socket times")
    for by_ucx, by_socket in parts.moving(part, runs, place.ram):
        row.add(by_ucx / by_socket, 1.0)
    return [*out, row]


def say(what: str) -> None:
    """Progress, for whoever waits."""
    print(f"[{time.strftime('%H:%M:%S')}] {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
