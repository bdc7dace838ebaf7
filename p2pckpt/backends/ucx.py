"""Transport over UCX: the agent's side, which never loads UCX itself.

A child process, the mover, does the moving (see `ucx_mover`); this file starts it, tells it what
to do over a Unix socket, hands it arena files as descriptors, and starts it again when it dies.

Contract: as `ports.Transport`. `Expected.cancel()` returns when the mover said that its endpoint
is closed, or, if it does not say so within CANCEL_S, when it was killed and reaped: in both cases
nobody writes into the region any more. When a mover dies, every operation it carried ends with
PeerUnreachable, after it was reaped; the next one takes the same port where it can, and `address`
says which. Mover restarts are spaced from 50 ms to 5 s, so that a crash loop costs little.

Consequence: a crash in UCX costs a retry, never the agent; and what the agent believes about its
regions is true. Anybody who can reach the port can offer, but only a nonce, 128 random bits told
over the control plane, opens a region; UCX itself neither authenticates nor encrypts.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import secrets
import socket
from collections.abc import Callable, Mapping

from p2pckpt import errors
from p2pckpt.backends import ucx_flow as flow
from p2pckpt.backends import ucx_words as words
from p2pckpt.backends.ucx_child import Child
from p2pckpt.errors import CheckpointError, MissingDependency, PeerUnreachable, UsageError
from p2pckpt.ports import Region
from p2pckpt.traffic import Rates, Traffic

CANCEL_S = 2.0
"""A mover that does not confirm a cancellation within this time is killed."""
PAUSE_S = (0.05, 5.0)
"""Shortest and longest pause before a mover that died is started again; doubles in between."""
STEADY_S = 10.0
"""A mover that lived so long is restarted after the shortest pause."""
COUNTED = 64
"""Nonces of which the received bytes are remembered: those of some ten saves."""


class _Op:
    """One operation of the mover's, as the agent sees it."""

    def __init__(self, number: int, nonce: str) -> None:
        self.number = number
        self.nonce = nonce
        self.granted = asyncio.Event()
        self.ended = asyncio.Event()
        self.error: tuple[type[CheckpointError], str] | None = None

    def end(self, error: type[CheckpointError] | None, message: str) -> None:
        """The region is not touched any more."""
        self.error = None if error is None else (error, message)
        self.granted.set()
        self.ended.set()

    def check(self) -> None:
        """Raise what the operation ended with."""
        if self.error is not None:
            raise self.error[0](self.error[1])


class UcxExpected:
    """A grant; see ports.Expected."""

    def __init__(self, transport: UcxTransport, op: _Op, nonce: str, region: Region) -> None:
        self.nonce = nonce
        self._transport = transport
        self._op = op
        self._region = region

    async def received(self, timeout_s: float) -> None:
        """See ports.Expected. After a timeout the grant stays open until it is cancelled."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._op.ended.wait()
        except TimeoutError:
            raise PeerUnreachable(
                f"{self._region.file}: {self._region.length} bytes at {self._region.offset} "
                f"did not arrive within {timeout_s} s"
            ) from None
        self._op.check()

    async def cancel(self) -> None:
        """See ports.Expected; idempotent, and without effect on what has arrived."""
        await self._transport.withdraw(self._op)


class UcxTransport:
    """See ports.Transport. Make one with `start`."""

    def __init__(
        self,
        descriptor: Callable[[str, bool], int],
        host: str,
        port: int,
        limits: flow.Limits,
        environment: Mapping[str, str],
    ) -> None:
        self._descriptor = descriptor
        self._host = host
        self._port = port
        self._limits = limits
        self._environment = dict(environment)
        self._ops: dict[int, _Op] = {}
        self._last_op = 0
        self._rates: dict[Traffic, float] = {}
        self._ready = asyncio.Event()
        self._closed = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self.received_bytes: dict[str, int] = {}
        """By the first 8 digits of the nonce, of the last COUNTED grants that received any."""
        self.received_total_bytes = 0
        """Of all pieces that ever landed here."""

    @classmethod
    async def start(
        cls,
        descriptor: Callable[[str, bool], int],
        host: str,
        port: int = 0,
        limits: flow.Limits | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> UcxTransport:
        """A transport whose mover runs.

        ``descriptor(file, writable=True)`` opens an arena file afresh; it is closed here.
        ``host`` is what peers reach us by; UCX listens on all interfaces. ``environment`` is added
        to the child's. Raises MissingDependency if UCX cannot be loaded, PeerUnreachable if it
        does not start.
        """
        self = cls(descriptor, host, port, limits or flow.Limits(), environment or {})
        await self._launch()
        self._keeper = asyncio.create_task(self._keep(), name="ucx mover")
        return self

    # -- the port -------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """host:port; the port may change when a mover was restarted."""
        return f"{self._host}:{self._port}"

    @property
    def mover_pid(self) -> int:
        """Of the mover that runs now, or ran last."""
        return self._child.process.pid

    def describe(self) -> dict[str, str]:
        """UCX version, library file, wheel or system preferred, transports and devices in use."""
        return {"address": self.address, **self._child.hello.facts}

    async def expect(
        self,
        region: Region,
        traffic: Traffic = Traffic.RESTORE,
        timeout_s: float = math.inf,  # noqa: ARG002
    ) -> UcxExpected:
        """See ports.Transport. Raises UsageError if the region is not inside its file."""
        nonce = secrets.token_hex(16)
        what = (nonce, region.file, region.offset, region.length, traffic)
        await self._running(self._limits.silent_s)
        op = self._begin(lambda number: words.Expect(number, *what))
        try:
            async with asyncio.timeout(self._limits.silent_s):
                await op.granted.wait()
        except BaseException as e:  # nobody knows the nonce, so nothing is written meanwhile
            self._child.tell(words.Cancel(op.number))
            if isinstance(e, TimeoutError):
                raise PeerUnreachable(f"{self.address}: our own mover does not answer") from None
            raise
        op.check()
        return UcxExpected(self, op, nonce, region)

    async def send(
        self,
        address: str,
        nonce: str,
        region: Region,
        timeout_s: float,
        traffic: Traffic = Traffic.RESTORE,
    ) -> None:
        """See ports.Transport. Here returning does say that the receiver's mover has it all."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        host, port = await _resolve(address, timeout_s)
        what = (nonce, region.file, region.offset, region.length, host, port, traffic)
        await self._running(end_s - loop.time())
        op = self._begin(lambda number: words.Send(number, *what))
        try:
            async with asyncio.timeout_at(end_s):
                await op.ended.wait()
        except TimeoutError:
            await self.withdraw(op)
            raise PeerUnreachable(f"{address}: not sent within {timeout_s} s") from None
        except asyncio.CancelledError:
            await self.withdraw(op)
            raise
        op.check()

    def limit(self, rates: Rates) -> None:
        """See ports.Transport; a mover that is started again is told, too."""
        self._rates = dict(rates)
        if self._ready.is_set():
            self._child.tell(words.Limit(self._rates))

    def forget(self, file: str) -> None:
        """An arena file was removed: keep no mapping of it (found out within 0.3 s anyway)."""
        if self._ready.is_set():
            self._child.tell(words.Unmap(file))

    async def withdraw(self, op: _Op) -> None:
        """End an operation; when this is over, also if it is cancelled, the mover does not touch
        its region."""
        if op.ended.is_set():
            return
        self._child.tell(words.Cancel(op.number))
        end_s: float | None = asyncio.get_running_loop().time() + CANCEL_S
        cancelled: asyncio.CancelledError | None = None
        while not op.ended.is_set():
            try:
                async with asyncio.timeout_at(end_s):
                    await op.ended.wait()
            except TimeoutError:
                self._child.kill()
                end_s = None  # the keeper sets it once the mover is reaped
            except asyncio.CancelledError as e:
                cancelled = e  # it goes on below: whoever is cancelled gives the region away
        if cancelled is not None:
            raise cancelled

    async def close(self) -> None:
        """See ports.Transport. Open operations end with PeerUnreachable."""
        self._closed.set()
        self._child.kill()
        if self._keeper is not None:
            await self._keeper

    # -- the mover ------------------------------------------------------------------------------

    async def _launch(self) -> None:
        child = await Child.start(self._port, self._limits, self._environment)
        self._port = child.hello.port
        self._child = child
        child.tell(words.Limit(self._rates))
        if self._closed.is_set():
            child.kill()
        self._ready.set()

    async def _keep(self) -> None:
        """Listen to the mover; when it is gone, reap it, end its operations, start another one."""
        loop = asyncio.get_running_loop()
        pause_s = PAUSE_S[0]
        while True:
            begun_s = loop.time()
            if self._ready.is_set():
                await self._listen()
            if loop.time() - begun_s > STEADY_S:
                pause_s = PAUSE_S[0]
            try:
                async with asyncio.timeout(pause_s):
                    await self._closed.wait()
                return
            except TimeoutError:
                pause_s = min(2 * pause_s, PAUSE_S[1])
            try:
                await self._launch()
            except (PeerUnreachable, MissingDependency, OSError):
                pass  # operations meanwhile raise PeerUnreachable; the next try comes

    async def _listen(self) -> None:
        try:
            async for message in self._child.messages():
                self._hear(message)
        finally:
            self._ready.clear()
            code = await self._child.reap()
            for number in list(self._ops):
                self._finish(number, PeerUnreachable, f"our own mover ended with {code}")

    def _hear(self, message: words.FromMover) -> None:
        if isinstance(message, words.Granted):
            if message.op in self._ops:
                self._ops[message.op].granted.set()
        elif isinstance(message, words.Received):
            self.received_total_bytes += message.size_bytes
            key = self._ops[message.op].nonce[:8]
            self.received_bytes[key] = self.received_bytes.get(key, 0) + message.size_bytes
            if len(self.received_bytes) > COUNTED:
                del self.received_bytes[next(iter(self.received_bytes))]
        elif isinstance(message, words.Ended):
            kind = getattr(errors, message.error) if message.error else None
            self._finish(message.op, kind, message.message)

    def _finish(self, number: int, error: type[CheckpointError] | None, message: str) -> None:
        if (op := self._ops.pop(number, None)) is not None:
            op.end(error, message)

    async def _running(self, wait_s: float) -> None:
        if self._closed.is_set():
            raise PeerUnreachable(f"{self.address}: the transport is closed")
        try:
            async with asyncio.timeout(min(wait_s, self._limits.silent_s)):
                await self._ready.wait()
        except TimeoutError:
            raise PeerUnreachable(f"{self.address}: our own mover is not running") from None

    def _begin(self, message: Callable[[int], words.Expect | words.Send]) -> _Op:
        told = message(self._last_op + 1)
        descriptor = self._descriptor(told.file, True)
        self._last_op += 1
        op = self._ops[told.op] = _Op(told.op, told.nonce)
        self._child.tell(told, descriptor)
        return op


async def _resolve(address: str, timeout_s: float) -> tuple[str, int]:
    """Numeric host and port. Raises UsageError or, if the name is not known, PeerUnreachable."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"transport address {address!r}: needs host:port")
    try:
        return str(ipaddress.IPv4Address(host)), int(port)
    except ValueError:
        pass
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            found = await loop.getaddrinfo(host, int(port), family=socket.AF_INET)
    except (TimeoutError, OSError) as e:
        raise PeerUnreachable(f"{address}: {e or 'no answer'}") from None
    return str(found[0][4][0]), int(port)
