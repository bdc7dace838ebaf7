"""Monte Carlo of what is no training run: groups and sets of nodes that die, chains. Vectorised.

Intuition: a closed form that nobody ever tried is a rumour. Each function here plays the situation
that a closed form of ``formulas.py`` or ``durability.py`` describes, without using the formula:
it draws who dies and looks who is lost.

Contract: every function takes a `numpy.random.Generator` first, and returns an `Estimate`: mean
and standard error. Work is done in blocks of bounded memory. Draws depend on the generator only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Ints = NDArray[np.int64]

BLOCK_CELLS = 4_000_000
"""Cells of the largest array of one block: 32 MB."""


class Estimate(NamedTuple):
    """A mean over trials and its standard error."""

    mean: float
    se: float


def estimate(samples: NDArray[np.generic]) -> Estimate:
    """Mean and standard error of independent samples."""
    values = samples.astype(np.float64)
    return Estimate(float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))))


# -- who dies, who is lost -------------------------------------------------------------------------


def _blocks(trials: int, width: int) -> Iterator[int]:
    most = max(1, BLOCK_CELLS // max(1, width))
    for start in range(0, trials, most):
        yield min(most, trials - start)


def dead_sets(rng: Generator, nodes: int, dead: int, trials: int) -> Ints:
    """(trials, dead): distinct node numbers each, uniform among all subsets of that size."""
    if dead * dead > nodes:  # most draws with replacement would repeat a node
        order = rng.permuted(np.broadcast_to(np.arange(nodes), (trials, nodes)), axis=1)
        return order[:, :dead].copy()
    picked = rng.integers(0, nodes, (trials, dead))
    while True:
        ordered = np.sort(picked, axis=1)
        again = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
        if not len(again):
            return picked
        picked[again] = rng.integers(0, nodes, (len(again), dead))


def overfull(labels: Ints, tolerated: int) -> NDArray[np.bool_]:
    """Whether a row of ``labels`` holds one of them more than ``tolerated`` times."""
    if labels.shape[1] <= tolerated:
        return np.zeros(len(labels), bool)
    ordered = np.sort(labels, axis=1)
    return np.asarray((ordered[:, tolerated:] == ordered[:, : labels.shape[1] - tolerated]).any(1))


def group_loss(rng: Generator, groups: Ints, tolerated: int, dead: int, *, trials: int) -> Estimate:
    """Share of trials in which ``dead`` random nodes hit a group more than ``tolerated`` times.

    ``groups``: of each node, the number of its group.
    """
    nodes = len(groups)
    lost = [
        overfull(groups[dead_sets(rng, nodes, dead, count)], tolerated)
        for count in _blocks(trials, nodes)
    ]
    return estimate(np.concatenate(lost))


def permutation_loss(
    rng: Generator, nodes: int, copies: int, permutations: int, dead: int, *, trials: int
) -> Estimate:
    """Share of trials in which ``dead`` random nodes hold a whole set of Copyset Replication.

    Each permutation of the nodes is cut into sets of ``copies``; a rest holds nothing.
    """
    places = [rng.permutation(nodes) for _ in range(permutations)]
    usable = nodes // copies * copies
    lost = []
    for count in _blocks(trials, dead):
        rows = dead_sets(rng, nodes, dead, count)
        found = np.zeros(count, bool)
        for place in places:
            at = place[rows]
            own = np.where(at < usable, at // copies, nodes + at)  # the rest: a set of its own each
            found |= overfull(own, copies - 1)
        lost.append(found)
    return estimate(np.concatenate(lost))


def random_set_loss(rng: Generator, nodes: int, sets: int, dead: int, *, trials: int) -> Estimate:
    """Share of trials in which ``dead`` random nodes hold one of ``sets`` random triples wholly."""
    triples = dead_sets(rng, nodes, 3, sets)
    first, second, third = triples[np.argsort(triples[:, 0])].T
    bounds = np.searchsorted(first, np.arange(nodes + 1))
    lost = []
    for count in _blocks(trials, max(nodes, dead * sets // nodes)):
        rows = dead_sets(rng, nodes, dead, count)
        gone = np.zeros((count, nodes), bool)
        gone[np.arange(count)[:, None], rows] = True
        starts = bounds[rows].ravel()  # the sets whose first member is one of the dead
        many = bounds[rows + 1].ravel() - starts
        at = np.arange(many.sum()) + np.repeat(starts - (np.cumsum(many) - many), many)
        trial = np.repeat(np.arange(count * dead) // dead, many)
        found = np.zeros(count, bool)
        found[trial[gone[trial, second[at]] & gone[trial, third[at]]]] = True
        lost.append(found)
    return estimate(np.concatenate(lost))


# -- failures and repairs --------------------------------------------------------------------------


def chain_life(
    rng: Generator, pieces: int, needed: int, fail: float, repair: float, *, trials: int
) -> Estimate:
    """Mean time until fewer than ``needed`` of ``pieces`` live, repaired one at a time."""
    living = np.full(trials, pieces)
    life = np.zeros(trials)
    going = np.arange(trials)
    while len(going):
        at = living[going]
        down = at * fail
        total = down + np.where(at < pieces, repair, 0.0)
        life[going] += rng.exponential(1.0, len(going)) / total
        living[going] = np.where(rng.random(len(going)) * total < down, at - 1, at + 1)
        going = going[living[going] >= needed]
    return estimate(life)
