"""The ledger and the membership in a real etcd.

Agents agree through a handful of small records in etcd and nothing else, so this file keeps to
what etcd promises: linearizable reads, transactions that compare and write at one revision, leases,
and watches that are resumed from a revision. How a member is asked and what its silence means is in
`etcd_calls.py`; how a watch survives in `etcd_watch.py`; transactions and limits in `etcd_txn.py`.

Contract: `Etcd.ledger` and `Etcd.membership` are ports.Ledger and ports.Membership. Limits are
checked before anything is sent. Reads are never served from a member's own, perhaps stale, state.
`keep` says False only of a lease that is gone for good: one that etcd no longer knows is revoked
before that is said. With certificates, a client is the etcd user named by its certificate's CN;
passwords are not offered, since their tokens do not outlive the server.

Consequence: an agent that holds an `Etcd` needs no other knowledge of etcd. Make it on the running
loop, use it there only, and close it.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc.aio
from pyetcd.etcdrpc import rpc_pb2 as pb

from p2pckpt.backends.etcd_calls import REQUIRE_LEADER, EtcdCalls, EtcdMember, Rejected
from p2pckpt.backends.etcd_txn import key_bytes, request_of
from p2pckpt.backends.etcd_watch import EtcdWatch
from p2pckpt.errors import AmbiguousAnswer, FormatError, LedgerUnavailable, UsageError
from p2pckpt.ports import (
    Entry,
    Listing,
    Living,
    Put,
    Session,
    Txn,
    absent,
    prefix_end,
    unchanged,
)
from p2pckpt.records import MEMBERS, Member
from p2pckpt.wire import pack, unpack

PAGE_KEYS = 256
"""Keys of one answer of a listing: at most 16 MiB of values."""

MANY_REVISIONS = 500_000
"""An etcd that still has what was so many changes ago is compacted by nobody. 1,250 agents make
some 25 changes a save: a day of one save in five seconds."""

_LEASE_UNKNOWN = "requested lease not found"
_LEASE_EXISTS = "lease already exists"
_LONGEST_TTL_S = 86_400
_OPEN_TRIES = 5


@dataclass(frozen=True)
class Room:
    """Of a member: bytes of its database, which count against its quota; the alarms of the cluster,
    as NOSPACE; does it forget what was long ago?"""

    database_bytes: int
    alarms: tuple[str, ...]
    forgets: bool


class Etcd:
    """A client of one etcd; an async context manager.

    ``endpoints`` are http(s)://host:port of all members. ``tls`` is (ca, cert, key) as PEM files.
    A call to a member takes at most `rpc_deadline_s`, an operation at most `operation_deadline_s`.
    Raises ConfigError for wrong endpoints, files or deadlines; connects at the first use.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        tls: tuple[Path, Path, Path] | None = None,
        rpc_deadline_s: float = 1.0,
        operation_deadline_s: float = 10.0,
    ) -> None:
        self._calls = EtcdCalls(endpoints, tls, rpc_deadline_s, operation_deadline_s)
        self.ledger = EtcdLedger(self._calls)
        self.membership = EtcdMembership(self._calls, self.ledger)

    async def check_version(self, trial: bool = False) -> dict[str, str]:
        """The release of every member that answers, by endpoint.

        Raises UsageError for one that can lose committed transactions, unless this is a `trial`;
        LedgerUnavailable if no member answers.
        """
        found: dict[str, str] = {}
        failures = []
        for member in self._calls.members:
            try:
                status = await member.status(self._calls.rpc_deadline_s)
            except grpc.aio.AioRpcError as error:
                failures.append(f"{member.name}: {error.code().name} {error.details()}")
                continue
            self._calls.check_cluster(status.header, member)
            found[member.name] = status.version
            if not trial and (why := version_flaw(status.version)):
                refused = f"etcd {member.name}: release {status.version} is refused: {why}"
                raise UsageError(f"{refused}; for a trial: --trial")
        if not found:
            raise LedgerUnavailable("etcd release: no member answers: " + "; ".join(failures))
        return found

    async def room(self) -> Room:
        """How the database of one member stands. Raises LedgerUnavailable."""

        async def send(member: EtcdMember, timeout_s: float) -> Any:
            return await member.status(timeout_s)

        async def listen(member: EtcdMember, timeout_s: float) -> Any:
            return await member.maintenance.Alarm(pb.AlarmRequest(), timeout=timeout_s)  # GET

        status = await self._calls.ask("room in etcd", send, repeatable=True)
        raised = await self._calls.ask("alarms of etcd", listen, repeatable=True)
        names = {number: name for name, number in pb.AlarmType.items()}  # not all that there are
        alarms = tuple(sorted({names.get(a.alarm, f"alarm {a.alarm}") for a in raised.alarms}))
        old = status.header.revision - MANY_REVISIONS
        return Room(status.dbSize, alarms, old <= 0 or await self.ledger.forgot(old))

    async def close(self) -> None:
        """Close all channels; watches and calls in flight end with LedgerUnavailable."""
        await self._calls.close()

    async def __aenter__(self) -> Etcd:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def version_flaw(version: str) -> str:
    """Why a release of etcd must not be trusted with commits; "" if it may be.

    Source: etcd-io/etcd#13766 (3.5.0 to 3.5.2 may lose committed transactions of a member that is
    killed under load) and upstream's advice that followed: at least 3.4.22, or 3.5.6.
    """
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if not match:
        return f"needs a release like 3.5.16, has {version!r}"
    release = tuple(int(part) for part in match.groups())
    if release < (3, 4, 22):
        return "it is older than 3.4.22, the oldest that upstream supports in production"
    if (3, 5, 0) <= release < (3, 5, 6):
        return "3.5.0 to 3.5.5 can corrupt or lose data; use 3.5.6 or later, or 3.4.22 or later"
    return ""


class EtcdLedger:
    """ports.Ledger on etcd."""

    def __init__(self, calls: EtcdCalls) -> None:
        self._calls = calls

    async def get(self, key: str) -> Entry | None:
        """Linearizable read of one key."""
        found = await self.read(key)
        return _entry(found) if found is not None else None

    async def read(self, key: str) -> Any:
        """As `get`, but etcd's own KeyValue, which also names the lease."""
        answer = await self._range(f"read of {key!r}", pb.RangeRequest(key=key_bytes(key)))
        return answer.kvs[0] if answer.kvs else None

    async def forgot(self, revision: int) -> bool:
        """Was that revision compacted?"""
        request = pb.RangeRequest(key=key_bytes(MEMBERS), revision=revision, keys_only=True)
        try:
            await self._range(f"what was at revision {revision}", request)
        except Rejected as error:
            if "compacted" not in error.says:
                raise
            return True
        return False

    async def list(self, prefix: str) -> Listing:
        """Linearizable read of all keys that begin with `prefix`, in pages of one revision."""
        what = f"list of {prefix!r}"
        start, end = _span(prefix)
        deadline = asyncio.get_running_loop().time() + self._calls.operation_deadline_s
        while True:
            page = await self._range(
                what, pb.RangeRequest(key=start, range_end=end, limit=PAGE_KEYS)
            )
            revision = page.header.revision
            kvs = [*page.kvs]
            try:
                while page.more:
                    request = pb.RangeRequest(
                        key=kvs[-1].key + b"\0", range_end=end, limit=PAGE_KEYS, revision=revision
                    )
                    page = await self._range(what, request)
                    kvs += page.kvs
            except Rejected as error:
                # Compacted between two pages: start again at a newer revision.
                if "compacted" not in error.says:
                    raise
                if asyncio.get_running_loop().time() > deadline:
                    raise LedgerUnavailable(f"{what}: {error}") from None
            else:
                return Listing(tuple(_entry(kv) for kv in kvs), revision)

    async def transact(self, txn: Txn) -> int | None:
        """The new revision, or None if a compare did not hold or a put's lease is gone."""
        request = request_of(txn)
        what = "transaction on " + ", ".join(
            repr(key) for key in ([put.key for put in txn.puts] + [*txn.deletes])[:3]
        )

        async def send(member: EtcdMember, timeout_s: float) -> Any:
            return await member.kv.Txn(request, timeout=timeout_s, metadata=REQUIRE_LEADER)

        # Without operations it only reads, so it may be asked again.
        readonly = not (txn.puts or txn.deletes)
        try:
            answer = await self._calls.ask(what, send, repeatable=readonly)
        except Rejected as error:
            if _LEASE_UNKNOWN in error.says:
                return None
            raise
        return answer.header.revision if answer.succeeded else None

    def watch(self, prefix: str, from_revision: int) -> EtcdWatch:
        """Changes below `prefix` from `from_revision` on, in order, none lost, none twice.

        Holds a stream from the first wait on: `aclose` it, or drop it.
        """
        if from_revision < 1:
            raise UsageError(f"watch of {prefix!r} from {from_revision}: needs a revision >= 1")
        return EtcdWatch(self._calls, f"watch of {prefix!r}", _span(prefix), from_revision)

    async def _range(self, what: str, request: Any) -> Any:
        async def send(member: EtcdMember, timeout_s: float) -> Any:
            return await member.kv.Range(request, timeout=timeout_s, metadata=REQUIRE_LEADER)

        return await self._calls.ask(what, send, repeatable=True)


class EtcdMembership:
    """ports.Membership on etcd: one key a member, under its lease."""

    def __init__(self, calls: EtcdCalls, ledger: EtcdLedger) -> None:
        self._calls = calls
        self._ledger = ledger

    async def open(self, member: Member, ttl_s: float) -> Session:
        """Announce a member under a new lease of `ttl_s`, rounded up to seconds.

        An older session of the same store ends. Raises UsageError if another store holds the name.
        What a failed or cancelled call leaves behind ends with its lease.
        """
        if not 0 < ttl_s <= _LONGEST_TTL_S:
            raise UsageError(
                f"member {member.node!r}: ttl_s needs to be above 0 and at most "
                f"{_LONGEST_TTL_S}, is {ttl_s}"
            )
        key, value = MEMBERS + member.node, pack(member)
        for _ in range(_OPEN_TRIES):
            await self._make_way(key, member)
            lease = await self._grant(math.ceil(ttl_s))
            txn = Txn((absent(key),), (Put(key, value, Session(lease, 0)),))
            try:
                revision = await self._ledger.transact(txn)
            except AmbiguousAnswer:
                found = await self._ledger.read(key)
                ours = found is not None and found.lease == lease
                revision = found.create_revision if ours else None
            if revision is not None:
                return Session(lease, revision)
            # Somebody else was first, or the put is still on its way: without its lease it fails.
            await self._revoke(lease)
        raise LedgerUnavailable(
            f"member {member.node!r}: lost the race for its key {_OPEN_TRIES} times"
        )

    async def keep(self, session: Session) -> bool:
        """Renew once. False: the lease is gone for good."""

        async def send(member: EtcdMember, timeout_s: float) -> Any:
            request = pb.LeaseKeepAliveRequest(ID=session.lease)
            call = member.lease.LeaseKeepAlive(
                iter([request]), timeout=timeout_s, metadata=REQUIRE_LEADER
            )
            answers = [answer async for answer in call]
            if not answers:
                raise LedgerUnavailable(f"lease {session.lease:x}: etcd ended without an answer")
            return answers[-1]

        answer = await self._calls.ask(f"renewal of lease {session.lease:x}", send, repeatable=True)
        if answer.TTL > 0:
            return True
        # A leader that has not applied a fresh grant yet says 0 too (by the source of 3.5.1).
        # Revoking makes the word true: renewals bypass the log, a revocation does not.
        await self._revoke(session.lease)
        return False

    async def close(self, session: Session) -> None:
        """Give the lease back; its keys vanish at once. Of a lease that is gone: fine."""
        await self._revoke(session.lease)

    async def living(self) -> Living:
        """A linearizable read of all members. Raises FormatError for a key that is no member."""
        listing = await self._ledger.list(MEMBERS)
        members: dict[str, Member] = {}
        revisions: dict[str, int] = {}
        for entry in listing.entries:
            member = unpack(entry.value, Member)
            if MEMBERS + member.node != entry.key:
                raise FormatError(f"{entry.key}: holds a member named {member.node!r}")
            members[member.node] = member
            revisions[member.node] = entry.create_revision
        return Living(members, revisions, listing.revision)

    async def _make_way(self, key: str, member: Member) -> None:
        """End an older session of the same store. Raises UsageError for one of another store."""
        found = await self._ledger.read(key)
        if found is None:
            return
        holder = unpack(found.value, Member)
        if holder.store_id != member.store_id:
            raise UsageError(
                f"member {member.node!r}: held by store {holder.store_id} on {holder.host}; "
                f"needs that lease gone or the same store, not {member.store_id}"
            )
        if found.lease:
            await self._revoke(found.lease)
        else:
            await self._ledger.transact(Txn((unchanged(_entry(found)),), (), (key,)))

    async def _grant(self, ttl_s: int) -> int:
        """A new lease. Its id is ours, so that asking twice does not make two."""
        lease = secrets.randbits(62) + 1

        async def send(member: EtcdMember, timeout_s: float) -> Any:
            request = pb.LeaseGrantRequest(ID=lease, TTL=ttl_s)
            return await member.lease.LeaseGrant(
                request, timeout=timeout_s, metadata=REQUIRE_LEADER
            )

        try:
            await self._calls.ask("grant of a lease", send, repeatable=True)
        except Rejected as error:
            if _LEASE_EXISTS not in error.says:
                raise
        return lease

    async def _revoke(self, lease: int) -> None:
        async def send(member: EtcdMember, timeout_s: float) -> Any:
            request = pb.LeaseRevokeRequest(ID=lease)
            return await member.lease.LeaseRevoke(
                request, timeout=timeout_s, metadata=REQUIRE_LEADER
            )

        try:
            await self._calls.ask(f"end of lease {lease:x}", send, repeatable=True)
        except Rejected as error:
            if _LEASE_UNKNOWN not in error.says:
                raise


def _span(prefix: str) -> tuple[bytes, bytes]:
    """First key and end of a prefix, in etcd's words; of all keys for ""."""
    return (prefix.encode(), prefix_end(prefix).encode()) if prefix else (b"\0", b"\0")


def _entry(kv: Any) -> Entry:
    return Entry(kv.key.decode(), kv.value, kv.create_revision, kv.mod_revision)
