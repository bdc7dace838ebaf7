"""Which rank of the next launch starts on which host, so that most find their bytes there.

Intuition: a rank that starts where its own slot lies reads nothing over the network. Where that
host is gone, a spare in the rack of most of its shards keeps the reading short. So hosts are given
out in two rounds: own copies first, then nearness.

Contract: pure, deterministic. The first round is exact: no other plan lets more ranks find their
own copy. The second is greedy, in the order of ranks. `blocks`: launchers that number ranks host by
host (torchrun) get whole blocks of `per_host` consecutive ranks; else each rank is placed by itself
(Slurm's arbitrary distribution). A plan says where bytes are, it moves none: a rank that starts
anywhere else restores all the same, over the network.

Exactness: units (ranks or blocks) are added one by one, each along the path of the most gain
through those that are seated already, who may move on or lose their seat. This is the successive
shortest path method for the assignment problem (Tomizawa 1971; Edmonds and Karp 1972), on the few
hosts that hold anything of a unit; where ranks come in blocks every path has one edge.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from p2pckpt.errors import UsageError
from topology.cluster import Cluster


@dataclass(frozen=True)
class RankSources:
    """Where the bytes of one rank can be had now: living nodes with its own slot, and by index of
    the shard; ``k`` different shards are enough. ``stored``: the object store has it as well.
    ``home``: where it ran when it was saved; of equal plans the one that leaves it there."""

    rank: int
    own: tuple[str, ...]
    shards: Mapping[int, tuple[str, ...]]
    k: int
    stored: bool = False
    home: str = ""

    @property
    def in_ram(self) -> bool:
        """It can be had from RAM."""
        return bool(self.own) or len(self.shards) >= self.k

    @property
    def lacks(self) -> str:
        """Why it cannot be had at all; "": it can."""
        if self.in_ram or self.stored:
            return ""
        return f"rank {self.rank}: no own copy, {len(self.shards)} shards, it needs {self.k}"


@dataclass(frozen=True)
class Holder:
    """A living node with bytes of a rank: its own slot whole, or shards of it."""

    node: str
    own: bool
    shards: tuple[int, ...]


@dataclass(frozen=True)
class RankPlace:
    """Where a rank starts. ``own``: its own slot lies there. ``holders``: who has its bytes, the
    best for it first: own slots, then shards as near to ``host`` as can be."""

    rank: int
    host: str
    own: bool
    holders: tuple[Holder, ...]


@dataclass(frozen=True)
class RestartPlan:
    """``places`` by rank; ``order``: hosts with ranks, as the launcher should number them;
    ``spares``: hosts without."""

    places: tuple[RankPlace, ...]
    order: tuple[str, ...]
    spares: tuple[str, ...]

    def of_host(self, host: str) -> tuple[RankPlace, ...]:
        """The ranks of one host."""
        return tuple(place for place in self.places if place.host == host)


def decide_restart(
    ranks: Sequence[RankSources],
    cluster: Cluster,
    hosts: Sequence[str],
    per_host: int,
    blocks: bool,
) -> RestartPlan:
    """Hosts for all ``ranks``, given in order; ``hosts`` may be used, ``per_host`` ranks on each.

    ``cluster``: all living nodes, whose labels say what is near. A host that it lacks holds nothing
    and is near to nothing, but may be used. Raises UsageError for too few hosts.
    """
    size = per_host if blocks else 1
    units = [ranks[at : at + size] for at in range(0, len(ranks), size)]
    room = 1 if blocks else per_host
    if len(hosts) * room < len(units):
        need = -(-len(units) // room)
        raise UsageError(
            f"{len(ranks)} ranks, {per_host} on a host: needs {need} hosts, {len(hosts)} can be had"
        )
    free = dict.fromkeys(hosts, room)
    wanted = [_own_counts(unit, free) for unit in units]
    first = sorted(range(len(units)), key=lambda i: all(x.home not in wanted[i] for x in units[i]))
    seats = _most_own(wanted, first, room)
    for host in filter(None, seats):
        free[host] -= 1
    for number, unit in enumerate(units):
        if not seats[number]:
            near = _Nearness(cluster, unit)
            seats[number] = max((h for h in hosts if free[h]), key=near.of)
            free[seats[number]] -= 1
    places = tuple(
        _place(one, host, cluster) for unit, host in zip(units, seats, strict=True) for one in unit
    )
    order = tuple(dict.fromkeys(seats))
    return RestartPlan(places, order, tuple(host for host in hosts if host not in order))


def _own_counts(unit: Sequence[RankSources], free: Mapping[str, int]) -> dict[str, int]:
    """How many ranks of a unit have their own slot on each host that may be used."""
    counts = Counter(node for one in unit for node in one.own if node in free)
    homes = {one.home for one in unit}
    return dict(sorted(counts.items(), key=lambda found: (found[0] not in homes, found[0])))


def _most_own(wanted: Sequence[Mapping[str, int]], order: Sequence[int], room: int) -> list[str]:
    """The host of each unit, "" for none, with the largest sum of ``wanted`` that there is; of
    equal ones what comes first, units in this order and their hosts in theirs."""
    seats = [""] * len(wanted)
    seated: dict[str, list[int]] = {host: [] for counts in wanted for host in counts}
    for new in order:
        gain, before, queue = {new: 0}, {new: new}, deque([new])
        best = (0, new, "")
        while queue:
            unit = queue.popleft()
            if gain[unit] > best[0]:
                best = (gain[unit], unit, "")
            for host, count in wanted[unit].items():
                if host == seats[unit]:
                    continue
                if len(seated[host]) < room:
                    if gain[unit] + count > best[0]:
                        best = (gain[unit] + count, unit, host)
                    continue
                for other in seated[host]:
                    found = gain[unit] + count - wanted[other][host]
                    if other not in gain or found > gain[other]:
                        gain[other], before[other] = found, unit
                        queue.append(other)
        _move(seats, seated, before, best[1:])
    return seats


def _move(
    seats: list[str],
    seated: Mapping[str, list[int]],
    before: Mapping[int, int],
    end: tuple[int, str],
) -> None:
    """Give the last unit of a path its host, the one before it what that leaves, and so on."""
    unit, host = end
    while True:
        left, seats[unit] = seats[unit], host
        if left:
            seated[left].remove(unit)
        if host:
            seated[host].append(unit)
        if before[unit] == unit:
            return
        unit, host = before[unit], left


class _Nearness:
    """How near a host is to the shards of some ranks."""

    def __init__(self, cluster: Cluster, ranks: Sequence[RankSources]) -> None:
        self.cluster = cluster
        nodes = Counter(n for one in ranks for held in one.shards.values() for n in held)
        self.counts: list[tuple[str, Counter[str]]] = []
        for level in (*cluster.levels, "node"):
            found: Counter[str] = Counter()
            for node, count in nodes.items():
                label = cluster.domain(node, level) if node in cluster else None
                if label is not None:
                    found[label] += count
            self.counts.append((level, found))

    def of(self, host: str) -> tuple[int, ...]:
        """Shards in its domain of each level, narrow to wide, then on itself; more is nearer."""
        if host not in self.cluster:
            return (-1,) * len(self.counts)
        where = [(self.cluster.domain(host, level), found) for level, found in self.counts]
        return tuple(found[label] if label is not None else 0 for label, found in where)


def _place(one: RankSources, host: str, cluster: Cluster) -> RankPlace:
    shards: dict[str, list[int]] = {node: [] for node in one.own}
    for index, nodes in sorted(one.shards.items()):
        for node in nodes:
            shards.setdefault(node, []).append(index)

    def rank_of(node: str) -> tuple[bool, bool, tuple[bool, ...], str]:
        near = tuple(not _together(cluster, host, node, level) for level in cluster.levels)
        return node not in one.own, node != host, near, node

    holders = tuple(
        Holder(node, node in one.own, tuple(shards[node])) for node in sorted(shards, key=rank_of)
    )
    return RankPlace(one.rank, host, host in one.own, holders)


def _together(cluster: Cluster, one: str, other: str, level: str) -> bool:
    if one not in cluster or other not in cluster:
        return False
    label = cluster.domain(one, level)
    return label is not None and label == cluster.domain(other, level)
