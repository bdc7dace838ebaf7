"""The two drivers of a long run: chance, and coverage. Each runs in a process of its own."""

import random
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.mutate import MOST_BYTES, mutated
from tests.fuzz.targets import TARGETS, DefectError, check


def by_moves(name, seconds, seed, where):
    """Seeds, bent by chance."""
    chance, target = random.Random(seed), TARGETS[name]
    end, tries, accepted = time.monotonic() + seconds, 0, 0
    while time.monotonic() < end:
        moves = [
            (chance.randrange(256), chance.randrange(1 << 16), chance.randrange(1 << 16))
            for _ in range(chance.choice((1, 1, 2, 3, 5, 8)))
        ]
        data = mutated(target.seeds, chance.randrange(1 << 16), moves)
        try:
            accepted += check(name, data)
        except DefectError as e:
            where.write_bytes(data)
            print(f"{e}: {where}: {data[:200]!r}", flush=True)
            sys.exit(1)
        tries += 1
    print(f"{tries} inputs, {accepted} accepted", flush=True)


def by_atheris(name, seconds, seed, where):
    """libFuzzer with the coverage of our own modules; it ends the process by itself."""
    import atheris

    for package in ("p2pckpt", "topology", "simulations"):
        for module in [m for m in list(sys.modules) if m == package or m.startswith(package + ".")]:
            for value in list(vars(sys.modules[module]).values()):
                if getattr(value, "__module__", None) == module and hasattr(value, "__code__"):
                    setattr(sys.modules[module], value.__name__, atheris.instrument_func(value))

    with tempfile.TemporaryDirectory(prefix="corpus-") as corpus:
        for number, data in enumerate(TARGETS[name].seeds):
            Path(corpus, f"{number:03d}").write_bytes(data)
        flags = [
            f"-max_total_time={int(seconds)}", f"-seed={seed}", f"-max_len={MOST_BYTES}",
            f"-artifact_prefix={where}-", "-timeout=20", "-rss_limit_mb=4096", "-verbosity=0",
            "-print_final_stats=1",
        ]  # fmt: skip
        atheris.Setup(["fuzz", *flags, corpus], lambda data: check(name, data) and None)
        atheris.Fuzz()
