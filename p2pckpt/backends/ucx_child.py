"""One mover process, as the agent holds it: started, greeted, told, listened to, killed, reaped.

The child gets one end of a Unix socket of packets; each message is one packet of JSON, an arena
file comes along as a descriptor. UCX is set up by environment variables, in the child's only.

Contract: after `reap` the process is dead and collected, so it touches no region any more; it is
signalled through a pidfd, which cannot hit another process. Messages go out in order; `tell` never
blocks, and what the child did not take is dropped with it. The child dies with the agent, or when
the socket closes. Consequence: whoever holds a Child knows at any time whether it can still write.
"""

from __future__ import annotations

import asyncio
import collections
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec

from p2pckpt.backends import ucx_flow as flow
from p2pckpt.backends import ucx_words as words
from p2pckpt.errors import MissingDependency, PeerUnreachable

START_S = 30.0
"""From the start of the process to its Hello; importing the bindings takes about 1 s."""

ENVIRONMENT = {
    "UCX_TLS": "^sm,cuda",  # with peer error handling shared memory is not used anyway
    "UCX_TCP_TX_SEG_SIZE": "512K",  # 8K, the default, gives a quarter of the throughput
    "UCX_TCP_RX_SEG_SIZE": "512K",
    "UCX_TCP_KEEPIDLE": "1s",
    "UCX_TCP_KEEPINTVL": "1s",
    "UCX_TCP_KEEPCNT": "3",
    "UCX_KEEPALIVE_INTERVAL": "1s",
    "UCX_TCP_SYN_CNT": "2",
    "UCX_TCP_CM_SYN_CNT": "2",
    "UCX_TCP_CM_REUSEADDR": "y",  # a restarted mover takes its port again
    "UCX_RNDV_FRAG_MEM_TYPE": "host",  # the bindings would say cuda
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_LOG_LEVEL": "fatal",  # what goes wrong on a connection is reported as an error of ours
    "UCXX_LOG_LEVEL": "fatal",
}
"""Settings of the child, measured; a variable that the agent's environment has wins."""

_DECODER: msgspec.json.Decoder[words.FromMover] = msgspec.json.Decoder(words.FromMover)
_PACKET_BYTES = 65536


class Child:
    """A mover that said Hello; see `start`."""

    def __init__(self, process: asyncio.subprocess.Process, channel: socket.socket) -> None:
        self.process = process
        self.hello = words.Hello()
        self._channel = channel
        self._out: collections.deque[tuple[bytes, int | None]] = collections.deque()
        try:
            self._pidfd = os.pidfd_open(process.pid)
        except OSError:  # it is dead and reaped already
            self._pidfd = -1

    @classmethod
    async def start(cls, port: int, limits: flow.Limits, extra: Mapping[str, str]) -> Child:
        """Start a mover that listens on `port` if it can (0: any). ``extra`` environment.

        Raises MissingDependency if UCX cannot be loaded, PeerUnreachable if it does not start.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        environment = {**ENVIRONMENT, **os.environ, **extra}
        paths = [
            *environment.get("PYTHONPATH", "").split(os.pathsep),
            str(Path(__file__).parents[2]),
        ]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "p2pckpt.backends.ucx_mover"),
                    *(str(theirs.fileno()), str(port), msgspec.json.encode(limits).decode()),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=2,  # UCX logs there; as its own log file it would cut ours
                    pass_fds=(theirs.fileno(),),
                    env=environment,
                )
        except BaseException:
            ours.close()
            raise
        self = cls(process, ours)
        try:
            await self._greet()
        except BaseException:
            await self.reap()
            raise
        return self

    async def _greet(self) -> None:
        try:
            async with asyncio.timeout(START_S):
                async for hello in self.messages():
                    if isinstance(hello, words.Hello):
                        self.hello = hello
                        break
                else:
                    raise PeerUnreachable(f"our own mover (pid {self.process.pid}) did not start")
        except TimeoutError:
            raise PeerUnreachable(f"our own mover did not start within {START_S} s") from None
        if self.hello.missing:
            raise MissingDependency(
                "UCX needs the Python bindings ucxx: pip install 'p2pckpt[ucx-cu12]' "
                f"({self.hello.missing})"
            )

    async def messages(self) -> AsyncIterator[words.FromMover]:
        """What the mover says, until its end of the socket closes."""
        loop = asyncio.get_running_loop()
        try:
            while data := await loop.sock_recv(self._channel, _PACKET_BYTES):
                yield _DECODER.decode(data)
        except OSError:
            return

    def tell(self, message: words.ToMover, descriptor: int | None = None) -> None:
        """Send, in order, as soon as the mover takes it; the descriptor is closed here then."""
        self._out.append((msgspec.json.encode(message), descriptor))
        if self._channel.fileno() >= 0:
            self._pump()
        else:
            self._drop_rest()

    def _pump(self) -> None:
        loop = asyncio.get_running_loop()
        while self._out:
            data, descriptor = self._out[0]
            try:
                socket.send_fds(self._channel, [data], [] if descriptor is None else [descriptor])
            except BlockingIOError:
                loop.add_writer(self._channel, self._pump)
                return
            except OSError:
                break  # the mover is gone, as whoever listens learns too; reap() clears up
            self._out.popleft()
            if descriptor is not None:
                os.close(descriptor)
        loop.remove_writer(self._channel)

    def kill(self) -> None:
        """SIGKILL. Not Process.kill(), which reaps and so races with asyncio's own watcher."""
        try:
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except OSError:
            pass

    async def reap(self) -> int:
        """Kill it, wait until it is dead, let go of everything; returns its exit code."""
        self.kill()
        code = await self.process.wait()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        asyncio.get_running_loop().remove_writer(self._channel)
        self._channel.close()
        self._drop_rest()
        return code

    def _drop_rest(self) -> None:
        for _, descriptor in self._out:
            if descriptor is not None:
                os.close(descriptor)
        self._out.clear()
