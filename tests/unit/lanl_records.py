"""Synthetic failure records in the form of LANL's, for tests: whose law is known."""

import csv
from datetime import datetime, timedelta

import numpy as np

from simulations.study import traces


def lanl_file(path, systems=(("2", "22"),), shape=0.735, count=400):
    """Synthetic records in LANL's form: Weibull gaps, lognormal repairs, some pairs at once."""
    rng = np.random.default_rng(11)
    at = datetime(1998, 6, 1)
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(("System", "nodenumz", traces.LANL_BEGAN, traces.LANL_FIXED, "Software"))
        for i in range(count):
            at += timedelta(hours=float(100 * rng.weibull(shape)))
            back = at + timedelta(minutes=float(np.exp(rng.normal(4.1, 1.4))) + 1)
            for system, node in systems[: 1 + (i % 3 == 0)]:
                stamp = (f"{x.month}/{x.day}/{x.year} {x:%H:%M}" for x in (at, back))
                out.writerow((system, node, *stamp, ""))
    return path
