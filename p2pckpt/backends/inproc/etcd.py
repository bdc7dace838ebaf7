"""The fake etcd: one revision counter, leases, compares, and faults to switch on.

Intuition. `FakeEtcd` is the whole cluster as a state machine without waiting in it, and beside it
the links of its clients, on which all waiting and loss takes place (`ledger` has the clients).

Contract. Compares, revisions and leases follow etcd 3.5 (server/etcdserver/txn and mvcc). A compare
over an empty range sees create and mod revision 0, and fails if it is of a value. A put under a
lease that is gone counts as a compare that does not hold. The end of a lease deletes its keys at
one revision.

Faults are methods. Those that break a connection make a watch resume from what it delivered last,
and there it finds out whether that was compacted; a connected watch is immune to compaction. After
`rollback` or `wipe` a watch from a later revision waits in silence, as etcd's does: who must notice
compares revisions.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from p2pckpt.backends.inproc.net import call_at_true_time, true_time
from p2pckpt.coding.checksum import crc32c
from p2pckpt.errors import LedgerUnavailable, UsageError
from p2pckpt.ports import Change, Compare, Entry, Listing, Put, Txn

T = TypeVar("T")

NOWHERE = "\0"
"""A prefix of no key."""


@dataclass(frozen=True)
class _Event:
    """One write of one key, as the history keeps it."""

    change: Change
    lease: int = 0


_Changes = list[Change]


@dataclass
class _Lease:
    ttl_s: float
    timer: asyncio.TimerHandle


class FakeEtcd:
    """The state of the ledger, its faults, and the links of its clients.

    ``log(who, what, facts)`` is told of every write and fault. Latencies are drawn from `rng`, one
    way, uniformly from ``latency_s``.
    """

    rpc_timeout_s = 1.0
    operation_timeout_s = 10.0

    def __init__(
        self,
        rng: Random,
        log: Callable[[str, str, dict[str, Any]], None],
        latency_s: tuple[float, float] = (0.0003, 0.002),
    ) -> None:
        self.revision = 1
        self.compacted = 0
        self._rng = rng
        self._log = log
        self._latency_s = latency_s
        self._entries: dict[str, Entry] = {}
        self._names: list[str] = []  # of the entries, sorted
        self._attached: dict[str, int] = {}  # lease id by key
        self._history: list[_Event] = []
        self._below: dict[str, _Changes] = {}  # the history of each prefix that was asked for
        self._worked_out: dict[str, tuple[tuple[int, int], Any]] = {}
        self._leases: dict[int, _Lease] = {}
        self._granted: dict[int, float] = {}  # TTL of every lease there ever was
        self._closed_until: dict[str, float] = {}
        self._breaks: dict[str, int] = {}
        self._breaks_of_all = 0
        self._ambiguous: dict[str, int] = {}
        self._lags: dict[str, float] = {}
        self._late: dict[str, float] = {}
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}

    # -- reading and writing ----------------------------------------------------------------------

    def get(self, key: str) -> Entry | None:
        """One key as it is now."""
        return self._entries.get(key)

    def list(self, prefix: str) -> Listing:
        """All keys below a prefix, sorted."""
        found = self._between(prefix, prefix + "\U0010ffff")
        return Listing(tuple(self._entries[key] for key in found), self.revision)

    def _between(self, first: str, end: str) -> Sequence[str]:
        names = self._names
        return names[bisect_left(names, first) : bisect_left(names, end)]

    def apply(self, who: str, txn: Txn) -> int | None:
        """Do a transaction whole or not at all; the revision, or None if a compare failed."""
        if not all(self._holds(compare) for compare in txn.compares):
            return None
        if not all(put.session is None or put.session.lease in self._leases for put in txn.puts):
            return None
        deletes = [key for key in dict.fromkeys(txn.deletes) if key in self._entries]
        if txn.puts or deletes:
            self._write(who, txn.puts, deletes)
        return self.revision

    def changes(self, prefix: str, from_revision: int) -> tuple[Change, ...]:
        """All changes below a prefix from a revision on."""
        below = self._changes_below(prefix)
        return tuple(below[bisect_left(below, from_revision, key=lambda c: c.revision) :])

    def _changes_below(self, prefix: str) -> _Changes:
        """The history of a prefix; kept from now on, so that watches need not search for it."""
        if prefix not in self._below:
            every = (event.change for event in self._history)
            self._below[prefix] = [change for change in every if change.key.startswith(prefix)]
        return self._below[prefix]

    def worked_out(self, prefix: str, work: Callable[[Listing], T]) -> T:
        """``work(list(prefix))``, done again only when something below the prefix has changed."""
        below = self._changes_below(prefix)
        version = (self._breaks_of_all, below[-1].revision if below else 0)
        known = self._worked_out.get(prefix)
        if known is None or known[0] != version:
            known = self._worked_out[prefix] = (version, work(self.list(prefix)))
        result: T = known[1]
        return result

    def _holds(self, compare: Compare) -> bool:
        if compare.end:
            keys = self._between(compare.key, compare.end)
        else:
            keys = [compare.key] if compare.key in self._entries else []
        if not keys:
            return compare.target != "value" and _compare(compare, Entry("", b"", 0, 0))
        return all(_compare(compare, self._entries[key]) for key in keys)

    def _write(self, who: str, puts: Sequence[Put], deletes: Sequence[str]) -> None:
        self.revision += 1
        for put in puts:
            old = self._entries.get(put.key)
            created = old.create_revision if old else self.revision
            change = Change(put.key, put.value, self.revision, created)
            self._record(_Event(change, put.session.lease if put.session else 0))
        for key in deletes:
            self._record(_Event(Change(key, None, self.revision)))
        written = {put.key: f"{crc32c(put.value):08x}" for put in puts}
        facts = {"revision": self.revision, "puts": written, "deletes": list(deletes)}
        self._log(who, "ledger.write", facts)
        self._wake((*written, *deletes))

    def _record(self, event: _Event) -> None:
        self._history.append(event)
        change = event.change
        for prefix, below in self._below.items():
            if change.key.startswith(prefix):
                below.append(change)
        self._attached.pop(change.key, None)
        if change.value is None:
            del self._entries[change.key]
            del self._names[bisect_left(self._names, change.key)]
            return
        if change.key not in self._entries:
            insort(self._names, change.key)
        self._entries[change.key] = Entry(
            change.key, change.value, change.create_revision, change.revision
        )
        if event.lease:
            self._attached[change.key] = event.lease

    # -- leases -----------------------------------------------------------------------------------

    def grant(self, ttl_s: float) -> int:
        """A new lease."""
        lease = 1000 + len(self._granted)
        self._granted[lease] = ttl_s
        self._arm(lease, ttl_s)
        return lease

    def keep(self, lease: int) -> bool:
        """Renew a lease; False if it is gone."""
        if lease not in self._leases:
            return False
        self._arm(lease, self._leases[lease].ttl_s)
        return True

    def revoke(self, lease: int, who: str) -> None:
        """End a lease and delete its keys, at one revision; a lease that is gone is fine."""
        gone = self._leases.pop(lease, None)
        if gone is None:
            return
        gone.timer.cancel()
        if keys := sorted(key for key, owner in self._attached.items() if owner == lease):
            self._write(who, (), keys)

    def lease_of(self, key: str) -> int:
        """The lease that a key is attached to, or 0."""
        return self._attached.get(key, 0)

    def _arm(self, lease: int, ttl_s: float) -> None:
        if lease in self._leases:
            self._leases[lease].timer.cancel()
        timer = call_at_true_time(ttl_s, self.revoke, lease, "etcd.lease")
        self._leases[lease] = _Lease(ttl_s, timer)

    # -- faults -----------------------------------------------------------------------------------

    def ambiguous_next(self, client: str) -> None:
        """The client's next transaction happens or does not, and its answer is ambiguous."""
        self._ambiguous[client] = self._ambiguous.get(client, 0) + 1
        self._log(client, "fault.ledger.ambiguous_next", {})

    def unavailable(self, client: str, for_s: float) -> None:
        """Nothing passes between this client and the ledger for a while; inf: until `heal`."""
        until = true_time() + for_s
        self._closed_until[client] = until
        self._breaks[client] = self._breaks.get(client, 0) + 1
        if for_s < math.inf:
            call_at_true_time(for_s, self._wake)
        self._log(client, "fault.ledger.unavailable", {"for_s": str(for_s)})
        self._wake()

    def lag(self, client: str, lag_s: float) -> None:
        """The client's watches bring everything so much later: what it reads there is old."""
        self._lags[client] = lag_s
        self._log(client, "fault.ledger.lag", {"lag_s": lag_s})

    def late(self, client: str, up_to_s: float) -> None:
        """The client's transactions may be on their way for so long, and are carried out when it
        has given up waiting; 0: no longer."""
        self._late[client] = up_to_s
        self._log(client, "fault.ledger.late", {"up_to_s": up_to_s})

    def heal(self) -> None:
        """All links are whole again."""
        self._late.clear()
        self._closed_until.clear()
        self._lags.clear()
        self._wake()

    def compact(self, revision: int) -> None:
        """Forget the history before a revision; connected watches do not notice."""
        if not self.compacted < revision <= self.revision:
            raise UsageError(
                f"compact({revision}): needs {self.compacted + 1} to {self.revision}, the newest"
            )
        self.compacted = revision
        self._log("etcd", "fault.ledger.compact", {"revision": revision})

    def expire_all_ttl_reset(self) -> None:
        """A new leader: every lease starts its time anew."""
        for lease, state in self._leases.items():
            self._arm(lease, state.ttl_s)
        self._log("etcd", "fault.ledger.ttl_reset", {})

    def rollback(self, revision: int) -> None:
        """The ledger was restored from a backup of this revision; later writes never were."""
        kept = [event for event in self._history if event.change.revision <= revision]
        self._forget(max(1, min(revision, self.revision)))
        for event in kept:
            self._record(event)
        for lease in sorted(set(self._attached.values())):
            self._arm(lease, self._granted[lease])
        self._log("etcd", "fault.ledger.rollback", {"revision": self.revision})

    def wipe(self) -> None:
        """An empty ledger stands in its place."""
        self._forget(1)
        self._log("etcd", "fault.ledger.wipe", {})

    def _forget(self, revision: int) -> None:
        for lease in self._leases.values():
            lease.timer.cancel()
        self._entries, self._attached, self._history, self._leases = {}, {}, [], {}
        self._below = {}
        self._names = []
        self.revision = revision
        self.compacted = min(self.compacted, revision)
        self._breaks_of_all += 1
        self._wake()

    # -- the way there and back -------------------------------------------------------------------

    def is_open(self, client: str) -> bool:
        """Does anything pass between this client and the ledger?"""
        until = self._closed_until.get(client)
        return until is None or until <= true_time()

    def link(self, client: str) -> int:
        """Number of the client's connection: another one after every break."""
        return self._breaks.get(client, 0) + self._breaks_of_all

    def takes_ambiguous(self, client: str) -> bool:
        """Is the transaction that arrives now one for `ambiguous_next`?"""
        if not self._ambiguous.get(client):
            return False
        self._ambiguous[client] -= 1
        return True

    def goes_late(self, client: str, txn: Txn) -> bool:
        """Is a transaction that is sent now carried out after its sender gave up? Then it will be,
        unless the connection breaks."""
        up_to_s, link = self._late.get(client, 0.0), self.link(client)
        if up_to_s <= 0 or (late_s := self._rng.uniform(0.0, up_to_s)) < self.rpc_timeout_s:
            return False

        def arrives() -> None:
            if self.is_open(client) and self.link(client) == link:
                self.apply(client, txn)

        call_at_true_time(late_s, arrives)
        return True

    def coin(self) -> bool:
        """One or the other."""
        return self._rng.random() < 0.5

    async def travel(self) -> None:
        """One way over the network."""
        await asyncio.sleep(self._rng.uniform(*self._latency_s))

    async def bring(self, client: str) -> None:
        """What a watch brings comes over the network, later if it lags."""
        await self.travel()
        if client in self._lags:
            await asyncio.sleep(self._lags[client])

    async def reach(self, client: str, timeout_s: float | None) -> None:
        """Wait until the client's link is open. Raises LedgerUnavailable."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.is_open(client):
                    await self.news()
        except TimeoutError:
            raise LedgerUnavailable(
                f"ledger: no answer to {client} within {timeout_s:g} s"
            ) from None

    async def news(self, prefix: str = NOWHERE) -> None:
        """Wait for the next write below a prefix, or change of a link."""
        bell: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(prefix, {})
        waiting[bell] = None
        try:
            await bell
        finally:
            waiting.pop(bell, None)

    def _wake(self, keys: Sequence[str] | None = None) -> None:
        """Who waits for one of these keys; None: everybody."""
        for prefix in list(self._waiting):
            if keys is None or any(key.startswith(prefix) for key in keys):
                for bell in self._waiting.pop(prefix):
                    if not bell.done():
                        bell.set_result(None)


def _compare(compare: Compare, entry: Entry) -> bool:
    found: Any = {
        "value": entry.value,
        "create": entry.create_revision,
        "mod": entry.mod_revision,
    }[compare.target]
    operand: Any = compare.operand
    return bool({"=": found == operand, "<": found < operand, ">": found > operand}[compare.op])
