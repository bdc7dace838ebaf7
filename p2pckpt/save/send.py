"""Shards -> receipts: offer, wait for the grant, move the bytes, ask for the receipt.

One holder a shard index, as placed. A holder that refuses, has no room or falls silent is replaced
once, by the next node that the placement rules allow; after that the shard stays unplaced and the
commit decides whether what is left suffices. Data shards leave straight from the slots, parity and
the manifest from staging: nothing is copied on the way.

Contract: a store_id in the result means that this very store answered, after the last byte, that
every chunk matched the manifest with this digest. Cancelling stops all transfers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import lru_cache

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.config import Config
from p2pckpt.errors import CheckpointError, IntegrityError, NoRoom, Refused, UsageError
from p2pckpt.ports import Doors, Region
from p2pckpt.traffic import Traffic
from topology.cluster import LEVELS, Cluster, Node, TopologyError
from topology.place import Level, Placement, Rules, place


@dataclass(frozen=True)
class EncodedShare:
    """A node's share, ready to leave: ``shards[i]`` are the regions of shard i in rank order."""

    manifest: r.Manifest
    digest: str
    shards: tuple[tuple[Region, ...], ...]
    manifest_region: Region

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of all snapshots."""
        return sum(entry.length for entry in self.manifest.ranks)


@dataclass(frozen=True)
class Crew:
    """Who may hold shards: the cluster of living nodes, their member records, the rules.

    ``leaving``: nodes that are being drained; they are in the cluster, and get no shard.
    """

    cluster: Cluster
    members: Mapping[str, r.Member]
    rules: Rules
    leaving: frozenset[str] = frozenset()


def crew_of(
    members: dict[str, r.Member],
    own: r.Member,
    layout: r.Layout,
    spread: tuple[tuple[str, bool], ...],
) -> Crew:
    """The cluster of living members, and the rules of a layout."""
    everybody = {**members, own.node: own}
    nodes = tuple(_node(everybody[name]) for name in sorted(everybody))
    levels = levels_of(spread, {level for m in everybody.values() for level in m.domains})
    leaving = frozenset(m.node for m in everybody.values() if m.draining)
    try:
        rules = Rules(layout.k, layout.m, tuple(Level(name, must) for name, must in spread))
        return Crew(_cluster(nodes, levels), everybody, rules, leaving)
    except TopologyError as e:
        raise UsageError(f"placement: {e}") from e


def _node(member: r.Member) -> Node:
    return _node_of(member.node, member.host, tuple(sorted(member.domains.items())))


@lru_cache(maxsize=4096)
def _node_of(name: str, host: str, domains: tuple[tuple[str, str], ...]) -> Node:
    return Node(name, host, domains)


@lru_cache(maxsize=4)
def _cluster(nodes: tuple[Node, ...], levels: tuple[str, ...]) -> Cluster:
    """One cluster for many saves: what placing works out of it is kept with it."""
    return Cluster(nodes, levels)


def levels_of(spread: tuple[tuple[str, bool], ...], labelled: Set[str]) -> tuple[str, ...]:
    """All levels, narrow to wide: as in ``spread``, but rack, switch, pod always in this order;
    then those that it does not name. Who reads the same labels in the same order (`topology plan`,
    the simulator) places alike."""
    named = dict.fromkeys(level for level, _ in spread)
    known = iter([level for level in LEVELS if level in named])
    ordered = [next(known) if level in LEVELS else level for level in named]
    return tuple(dict.fromkeys((*ordered, *LEVELS, *sorted(labelled))))


@dataclass(frozen=True)
class SentShare:
    """Store_ids by shard index ("" = nobody), where they were placed, and what went wrong."""

    holders: tuple[str, ...]
    placement: Placement
    failures: tuple[CheckpointError, ...]

    def check(self, owner: str, layout: r.Layout, spare: int) -> None:
        """Raises NoRoom or Refused, with what went wrong, if fewer than k + spare hold the share,
        the owner counted as one: it could not be committed."""
        have = sum(1 for store in self.holders if store) + 1
        if have < layout.k + spare:
            kind = NoRoom if any(isinstance(e, NoRoom) for e in self.failures) else Refused
            words = "; ".join(str(e) for e in self.failures[-3:]) or self.placement.reason
            raise kind(
                f"share of {owner}: needs {layout.k + spare} living sources (k={layout.k} + "
                f"min_spare={spare}), has {have}: {words}"
            )


async def send_share(share: EncodedShare, crew: Crew, doors: Doors, config: Config) -> SentShare:
    """Send every shard. Raises Refused for a placement that a required level forbids."""
    try:
        placement = place(crew.cluster, share.manifest.owner, crew.rules, crew.leaving)
    except TopologyError as e:
        raise Refused(f"placement of {share.manifest.owner}: {e}") from e
    used = set(placement.nodes)
    failed: set[str] = set()
    failures: list[CheckpointError] = []

    async def one(index: int) -> str:
        node: str | None = placement.nodes[index] if index < len(placement.nodes) else None
        for _ in range(2):
            if node is None:
                break
            try:
                return await send_shard(share, index, crew.members[node], doors, config)
            except CheckpointError as e:
                failed.add(node)
                failures.append(e)
                doors.notes("holder_failed", {"node": node, "shard": index, "why": str(e)})
                node = substitute(crew, share.manifest.owner, used, failed)
                if node is not None:
                    used.add(node)
        return ""

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(i)) for i in range(share.manifest.layout.shards)]
    return SentShare(tuple(t.result() for t in tasks), placement, tuple(failures))


def substitute(crew: Crew, owner: str, used: set[str], failed: set[str]) -> str | None:
    """The next node for a shard whose holder failed: one on a host of its own that, together with
    those ``used`` which have not failed, goes least against the rules; then the best by itself."""
    cluster, failed = crew.cluster, failed | crew.leaving
    try:
        again = place(cluster, owner, crew.rules, frozenset(failed))
    except TopologyError:
        return None
    holders = used - failed - {owner}
    hosts = {cluster.node(n).host for n in (owner, *holders)}

    def against(name: str) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """By level: shards too many in the node's domain; is it the owner's own?"""
        domains = [(lv.name, cluster.domain(name, lv.name)) for lv in crew.rules.spread]
        beside = [sum(cluster.domain(n, lv) == d for n in holders) for lv, d in domains]
        own = tuple(d is not None and d == cluster.domain(owner, lv) for lv, d in domains)
        return tuple(max(0, n + 1 - crew.rules.most) for n in beside), own

    candidates = dict.fromkeys((*again.nodes, *cluster.ring))
    free = (n for n in candidates if n not in used and n not in failed)
    found = [(against(n), n) for n in free if cluster.node(n).host not in hosts]
    must = [level.required for level in crew.rules.spread]
    may = [f for f in found if not any(n and m for n, m in zip(f[0][0], must, strict=True))]
    return min(may, key=lambda f: f[0], default=(None, None))[1]


async def send_shard(
    share: EncodedShare,
    index: int,
    holder: r.Member,
    doors: Doors,
    config: Config,
    traffic: Traffic = Traffic.SAVE,
) -> str:
    """Put one shard and the manifest on a holder; its store_id once it has sent the receipt.

    Raises NoRoom, Refused, PeerUnreachable or IntegrityError.
    """
    regions = share.shards[index]
    size = sum(region.length for region in regions) + share.manifest_region.length
    timeout_s = config.patience_s(size, traffic.can_wait)
    offer = w.PutOffer(
        attempt=share.manifest.attempt,
        owner=share.manifest.owner,
        index=index,
        lengths=tuple(region.length for region in regions),
        manifest_bytes=share.manifest_region.length,
        manifest_digest=share.digest,
        traffic=traffic,
    )
    # A holder that has no free file clears a new one first: as slow as sending, and slower.
    grant = await doors.peers.call(holder.peers_address, offer, timeout_s)
    if isinstance(grant, w.RefusedReply):
        if grant.room_need:
            raise NoRoom(f"{holder.node}: {grant.reason}")
        raise Refused(f"{holder.node}: {grant.reason}")
    if not isinstance(grant, w.PutGrant) or len(grant.shard) != len(regions):
        raise Refused(f"{holder.node}: answered an offer with {type(grant).__name__}")
    for to, region in zip(
        (*grant.shard, grant.manifest), (*regions, share.manifest_region), strict=True
    ):
        if region.length:
            await doors.transport.send(to.address, to.nonce, region, timeout_s, traffic)
    seal = w.PutSeal(attempt=share.manifest.attempt, owner=share.manifest.owner, index=index)
    receipt = await doors.peers.call(holder.peers_address, seal, timeout_s)
    if not isinstance(receipt, w.Receipt):
        raise Refused(f"{holder.node}: {getattr(receipt, 'reason', type(receipt).__name__)}")
    if receipt.manifest_digest != share.digest or receipt.store_id != holder.store_id:
        raise IntegrityError(
            f"{holder.node}: receipt of store {receipt.store_id} for manifest "
            f"{receipt.manifest_digest[:12]}, needs {holder.store_id}, {share.digest[:12]}"
        )
    return receipt.store_id
