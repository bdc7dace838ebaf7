"""Paper checks about loss: groups, copysets, domains, chains, and the fits to LANL's records.

Intuition: what a formula counts is also drawn: who dies, and who is lost. Failures of whole domains
come from the study's own failure processes, and what they kill is decided by its loss test.

Contract: `FORMS` by name, each a `Form` (see ``finding.py``). No published value stands here. A
form that needs a file of the user's, or numbers that nobody published, says so in `Finding.note`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.random import Generator

from simulations.papers import trials
from simulations.papers.finding import Finding, Form, Given
from simulations.study import durability, traces
from simulations.study.hazards import draw
from simulations.study.scenario import (
    YEAR_S,
    Cause,
    Fate,
    Fleet,
    Hazards,
    Links,
    Recovery,
    Saving,
    Scenario,
)
from simulations.study.schemes import Pieces, parse, pieces

TRIALS = 40_000
SET_TRIALS = 5_000
"""Trials of 275,000 sets each."""
RUNS = 100
"""Histories of a year for the share of failures that peers recover from."""


def _proportion(found: trials.Estimate, truth: float, count: int) -> trials.Estimate:
    """The estimate with the standard error that it should have: right also where none was seen."""
    return trials.Estimate(found.mean, math.sqrt(truth * (1 - truth) / count))


def _percent(found: trials.Estimate) -> trials.Estimate:
    return trials.Estimate(100 * found.mean, 100 * found.se)


def _sizes(g: Given) -> tuple[int, int, int]:
    return g.whole("nodes"), g.whole("copies"), g.whole("dead")


# -- groups and domains: PC-04, PC-23, PC-25 -------------------------------------------------------


def _group_survival(g: Given, rng: Generator | None) -> Finding:
    nodes, copies, dead = _sizes(g)
    exact = durability.group_survival(nodes, copies, dead)
    if rng is None:
        return Finding(exact)
    loss = trials.group_loss(rng, _placed(nodes, copies), copies - 1, dead, trials=TRIALS)
    return Finding(exact, _proportion(loss._replace(mean=1 - loss.mean), exact, TRIALS))


def _placed(nodes: int, copies: int) -> trials.Ints:
    """For each node its group, where the product places ``copies``, the own one counted."""
    placed = pieces(Fleet(nodes).cluster(), parse(f"copies:{copies - 1}@group"))
    return np.array([min(node, *row) for node, row in enumerate(placed.rows)])


def _group_bound(g: Given, _: Generator | None) -> Finding:
    return Finding(durability.group_survival_bound(*_sizes(g)))


def _pair_loss(g: Given, rng: Generator | None) -> Finding:
    nodes, dead = g.whole("nodes"), g.whole("dead")
    exact = durability.pair_loss(nodes, dead)
    if rng is None:
        return Finding(exact)
    loss = trials.group_loss(rng, _placed(nodes, 2), 1, dead, trials=TRIALS)
    return Finding(exact, _proportion(loss, exact, TRIALS))


def _domain_job(g: Given) -> Scenario:
    """Single nodes at the given MTBF, and whole domains (level: [nodes, years]) on top."""
    domains = g.any("domains")
    causes = [Cause("node", Fate.LOST, share=1.0)]
    causes += [
        Cause(level, Fate.LOST, level, per_year=1 / years) for level, (_, years) in domains.items()
    ]
    sizes = tuple((level, size) for level, (size, _) in domains.items())
    return Scenario(
        "paper check", "", YEAR_S, 0.0, Fleet(g.whole("nodes"), domains=sizes), Links(1.0),
        Saving(), Recovery(), Hazards(g["mtbf_h"] * 3600, tuple(causes), mtbf_counts="node"),
    )  # fmt: skip


def _peer_fraction(g: Given, rng: Generator | None) -> Finding:
    nodes, size, tolerated = (g.whole(x) for x in ("nodes", "group", "tolerated"))
    job = _domain_job(g)
    classes = [(24 * 365.25 / g["mtbf_h"], 0.0)]
    for cause in job.hazards.causes[1:]:
        for domain in job.fleet.members(cause.level):
            loss = durability.grouped_loss(nodes, size, tolerated, len(domain))
            classes.append((cause.per_year, loss))
    exact = 1 - durability.mean_loss(classes)
    return Finding(exact, _played_fraction(rng, job, size, tolerated) if rng else None)


def _played_fraction(rng: Generator, job: Scenario, size: int, tolerated: int) -> trials.Estimate:
    """Failures that random groups survive, of all failures of many histories; groups anew each."""
    lost = total = 0
    for child in np.random.SeedSequence(int(rng.integers(2**63))).spawn(RUNS):
        failures = draw(job, child).failures
        groups = _random_groups(rng, job.fleet.nodes, size, tolerated)
        lost += sum(groups.lost(set(failure.nodes)) for failure in failures)
        total += len(failures)
    share = lost / total
    return trials.Estimate(1 - share, math.sqrt(share * (1 - share) / total))


def _random_groups(rng: Generator, nodes: int, size: int, tolerated: int) -> Pieces:
    """Groups of ``size``, of which so many may die; a smaller rest keeps one node at least."""
    order = rng.permutation(nodes).tolist()
    rows: list[tuple[int, ...]] = [()] * nodes
    for start in range(0, nodes, size):
        group = order[start : start + size]
        for node in group:
            rows[node] = tuple(other for other in group if other != node)
    return Pieces(tuple(rows), tuple(min(tolerated, len(row)) - 1 for row in rows))


# -- copysets: PC-09, PC-10 ------------------------------------------------------------------------


def _set_loss(g: Given, _: Generator | None = None) -> Finding:
    return Finding(durability.set_loss(*_sizes(g)))


def _one(g: Given) -> float:
    return durability.set_loss(*_sizes(g))


def _chunk_loss(g: Given, _: Generator | None) -> Finding:
    chunks = g["nodes"] * g["chunks_per_node"] / g["copies"]
    return Finding(-100 * math.expm1(-_one(g) * chunks))


def _copyset_count(g: Given, _: Generator | None) -> Finding:
    count = durability.random_copysets(g.whole("nodes"), g.whole("scatter"), g.whole("copies"))
    return Finding(float(count))


def _random_loss(g: Given, rng: Generator | None) -> Finding:
    nodes, copies, dead = _sizes(g)
    sets = durability.random_copysets(nodes, g.whole("scatter"), copies)
    exact = durability.any_set_loss(_one(g), sets)
    if rng is None:
        return Finding(100 * exact)
    found = trials.random_set_loss(rng, nodes, sets, dead, trials=SET_TRIALS)
    return Finding(100 * exact, _percent(_proportion(found, exact, SET_TRIALS)))


def _copyset_loss(g: Given, rng: Generator | None) -> Finding:
    nodes, copies, dead = _sizes(g)
    scatter = g.whole("scatter")
    sets = durability.permuted_copysets(nodes, scatter, copies)
    exact = durability.any_set_loss(_one(g), sets)
    if rng is None:
        return Finding(100 * exact)
    cuts = scatter // (copies - 1)
    found = trials.permutation_loss(rng, nodes, copies, cuts, dead, trials=TRIALS)
    return Finding(100 * exact, _percent(_proportion(found, exact, TRIALS)))


def _years_between(g: Given, _: Generator | None) -> Finding:
    sets = durability.permuted_copysets(g.whole("nodes"), g.whole("scatter"), g.whole("copies"))
    return Finding(1 / durability.any_set_loss(_one(g), sets) / g["outages_per_year"])


# -- chains: PC-15 to PC-18 ------------------------------------------------------------------------


def _chain(g: Given) -> tuple[int, int, float, float]:
    return g.whole("pieces"), g.whole("needed"), g["fail"], g["repair"]


def _mttdl(g: Given, _: Generator | None) -> Finding:
    return Finding(durability.chain_mttdl(*_chain(g)))


def _played_mttdl(g: Given, rng: Generator | None) -> Finding:
    played = trials.chain_life(rng, *_chain(g), trials=TRIALS) if rng else None
    return Finding(durability.chain_mttdl(*_chain(g)), played)


def _double_sum(g: Given, _: Generator | None) -> Finding:
    """Largest relative difference to Ford's double sum over all codes up to a size."""
    most, fail, repair = g.whole("most_pieces"), g["fail"], g["repair"]
    pairs = [
        (durability.chain_mttdl(n, k, fail, repair), durability.chain_mttdl_sum(n, k, fail, repair))
        for n in range(1, most + 1)
        for k in range(1, n + 1)
    ]
    return Finding(max(abs(a / b - 1) for a, b in pairs))


def _leading_term(g: Given, _: Generator | None) -> Finding:
    return Finding(durability.chain_mttdl_leading(*_chain(g)) / durability.chain_mttdl(*_chain(g)))


def _faster_repair(g: Given, _: Generator | None) -> Finding:
    """Per cent by which the unavailability falls when repair takes that much less time."""
    pieces, needed, fail, repair = _chain(g)
    faster = repair / (1 - g["less_time"])
    now = durability.chain_mttdl(pieces, needed, fail, repair)
    return Finding(100 * (1 - now / durability.chain_mttdl(pieces, needed, fail, faster)))


def _bursts(g: Given) -> durability.Bursts:
    return durability.fit_bursts(g["fail"], g["repair"], g["two_copies"], g["three_copies"])


def _faster_with_bursts(g: Given, _: Generator | None) -> Finding:
    pieces, needed, fail, repair = _chain(g)
    bursts, faster = _bursts(g), repair / (1 - g["less_time"])
    now = durability.burst_mttdl(pieces, needed, fail, repair, bursts)
    return Finding(100 * (1 - now / durability.burst_mttdl(pieces, needed, fail, faster, bursts)))


def _correlation_cost(g: Given, _: Generator | None) -> Finding:
    """By how much bursts shorten the life, in a model that is fitted to two and three copies."""
    chain = _chain(g)
    return Finding(durability.chain_mttdl(*chain) / durability.burst_mttdl(*chain, _bursts(g)))


def _printed_order(g: Given, _: Generator | None) -> Finding:
    lives = list(g.any("lives").values())
    return Finding(float(sum(a < b for a, b in pairwise(lives))))


def _modelled_order(g: Given, _: Generator | None) -> Finding:
    bursts = _bursts(g)
    lives = [
        durability.burst_mttdl(pieces, needed, g["fail"], g["repair"], bursts)
        for pieces, needed in g.any("codes").values()
    ]
    return Finding(float(sum(a < b for a, b in pairwise(lives))))


def _cluster_mttdl(g: Given, _: Generator | None) -> Finding:
    """Days to the first loss in a store of many stripes; a repair moves ``read`` blocks."""
    pieces, needed = g.whole("pieces"), g.whole("needed")
    block = g["block_bytes"]
    fail = 1 / (g["node_mttf_years"] * 365)
    repair = g["repair_gbit_per_s"] * 1e9 / 8 / (block * g["read_blocks"]) * 86400
    stripe = g["stored_blocks"] * block
    life = durability.chain_mttdl(pieces, needed, fail, repair)
    return Finding(durability.striped_mttdl(life, g["stored_bytes"] / stripe))


def _not_published(g: Given, _: Generator | None) -> Finding:
    return Finding(None, note=str(g.any("missing")))


# -- LANL's records: PC-21 -------------------------------------------------------------------------


def _synthetic_shape(g: Given, rng: Generator | None) -> Finding:
    """The fit on exact quantiles of the law; played: on draws."""
    shape, count = g["shape"], g.whole("count")
    spread = (np.arange(count) + 0.5) / count
    exact = traces.fit_weibull((-np.log1p(-spread)) ** (1 / shape))
    found = traces.fit_weibull(rng.weibull(shape, count)) if rng else None
    played = found and trials.Estimate(found.shape, found.shape * 0.78 / math.sqrt(count))
    return Finding(exact.shape if exact else None, played)


def _lanl(g: Given) -> list[traces.Incident] | None:
    """The records of the row's system, node ("" for all) and years; None without the file."""
    system, node = str(g.any("system")), str(g.any("node"))
    first, last = g.any("years")
    if g.lanl is None:
        return None
    return [
        one
        for one in g.lanl
        if system in ("", one.system) and node in ("", one.node) and first <= one.began.year <= last
    ]


NO_FILE = Finding(None, note="needs LANL's failure records (USENIX CFDR); give them by --lanl FILE")


def _gaps_h(records: Sequence[traces.Incident]) -> list[float]:
    times = [one.began for one in records]
    return [(b - a).total_seconds() / 3600 for a, b in pairwise(times)]


def _lanl_shape(g: Given, _: Generator | None) -> Finding:
    records = _lanl(g)
    if records is None:
        return NO_FILE
    fit = traces.fit_weibull(_gaps_h(records))
    return Finding(fit.shape if fit else math.nan)


def _lanl_mtbf(g: Given, _: Generator | None) -> Finding:
    records = _lanl(g)
    return NO_FILE if records is None else Finding(float(np.mean(_gaps_h(records) or [math.nan])))


def _lanl_zero_gaps(g: Given, _: Generator | None) -> Finding:
    records = _lanl(g)
    if records is None:
        return NO_FILE
    gaps = _gaps_h(records)
    return Finding(100 * gaps.count(0.0) / len(gaps) if gaps else math.nan)


def _lanl_repair(part: str) -> Form:
    def form(g: Given, _: Generator | None) -> Finding:
        records = _lanl(g)
        if records is None:
            return NO_FILE
        fit = traces.fit_lognormal(traces.trace_of("", records).repairs_s)
        return Finding(float(getattr(fit, part)) if fit else math.nan)

    return form


def _lanl_bursts(g: Given, _: Generator | None) -> Finding:
    records, window_s = _lanl(g), g["window_s"]
    if records is None:
        return NO_FILE
    start = records[0].began if records else None
    losses = [((one.began - start).total_seconds(), one.node) for one in records if start]
    return Finding(100 * traces.find_bursts(losses, window_s).share)


FORMS: dict[str, Form] = {
    "group survival": _group_survival,
    "group survival bound": _group_bound,
    "pair loss": _pair_loss,
    "peer fraction": _peer_fraction,
    "set loss": _set_loss,
    "chunk loss": _chunk_loss,
    "copyset count": _copyset_count,
    "random copysets": _random_loss,
    "permuted copysets": _copyset_loss,
    "years between losses": _years_between,
    "MTTDL": _mttdl,
    "MTTDL, played": _played_mttdl,
    "double sum": _double_sum,
    "leading term": _leading_term,
    "faster repair": _faster_repair,
    "faster repair with bursts": _faster_with_bursts,
    "cost of correlation": _correlation_cost,
    "printed order": _printed_order,
    "modelled order": _modelled_order,
    "cluster MTTDL": _cluster_mttdl,
    "not published": _not_published,
    "synthetic shape": _synthetic_shape,
    "LANL shape": _lanl_shape,
    "LANL MTBF": _lanl_mtbf,
    "LANL zero gaps": _lanl_zero_gaps,
    "LANL repair mu": _lanl_repair("mu"),
    "LANL repair sigma": _lanl_repair("sigma"),
    "LANL bursts": _lanl_bursts,
}
