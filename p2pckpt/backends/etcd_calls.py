"""One question to etcd: which member is asked, how long, and what its silence means.

Every member has a channel of its own. One member is preferred; whoever finds it silent, leaderless
or gone moves the preference on to the next, so that a dead or frozen member costs one RPC deadline
and not one for each caller. A read is asked again anywhere until the operation's deadline. A
transaction may be asked again only if it was provably not carried out, and this is how we tell:

* it is sent only on a channel that is READY; one that is not is first brought up by a `Status`
  call, whose failure proves that nothing of ours was sent;
* gRPC's "failed to connect" and the answers of etcd that come before a proposal (`NOT_DONE`) prove
  it too; so do refusals for what was asked (too many operations, unknown lease, no permission);
* everything else leaves it open: a deadline, a broken connection, "request timed out", "leader
  changed", and "database space exceeded", which etcd may say of a transaction that it has applied.
  Then AmbiguousAnswer is raised.

Contract: `ask` returns an answer, or raises an error of `errors` within the operation deadline. All
members must be of one cluster: an answer from another raises LedgerForgot.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import grpc.aio
from pyetcd.etcdrpc import rpc_pb2 as pb
from pyetcd.etcdrpc import rpc_pb2_grpc as stubs

from p2pckpt.errors import (
    AmbiguousAnswer,
    ConfigError,
    LedgerForgot,
    LedgerUnavailable,
    UsageError,
)

REQUIRE_LEADER = (("hasleader", "true"),)
"""Metadata by which a member without a leader says so at once instead of being silent."""

NOT_DONE = (
    "etcdserver: no leader",
    "etcdserver: not capable",
    "etcdserver: too many requests",
    "etcdserver: rpc not supported for learner",
    "auth: revision in header is old",
    "failed to connect to all addresses",
)
"""Failures that come before a transaction is proposed; worth another try."""

NO_SPACE = "database space exceeded"
MAKE_SPACE = (
    "nothing can be written until an operator makes room, and reads go on; in this order: "
    "'etcdctl compaction REVISION', 'etcdctl defrag --cluster', 'etcdctl alarm disarm'"
)
"""REVISION: of `etcdctl endpoint status`. Or raise --quota-backend-bytes, then disarm."""

_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 10_000),  # etcd closes connections that ping oftener than every 5 s
    ("grpc.keepalive_timeout_ms", 2_000),
    # Without this one a frozen server is noticed after a minute: gRPC waits for its ping's answer
    # by another clock than the keepalive timeout (measured: 65 s without, 7 s with it).
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A watch that catches up gets up to 1000 revisions in one message.
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5


class Rejected(UsageError):
    """etcd refused what was asked and did nothing; `says` is its own text."""

    def __init__(self, message: str, says: str) -> None:
        super().__init__(message)
        self.says = says


class EtcdMember:
    """One endpoint: its channel and stubs, made at the first use, on the running loop."""

    def __init__(self, endpoint: str, tls: tuple[bytes, bytes, bytes] | None) -> None:
        self.name = endpoint
        target = urlsplit(endpoint).netloc
        if tls is None:
            self.channel = grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
        else:
            ca, cert, key = tls
            credentials = grpc.ssl_channel_credentials(ca, key, cert)
            self.channel = grpc.aio.secure_channel(target, credentials, options=_CHANNEL_OPTIONS)
        self.kv = stubs.KVStub(self.channel)
        self.lease = stubs.LeaseStub(self.channel)
        self.watch = stubs.WatchStub(self.channel)
        self.maintenance = stubs.MaintenanceStub(self.channel)

    @property
    def up(self) -> bool:
        """A connection stands, as far as gRPC knows."""
        return bool(self.channel.get_state() is grpc.ChannelConnectivity.READY)

    async def status(self, timeout_s: float) -> Any:
        """The member's StatusResponse; connects if need be. Raises AioRpcError."""
        return await self.maintenance.Status(
            pb.StatusRequest(), timeout=timeout_s, metadata=REQUIRE_LEADER
        )


class EtcdCalls:
    """Channels to the members of one etcd, and the way to ask them. Made on a running loop."""

    def __init__(
        self,
        endpoints: Sequence[str],
        tls: tuple[Path, Path, Path] | None,
        rpc_deadline_s: float,
        operation_deadline_s: float,
    ) -> None:
        names = _checked(endpoints, secured=tls is not None)
        if not 0 < rpc_deadline_s <= operation_deadline_s:
            raise ConfigError(
                f"etcd deadlines: needs 0 < RPC <= operation, "
                f"has {rpc_deadline_s} s and {operation_deadline_s} s"
            )
        pems = _read(tls) if tls else None
        self.members = [EtcdMember(name, pems) for name in names]
        self.rpc_deadline_s = rpc_deadline_s
        self.operation_deadline_s = operation_deadline_s
        self._preferred = 0
        self._cluster = 0
        self._closed = False

    @property
    def closed(self) -> bool:
        """`close` was called."""
        return self._closed

    def cut_short(self) -> bool:
        """Whether a CancelledError comes from `close` and not from the task being cancelled."""
        task = asyncio.current_task()
        return self._closed and not (task and task.cancelling())

    async def ask(
        self, what: str, send: Callable[[EtcdMember, float], Awaitable[Any]], *, repeatable: bool
    ) -> Any:
        """The answer of the first member that gives one.

        ``send`` makes one call to a member within a time in seconds. ``repeatable`` says that
        carrying it out twice is as good as once. Raises LedgerUnavailable (nothing was done),
        AmbiguousAnswer, Rejected, ConfigError, LedgerForgot.
        """
        end = asyncio.get_running_loop().time() + self.operation_deadline_s
        failures: dict[str, str] = {}
        while True:
            member = await self.reach(what, end, failures)
            try:
                answer = await send(member, self._rpc_s(end))
            except grpc.aio.AioRpcError as error:
                failures[member.name] = _text(error)
                if not _may_go_on(what, member.name, error, repeatable):
                    self.move_on(member)
                    raise AmbiguousAnswer(
                        f"{what}: may or may not have happened; {member.name}: {_text(error)}"
                    ) from None
                await self._move_on_and_pause(member, len(failures), end)
            except asyncio.CancelledError:
                if not self.cut_short():
                    raise
                kind = LedgerUnavailable if repeatable else AmbiguousAnswer
                raise kind(f"{what}: the etcd client was closed meanwhile") from None
            else:
                self.check_cluster(answer.header, member)
                return answer

    async def reach(
        self, what: str, end: float = math.inf, failures: dict[str, str] | None = None
    ) -> EtcdMember:
        """A member with a connection; the preferred one if it has. Nothing else is sent.

        Raises LedgerUnavailable at loop time `end` naming why each of them failed.
        """
        failures = {} if failures is None else failures
        loop = asyncio.get_running_loop()
        tries = 0
        while True:
            if self._closed:
                raise LedgerUnavailable(f"{what}: the etcd client is closed")
            if loop.time() >= end:
                why = "; ".join(f"{name}: {text}" for name, text in failures.items())
                raise LedgerUnavailable(
                    f"{what}: no etcd member carried it out within "
                    f"{self.operation_deadline_s:g} s: {why}"
                )
            member = self.members[self._preferred]
            if member.up:
                return member
            try:
                status = await member.status(self._rpc_s(end))
                self.check_cluster(status.header, member)
                if self.closed:  # after the answer, before we were woken by it
                    continue
                return member
            except grpc.aio.AioRpcError as error:
                failures[member.name] = _text(error)
                _may_go_on(what, member.name, error, True)
            except asyncio.CancelledError:
                if not self.cut_short():
                    raise
                continue
            tries += 1
            await self._move_on_and_pause(member, tries, end)

    def _rpc_s(self, end: float) -> float:
        return min(self.rpc_deadline_s, end - asyncio.get_running_loop().time())

    def move_on(self, member: EtcdMember) -> None:
        """Prefer the next member from now on, if this one still is the preferred one."""
        if self.members[self._preferred] is member:
            self._preferred = (self._preferred + 1) % len(self.members)

    async def _move_on_and_pause(self, member: EtcdMember, failed: int, end: float) -> None:
        self.move_on(member)
        left = max(0.0, end - asyncio.get_running_loop().time())
        await asyncio.sleep(min(_FIRST_PAUSE_S * 2 ** min(failed, 10), _LONGEST_PAUSE_S, left))

    def check_cluster(self, header: Any, member: EtcdMember) -> None:
        """Raises LedgerForgot if the member is of another cluster than the first that answered."""
        if not self._cluster:
            self._cluster = header.cluster_id
        elif header.cluster_id != self._cluster:
            raise LedgerForgot(
                f"etcd {member.name}: is of cluster {header.cluster_id:x}, "
                f"needs {self._cluster:x}, which answered before"
            )

    async def close(self) -> None:
        """Cut off all calls and close the channels. Again is fine."""
        self._closed = True
        for member in self.members:
            await member.channel.close()


def _may_go_on(what: str, name: str, error: grpc.aio.AioRpcError, repeatable: bool) -> bool:
    """True: ask again. False: it may have happened. Raises for an answer that is final."""
    code, says = error.code(), error.details() or ""
    if any(text in says for text in NOT_DONE):
        return True
    if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
        raise ConfigError(
            f"{what}: etcd {name} refuses: {says}; the user named by the CN of the client "
            "certificate needs readwrite on the prefix p2pckpt/"
        )
    if NO_SPACE in says:
        # etcd's quota applier carries a transaction out and then reports the space it found.
        kind = LedgerUnavailable if repeatable else AmbiguousAnswer
        raise kind(f"{what}: etcd {name} is full ({NO_SPACE}): {MAKE_SPACE}")
    if code is grpc.StatusCode.DATA_LOSS:
        raise LedgerUnavailable(f"{what}: etcd {name} raised its corruption alarm: {says}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        raise ConfigError(f"{what}: {name} is no etcd with the v3 API: {says}")
    if code in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    ):
        raise Rejected(f"{what}: etcd {name} refuses: {says}", says)
    return repeatable


def _text(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name} {error.details()}"


def _checked(endpoints: Sequence[str], secured: bool) -> list[str]:
    """Endpoints as scheme://host:port. Raises ConfigError naming a wrong one."""
    if not endpoints or isinstance(endpoints, str):
        raise ConfigError(f"etcd endpoints {endpoints!r}: needs a list of at least one")
    scheme = "https" if secured else "http"
    names = []
    for endpoint in endpoints:
        url = urlsplit(endpoint if "://" in endpoint else f"{scheme}://{endpoint}")
        try:
            fine = url.scheme == scheme and url.hostname and url.port and not url.path.strip("/")
        except ValueError:
            fine = False
        if not fine:
            raise ConfigError(
                f"etcd endpoint {endpoint!r}: needs {scheme}://host:port "
                + ("with" if secured else "without")
                + " certificates given"
            )
        names.append(f"{scheme}://{url.netloc}")
    return names


def _read(tls: tuple[Path, Path, Path]) -> tuple[bytes, bytes, bytes]:
    """The PEM bytes of (ca, cert, key). Raises ConfigError naming a file that cannot be read."""
    try:
        ca, cert, key = (Path(path).read_bytes() for path in tls)
    except OSError as error:
        raise ConfigError(f"etcd certificate {error.filename}: {error.strerror}") from None
    return ca, cert, key
