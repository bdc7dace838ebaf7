"""`python -m tests.planted [--only NAME ...] [--seeds N] [--checkers-off] [--json FILE]`.

Hunts every planted bug with the seeds of the world until a checker objects. Exit code 0: each was
found, by a seed that ends well without the bug; 1: one was not. With ``--checkers-off`` nobody
looks, and 0 means that none was found.
"""

import argparse
import json
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tests.planted.bugs import every
from tests.planted.hunt import Hunt, Plan


def main(arguments: list[str]) -> int:
    """Hunt, tell, write."""
    bugs = every()
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    names = [bug.name for bug in bugs]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME")
    parser.add_argument("--seeds", type=int, default=500, help="at most, for each bug")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--checkers-off", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    if min(given.seeds, given.processes) < 1:
        parser.error("--seeds and --processes need 1 or more")
    plan = Plan(given.seeds, given.first, given.processes, not given.checkers_off)
    wanted = [bug for bug in bugs if not given.only or bug.name in given.only]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    begun = time.monotonic()
    hunt = Hunt(wanted, plan, lambda text: print(text, flush=True))
    catches = hunt.run()
    found = [catch for catch in catches if catch.found_after_seeds]
    seconds = round(time.monotonic() - begun, 1)
    print(f"{len(found)} of {len(catches)} planted bugs found, {seconds} s")
    for catch in catches:
        if not catch.found_after_seeds:
            print(f"  {catch.bug}: not found in {catch.tried} seeds")
    if given.json:
        document = {
            "planted": [asdict(catch) for catch in catches],
            "checkers": plan.checkers,
            "seconds": seconds,
        }
        given.json.write_text(json.dumps(document, indent=1) + "\n")
    well = not found if given.checkers_off else len(found) == len(catches)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
