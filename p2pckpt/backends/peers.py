"""Requests between agents over gRPC: wire envelopes in, wire envelopes out.

One generic method carries every request, so there are no generated stubs and no second schema: the
envelope says what kind it is and proves its own bytes. An error that the handler raises travels as
a Failed record and is raised at the caller as the same class. With certificates both sides prove
themselves (mutual TLS) and the handler is told the caller's common name; without, the address that
the caller gave, which nothing proves.

Contract: as `ports.Peers`. Every call ends at its timeout. Whatever keeps a call from being
answered (nobody there, broken off, overloaded, a defect of the peer) is PeerUnreachable, and it may
have been carried out; a request over 4 MiB is a UsageError and is not sent. A request that arrived
is worked on to its end even if the caller has given up: handlers are not cancelled from afar.
Work in progress is bounded here (HANDLERS) and so are the open connections (CHANNELS); one that
nobody used for IDLE_S is closed, so peers that left for good leave nothing behind.

Traps, measured: without `ping_timeout_ms` gRPC notices a frozen peer after a minute, not after the
keepalive timeout; two servers may share a port unless so_reuseport is off; closing a channel raises
CancelledError in calls that nobody cancelled.
"""

from __future__ import annotations

import asyncio
import collections
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from p2pckpt import errors, wire
from p2pckpt.errors import CheckpointError, ConfigError, PeerUnreachable, UsageError
from p2pckpt.ports import PeerHandler
from p2pckpt.records import Record

MAX_MESSAGE_BYTES = 4 << 20
HANDLERS = 256
"""Requests worked on at once; more are turned away, and the caller may retry."""
CHANNELS = 256
"""Connections kept; the one unused for longest gives way."""
IDLE_S = 30.0
"""A connection unused for so long is closed, at the next call to anybody: its peer may be gone."""
_SERVICE, _METHOD, _CALLER = "p2pckpt.Peers", "Call", "p2pckpt-caller"
_BOTH = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
)
_SERVER = (
    *_BOTH,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
)
_CHANNEL = (
    *_BOTH,
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
)


@dataclass(frozen=True)
class Tls:
    """PEM files for mutual TLS. ``peer_name``: what every peer's certificate is made out to, if
    not to the host that it is reached by."""

    ca: Path
    cert: Path
    key: Path
    peer_name: str = ""

    def read(self) -> tuple[bytes, bytes, bytes]:
        """CA, certificate and key. Raises ConfigError naming the file."""
        try:
            return self.ca.read_bytes(), self.cert.read_bytes(), self.key.read_bytes()
        except OSError as e:
            raise ConfigError(f"TLS file {e.filename}: {e.strerror}") from None


@dataclass(eq=False)
class _Link:
    """A connection to one address, the calls that use it now, and when one began or ended last."""

    channel: grpc.aio.Channel
    ask: Any
    calls: int = 0
    used_s: float = 0.0


class GrpcPeers:
    """See ports.Peers. Make one with `start`."""

    def __init__(self, server: grpc.aio.Server, address: str, tls: Tls | None) -> None:
        self.address = address
        self._server = server
        self._tls = tls
        self._handler: PeerHandler | None = None
        self._work: set[asyncio.Task[bytes | None]] = set()
        self._links: collections.OrderedDict[str, _Link] = collections.OrderedDict()
        self._closed = False

    @classmethod
    async def start(cls, host: str, port: int = 0, tls: Tls | None = None) -> GrpcPeers:
        """Listen at host:port (0: any free port, see `address`).

        Requests are turned away until `serve`. Raises ConfigError if the address cannot be had or
        a TLS file not be read.
        """
        server = grpc.aio.server(options=_SERVER)
        try:
            if tls is None:
                bound = server.add_insecure_port(f"{host}:{port}")
            else:
                ca, cert, key = tls.read()
                credentials = grpc.ssl_server_credentials([(key, cert)], ca, True)
                bound = server.add_secure_port(f"{host}:{port}", credentials)
        except RuntimeError as e:
            raise ConfigError(f"peers: cannot listen at {host}:{port}: {e}") from None
        self = cls(server, f"{host}:{bound}", tls)
        method = grpc.unary_unary_rpc_method_handler(self._answer)
        handlers = grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: method})
        server.add_generic_rpc_handlers((handlers,))
        await server.start()
        return self

    async def serve(self, handler: PeerHandler) -> None:
        """See ports.Peers."""
        self._handler = handler

    async def close(self) -> None:
        """See ports.Peers. Our own open calls end with PeerUnreachable, our work is cancelled."""
        self._closed = True
        self._handler = None
        await self._server.stop(None)
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        for link in self._links.values():
            await link.channel.close()
        self._links.clear()

    # -- asking ---------------------------------------------------------------------------------

    async def call(self, address: str, request: Record, timeout_s: float) -> Record:
        """See ports.Peers."""
        packed = _pack(request)
        link = await self._link(address)
        link.calls += 1
        try:
            metadata = ((_CALLER, self.address),)
            reply = wire.unpack_any(await link.ask(packed, timeout=timeout_s, metadata=metadata))
        except grpc.aio.AioRpcError as e:
            raise PeerUnreachable(f"{address}: {e.code().name}: {e.details()}") from None
        except grpc.aio.UsageError as e:
            raise PeerUnreachable(f"{address}: {e}") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():
                raise PeerUnreachable(f"{address}: our own side was closed") from None
            raise
        finally:
            link.calls -= 1
            link.used_s = asyncio.get_running_loop().time()
        if isinstance(reply, wire.Failed):
            raise _error(reply)
        record: Record = reply
        return record

    async def _link(self, address: str) -> _Link:
        if self._closed:
            raise PeerUnreachable(f"{address}: our own side was closed")
        await self._close_idle(asyncio.get_running_loop().time() - IDLE_S, address)
        while len(self._links) >= CHANNELS and address not in self._links:
            idle = next((name for name, link in self._links.items() if not link.calls), None)
            if idle is None:
                raise PeerUnreachable(f"{address}: all {CHANNELS} connections are in use")
            await self._links.pop(idle).channel.close()
        if address not in self._links:
            channel = self._channel(address)
            self._links[address] = _Link(channel, channel.unary_unary(f"/{_SERVICE}/{_METHOD}"))
        self._links.move_to_end(address)
        return self._links[address]

    async def _close_idle(self, before_s: float, wanted: str) -> None:
        """Close what nobody used since `before_s`, but for the connection that is wanted now."""
        for address, link in list(self._links.items()):
            idle = not link.calls and link.used_s < before_s and address != wanted
            if idle and self._links.get(address) is link:  # others come and go while one closes
                del self._links[address]
                await link.channel.close()

    def _channel(self, address: str) -> grpc.aio.Channel:
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options=_CHANNEL)
        ca, cert, key = self._tls.read()
        options: list[tuple[str, int | str]] = list(_CHANNEL)
        if self._tls.peer_name:
            options.append(("grpc.ssl_target_name_override", self._tls.peer_name))
        credentials = grpc.ssl_channel_credentials(ca, key, cert)
        return grpc.aio.secure_channel(address, credentials, options=options)

    # -- answering ------------------------------------------------------------------------------

    async def _answer(self, packed: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """One request. The work is a task of its own, which outlives a caller that gives up."""
        if self._handler is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "does not serve")
        if len(self._work) >= HANDLERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{HANDLERS} requests open")
        task = asyncio.create_task(self._done(_caller(context), packed))
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        reply = await asyncio.shield(task)
        if reply is None:
            await context.abort(grpc.StatusCode.INTERNAL, "the handler failed")
        return reply or b""

    async def _done(self, caller: str, packed: bytes) -> bytes | None:
        """The packed reply or Failed; None if the handler has a defect, which is reported here."""
        try:
            assert self._handler is not None
            return _pack(await self._handler(caller, wire.unpack_any(packed)))
        except CheckpointError as e:
            text = str(e)[: MAX_MESSAGE_BYTES // 8]
            return wire.pack(wire.Failed(error=type(e).__name__, message=text))
        except Exception as e:
            facts = {"message": f"handler of a request of {caller} failed", "exception": e}
            asyncio.get_running_loop().call_exception_handler(facts)
            return None


def _caller(context: grpc.aio.ServicerContext) -> str:
    """Common name of the proven certificate; else the address given; else the socket's."""
    if names := context.auth_context().get("x509_common_name"):
        return bytes(names[0]).decode(errors="replace")
    metadata = dict(context.invocation_metadata() or ())
    return str(metadata.get(_CALLER, context.peer()))


def _pack(record: Record) -> bytes:
    packed = wire.pack(record)
    if len(packed) > MAX_MESSAGE_BYTES:
        kind = type(record).__name__
        raise UsageError(f"{kind}: message of {len(packed)} bytes, at most {MAX_MESSAGE_BYTES}")
    return packed


def _error(failed: wire.Failed) -> CheckpointError:
    """What the peer raised; a class that this release does not know becomes the root."""
    kind = getattr(errors, failed.error, None)
    if isinstance(kind, type) and issubclass(kind, CheckpointError):
        return kind(failed.message)
    return CheckpointError(f"{failed.error}: {failed.message}")
