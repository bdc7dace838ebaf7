"""`python -m tests.fuzz [--target NAME] [--seconds S] [--driver atheris|moves]`: bad input.

Every target gets S seconds, in a process of its own. With atheris (`pip install p2pckpt[fuzz]`)
libFuzzer is led by coverage; else, or with `--driver moves`, the moves of `mutate.py` are drawn by
chance. What breaks is written to a file, and a short form of it belongs to `test_fuzz.CASES`.
Exit code 0 if nothing broke.
"""

import argparse
import importlib.util
import multiprocessing
import random
import sys
import tempfile
from pathlib import Path

from tests.fuzz.drive import by_atheris, by_moves
from tests.fuzz.targets import TARGETS


def main(arguments):
    """One target after the other; 1 if one broke."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--target", choices=list(TARGETS), nargs="+", default=list(TARGETS))
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--driver", choices=["atheris", "moves"])
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args(arguments)
    there = importlib.util.find_spec("atheris") is not None
    driver = options.driver or ("atheris" if there else "moves")
    if driver == "atheris" and not there:
        parser.error("--driver atheris: needs the package atheris (pip install 'p2pckpt[fuzz]')")
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    broken = 0
    for name in options.target:
        where = options.out / f"fuzz-{name.replace(' ', '-')}"
        run = {"atheris": by_atheris, "moves": by_moves}[driver]
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(target=run, args=(name, options.seconds, seed, where))
        process.start()
        process.join()
        broken += process.exitcode != 0
        said = "pass" if process.exitcode == 0 else f"FAIL (input: {where}*)"
        print(f"{said}  {name}, by {driver}, seed {seed}", flush=True)
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
