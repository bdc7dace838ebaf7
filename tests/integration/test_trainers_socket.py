"""Trainers and their agent over a real Unix socket: death, fork, restart, strangers, garbage.

The agent runs in the test, on its event loop; trainers are real processes that use `AgentLink`, so
that they can be killed and can fork. Wherever something goes wrong, the agent has to answer the
next honest request.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2pckpt import errors, wire
from p2pckpt.backends.agent_link import AgentLink
from p2pckpt.backends.arena import TmpfsArena
from p2pckpt.backends.trainers import SocketLimits, SocketTrainers, default_socket_paths
from p2pckpt.errors import AgentUnreachable, FormatError, NoRoom, UsageError
from p2pckpt.ports import Region, TrainerId

MB = 1024 * 1024


class Agent:
    """A handler that really reserves slots; waits with SaveStatus until `release` is set."""

    def __init__(self, arena: TmpfsArena | None = None) -> None:
        self.arena = arena
        self.calls: list[tuple[TrainerId, object]] = []
        self.ended: list[str] = []
        self.gone: asyncio.Queue[TrainerId] = asyncio.Queue()
        self.waiting = asyncio.Event()
        self.release = asyncio.Event()

    async def on_call(self, trainer, request):
        self.calls.append((trainer, request))
        match request:
            case wire.Ping():
                return wire.Pong(store_id=request.store_id, session=str(trainer.pid))
            case wire.OpenSlot():
                file = f"slot.{request.ordinal}"
                await self.arena.reserve(file, request.capacity)
                return wire.Slot(file=file, capacity=request.capacity)
            case wire.RestoreCall():
                facts = {"ballot": 1, "step": 1, "chunk_bytes": 4096, "table": b"", "source": "x"}
                return wire.RestoreFile(file="slot.1", length=8, **facts)
            case wire.SaveStatus():
                self.waiting.set()
                try:
                    await self.release.wait()
                except asyncio.CancelledError:
                    self.ended.append("cancelled")
                    raise
                return wire.SaveState(outcome=None)
            case wire.SlotDone():
                return wire.Slot(file="absent", capacity=1)
            case wire.RestoreDone():
                raise NoRoom("slot: needs 5, has 4")
        raise ZeroDivisionError("a bug in the agent")

    async def on_gone(self, trainer):
        self.gone.put_nowait(trainer)


@contextlib.asynccontextmanager
async def serving(path: Path, agent: Agent, **options):
    descriptor = agent.arena.descriptor if agent.arena else lambda file, writable: -1
    door = SocketTrainers(str(path), descriptor, **options)
    await door.serve(agent)
    try:
        yield door
    finally:
        await door.close()


@pytest.fixture
def shm():
    made = Path(
        subprocess.check_output(["mktemp", "-d", "/dev/shm/p2pckpt-XXXXXX"], text=True)[:-1]
    )
    yield made
    subprocess.run(["rm", "-rf", made], check=True)


@pytest.fixture
def arena(shm):
    made = TmpfsArena(shm / "arena", 64 * MB)
    yield made
    made.close()


class Process:
    """A trainer that runs `code` with `link`; it lives 30 s at most."""

    HEAD = """
import os, signal, sys
signal.alarm(30)
from p2pckpt import wire
from p2pckpt.backends.agent_link import AgentLink
from p2pckpt.errors import *
def say(*words): print(*words, flush=True)
if len(sys.argv) > 2:
    os.umask(0o077); os.setgroups([]); os.setgid(int(sys.argv[3])); os.setuid(int(sys.argv[2]))
link = AgentLink([sys.argv[1]])
"""

    @classmethod
    async def start(cls, path: Path, code: str, *user: int, **options):
        self = cls()
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", cls.HEAD + textwrap.dedent(code), str(path), *map(str, user)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            **options,
        )
        return self

    async def heard(self) -> str:
        async with asyncio.timeout(20):
            return (await self.process.stdout.readline()).decode().strip()

    async def kill(self) -> int:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        return await self.ended()

    async def ended(self) -> int:
        async with asyncio.timeout(10):
            await self.process.communicate()
        return self.process.returncode


def story(main):
    asyncio.run(asyncio.wait_for(main, 40))


async def soon(queue: asyncio.Queue):
    async with asyncio.timeout(10):
        return await queue.get()


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


async def ping(link: AgentLink, text: str = "?") -> str:
    return (await asyncio.to_thread(link.call, wire.Ping(store_id=text), 10)).store_id


# -- asking, answering, memory ---------------------------------------------------------------------


def test_slot_and_restore_file_travel_as_memory(shm, arena):
    async def main():
        agent = Agent(arena)
        code = """
            slot = link.call(wire.OpenSlot(ordinal=1, step=1, capacity=8192), 10)
            memory = link.map(slot.file)
            assert len(memory) == 8192 and not memory.readonly
            memory[:8] = b"snapshot"
            del memory
            link.call(wire.RestoreCall(ordinal=1), 10)
            memory = link.map(slot.file)
            assert memory.readonly and bytes(memory) == b"snapshot"
            link.release(slot.file)
            try:
                link.map(slot.file)
            except UsageError as e:
                say(e)
            say(bytes(memory))
            del memory
            held = [os.readlink(f.path) for f in os.scandir("/proc/self/fd") if f.is_file()]
            say(*[name for name in held if "slot.1" in name])
            """
        async with serving(shm / "s", agent):
            trainer = await Process.start(shm / "s", code)
            assert "slot.1" in await trainer.heard()
            assert await trainer.heard() == "b'snapshot'"
            assert await trainer.heard() == ""  # no descriptor stays behind
            assert (await soon(agent.gone)).pid == trainer.process.pid
            assert await trainer.ended() == 0
            held = [os.readlink(f.path) for f in os.scandir("/proc/self/fd") if f.is_file()]
            assert not any("slot.1" in name for name in held)
        assert bytes(arena.view(Region("slot.1", 0, 8))) == b"snapshot"

    story(main())


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount needs root")
def test_a_file_of_a_moved_arena_is_not_taken_for_the_old_one(shm):
    """The agent goes on in another tmpfs, which counts its inodes from 1 as the first one did: the
    trainer gets its new slot, under the old name, and not the old one's memory."""
    places = [shm / "first", shm / "second"]

    async def main():
        link = None
        for place in places:
            made = TmpfsArena(place / "arena", 64 * MB)
            async with serving(shm / "a.sock", Agent(made)):
                link = link or await asyncio.to_thread(AgentLink, [str(shm / "a.sock")])
                with contextlib.suppress(AgentUnreachable):  # that of before
                    await asyncio.to_thread(link.call, wire.Ping("?"), 10)
                slot = await asyncio.to_thread(link.call, wire.OpenSlot(1, 1, MB), 10)
                link.map(slot.file)[:5] = place.name.encode()[:5]
                assert bytes(made.view(Region(slot.file, 0, 5))) == place.name.encode()[:5]
            made.close()
        link.close()

    with contextlib.ExitStack() as mounted:
        for place in places:
            place.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], check=True)
            mounted.callback(subprocess.run, ["umount", "-l", place], check=True)
        story(main())


def test_errors_arrive_by_their_class(shm, arena):
    async def main():
        agent = Agent(arena)
        async with serving(shm / "s", agent):
            link = AgentLink([str(shm / "s")])
            bad = wire.RestoreDone(ballot=1)
            with pytest.raises(NoRoom, match="needs 5, has 4"):
                await asyncio.to_thread(link.call, bad, 10)
            with pytest.raises(UsageError, match="absent"):  # the descriptor cannot be had
                await asyncio.to_thread(link.call, wire.SlotDone(ordinal=1, step=1, length=1), 10)
            reports = []
            asyncio.get_running_loop().set_exception_handler(lambda _, facts: reports.append(facts))
            with pytest.raises(errors.CheckpointError, match="ZeroDivisionError") as caught:
                await asyncio.to_thread(link.call, wire.Leave(), 10)
            assert type(caught.value) is errors.CheckpointError
            assert isinstance(reports[0]["exception"], ZeroDivisionError)
            assert await ping(link, "still here") == "still here"
            link.close()

    story(main())


def test_one_connection_in_order_and_several_side_by_side(shm):
    async def main():
        agent = Agent()
        async with serving(shm / "s", agent) as door:
            slow, fast = AgentLink([str(shm / "s")]), AgentLink([str(shm / "s")])
            wait = wire.SaveStatus(ordinal=1, step=1, wait_s=9)
            waiting = asyncio.create_task(asyncio.to_thread(slow.call, wait, 10))
            await agent.waiting.wait()
            assert await ping(fast, "overtakes") == "overtakes"
            agent.release.set()
            assert await waiting == wire.SaveState(outcome=None)
            with socket.socket(socket.AF_UNIX) as sock:  # three requests at once
                sock.connect(str(shm / "s"))
                for n in range(3):
                    sock.sendall(frame(wire.pack(wire.Ping(store_id=str(n)))))
                got = await asyncio.to_thread(replies, sock, 3)
            assert [r.store_id for r in got] == ["0", "1", "2"]
            assert len({trainer for trainer, _ in agent.calls}) == 1  # one process, one trainer
            assert agent.gone.empty()
            assert not door.dropped
            slow.close()
            fast.close()

    story(main())


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def replies(sock: socket.socket, count: int) -> list:
    sock.settimeout(10)
    stream = sock.makefile("rb")
    return [
        wire.unpack_any(stream.read(*struct.unpack("<I", stream.read(4)))) for _ in range(count)
    ]


# -- death and fork --------------------------------------------------------------------------------


def test_death_is_told_once_and_only_when_it_is_death(shm):
    async def main():
        agent = Agent()
        code = """
            second = AgentLink([sys.argv[1]])
            link.call(wire.Ping(), 10); second.call(wire.Ping(), 10)
            link.close(); second.close()
            say("closed"); sys.stdin.readline()
            link.call(wire.Ping(), 10)
            say("called"); sys.stdin.readline()
            link.call(wire.SaveStatus(ordinal=1, step=1, wait_s=9), 20)
            """
        async with serving(shm / "s", agent) as door:
            trainer = await Process.start(shm / "s", code)
            assert await trainer.heard() == "closed"
            await until(lambda: door._connections == 0)
            assert agent.gone.empty()
            trainer.process.stdin.write(b"\n")
            assert await trainer.heard() == "called"
            trainer.process.stdin.write(b"\n")
            await agent.waiting.wait()
            os.kill(trainer.process.pid, signal.SIGKILL)
            gone = await soon(agent.gone)
            assert agent.ended == ["cancelled"]  # before the death was told
            assert {gone} == {asked for asked, _ in agent.calls}
            assert gone.pid == trainer.process.pid
            boot_s = float(Path("/proc/uptime").read_text().split()[0])
            assert boot_s - 30 < gone.started <= boot_s
            await trainer.kill()
            assert agent.gone.empty()
            assert not door._processes

    story(main())


def test_a_stopped_trainer_is_alive(shm):
    async def main():
        agent = Agent()
        async with serving(shm / "s", agent):
            trainer = await Process.start(shm / "s", "link.call(wire.Ping(), 9); say(1); input()")
            await trainer.heard()
            os.kill(trainer.process.pid, signal.SIGSTOP)
            stat = Path(f"/proc/{trainer.process.pid}/stat")
            await until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
            assert agent.gone.empty()
            await trainer.kill()
            assert (await soon(agent.gone)).pid == trainer.process.pid

    story(main())


def test_a_forked_child_gets_an_error_and_harms_nobody(shm, arena):
    """B071."""

    async def main():
        agent = Agent(arena)
        code = """
            slot = link.call(wire.OpenSlot(ordinal=1, step=1, capacity=4096), 10)
            for end in ("exit", "close", "kill"):
                child = os.fork()
                if not child:
                    try:
                        link.call(wire.Ping(), 10)
                    except UsageError as e:
                        say(type(e).__name__, "fork" in str(e))
                    try:
                        link.map(slot.file)
                    except UsageError as e:
                        say(type(e).__name__)
                    if end == "close":
                        link.close()
                    if end == "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                    sys.exit()
                os.waitpid(child, 0)
            child = os.fork()
            if not child:  # a child with a link of its own is another trainer
                mine = AgentLink([sys.argv[1]])
                mine.call(wire.Ping(), 10)
                os._exit(0)
            os.waitpid(child, 0)
            link.map(slot.file)[:2] = b"ok"
            say(child, link.call(wire.Ping(store_id="x"), 10).session)
            sys.stdin.readline()
            """
        async with serving(shm / "s", agent) as door:
            trainer = await Process.start(shm / "s", code)
            for _ in range(3):
                assert await trainer.heard() == "UsageError True"
                assert await trainer.heard() == "UsageError"
            child, parent = (await trainer.heard()).split()
            assert int(parent) == trainer.process.pid
            assert (await soon(agent.gone)).pid == int(child)
            assert bytes(arena.view(Region("slot.1", 0, 2))) == b"ok"
            assert agent.gone.empty()
            assert not door.dropped
            await trainer.kill()
            assert (await soon(agent.gone)).pid == trainer.process.pid

    story(main())


def test_the_death_of_a_parent_is_seen_although_a_child_holds_its_socket(shm):
    async def main():
        agent = Agent()
        asking = """
            link.call(wire.Ping(), 10)
            child = os.fork()
            if not child:
                signal.pause()
            say(child)
            os.kill(os.getpid(), signal.SIGKILL)
            """
        silent = asking.replace("link.call(wire.Ping(), 10)", "")  # never asks anything
        async with serving(shm / "s", agent) as door:
            for code, told in ((silent, False), (asking, True)):
                trainer = await Process.start(shm / "s", code)
                child = int(await trainer.heard())
                if told:
                    assert (await soon(agent.gone)).pid == trainer.process.pid
                await until(lambda: door._connections == 0)
                os.kill(child, 0)  # it lives
                os.kill(child, signal.SIGKILL)
                await trainer.ended()
                assert agent.gone.empty()

    story(main())


# -- restart, refusal, places ----------------------------------------------------------------------


def test_after_an_agents_restart_one_call_fails_and_the_next_connects(shm):
    async def main():
        path = shm / "s"
        async with serving(path, Agent()):
            link = AgentLink([str(path)])
            assert await ping(link) == "?"
        assert not path.exists()
        with pytest.raises(AgentUnreachable):
            await ping(link)
        with pytest.raises(AgentUnreachable, match="No such file"):
            await ping(link)
        async with serving(path, Agent()):
            assert await ping(link, "again") == "again"
        async with serving(path, Agent()):
            with pytest.raises(AgentUnreachable):
                await ping(link)
            assert await ping(link, "again") == "again"
            link.close()

    story(main())


def test_a_late_reply_is_not_taken_for_the_next_one(shm):
    async def main():
        agent = Agent()
        async with serving(shm / "s", agent):
            link = AgentLink([str(shm / "s")])
            wait = wire.SaveStatus(ordinal=1, step=1, wait_s=9)
            with pytest.raises(AgentUnreachable, match=r"no reply within 0\.05 s"):
                await asyncio.to_thread(link.call, wait, 0.05)
            agent.release.set()
            assert await ping(link, "mine") == "mine"
            link.close()

    story(main())


def test_nobody_answers_names_every_place_and_why(shm):
    (shm / "file").write_text("")
    (shm / "file").chmod(0o640)
    places = [str(shm / "absent"), str(shm / "file"), str(shm / ("long" * 40))]
    with pytest.raises(AgentUnreachable) as caught:
        AgentLink(places)
    text = str(caught.value)
    assert all(place in text for place in places)
    assert "No such file" in text
    assert f"-rw-r----- of uid {os.geteuid()}" in text
    assert "too long" in text
    with pytest.raises(UsageError):
        AgentLink([])


def test_default_places():
    system = "/run/p2pckpt/agent.sock"
    assert default_socket_paths({}) == (system,)
    assert default_socket_paths({"XDG_RUNTIME_DIR": "/run/user/7", "P2PCKPT_AGENT": ""}) == (
        "/run/user/7/p2pckpt/agent.sock",
        system,
    )
    assert default_socket_paths({"P2PCKPT_AGENT": "/x"})[0] == "/x"


def test_the_socket_is_private_and_replaces_only_a_dead_one(shm):
    async def main():
        path = shm / "made" / "s"
        async with serving(path, Agent()) as door:
            assert path.stat().st_mode & 0o7777 == 0o600
            with pytest.raises(UsageError, match="already"):
                await door.serve(Agent())
            with pytest.raises(UsageError, match="another agent answers"):
                await SocketTrainers(str(path), lambda *_: -1).serve(Agent())
            with AgentLink([str(path)]) as link:
                assert await ping(link, "unharmed") == "unharmed"
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
        assert path.is_socket()
        async with serving(path, Agent(), group=os.getegid()):
            assert path.stat().st_mode & 0o7777 == 0o660
            with AgentLink([str(path)]) as link:
                assert await ping(link, "new") == "new"
        path.write_text("something else")
        with pytest.raises(UsageError, match="-rw-"):
            await SocketTrainers(str(path), lambda *_: -1).serve(Agent())
        assert path.read_text() == "something else"
        with pytest.raises(UsageError, match="at most 107"):
            await SocketTrainers(str(shm / ("x" * 107)), lambda *_: -1).serve(Agent())
        with pytest.raises(UsageError, match="No such file"):
            await SocketTrainers(str(shm / "a/b/s"), lambda *_: -1).serve(Agent())

    story(main())


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_other_users_are_served_if_allowed_and_told_if_not(shm, arena):
    """B068."""

    async def main():
        shm.chmod(0o755)
        code = """
            try:
                slot = link.call(wire.OpenSlot(ordinal=1, step=1, capacity=4096), 10)
                link.map(slot.file)[:5] = b"alien"
                say("served")
            except UsageError as e:
                say(e)
            """
        agent = Agent(arena)
        async with serving(shm / "s", agent, group=23456) as door:
            trainer = await Process.start(shm / "s", code, 12345, 23456)
            assert "uid 12345 is not served" in await trainer.heard()
            await trainer.kill()
            assert door.dropped == {"uid": 1}
            assert not agent.calls
        async with serving(shm / "s", agent, group=23456, allowed_uids={12345}):
            trainer = await Process.start(shm / "s", code, 12345, 23456)
            assert await trainer.heard() == "served"
            await trainer.kill()
        assert bytes(arena.view(Region("slot.1", 0, 5))) == b"alien"
        async with serving(shm / "s", agent, allowed_uids={12345}):
            trainer = await Process.start(shm / "s", "", 12345, 23456, stderr=subprocess.PIPE)
            _, said = await trainer.process.communicate()
            assert b"Permission denied: srw------- of uid 0" in said

    story(main())


# -- garbage and floods ----------------------------------------------------------------------------


QUICK = SocketLimits(frame_bytes=4096, frame_s=0.3, connections=24, connections_each=20)


def test_every_kind_of_bad_frame_ends_its_connection_with_a_counted_reason(shm):
    async def main():
        good = frame(wire.pack(wire.Ping(store_id="x")))
        bad = {
            "oversized": struct.pack("<I", 4097),
            "garbage": frame(b"hello"),
            "half frame": good[:-1],
        }
        async with serving(shm / "s", Agent(), limits=QUICK) as door:
            honest = AgentLink([str(shm / "s")])
            for reason, sent in bad.items():
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.connect(str(shm / "s"))
                    sock.sendall(good + sent)
                    sock.shutdown(socket.SHUT_WR)
                    answer, refusal = await asyncio.to_thread(replies, sock, 2)
                    assert answer.store_id == "x"
                    assert refusal.error == "FormatError"
                    assert await asyncio.to_thread(sock.recv, 1) == b""
                assert door.dropped[reason] == 1
                assert await ping(honest, reason) == reason
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(shm / "s"))
                sock.sendall(good[:5])  # and nothing more
                (refusal,) = await asyncio.to_thread(replies, sock, 1)
                assert "in time" in refusal.message
            assert door.dropped["slow"] == 1
            with pytest.raises(FormatError, match="allowed are 4096"):
                await asyncio.to_thread(honest.call, wire.Ping(store_id="x" * 8000000), 10)
            with pytest.raises(AgentUnreachable):
                await ping(honest)
            assert await ping(honest, "again") == "again"
            honest.close()

    story(main())


def test_who_does_not_read_is_dropped_and_others_are_answered_meanwhile(shm):
    async def main():
        code = """
            import socket, struct
            flood = socket.socket(socket.AF_UNIX)
            flood.connect(sys.argv[1])
            body = wire.pack(wire.Ping(store_id="x" * 3000))
            try:
                while True:
                    flood.sendall(struct.pack("<I", len(body)) + body)
            except OSError:
                say("dropped")
            """
        async with serving(shm / "s", Agent(), limits=QUICK) as door:
            honest = AgentLink([str(shm / "s")])
            flood = await Process.start(shm / "s", code)
            while not door.dropped["does not read"]:
                assert await ping(honest, "served") == "served"
            assert await flood.heard() == "dropped"
            await flood.kill()
            honest.close()

    story(main())


def test_a_flood_that_reads_its_replies_does_not_starve_others(shm):
    async def main():
        code = """
            import socket, struct, threading
            flood = socket.socket(socket.AF_UNIX)
            flood.connect(sys.argv[1])
            body = wire.pack(wire.Ping()); frames = (struct.pack("<I", len(body)) + body) * 1000
            def drain():
                while flood.recv(1 << 20): pass
            threading.Thread(target=drain, daemon=True).start()
            flood.sendall(frames)
            say("flooding")
            while True:
                flood.sendall(frames)
            """
        agent = Agent()
        async with serving(shm / "s", agent) as door:
            floods = [await Process.start(shm / "s", code) for _ in range(2)]
            for flood in floods:
                assert await flood.heard() == "flooding"
            honest = AgentLink([str(shm / "s")])
            async with asyncio.timeout(8):  # about 0.3 s; 40 s if a flood keeps its turn
                for n in range(50):
                    assert await ping(honest, str(n)) == str(n)
            for flood in floods:
                await flood.kill()
            gone = {(await soon(agent.gone)).pid for _ in floods}
            assert gone == {flood.process.pid for flood in floods}
            assert set(door.dropped) <= {"broken"}  # by their own deaths
            honest.close()

    story(main())


def test_connections_are_bounded_for_a_process_and_in_all(shm):
    async def main():
        agent = Agent()
        async with serving(shm / "s", agent, limits=QUICK) as door:
            mine = [AgentLink([str(shm / "s")]) for _ in range(20)]
            await until(lambda: door._connections == 20)
            refused = AgentLink([str(shm / "s")])
            with pytest.raises(UsageError, match=f"pid {os.getpid()} has its 20 connections"):
                await ping(refused)
            refused.close()
            code = "links = [AgentLink([sys.argv[1]]) for _ in range(3)]; say('up'); input()"
            other = await Process.start(shm / "s", code)
            await other.heard()
            await until(lambda: door._connections == 24)
            late = await Process.start(
                shm / "s", "try: link.call(wire.Ping(), 9)\nexcept UsageError as e: say(e)"
            )
            assert "24 connections already" in await late.heard()
            await late.kill()
            await other.kill()
            await until(lambda: door._connections == 20)
            assert await ping(mine[0], "fine") == "fine"
            for link in mine:
                link.close()
            await until(lambda: door._connections == 0)
            assert agent.gone.empty()  # the other one never asked anything
            assert door.dropped == {"connections of a process": 1, "connections": 1}

    story(main())


PIECES = st.one_of(
    st.binary(max_size=200),
    st.binary(max_size=100).map(frame),
    st.integers(0, 2**32 - 1).map(lambda n: struct.pack("<I", n)),
    st.just(frame(wire.pack(wire.Ping(store_id="ok")))),
    st.sampled_from([wire.Leave(), wire.ListSteps()]).map(
        lambda r: frame(wire.pack(r)[:-1] + b" ")
    ),
)


def test_no_garbage_kills_the_agent(shm):
    async def main():
        agent = Agent()
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        loop = asyncio.get_running_loop()
        async with serving(shm / "s", agent, limits=QUICK) as door:
            honest = AgentLink([str(shm / "s")])

            @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
            @given(st.lists(PIECES, max_size=5).map(b"".join))
            def play(sent):
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.settimeout(10)
                    sock.connect(str(shm / "s"))
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                        sock.sendall(sent)
                        sock.shutdown(socket.SHUT_WR)
                        while sock.recv(1 << 16):
                            pass
                assert honest.call(wire.Ping(store_id="alive"), 10).store_id == "alive"

            await asyncio.to_thread(play)
            await until(lambda: door._connections == 1)
            assert set(door.dropped) <= {"oversized", "garbage", "half frame", "broken"}
            assert door.dropped["garbage"] > 10
            assert loop.is_running()
            honest.close()

    story(main())
