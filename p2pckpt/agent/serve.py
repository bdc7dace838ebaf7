"""The holder's side: keep shards for peers, give them back, say what is here.

A put is offer -> grants -> bytes -> seal -> receipt. The offer is judged at once: an older
generation, a decided attempt, a holder cut off from the ledger, or lack of room are answers, never
waits. The receipt is given only after every chunk of every rank's piece matched the manifest,
the manifest matched the digest, and the record beside the file says WHOLE.

Contract: `decide_offer` is pure. Bytes of an attempt are followed to its outcome by
`JobContext.track` from the moment that they have a file here. Reads are always served: neither the
lease nor the ledger is needed to give bytes back.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.closing import restore_first
from p2pckpt.agent.context import Home, JobContext
from p2pckpt.agent.holdings import Held, Want, document_name
from p2pckpt.agent.readying import prepare_files
from p2pckpt.coding.checksum import verify_chunks
from p2pckpt.errors import CheckpointError, FormatError, IntegrityError, NoRoom, Refused
from p2pckpt.jobstate import JobState
from p2pckpt.ports import Expected
from p2pckpt.wire import unpack

MANIFEST_PIECE_BYTES = 1024 * 1024
"""Of one reply: peers' messages stay below 4 MiB, and bytes grow by a third as text."""


def decide_offer(offer: w.PutOffer, state: JobState, cut_off: bool, draining: bool = False) -> str:
    """Why an offer is refused; "" if it may be granted."""
    attempt, committed = offer.attempt, state.committed(offer.attempt) is not None
    if state.ledger_id != attempt.ledger_id and not committed:  # a rebuild keeps older commits
        return f"ledger id {attempt.ledger_id[:8]} is not this job's ({state.ledger_id[:8]})"
    if cut_off:
        return "cut off from the ledger for longer than a lease"
    if draining:
        return "it is being drained"
    if offer.index < 0 or min((*offer.lengths, offer.manifest_bytes - 1)) < 0:
        return f"shard {offer.index}, {offer.lengths}, {offer.manifest_bytes}: need 0, 0, 1 or more"
    if committed:
        return ""  # a repair: it needs no fence, its bytes are named by the group record
    if state.generation is None or state.generation.number < attempt.generation:
        return f"generation {attempt.generation} is not known here yet"
    if state.generation.number > attempt.generation:
        return f"generation {attempt.generation} is over, {state.generation.number} began"
    if attempt.key in state.outcomes or state.settled(attempt):
        return "the attempt is decided"
    return ""


@dataclass
class Incoming:
    """A put under way."""

    offer: w.PutOffer
    shard: Held
    manifest: Held
    expected: list[Expected]
    expected_manifest: Expected
    ending: asyncio.Task[None] | None = None
    """Gives it up in time, unless it is taken before."""


class Serving:
    """Requests of peers. ``context`` finds or makes the context of a job."""

    def __init__(self, home: Home, context: Callable[[str], Awaitable[JobContext]]) -> None:
        self.home = home
        self.context = context
        self.incoming: dict[tuple[r.Attempt, str, int], Incoming] = {}

    # -- put --------------------------------------------------------------------------------------

    async def offer(self, offer: w.PutOffer) -> r.Record:
        """Judge an offer and grant it."""
        ctx = await self.context(offer.attempt.job)
        generation, other = ctx.state.generation, ctx.state.ledger_id != offer.attempt.ledger_id
        if other or generation is None or generation.number < offer.attempt.generation:
            await ctx.refresh()
        draining = self.home.member.draining
        if why := decide_offer(offer, ctx.state, self.home.cut_off, draining):
            return w.RefusedReply(reason=why)
        key = (offer.attempt, offer.owner, offer.index)
        if (before := self._take(key)) is not None:
            await self._drop(before)
        try:
            incoming = await self._prepare(offer)
        except NoRoom as e:
            need, arena = sum(offer.lengths) + offer.manifest_bytes, self.home.doors.arena
            have = max(0, arena.budget_bytes - arena.used_bytes)
            return w.RefusedReply(reason=str(e), room_need=need, room_have=have)
        while (twin := self._take(key)) is not None:  # the same offer came twice
            await self._drop(twin)
        if self.home.member.draining and not draining:  # it had no file yet that a drain waits for
            await self._drop(incoming)
            return w.RefusedReply(reason="a drain has begun")
        self.incoming[key] = incoming
        layout = ctx.state.generation.layout if ctx.state.generation else r.Layout(1, 0)
        ctx.track(offer.attempt, sum(offer.lengths) * layout.shards)
        ending = self._end_with_attempt(ctx, key, incoming)
        incoming.ending = self.home.spawn(f"incoming {key}", ending)
        address = self.home.doors.transport.address
        return w.PutGrant(
            shard=tuple(
                w.Grant(address=address, nonce=e.nonce, length=length)
                for e, length in zip(incoming.expected, offer.lengths, strict=True)
            ),
            manifest=w.Grant(
                address=address,
                nonce=incoming.expected_manifest.nonce,
                length=offer.manifest_bytes,
            ),
        )

    async def _prepare(self, offer: w.PutOffer) -> Incoming:
        holdings, transport = self.home.holdings, self.home.doors.transport
        attempt, writer = offer.attempt, object()
        size, traffic = sum(offer.lengths), offer.traffic
        timeout_s = self.home.config.patience_s(size + offer.manifest_bytes, traffic.can_wait)
        shard = await holdings.take(
            Want(r.FileKind.SHARD, attempt, offer.owner, offer.index, max(1, size)), writer
        )
        files, expected, at = [shard], list[Expected](), 0
        try:
            manifest = await holdings.take(
                Want(r.FileKind.STAGE, attempt, offer.owner, offer.index, offer.manifest_bytes),
                writer,
            )
            files.append(manifest)
            for length in offer.lengths:
                region = holdings.region(shard, at, length)
                expected.append(await transport.expect(region, traffic, timeout_s))
                at += length
            region = holdings.region(manifest, 0, offer.manifest_bytes)
            last = await transport.expect(region, traffic, timeout_s)
        except BaseException:  # no room for all, or our own mover does not answer
            for one in expected:
                await one.cancel()
            for held in files:
                self._let_go(held)
            raise
        return Incoming(offer, shard, manifest, expected, last)

    async def seal(self, seal: w.PutSeal) -> r.Record:
        """All bytes should be here: check, record, and give the receipt."""
        key = (seal.attempt, seal.owner, seal.index)
        incoming = self._take(key)
        if incoming is None:
            kept = self.home.holdings.find(*key_of(seal))
            if kept is not None:  # the receipt was lost on its way
                store_id = self.home.doors.arena.store_id
                return w.Receipt(store_id=store_id, manifest_digest=kept.manifest_digest)
            return w.RefusedReply(reason="no such put is under way (it was refused or given up)")
        config, offer = self.home.config, incoming.offer
        size = sum(offer.lengths) + offer.manifest_bytes
        timeout_s = config.patience_s(size, offer.traffic.can_wait)
        try:
            for expected, length in zip(incoming.expected, offer.lengths, strict=True):
                if length:
                    await expected.received(timeout_s)
                else:  # nobody sends it
                    await expected.cancel()
            await incoming.expected_manifest.received(timeout_s)
            packed = await self._check(incoming)
            ctx = await self.context(seal.attempt.job)
            if ctx.state.settled(seal.attempt):
                raise Refused("the attempt was decided meanwhile")
            self.home.doors.arena.put_document(document_name(offer.manifest_digest), packed)
            self.home.holdings.seal(incoming.shard, sum(offer.lengths), offer.manifest_digest)
        except CheckpointError as e:
            await self._drop(incoming)
            return w.RefusedReply(reason=f"{type(e).__name__}: {e}")
        except BaseException:
            await self._drop(incoming)
            raise
        self._let_go(incoming.manifest)
        self._prepare_next(ctx, incoming.shard)
        if ctx.state.committed(seal.attempt) is not None:  # a repair: the record is to be copied
            ctx.wake()
        return w.Receipt(
            store_id=self.home.doors.arena.store_id, manifest_digest=offer.manifest_digest
        )

    def _prepare_next(self, ctx: JobContext, shard: Held) -> None:
        """The next save's file of this shard, before it is asked for."""
        shards = [h for h in self.home.holdings.of_job(ctx.job) if h.kind is r.FileKind.SHARD]
        count = 2 * len({(h.owner, h.part) for h in shards if h.capacity >= shard.capacity})

        async def prepare() -> None:
            await restore_first(ctx)
            await prepare_files(ctx, r.FileKind.SHARD, shard.capacity, count)

        self.home.spawn("prepare shards", prepare())

    async def _check(self, incoming: Incoming) -> bytes:
        """Everything that arrived against the digest. Raises IntegrityError or FormatError."""
        offer, holdings = incoming.offer, self.home.holdings
        packed = bytes(holdings.view(incoming.manifest, 0, offer.manifest_bytes))
        image = holdings.view(incoming.shard, 0, sum(offer.lengths))
        work = partial(check_shard, offer, packed, image)
        await self.home.doors.workers.run(work, len(image), offer.traffic)
        return packed

    async def _end_with_attempt(
        self, ctx: JobContext, key: tuple[r.Attempt, str, int], incoming: Incoming
    ) -> None:
        """A put is given up when its attempt is settled, or its owner took too long."""
        offer, config = incoming.offer, self.home.config
        attempt, size, can_wait = offer.attempt, sum(offer.lengths), offer.traffic.can_wait
        timeout_s = config.attempt_timeout_s - config.silent_holder_s
        timeout_s += config.patience_s(size, can_wait)
        await ctx.until(lambda: ctx.state.settled(attempt) != "", timeout_s)
        if self.incoming.get(key) is incoming:
            del self.incoming[key]
            await self._drop(incoming)

    def _take(self, key: tuple[r.Attempt, str, int]) -> Incoming | None:
        """A put that is under way: from now on it is for who asked to end it."""
        incoming = self.incoming.pop(key, None)
        if incoming is not None and incoming.ending is not None:
            incoming.ending.cancel()
        return incoming

    async def _drop(self, incoming: Incoming) -> None:
        """Give a put up: nobody writes any more when the files go back."""
        for expected in (*incoming.expected, incoming.expected_manifest):
            await expected.cancel()
        self._let_go(incoming.shard)
        self._let_go(incoming.manifest)

    def _let_go(self, held: Held) -> None:
        self.home.holdings.release(held)
        self.home.holdings.writer_done(held)

    # -- what is here, and back with it -----------------------------------------------------------

    def held(self, query: w.HeldQuery) -> w.HeldReply:
        """Everything WHOLE of a job, or of one attempt, but for what was found to be wrong."""
        files = [
            h
            for h in self.home.holdings.of_job(query.job)
            if query.attempt is None or h.attempt == query.attempt
        ]
        return w.HeldReply(
            store_id=self.home.doors.arena.store_id,
            files=tuple(
                w.HeldFile(
                    attempt=h.attempt,
                    kind=h.kind,
                    owner=h.owner,
                    part=h.part,
                    manifest_digest=h.manifest_digest,
                )
                for h in files
                if h.whole and h.attempt is not None and not h.bad
            ),
            bytes_held=sum(h.length for h in files),
        )

    def manifest(self, query: w.GetManifest) -> r.Record:
        """The packed manifest with a digest, as it lies here."""
        packed = self.home.doors.arena.document(document_name(query.manifest_digest))
        if packed is None:
            return w.RefusedReply(reason=f"manifest {query.manifest_digest[:12]} is not held here")
        return w.ManifestReply(
            total=len(packed), packed=packed[query.offset : query.offset + MANIFEST_PIECE_BYTES]
        )

    async def get(self, query: w.GetRange) -> r.Record:
        """Write a range of a WHOLE file to the asker's grant."""
        holdings = self.home.holdings
        owner = query.owner if query.kind is r.FileKind.SHARD else None
        found = holdings.find(query.attempt, query.kind, query.part, owner)
        if found is None:
            return w.RefusedReply(reason=f"{query.kind} {query.part} of {query.owner} is not held")
        if query.offset < 0 or query.offset + query.grant.length > found.length:
            return w.RefusedReply(
                reason=f"range {query.offset}+{query.grant.length} of {found.length} bytes"
            )
        region = holdings.region(found, query.offset, query.grant.length)
        config = self.home.config
        timeout_s = config.patience_s(region.length, query.traffic.can_wait)
        grant, transport = query.grant, self.home.doors.transport
        await transport.send(grant.address, grant.nonce, region, timeout_s, query.traffic)
        return w.Sent()


def key_of(seal: w.PutSeal) -> tuple[r.Attempt, r.FileKind, int, str]:
    """What a sealed put is found by in the holdings."""
    return seal.attempt, r.FileKind.SHARD, seal.index, seal.owner


def check_shard(offer: w.PutOffer, packed: bytes, image: memoryview) -> r.Manifest:
    """A received shard file and manifest against the offer's digest and each other.

    Raises IntegrityError naming what differs, or FormatError. Pure: runs on a worker.
    """
    found = hashlib.sha256(packed).hexdigest()
    if found != offer.manifest_digest:
        raise IntegrityError(f"manifest digest {found[:12]}, needs {offer.manifest_digest[:12]}")
    manifest = unpack(packed, r.Manifest)
    if (manifest.attempt, manifest.owner) != (offer.attempt, offer.owner):
        raise FormatError(f"manifest is of {manifest.owner}, {manifest.attempt.key}")
    k = manifest.layout.k
    lengths = tuple(entry.stored_bytes(offer.index, k) for entry in manifest.ranks)
    if not 0 <= offer.index < manifest.layout.shards or lengths != offer.lengths:
        raise FormatError(f"shard {offer.index}: manifest has {lengths}, offer {offer.lengths}")
    at = 0
    for entry, length in zip(manifest.ranks, lengths, strict=True):
        piece = image[at : at + length]
        at += length
        if bad := bad_chunks(manifest, entry, offer.index, piece):
            raise IntegrityError(f"rank {entry.rank}, shard {offer.index}: chunks {bad[:5]}")
    return manifest


def bad_chunks(
    manifest: r.Manifest, entry: r.RankSnapshot, shard: int, piece: memoryview
) -> list[int]:
    """Chunks of one stored shard piece that differ from the manifest's table."""
    table = np.frombuffer(entry.tables[shard], "<u4")
    return verify_chunks(piece, manifest.chunk_bytes, table)


async def answer(serving: Serving, request: r.Record) -> r.Record:
    """Dispatch one request of a peer. Raises Refused for what no peer may ask."""
    home = serving.home
    match request:
        case w.Ping():
            return w.Pong(store_id=home.doors.arena.store_id, session=home.member.session)
        case w.PutOffer():
            return await serving.offer(request)
        case w.PutSeal():
            return await serving.seal(request)
        case w.HeldQuery():
            return serving.held(request)
        case w.GetManifest():
            return serving.manifest(request)
        case w.GetRange():
            return await serving.get(request)
    raise Refused(f"{type(request).__name__} is not a request between agents")
