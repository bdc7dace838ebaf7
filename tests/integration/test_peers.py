"""gRPC between agents under real faults: kill -9, SIGSTOP, overload, foreign certificates."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest

from p2pckpt import wire
from p2pckpt.backends import peers
from p2pckpt.backends.peers import GrpcPeers, Tls
from p2pckpt.errors import CheckpointError, ConfigError, FormatError, PeerUnreachable, Refused

HOST = "127.0.0.1"
PING = wire.Ping(store_id="s")

AGENT = """
import asyncio, sys
from p2pckpt import wire
from p2pckpt.backends.peers import GrpcPeers
async def handler(caller, request):
    if request.store_id == "hang":
        print("hangs", flush=True)
        await asyncio.sleep(60)
    return wire.Pong(store_id=request.store_id, session=caller)
async def main():
    agent = await GrpcPeers.start("127.0.0.1", int(sys.argv[1]))
    await agent.serve(handler)
    print(agent.address, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


async def pong(caller, request):
    return wire.Pong(store_id=request.store_id, session=caller)


@asynccontextmanager
async def agents(count, handler=pong, tls=None):
    async with AsyncExitStack() as stack:
        made = []
        for _ in range(count):
            made.append(await GrpcPeers.start(HOST, tls=tls))
            stack.push_async_callback(made[-1].close)
            await made[-1].serve(handler)
        yield made


async def unreachable(awaitable, within_s, match=None):
    begun_s = time.monotonic()
    with pytest.raises(PeerUnreachable, match=match):
        await awaitable
    assert time.monotonic() - begun_s < within_s


# -- the other process dies, freezes, comes back --------------------------------------------------


class Agent:
    """A serving process."""

    def __init__(self, port=0):
        self.process = subprocess.Popen(
            [sys.executable, "-c", AGENT, str(port)], stdout=subprocess.PIPE, text=True
        )
        self.address = self.process.stdout.readline().strip()

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def test_killed_peer_is_known_at_once_and_found_again_when_it_is_back():
    async def body():
        agent = Agent()
        async with agents(1) as (a,):
            hang = asyncio.create_task(a.call(agent.address, wire.Ping(store_id="hang"), 30))
            assert await asyncio.to_thread(agent.process.stdout.readline) == "hangs\n"
            agent.end()
            await unreachable(hang, 2)
            await unreachable(a.call(agent.address, PING, 10), 2)
            again = Agent(int(agent.address.split(":")[1]))
            end = time.monotonic() + 5
            while True:
                try:
                    await a.call(agent.address, PING, 2)
                    break
                except PeerUnreachable:
                    assert time.monotonic() < end
                    await asyncio.sleep(0.02)
            again.end()

    asyncio.run(body())


def test_frozen_peer_ends_calls_at_their_timeout_and_answers_when_it_thaws():
    async def body():
        agent = Agent()
        async with agents(1) as (a,):
            await a.call(agent.address, PING, 5)
            os.kill(agent.process.pid, signal.SIGSTOP)
            await asyncio.gather(
                *(unreachable(a.call(agent.address, PING, 0.5), 2, "DEADLINE") for _ in range(5))
            )
            os.kill(agent.process.pid, signal.SIGCONT)
            assert (await a.call(agent.address, PING, 5)).store_id == "s"
        agent.end()

    asyncio.run(body())


@pytest.mark.slow
def test_frozen_peer_is_noticed_by_keepalive_long_before_a_long_timeout():
    async def body():
        agent = Agent()
        async with agents(1) as (a,):
            await a.call(agent.address, PING, 5)
            os.kill(agent.process.pid, signal.SIGSTOP)
            await unreachable(a.call(agent.address, PING, 60), 12)
        agent.end()

    asyncio.run(body())


def test_nobody_there_and_a_mute_listener():
    async def body():
        with socket.create_server((HOST, 0)) as mute, socket.socket() as bound:
            bound.bind((HOST, 0))
            async with agents(1) as (a,):
                refused = f"{HOST}:{bound.getsockname()[1]}"
                silent = f"{HOST}:{mute.getsockname()[1]}"
                await unreachable(a.call(refused, PING, 30), 2, "UNAVAILABLE")
                await unreachable(a.call(silent, PING, 0.5), 2)
                await unreachable(a.call("no-such-host.invalid:1", PING, 1), 3)
                await unreachable(a.call("nonsense", PING, 1), 3)

    asyncio.run(body())


def test_a_proxy_of_the_environment_is_not_used(monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def body():
        async with agents(2) as (a, b):
            await a.call(b.address, PING, 5)

    asyncio.run(body())


# -- the handler ----------------------------------------------------------------------------------


def test_work_goes_on_when_the_caller_gives_up():
    async def body():
        begun, release, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def handler(caller, request):
            begun.set()
            await release.wait()
            ended.set()
            return wire.Sent()

        async with agents(2, handler) as (a, b):
            await unreachable(a.call(b.address, PING, 0.3), 2)
            calling = asyncio.create_task(a.call(b.address, PING, 20))
            await begun.wait()
            calling.cancel()
            await asyncio.wait((calling,))
            release.set()
            await asyncio.wait_for(ended.wait(), 5)

    asyncio.run(body())


def test_a_defect_of_the_handler_is_reported_there_and_retryable_here():
    async def body():
        reported = []
        asyncio.get_running_loop().set_exception_handler(lambda _, facts: reported.append(facts))

        async def handler(caller, request):
            raise ZeroDivisionError("defect")

        async with agents(2, handler) as (a, b):
            await unreachable(a.call(b.address, PING, 5), 2, "INTERNAL: the handler failed")
        assert [repr(facts["exception"]) for facts in reported] == ["ZeroDivisionError('defect')"]

    asyncio.run(body())


def test_more_than_the_bound_is_turned_away(monkeypatch):
    monkeypatch.setattr(peers, "HANDLERS", 3)

    async def body():
        release = asyncio.Event()

        async def handler(caller, request):
            await release.wait()
            return wire.Sent()

        async with agents(2, handler) as (a, b):
            calls = [asyncio.create_task(a.call(b.address, PING, 20)) for _ in range(8)]
            end = time.monotonic() + 10
            while sum(call.done() for call in calls) < 5:
                assert time.monotonic() < end
                await asyncio.sleep(0.01)
            release.set()
            results = await asyncio.gather(*calls, return_exceptions=True)
            refused = [str(r) for r in results if isinstance(r, PeerUnreachable)]
            assert len(refused) == 5
            assert all("RESOURCE_EXHAUSTED: 3 requests open" in text for text in refused)

    asyncio.run(body())


def test_bytes_that_are_no_envelope_are_answered_with_a_format_error():
    async def body():
        async with agents(1) as (a,), grpc.aio.insecure_channel(a.address) as channel:
            ask = channel.unary_unary("/p2pckpt.Peers/Call")
            for garbage in (b"", b"garbage", wire.pack(PING)[:-1]):
                failed = wire.unpack(await ask(garbage, timeout=5), wire.Failed)
                assert failed.error == FormatError.__name__

    asyncio.run(body())


def test_an_unknown_error_class_becomes_the_root():
    async def body():
        async def handler(caller, request):
            return wire.Failed(error=request.store_id, message="why")

        async with agents(2, handler) as (a, b):
            with pytest.raises(CheckpointError, match="FromTheFuture: why") as found:
                await a.call(b.address, wire.Ping(store_id="FromTheFuture"), 5)
            assert type(found.value) is CheckpointError
            with pytest.raises(CheckpointError, match="annotations: why"):
                await a.call(b.address, wire.Ping(store_id="annotations"), 5)

    asyncio.run(body())


# -- connections ----------------------------------------------------------------------------------


def test_connections_are_bounded_and_those_in_use_stay(monkeypatch):
    monkeypatch.setattr(peers, "CHANNELS", 2)

    async def body():
        release = asyncio.Event()

        async def handler(caller, request):
            if request.store_id == "wait":
                await release.wait()
            return wire.Pong(store_id=request.store_id, session=caller)

        async with agents(6, handler) as (a, first, *rest):
            waiting = asyncio.create_task(a.call(first.address, wire.Ping(store_id="wait"), 20))
            await asyncio.sleep(0)
            for other in rest * 3:
                assert (await a.call(other.address, PING, 5)).session == a.address
                assert len(a._links) <= 2
            second = asyncio.create_task(a.call(rest[0].address, wire.Ping(store_id="wait"), 20))
            await asyncio.sleep(0)
            await unreachable(a.call(rest[1].address, PING, 5), 1, "all 2 connections are in use")
            release.set()
            assert {(await call).store_id for call in (waiting, second)} == {"wait"}

    asyncio.run(body())


def test_a_peer_that_left_leaves_no_connection_behind(monkeypatch):
    """Each of 20 peers is asked once and leaves; a call that takes long keeps its connection."""
    monkeypatch.setattr(peers, "IDLE_S", 0.05)

    async def body():
        release, waiting = asyncio.Event(), asyncio.Event()

        async def wait(caller, request):
            if request.store_id == "slow":
                waiting.set()
                await release.wait()
            return wire.Pong(store_id=request.store_id, session="x")

        async with agents(2, wait) as (a, b):
            slow = asyncio.create_task(a.call(b.address, wire.Ping(store_id="slow"), 30))
            await waiting.wait()
            descriptors = None
            for number in range(20):
                async with agents(1) as (guest,):
                    await a.call(guest.address, PING, 5)
                await asyncio.sleep(0.1)  # longer than IDLE_S, which nothing else tells
                await a.call(a.address, PING, 5)
                assert set(a._links) == {a.address, b.address}
                if number == 2:
                    descriptors = len(os.listdir("/proc/self/fd"))
            assert len(os.listdir("/proc/self/fd")) <= descriptors + 2
            assert not slow.done()
            release.set()
            assert (await slow).store_id == "slow"

    asyncio.run(body())


def test_close_ends_open_calls_on_both_sides_without_cancelling_anybody():
    async def body():
        begun = asyncio.Event()

        async def handler(caller, request):
            begun.set()
            await asyncio.sleep(60)

        for closes in (0, 1):
            begun.clear()
            async with agents(2, handler) as pair:
                calling = asyncio.create_task(pair[0].call(pair[1].address, PING, 30))
                await begun.wait()
                await pair[closes].close()
                await unreachable(calling, 2)
                await unreachable(pair[0].call(pair[1].address, PING, 5), 2)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(body())


def test_a_port_in_use_is_an_error_not_shared():
    """B054: at the start; agents bind port 0 and publish what they got."""

    async def body():
        async with agents(1) as (a,):
            port = int(a.address.split(":")[1])
            with pytest.raises(ConfigError, match=f"cannot listen at {HOST}:{port}"):
                await GrpcPeers.start(HOST, port)

    asyncio.run(body())


# -- TLS ------------------------------------------------------------------------------------------


def openssl(*arguments):
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """PEM files made by the openssl program: a CA with two nodes, and a CA of strangers."""
    place = tmp_path_factory.mktemp("tls")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")

    def authority(name):
        files = ("-keyout", f"{place}/{name}.key", "-out", f"{place}/{name}.pem")
        openssl("req", "-x509", *curve, "-subj", f"/CN={name}", "-days", "2", *files)

    def node(name, ca):
        key, request = f"{place}/{name}.key", f"{place}/{name}.csr"
        openssl("req", *curve, "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        extension = place / f"{name}.ext"
        extension.write_text("subjectAltName=IP:127.0.0.1,DNS:agent.p2pckpt\n")
        signer = ("-CA", f"{place}/{ca}.pem", "-CAkey", f"{place}/{ca}.key", "-CAcreateserial")
        out = ("-days", "2", "-extfile", str(extension), "-out", f"{place}/{name}.pem")
        openssl("x509", "-req", "-in", request, *signer, *out)
        return Tls(place / f"{ca}.pem", place / f"{name}.pem", place / f"{name}.key")

    for ca in ("ours", "theirs"):
        authority(ca)
    return {"n1": node("n1", "ours"), "n2": node("n2", "ours"), "x": node("x", "theirs")}


def test_certificates_prove_both_sides_and_name_the_caller(certificates):
    async def body():
        n1 = await GrpcPeers.start(HOST, tls=certificates["n1"])
        n2 = await GrpcPeers.start(HOST, tls=certificates["n2"])
        stranger = await GrpcPeers.start(HOST, tls=certificates["x"])
        plain = await GrpcPeers.start(HOST)
        asked = []

        async def handler(caller, request):
            asked.append(caller)
            raise Refused("no")

        for agent in (n1, n2, stranger, plain):
            await agent.serve(handler)
        for caller, callee in ((n1, n2), (n2, n1)):
            with pytest.raises(Refused):
                await caller.call(callee.address, PING, 5)
        assert asked == ["n1", "n2"]
        for caller, callee in ((stranger, n1), (n1, stranger), (plain, n1), (n1, plain)):
            await unreachable(caller.call(callee.address, PING, 2), 4)
        assert asked == ["n1", "n2"]
        for agent in (n1, n2, stranger, plain):
            await agent.close()

    asyncio.run(body())


def test_peer_name_replaces_the_host_in_the_check(certificates):
    async def body():
        n1 = certificates["n1"]
        named = Tls(n1.ca, n1.cert, n1.key, "agent.p2pckpt")
        wrong = Tls(n1.ca, n1.cert, n1.key, "other.p2pckpt")
        async with agents(1, tls=named) as (a,), agents(1, tls=wrong) as (b,):
            assert (await a.call(b.address, PING, 5)).session == "n1"
            await unreachable(b.call(a.address, PING, 2), 4)

    asyncio.run(body())


def test_a_missing_file_is_named(tmp_path):
    missing = Tls(tmp_path / "ca.pem", tmp_path / "c.pem", tmp_path / "k.pem")
    with pytest.raises(ConfigError, match=r"ca\.pem: No such file"):
        asyncio.run(GrpcPeers.start(HOST, tls=missing))
