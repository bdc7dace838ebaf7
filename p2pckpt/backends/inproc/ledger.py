"""Clients of the fake etcd: the ports Ledger and Membership.

Intuition. `etcd.FakeEtcd` is what is so; a door is one client's view of it and owns the waiting:
the way there, the way back, and what may go wrong on either.

Contract. A read is retried until its deadline, then LedgerUnavailable. A write is sent once: not
sent in time, LedgerUnavailable; sent and its answer lost, AmbiguousAnswer. Limits are etcd's own
(128 compares, 128 operations) and 64 KB a value, and are checked before anything is sent.
A watch reconnects by itself and delivers each change once, in order, or ends with Compacted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

from p2pckpt import wire
from p2pckpt.backends.inproc.etcd import FakeEtcd
from p2pckpt.errors import AmbiguousAnswer, Compacted, LedgerUnavailable, UsageError
from p2pckpt.ports import Change, Entry, Listing, Living, Put, Session, Txn
from p2pckpt.records import MEMBERS, Member

MAX_TXN_COMPARES = 128
MAX_TXN_OPERATIONS = 128
"""etcd's own --max-txn-ops; it bounds compares and operations alike."""

T = TypeVar("T")


class _Client:
    """One client's calls, with all that may happen to them on the way."""

    def __init__(self, etcd: FakeEtcd, client: str) -> None:
        self._etcd = etcd
        self._client = client

    async def _read(self, work: Callable[[], T]) -> T:
        """Ask until an answer comes back. Raises LedgerUnavailable at the deadline."""
        etcd, clock = self._etcd, asyncio.get_running_loop()
        deadline = clock.time() + etcd.operation_timeout_s
        while True:
            await etcd.reach(self._client, deadline - clock.time())
            await etcd.travel()
            if etcd.is_open(self._client):
                answer = work()
                await etcd.travel()
                if etcd.is_open(self._client):
                    return answer

    async def _write(self, work: Callable[[], T]) -> T:
        """Ask once. Raises LedgerUnavailable (not sent) or AmbiguousAnswer."""
        etcd, client = self._etcd, self._client
        await etcd.reach(client, etcd.operation_timeout_s)
        await etcd.travel()
        if etcd.takes_ambiguous(client):
            if etcd.coin():
                work()
            raise AmbiguousAnswer(f"ledger: the connection of {client} broke during a write")
        if etcd.is_open(client):
            answer = work()
            await etcd.travel()
            if etcd.is_open(client):
                return answer
        await asyncio.sleep(etcd.rpc_timeout_s)
        raise AmbiguousAnswer(f"ledger: no answer to a write of {client}")


class LedgerDoor(_Client):
    """`ports.Ledger` for one client of a `FakeEtcd`."""

    async def get(self, key: str) -> Entry | None:
        """Linearizable read of one key."""
        return await self._read(lambda: self._etcd.get(key))

    async def list(self, prefix: str) -> Listing:
        """Linearizable read of a prefix."""
        return await self._read(lambda: self._etcd.list(prefix))

    async def transact(self, txn: Txn) -> int | None:
        """The new revision, or None if a compare did not hold. Raises UsageError."""
        _check(txn)
        if self._etcd.goes_late(self._client, txn):
            await asyncio.sleep(self._etcd.rpc_timeout_s)
            raise AmbiguousAnswer(f"ledger: no answer to a write of {self._client}")
        return await self._write(lambda: self._etcd.apply(self._client, txn))

    def watch(self, prefix: str, from_revision: int) -> AsyncIterator[Sequence[Change]]:
        """Changes below `prefix` from a revision on; a batch never splits a revision."""
        if from_revision < 1:
            raise UsageError(f"watch {prefix!r} from {from_revision}: needs a revision >= 1")
        return _Watch(self._etcd, self._client, prefix, from_revision)


class _Watch:
    """No generator: it holds nothing that needs closing, and survives a cancelled next."""

    def __init__(self, etcd: FakeEtcd, client: str, prefix: str, from_revision: int) -> None:
        self._etcd = etcd
        self._client = client
        self._prefix = prefix
        self._next = from_revision
        self._link: int | None = None
        self._ended = False

    def __aiter__(self) -> AsyncIterator[Sequence[Change]]:
        return self

    async def __anext__(self) -> Sequence[Change]:
        if self._ended:
            raise StopAsyncIteration
        while True:
            if await self._connect():
                return ()
            batch = self._etcd.changes(self._prefix, self._next)
            if not batch:
                await self._etcd.news(self._prefix)
                continue
            await self._etcd.bring(self._client)
            if self._etcd.link(self._client) == self._link:
                self._next = batch[-1].revision + 1
                return batch

    async def _connect(self) -> bool:
        """True: there was another connection before."""
        etcd, before = self._etcd, self._link
        while not etcd.is_open(self._client) or etcd.link(self._client) != self._link:
            await etcd.reach(self._client, None)
            await etcd.travel()
            if self._next < etcd.compacted:
                self._ended = True
                raise Compacted(
                    f"watch {self._prefix!r}: needs changes from revision {self._next}, "
                    f"the ledger has them from {etcd.compacted}"
                )
            self._link = etcd.link(self._client)
        return before is not None and before != self._link


class MembershipDoor(_Client):
    """`ports.Membership` for one client of a `FakeEtcd`."""

    async def open(self, member: Member, ttl_s: float) -> Session:
        """A new lease with the member's key; see the port. Raises UsageError."""
        return await self._write(lambda: self._open(member, ttl_s))

    async def keep(self, session: Session) -> bool:
        """Renew once; False if the lease is gone for good."""
        etcd = self._etcd
        await etcd.reach(self._client, etcd.rpc_timeout_s)
        try:
            return await self._write(lambda: etcd.keep(session.lease))
        except AmbiguousAnswer as e:
            raise LedgerUnavailable(str(e)) from None  # renewed or not: one asks again

    async def close(self, session: Session) -> None:
        """Give the lease back."""
        await self._read(lambda: self._etcd.revoke(session.lease, self._client))

    async def living(self) -> Living:
        """A linearizable read of all members."""
        return await self._read(self._living)

    def _living(self) -> Living:
        members, revisions = self._etcd.worked_out(MEMBERS, _members)
        return Living(members, revisions, self._etcd.revision)

    def _open(self, member: Member, ttl_s: float) -> Session:
        etcd, key = self._etcd, MEMBERS + member.node
        if (old := etcd.get(key)) is not None:
            holder = wire.unpack(old.value, Member)
            if holder.store_id != member.store_id:
                raise UsageError(
                    f"member {member.node}: held by store {holder.store_id} on {holder.host}; "
                    f"needs that lease gone or the same store, not {member.store_id}"
                )
            etcd.revoke(etcd.lease_of(key), self._client)
        lease = etcd.grant(ttl_s)
        session = Session(lease, etcd.revision + 1)
        etcd.apply(self._client, Txn(puts=(Put(key, wire.pack(member), session),)))
        return session


def _members(listing: Listing) -> tuple[dict[str, Member], dict[str, int]]:
    """Members and their create revisions, by node."""
    found = [(wire.unpack(e.value, Member), e.create_revision) for e in listing.entries]
    return {m.node: m for m, _ in found}, {m.node: revision for m, revision in found}


def _check(txn: Txn) -> None:
    """Refuse what a real etcd, or the bound on values, would refuse."""
    operations = len(txn.puts) + len(txn.deletes)
    if len(txn.compares) > MAX_TXN_COMPARES or operations > MAX_TXN_OPERATIONS:
        raise UsageError(
            f"transaction: at most {MAX_TXN_COMPARES} compares and {MAX_TXN_OPERATIONS} "
            f"operations, has {len(txn.compares)} and {operations}"
        )
    written = [put.key for put in txn.puts]
    if len(set(written)) < len(written) or set(written) & set(txn.deletes):
        raise UsageError("transaction: writes or deletes a key that it also writes")
    for put in txn.puts:
        if len(put.value) > wire.MAX_RECORD_BYTES:
            raise UsageError(
                f"{put.key}: value of {len(put.value)} bytes, at most {wire.MAX_RECORD_BYTES}"
            )
