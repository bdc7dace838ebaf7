"""The policies: which nodes each owner would give its shards to, before the rules are applied.

Intuition: a policy only *proposes*, for each owner, nodes in the order of its liking. Dealing then
gives the shards to the first that the rules allow, and levels the loads. So every policy obeys the
same rules in the same way, and is one short function.

domain-aware: the nearest on the ring, both sides (place.py). group: nodes in groups of k+m+1, each
holds a shard of every other (Gemini, Wang et al., SOSP'23, there for copies). ring: the next k+m by
name, whatever they share (control). random: any (control). rendezvous: each owner has a random
order of all nodes of its own (Thaler and Ravishankar 1998), so that a node that goes takes only its
own shards along. copysets: few sets of nodes can kill, yet many nodes take part in a rebuild (Cidon
et al., ATC'13).

Contract: pure functions; positions are those of the ground. Chance is BLAKE2 of names: the same on
every machine. Nodes are told apart by their seat, so that who takes a seat over takes all its
shards.

Consequence: what a policy cannot propose within the rules, dealing takes from the nearest nodes.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable, Iterator

from topology import rules as r
from topology.cluster import TopologyError
from topology.ground import Ground

Proposals = list[Iterable[int]]
WORDS_AT_ONCE = 16
PROBES_PER_CELL = 8
SHIFTS_TRIED = 16


def propose(ground: Ground, rules: r.Rules, policy: r.Policy) -> tuple[Proposals, str]:
    """For each owner by position, nodes in order of preference; and how, in words."""
    size = len(ground.names)
    if policy.name == r.GROUP:
        return _groups(ground, rules.count), f"group of {min(size, rules.count + 1)} or more"
    if policy.name == r.RING:
        return _ring(ground, rules.count), f"the next {rules.count} nodes by name"
    if policy.name == r.RANDOM:
        return _random(ground, rules.count, policy.seed), f"random, seed {policy.seed}"
    if policy.name == r.RENDEZVOUS:
        return _rendezvous(ground), "first by rendezvous hash"
    return _copysets(ground, rules, policy.scatter or 2 * rules.count)


def around(start: int, size: int) -> Iterator[int]:
    """All positions but ``start``, nearest first: +1, -1, +2, -2, ..."""
    for step in range(2, size + 1):
        yield (start + (step // 2 if step % 2 == 0 else -(step // 2))) % size


def _ring(ground: Ground, count: int) -> Proposals:
    order = sorted(range(len(ground.names)), key=lambda at: ground.seats[at][::-1])
    return _successors([order], len(order), count)


def _successors(groups: list[list[int]], size: int, count: int) -> Proposals:
    """In each group everybody's proposals are the next ``count`` in it, then the others of it."""
    proposals: Proposals = [()] * size
    for group in groups:
        twice = group * 2
        for i, at in enumerate(group):
            proposals[at] = twice[i + 1 : i + min(len(group), 2 * count + 1)]
    return proposals


def _in_line(ground: Ground) -> list[int]:
    """Positions in an order in which each domain stands together, if the levels nest."""
    first: dict[str, tuple[str, str]] = {}
    for host, seat in zip(ground.hosts, ground.seats, strict=True):
        first[host] = min(seat, first.get(host, seat))

    def path(at: int) -> tuple[list[int], tuple[str, str], tuple[str, str]]:
        signature = ground.signatures[at]
        codes = [signature[i] for i in ground.wide_first]
        return codes, first[ground.hosts[at]], ground.seats[at]

    return sorted(range(len(ground.names)), key=path)


def _groups(ground: Ground, count: int) -> Proposals:
    """Deal the line like cards into groups of k+m+1 or a little more (a ring in itself).

    A domain of s nodes stands together, so of G groups none gets more than ceil(s/G) of it, which
    is the least that is possible, at every level at once.
    """
    line = _in_line(ground)
    groups = max(1, len(line) // (count + 1))
    return _successors([line[g::groups] for g in range(groups)], len(line), count)


def _random(ground: Ground, count: int, seed: int) -> Proposals:
    """Shard t of everybody goes by a random permutation, so each node gets one of it."""
    columns = []
    for t in range(count):
        salt = f"{seed}\0{t}\0".encode()
        keys = [
            hashlib.blake2b(salt + "\0".join(seat).encode(), digest_size=8).digest()
            for seat in ground.seats
        ]
        columns.append(sorted(range(len(keys)), key=keys.__getitem__))
    return list(zip(*columns, strict=True))


def _rendezvous(ground: Ground) -> Proposals:
    """Each owner meets all nodes in a random order of its own, without looking at all of them.

    Nodes lie in the cells of a table, by the hash of their seat; an owner looks into cells by
    hashes of its own. Who is met earlier is liked more; that a third node goes changes no order.
    """
    bits = (2 * len(ground.seats) - 1).bit_length()
    cells: list[tuple[int, ...]] = [()] * (1 << bits)
    names = ["\0".join(seat).encode() for seat in ground.seats]
    for at in sorted(range(len(names)), key=names.__getitem__):
        digest = hashlib.blake2b(names[at], digest_size=8).digest()
        cells[int.from_bytes(digest) & (len(cells) - 1)] += (at,)
    return [_probe(cells, name) for name in names]


def _probe(cells: list[tuple[int, ...]], name: bytes) -> Iterator[int]:
    mask = len(cells) - 1
    for block in range(max(4, PROBES_PER_CELL * len(cells) // WORDS_AT_ONCE)):
        digest = hashlib.blake2b(b"%d\0" % block + name, digest_size=4 * WORDS_AT_ONCE).digest()
        for word in struct.unpack(f">{WORDS_AT_ONCE}I", digest):
            yield from cells[word & mask]


def _copysets(ground: Ground, rules: r.Rules, width: int) -> tuple[Proposals, str]:
    """Groups of k+m+1 in several permutations; each owner uses its group in one of them.

    The line is folded into k+m+1 rows. A group takes one node of each row; permutation p takes
    those of colour c from p's shift times c columns further on. Rows of colour p use permutation
    p: then each group serves its rows of one colour, and every node holds exactly k+m shards.
    What does not fill a column, and one column more, is a ring in itself, as in ``group``.
    """
    size, line = rules.count + 1, _in_line(ground)
    columns, rest = divmod(len(line), size)
    if columns < 2:
        return _groups(ground, rules.count), f"copysets: {len(line)} nodes are one group"
    apart = size + rest if rest else 0
    columns -= 1 if rest else 0
    spare = {len(line) * i // apart for i in range(apart)}
    kept = [at for i, at in enumerate(line) if i not in spare]
    rows = [kept[i * columns : (i + 1) * columns] for i in range(size)]
    proposals = _successors([[line[i] for i in sorted(spare)]], len(line), rules.count)
    wanted = _permutations(size, width)
    for count in range(wanted, 0, -1):
        colours = [i * count // size for i in range(size)]
        shifts = _shifts(ground, rows, colours, rules.most)
        if len(shifts) == count:
            break
    for i, colour in enumerate(colours):
        moved = [shifts[colour] * (other - colour) for other in colours]
        for column, at in enumerate(rows[i]):
            proposals[at] = [
                rows[(i + j) % size][(column + moved[(i + j) % size]) % columns]
                for j in range(1, size)
            ]
    had = "" if count == wanted else f", not the {wanted} that scatter width {width} needs"
    return proposals, f"copysets of {size} in {count} permutations{had}"


def _permutations(size: int, width: int) -> int:
    """The fewest permutations of groups of ``size`` in which a node meets ``width`` others.

    Rows of one colour keep together, so it is less than Cidon's (size - 1) a permutation.
    """
    for count in range(1, size + 1):
        together = -(-size // count)
        if together - 1 + count * (size - together) >= width:
            return count
    raise TopologyError(
        f"copysets: scatter width {width} needs more than {size} permutations; "
        f"groups of {size} can have at most {size * (size - 1)}"
    )


def _shifts(ground: Ground, rows: list[list[int]], colours: list[int], most: int) -> list[int]:
    """A shift for each colour, fewer where none keeps groups as well spread as unshifted ones."""
    columns, count = len(rows[0]), colours[-1] + 1

    def worst(shift: int) -> int:
        return max(
            max(Counter(column).values())
            for level in range(len(ground.labels))
            for column in zip(
                *(
                    [
                        ground.signatures[row[(i + shift * c) % columns]][level]
                        for i in range(columns)
                    ]
                    for row, c in zip(rows, colours, strict=True)
                ),
                strict=True,
            )
        )

    allowed = max(most, worst(0)) if ground.labels else 0
    shifts = [0]
    for p in range(1, count):
        first = columns * p // count
        tried = (d % columns for d in range(first, first + min(columns, SHIFTS_TRIED)))
        fit = (d for d in tried if d not in shifts and (not allowed or worst(d) <= allowed))
        found = next(fit, None)
        if found is None:
            break
        shifts.append(found)
    return shifts
