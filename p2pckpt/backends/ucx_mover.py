"""The mover: the one process in which UCX lives.

    python -m p2pckpt.backends.ucx_mover <channel fd> <port> <Limits as JSON>

One thread owns a UCX worker, a listener and all connections, and carries out what `ucx_flow` says.
The agent tells it over a Unix socket which regions to expect or to send, and hands over each file
as a descriptor; payload goes by UCX tag from mapped file to mapped file, never through Python.

Contract: an operation is reported as Ended only when nothing of UCX refers to its region any more.
The mover holds no state worth keeping: if it dies, the agent starts another one. It ends when the
agent's end of the channel closes or the agent dies.

UCX never reports a peer that was stopped, so every wait has a deadline; its tags match per worker,
not per connection, so they are random, and control frames go by stream instead.
"""

from __future__ import annotations

import collections
import ctypes
import math
import os
import secrets
import select
import signal
import socket
import sys
import time

import msgspec

from p2pckpt.backends import ucx_flow as flow
from p2pckpt.backends import ucx_words as words
from p2pckpt.backends.ucx_line import MISSING, Files, Line, ucx
from p2pckpt.errors import (
    CheckpointError,
    FormatError,
    IntegrityError,
    PeerUnreachable,
    Refused,
)
from p2pckpt.traffic import Pace


class Mover:
    """All of it: the channel to the agent, the worker, grants, connections, the window."""

    def __init__(self, channel: socket.socket, port: int, limits: flow.Limits) -> None:
        self._channel = channel
        self._limits = limits
        self._out: collections.deque[bytes] = collections.deque()
        self._decoder = msgspec.json.Decoder(words.ToMover)
        self._files = Files()
        self._swept_s = 0.0
        self._ops: dict[int, flow.Inbound | flow.Outbound] = {}
        self._views: dict[int, memoryview] = {}
        self._grants: dict[str, flow.Inbound] = {}
        self._inward, self._outward = Pace(), Pace()
        self._window = flow.Window(limits, self._inward)
        self._callers: list[int] = []
        self._accepted: list[Line] = []
        self._dialled: dict[Line, tuple[str, int]] = {}
        features = (ucx.Feature.TAG, ucx.Feature.STREAM, ucx.Feature.WAKEUP)
        self._context = ucx.UCXContext({}, features)
        self._worker = ucx.UCXWorker(self._context)
        self._worker.init_blocking_progress_mode()
        try:
            self._listener = ucx.UCXListener.create(self._worker, port, self._callers.append)
        except ucx.UCXError:  # the old port is still taken: any other, the agent announces it
            self._listener = ucx.UCXListener.create(self._worker, 0, self._callers.append)
        self._tell(words.Hello(port=self._listener.port, facts=self._facts()))

    def _facts(self) -> dict[str, str]:
        lines = [line.split() for line in self._context.info.splitlines()]
        with open("/proc/self/maps") as maps:
            paths = {line.split()[-1] for line in maps if "libucp" in line}
        return {
            "ucx": ".".join(str(part) for part in ucx.get_ucx_version()),
            "transports": " ".join(line[-1] for line in lines if "resource" in line),
            "library": " ".join(sorted(paths)),
            "prefers": "system"
            if os.environ.get("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "false").lower() != "false"
            else "wheel",
            "UCX_TLS": os.environ.get("UCX_TLS", ""),
            "UCX_NET_DEVICES": os.environ.get("UCX_NET_DEVICES", "all"),
        }

    # -- the loop -------------------------------------------------------------------------------

    def run(self) -> None:
        """Until the agent closes the channel."""
        poll = select.poll()
        poll.register(self._worker.epoll_file_descriptor, select.POLLIN)
        while True:
            for _ in range(256):
                if not self._worker.progress_once():
                    break
            if self._turn(time.monotonic()) or not self._worker.arm():
                continue
            poll.register(self._channel, select.POLLIN | (select.POLLOUT if self._out else 0))
            poll.poll(self._rest_ms(time.monotonic()))

    def _rest_ms(self, now_s: float) -> int:
        """How long nothing is to be done if nothing is heard."""
        if not self._ops:
            return 250
        soonest_s = min(self._inward.soonest_s(now_s), self._outward.soonest_s(now_s))
        return min(50, math.ceil(min(1.0, soonest_s) * 1000))

    def _turn(self, now_s: float) -> bool:
        """Everything that can be done without waiting. True: look again at once."""
        busy = self._hear_agent(now_s)
        while self._callers:
            self._accept(self._callers.pop(0), now_s)
            busy = True
        for line in [*self._accepted, *self._dialled]:
            try:
                step = self._serve if line not in self._dialled else self._push
                busy = step(line, now_s) or busy
            except (ucx.UCXError, CheckpointError) as e:
                self._break(line, e, now_s)
                busy = True
        busy = self._ready(now_s) or busy
        while (inbound := self._window.next(now_s)) is not None:
            self._grant(inbound, now_s)
            busy = True
        if now_s - self._swept_s > 0.2:
            self._swept_s = now_s
            self._files.sweep()
        self._flush()
        return busy

    # -- the agent ------------------------------------------------------------------------------

    def _tell(self, message: words.FromMover) -> None:
        self._out.append(msgspec.json.encode(message))

    def _flush(self) -> None:
        try:
            while self._out:
                self._channel.send(self._out[0])
                self._out.popleft()
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            os._exit(0)

    def _hear_agent(self, now_s: float) -> bool:
        busy = False
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._channel, 65536, 1)
            except BlockingIOError:
                return busy
            except ConnectionResetError:
                os._exit(0)
            if not data:
                os._exit(0)
            busy = True
            message = self._decoder.decode(data)
            if isinstance(message, words.Cancel):
                self._cancel(message.op)
            elif isinstance(message, words.Unmap):
                self._files.sweep(message.file)
            elif isinstance(message, words.Limit):
                self._inward.limit(message.rates)
                self._outward.limit(message.rates)
            else:
                self._begin(message, descriptors[0], now_s)

    def _begin(self, message: words.Expect | words.Send, descriptor: int, now_s: float) -> None:
        op, length = message.op, message.length
        try:
            view = self._files.view(message, descriptor)
        except (CheckpointError, OSError, ValueError) as e:
            self._tell(words.Ended(op, "UsageError", f"{message.file}: cannot be mapped: {e}"))
            return
        self._views[op] = view
        if isinstance(message, words.Expect):
            inbound = flow.Inbound(op, message.nonce, length, self._limits, message.traffic)
            self._ops[op] = self._grants[message.nonce] = inbound
            self._tell(words.Granted(op))
            return
        peer = f"{message.host}:{message.port}"
        what = (op, message.nonce, length, peer, self._limits, now_s, message.traffic)
        outbound = flow.Outbound(*what)
        self._ops[op] = outbound
        self._dial(outbound, (message.host, message.port), now_s)

    def _cancel(self, op: int) -> None:
        if op not in self._ops:
            return  # it has ended, and Ended is on its way
        for line in [*self._accepted, *self._dialled]:
            if line.flow is self._ops[op]:
                self._drop(line)
        self._end(op, Refused("cancelled"))

    def _end(self, op: int, error: Exception | None = None) -> None:
        ended = self._ops.pop(op)
        if isinstance(ended, flow.Inbound):
            self._grants.pop(ended.nonce)
            self._window.leave(ended)
        del self._views[op]
        name = "" if error is None else type(error).__name__
        self._tell(words.Ended(op, name, "" if error is None else str(error)[:1000]))

    # -- connections ----------------------------------------------------------------------------

    def _accept(self, caller: int, now_s: float) -> None:
        try:
            endpoint = self._listener.create_endpoint_from_conn_request(caller, True)
            line = Line(self._worker, endpoint, "caller", now_s)
        except ucx.UCXError as e:
            print(f"mover: a caller was lost: {e}", file=sys.stderr)
            return
        self._accepted.append(line)
        if len(self._accepted) > self._limits.connections:
            idle = [line for line in self._accepted if line.flow is None]
            self._drop(min(idle, key=lambda line: line.used_s) if idle else line)

    def _dial(self, outbound: flow.Outbound, to: tuple[str, int], now_s: float) -> None:
        """Offer on an idle connection to the same peer, or on a new one."""
        for line, where in self._dialled.items():
            if where == to and line.flow is None:
                line.reused = True
                break
        else:
            try:
                endpoint = ucx.UCXEndpoint.create(self._worker, *to, True)
                line = Line(self._worker, endpoint, outbound.peer, now_s)
            except ucx.UCXError as e:
                self._end(outbound.op, PeerUnreachable(f"{outbound.peer}: {e}"))
                return
            self._dialled[line] = to
        line.flow = outbound
        line.say(outbound.offer(self._outward.holds(outbound.traffic)))

    def _drop(self, line: Line) -> None:
        line.close()
        if line in self._dialled:
            del self._dialled[line]
        else:
            self._accepted.remove(line)

    def _break(self, line: Line, error: Exception, now_s: float) -> None:
        """A connection failed: close it, then end what it carried."""
        to = self._dialled.get(line)
        self._drop(line)
        carried = line.flow
        if carried is None:
            return
        if not isinstance(error, CheckpointError):
            if isinstance(carried, flow.Outbound) and to and line.reused and not carried.frames:
                self._dial(carried, to, now_s)  # the peer had closed the idle connection
                return
            error = PeerUnreachable(f"{line.peer}: {type(error).__name__}: {error}")
        elif isinstance(error, FormatError):
            error = PeerUnreachable(f"{line.peer}: breaks the protocol: {error}")
        self._end(carried.op, error)

    # -- receiving ------------------------------------------------------------------------------

    def _serve(self, line: Line, now_s: float) -> bool:
        """One look at an accepted connection."""
        _, landed = line.settle()
        inbound = line.flow
        if isinstance(inbound, flow.Inbound):
            for tag in landed:
                self._tell(words.Received(inbound.op, inbound.landed(tag)))
            if inbound.due(now_s):
                line.say(flow.Frame(flow.Kind.WAIT, inbound.nonce))
            if inbound.whole:
                line.say(flow.Frame(flow.Kind.DONE, inbound.nonce))
                line.flow, line.used_s = None, now_s
                self._end(inbound.op)
        elif now_s - line.used_s > 6 * self._limits.idle_s:
            self._drop(line)
            return True
        frame = line.hear()
        if frame is not None:
            self._answer(line, frame, now_s)
        return frame is not None or bool(landed)

    def _answer(self, line: Line, frame: flow.Frame, now_s: float) -> None:
        if frame.kind is flow.Kind.READY and isinstance(line.flow, flow.Inbound):
            line.flow.hear(frame, now_s)
            return
        if frame.kind is flow.Kind.READY and 0 < line.refusals <= self._limits.refusals:
            line.refusals += 1  # it had not heard of the refusal yet
            return
        if frame.kind is not flow.Kind.OFFER or line.flow is not None:
            raise FormatError(f"{frame.kind.name} out of turn")
        inbound = self._grants.get(frame.nonce)
        try:
            if inbound is None:
                raise Refused(f"nonce {frame.nonce[:8]}: unknown or cancelled")
            inbound.offer(frame, now_s)
        except (Refused, IntegrityError) as e:
            line.refusals += 1
            if line.refusals > self._limits.refusals:
                raise FormatError(f"{line.refusals} refused offers in a row") from None
            line.say(flow.Frame(flow.Kind.REFUSED, frame.nonce, text=str(e)))
            line.used_s = now_s
            if inbound is not None and isinstance(e, IntegrityError):
                self._end(inbound.op, e)
            return
        line.flow, line.refusals = inbound, 0
        self._window.join(inbound)

    def _grant(self, inbound: flow.Inbound, now_s: float) -> None:
        """Await the next piece, then let the sender know."""
        line = next(line for line in self._accepted if line.flow is inbound)
        tag = 1 << flow.TAG_BITS | secrets.randbits(flow.TAG_BITS)
        most = self._inward.slice_bytes(inbound.traffic, self._limits.piece_bytes)
        piece = inbound.grant(tag, now_s, most)
        self._inward.spend(inbound.traffic, piece.length, now_s)
        try:
            line.receive(self._views[inbound.op][piece.offset :][: piece.length], piece.tag)
            grant = (flow.Kind.GRANT, inbound.nonce, piece.offset, piece.length, piece.tag)
            line.say(flow.Frame(*grant))
        except ucx.UCXError as e:
            self._break(line, e, now_s)

    # -- sending --------------------------------------------------------------------------------

    def _push(self, line: Line, now_s: float) -> bool:
        """One look at a connection that was dialled."""
        gone, _ = line.settle()
        frame = line.hear()
        outbound = line.flow
        if not isinstance(outbound, flow.Outbound):
            if frame is not None or now_s - line.used_s > self._limits.idle_s:
                self._drop(line)
            return False
        for _ in range(gone):
            outbound.left(now_s)
        if frame is not None:
            try:
                piece = outbound.hear(frame, now_s)
            except Refused as e:
                if outbound.sending:
                    raise
                line.flow, line.used_s = None, now_s
                self._end(outbound.op, e)
                return True
            if piece is not None:
                line.send(self._views[outbound.op][piece.offset :][: piece.length], piece.tag)
        if outbound.ended:
            line.flow, line.used_s = None, now_s
            self._end(outbound.op)
            return True
        outbound.check(now_s)
        return frame is not None or gone > 0

    def _ready(self, now_s: float) -> bool:
        """Say READY where it is time: first where it is longest ago."""
        waiting = [
            (line.flow.given_s, i, line, line.flow)
            for i, line in enumerate(self._dialled)
            if isinstance(line.flow, flow.Outbound) and line.flow.ready < line.flow.length
        ]
        busy = False
        for _, _, line, outbound in sorted(waiting, key=lambda found: found[:2]):
            if (more := outbound.more(self._outward, now_s)) is not None:
                busy = True
                try:
                    line.say(more)
                except ucx.UCXError as e:
                    self._break(line, e, now_s)
        return busy


def main(arguments: list[str]) -> None:
    """Run a mover on an inherited channel."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    channel = socket.socket(fileno=int(arguments[0]))
    if MISSING:
        channel.send(msgspec.json.encode(words.Hello(missing=MISSING)))
        return
    channel.setblocking(False)
    Mover(channel, int(arguments[1]), msgspec.json.decode(arguments[2], type=flow.Limits)).run()


if __name__ == "__main__":
    main(sys.argv[1:])
