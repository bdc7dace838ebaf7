"""The arena on real memory: too small file systems, SIGKILL, two agents, foreign files, cgroups.

Each story runs on a tmpfs (/dev/shm), those about room on one of 64 MB that the test mounts, which
needs root. A process that dies must not take the bytes along, and no path may end in SIGBUS.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from p2pckpt import wire
from p2pckpt.backends.arena import TmpfsArena
from p2pckpt.backends.budget import default_budget
from p2pckpt.backends.workers import SystemIds, ThreadWorkers
from p2pckpt.errors import NoRoom, UsageError
from p2pckpt.ports import Region
from p2pckpt.records import Attempt, FileKind, FileRecord, FileState
from p2pckpt.traffic import Traffic

MB = 1024 * 1024
ATTEMPT = Attempt(ledger_id="l", job="0.j", generation=1, ordinal=1, step=1)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs needs root")


def record(length: int, state: FileState = FileState.WHOLE) -> FileRecord:
    return FileRecord(
        state=state, kind=FileKind.SLOT, attempt=ATTEMPT, owner="n", part=0, length=length
    )


@pytest.fixture
def shm():
    made = Path(
        subprocess.check_output(["mktemp", "-d", "/dev/shm/p2pckpt-XXXXXX"], text=True)[:-1]
    )
    yield made
    subprocess.run(["rm", "-rf", made], check=True)


@pytest.fixture
def small_tmpfs(tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    options = ["-t", "tmpfs", "-o", "size=64m,mode=0700", "p2pckpt-test"]
    if (done := subprocess.run(["mount", *options, place], capture_output=True)).returncode:
        pytest.skip(f"mount: {done.stderr.decode()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


@contextlib.contextmanager
def opened(directory: Path, budget_bytes: int = 512 * MB):
    arena = TmpfsArena(directory, budget_bytes)
    try:
        yield arena
    finally:
        arena.close()


def child(code: str, *arguments: object) -> subprocess.Popen:
    """A real process that runs `code` and prints a line when it is ready; it lives 30 s at most."""
    code = f"import signal\nsignal.alarm(30)\n{textwrap.dedent(code)}"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate(timeout=10)


# -- what a file is --------------------------------------------------------------------------------


def test_files_are_private_whatever_the_umask(shm):
    """B068."""
    before = os.umask(0)
    try:
        with opened(shm / "a") as arena:
            asyncio.run(arena.reserve("slot.0", 5000))
            arena.put_record("slot.0", record(10))
            arena.put_document("manifest", b"m")
            found = {p.name: p.stat().st_mode & 0o7777 for p in (shm / "a").iterdir()}
            assert (shm / "a").stat().st_mode & 0o7777 == 0o700
    finally:
        os.umask(before)
    assert found == {
        "lock": 0o600,
        "store_id": 0o600,
        "slot.0.ram": 0o600,
        "slot.0.rec": 0o600,
        "manifest.doc": 0o600,
    }


def test_reserved_bytes_are_there_and_mapped(shm):
    with opened(shm / "a") as arena:
        before = _resident_shared()
        asyncio.run(arena.reserve("x", 32 * MB))
        found = arena.path("x").stat()
        assert found.st_size == 32 * MB
        assert found.st_blocks * 512 >= 32 * MB
        assert _resident_shared() - before >= 31 * MB  # the agent's page table has them


def _resident_shared() -> int:
    line = next(li for li in Path("/proc/self/status").read_text().splitlines() if "RssShmem" in li)
    return int(line.split()[1]) * 1024


def test_others_directories_are_refused_by_name_owner_and_mode(shm):
    (shm / "open").mkdir()
    (shm / "open").chmod(0o755)
    with pytest.raises(UsageError, match=r"open.*0700.*drwxr-xr-x of uid \d+"):
        TmpfsArena(shm / "open", MB)
    (shm / "file").write_text("")
    with pytest.raises(UsageError, match="file"):
        TmpfsArena(shm / "file", MB)
    with pytest.raises(UsageError, match="No such file"):
        TmpfsArena(shm / "absent" / "deep", MB)


@pytest.mark.skipif(os.geteuid() != 0, reason="making another user's directory needs root")
def test_another_users_left_over_is_refused(shm):
    """B068."""
    (shm / "a").mkdir(mode=0o700)
    os.chown(shm / "a", 12345, 12345)
    with pytest.raises(UsageError, match="uid 12345"):
        TmpfsArena(shm / "a", MB)


def test_names_and_regions_are_checked(shm):
    with opened(shm / "a") as arena:
        asyncio.run(arena.reserve("x", 100))
        for name in ("", "../x", "a/b", "A", "x" * 201, "x\0"):
            with pytest.raises(UsageError):
                asyncio.run(arena.reserve(name, 1))
            with pytest.raises(UsageError):
                arena.put_document(name, b"")
        for offset, length in ((-1, 2), (0, 101), (100, 1), (0, -1)):
            with pytest.raises(UsageError, match="has 100 bytes"):
                arena.view(Region("x", offset, length))
        assert len(arena.view(Region("x", 100, 0))) == 0
        with pytest.raises(UsageError, match="exists"):
            asyncio.run(arena.reserve("x", 1))
        for absent in (lambda: arena.view(Region("y", 0, 0)), lambda: arena.path("y")):
            with pytest.raises(UsageError, match="file y"):
                absent()
        with pytest.raises(UsageError, match="file y"):
            arena.put_record("y", record(1))
    with pytest.raises(UsageError, match="closed"):
        asyncio.run(arena.reserve("z", 1))
    with pytest.raises(UsageError, match="closed"):
        arena.remove("x")
    with opened(shm / "a") as arena:
        assert arena.adopt() == ()


def test_descriptors_are_fresh_and_read_only_where_asked(shm):
    with opened(shm / "a") as arena:
        asyncio.run(arena.reserve("x", 4096))
        fd = arena.descriptor("x", False)
        try:
            with pytest.raises(OSError):
                os.pwrite(fd, b"no", 0)
        finally:
            os.close(fd)
        fd = arena.descriptor("x", True)
        os.pwrite(fd, b"yes", 0)
        os.close(fd)
        assert bytes(arena.view(Region("x", 0, 3))) == b"yes"
        with pytest.raises(UsageError):
            arena.descriptor("y", True)


# -- room ------------------------------------------------------------------------------------------


@as_root
def test_too_small_tmpfs_is_no_room_and_never_sigbus(small_tmpfs):
    """B059."""
    with opened(small_tmpfs / "a") as arena:
        with pytest.raises(NoRoom, match=rf"needs {100 * MB} bytes.*has 6\d{{7}}"):
            asyncio.run(arena.reserve("big", 100 * MB))
        assert arena.used_bytes == 0
        asyncio.run(arena.reserve("fits", 50 * MB))  # all of the failed one was given back
        filler = small_tmpfs / "filler"
        with pytest.raises(OSError), filler.open("wb", buffering=0) as f:
            f.writelines([bytes(MB)] * 64)
        arena.view(Region("fits", 0, 50 * MB))[:] = b"\x07" * (50 * MB)  # SIGBUS if not reserved
        with pytest.raises(NoRoom):
            arena.put_document("manifest", bytes(MB))
        assert arena.document("manifest") is None
        filler.unlink()
        arena.put_document("manifest", bytes(MB))
        assert set(arena.documents()) == {"manifest"}
        assert bytes(arena.view(Region("fits", 50 * MB - 1, 1))) == b"\x07"


@as_root
def test_kills_do_not_pile_up_and_a_neighbour_lives(small_tmpfs):
    """B060."""
    code = """
        import asyncio, sys
        from p2pckpt.backends.arena import TmpfsArena
        arena = TmpfsArena(sys.argv[1], 1 << 30)
        kept = arena.adopt()
        asyncio.run(arena.reserve("slot", 19 << 20))
        print("ready", flush=True)
        sys.stdin.read()
        """
    with opened(small_tmpfs / "live") as live:
        asyncio.run(live.reserve("mine", MB))
        live.view(Region("mine", 0, 4))[:] = b"mine"
        for _ in range(10):
            process = child(code, small_tmpfs / "a")
            assert process.stdout.readline() == "ready\n"
            end(process)
            used = 64 * MB - os.statvfs(small_tmpfs).f_bavail * os.statvfs(small_tmpfs).f_frsize
            assert used < 21 * MB
        assert bytes(live.view(Region("mine", 0, 4))) == b"mine"


def test_concurrent_reservations_do_not_overshoot_the_budget(shm):
    async def story(arena):
        asked = [arena.reserve(f"f{i}", 10 * MB) for i in range(8)]
        ended = await asyncio.gather(*asked, return_exceptions=True)
        refused = [e for e in ended if e is not None]
        assert len(refused) == 4
        assert all(isinstance(e, NoRoom) for e in refused)
        assert str(10 * MB) in str(refused[0])
        assert str(5 * MB) in str(refused[0])
        assert arena.used_bytes == 40 * MB
        assert len(list((shm / "a").glob("*.ram"))) == 4

    with opened(shm / "a", 45 * MB) as arena:
        asyncio.run(story(arena))


def test_a_cancelled_or_removed_reservation_leaves_nothing(shm):
    async def until_free(arena):
        async with asyncio.timeout(10):
            while arena.used_bytes:
                await asyncio.sleep(0.001)

    async def story(arena):
        cancelled = asyncio.create_task(arena.reserve("x", 200 * MB))
        await asyncio.sleep(0)
        assert arena.used_bytes == 200 * MB
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        with pytest.raises(NoRoom):  # the thread is at it still, so its bytes count
            await arena.reserve("y", 200 * MB)
        await until_free(arena)
        before = _resident_shared()
        removed = asyncio.create_task(arena.reserve("x", 200 * MB))
        async with asyncio.timeout(10):
            while _resident_shared() < before + MB:
                await asyncio.sleep(0.001)  # until its pages are being touched
        with pytest.raises(UsageError, match="under way"):
            arena.adopt()
        arena.remove("x")
        with pytest.raises(UsageError, match="removed"):
            await removed
        assert arena.used_bytes == 0
        assert not [p for p in (shm / "a").iterdir() if ".ram" in p.name]
        await arena.reserve("x", 200 * MB)

    with opened(shm / "a", 201 * MB) as arena:
        asyncio.run(story(arena))


def test_the_loop_goes_on_while_pages_are_cleared(shm):
    async def story(arena):
        reserving = asyncio.create_task(arena.reserve("x", 256 * MB))
        gaps = []
        while not reserving.done():
            start = time.perf_counter()
            await asyncio.sleep(0.001)
            gaps.append(time.perf_counter() - start)
        await reserving
        assert sorted(gaps)[len(gaps) * 9 // 10] < 0.05

    with opened(shm / "a") as arena:
        asyncio.run(story(arena))


def test_removed_but_viewed_bytes_count_until_the_view_is_gone(shm):
    with opened(shm / "a", 10 * MB) as arena:
        asyncio.run(arena.reserve("x", 8 * MB))
        view = np.frombuffer(arena.view(Region("x", 0, 8 * MB)), np.uint8)
        arena.remove("x")
        view[:] = 1  # still memory, no SIGBUS
        assert not arena.documents()
        assert arena.used_bytes == 8 * MB
        with pytest.raises(NoRoom):
            asyncio.run(arena.reserve("x", 8 * MB))
        del view
        assert arena.used_bytes == 0
        asyncio.run(arena.reserve("x", 8 * MB))
        assert not any(arena.view(Region("x", 0, MB)))


# -- one agent, one store, adoption ----------------------------------------------------------------


def test_a_second_agent_learns_who_holds_the_arena(shm):
    code = """
        import sys
        from p2pckpt.backends.arena import TmpfsArena
        arena = TmpfsArena(sys.argv[1], 1)
        print(arena.store_id, flush=True)
        sys.stdin.read()
        """
    holder = child(code, shm / "a")
    store_id = holder.stdout.readline().strip()
    try:
        with pytest.raises(UsageError, match=f"pid {holder.pid} holds"):
            TmpfsArena(shm / "a", MB)
    finally:
        end(holder)
    with opened(shm / "a") as arena:
        assert arena.store_id == store_id


def test_adoption_after_sigkill_takes_the_whole_ones_and_sweeps_the_rest(shm):
    code = """
        import asyncio, os, signal, sys
        from p2pckpt.backends.arena import TmpfsArena
        from p2pckpt.ports import Region
        from tests.integration.test_arena import MB, record, FileState
        arena = TmpfsArena(sys.argv[1], 1 << 30)
        async def fill():
            for name in ("whole", "filling", "bare", "torn", "long", "replaced"):
                await arena.reserve(name, MB)
                arena.view(Region(name, 0, 5))[:] = b"bytes"
            arena.put_record("whole", record(MB))
            arena.put_record("filling", record(MB, FileState.FILLING))
            arena.put_record("torn", record(MB))
            arena.put_record("long", record(MB + 1))
            arena.put_record("replaced", record(MB))
            arena.put_record("replaced", record(MB, FileState.FILLING))
            arena.put_document("whole.manifest", b"manifest")
            asyncio.create_task(arena.reserve("under.way", 400 * MB))
            while not os.path.exists(sys.argv[1] + "/under.way.ram.tmp"):
                await asyncio.sleep(0.001)
            print("ready", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(fill())
        """
    place = shm / "a"
    process = child(code, place)
    assert process.stdout.readline() == "ready\n"
    assert process.wait(10) == -signal.SIGKILL
    process.communicate()
    assert (place / "under.way.ram.tmp").exists()
    torn = bytearray((place / "torn.rec").read_bytes())
    torn[-5] ^= 1
    (place / "torn.rec").write_bytes(torn)
    (place / "lonely.rec").write_bytes(wire.pack(record(1)))
    foreign = ["photo.jpg", "UPPER.ram", "a b.rec", "notes.tmp", "x.ram.bak"]
    for name in foreign:
        (place / name).write_text("not ours")
    (place / "folder.ram").mkdir()
    (place / "link.ram").symlink_to(place / "photo.jpg")
    with opened(place) as arena:
        (kept,) = arena.adopt()
        assert (kept.file, kept.capacity, kept.record) == ("whole", MB, record(MB))
        assert bytes(arena.view(Region("whole", 0, 5))) == b"bytes"
        assert arena.used_bytes == MB
        assert set(arena.documents()) == {"whole.manifest"}
        assert arena.document("whole.manifest") == b"manifest"
        ours = {"lock", "store_id", "whole.ram", "whole.rec", "whole.manifest.doc"}
        assert {p.name for p in place.iterdir()} == ours | {*foreign, "folder.ram", "link.ram"}
        arena.remove("whole")
        arena.remove("whole")
        assert arena.adopt() == ()


def test_a_directory_without_its_store_id_is_a_new_store(shm):
    with opened(shm / "a") as arena:
        first = arena.store_id
        asyncio.run(arena.reserve("x", MB))
        arena.put_record("x", record(MB))
    with opened(shm / "a") as arena:
        assert arena.store_id == first
        assert len(arena.adopt()) == 1
    (shm / "a" / "store_id").unlink()
    with opened(shm / "a") as arena:
        assert arena.store_id != first
        assert arena.adopt() == ()


def test_a_record_is_old_or_new_at_every_moment(shm):
    code = """
        import asyncio, sys
        from p2pckpt.backends.arena import TmpfsArena
        from tests.integration.test_arena import record
        arena = TmpfsArena(sys.argv[1], 1 << 20)
        asyncio.run(arena.reserve("x", 4096))
        arena.put_record("x", record(0))
        print("ready", flush=True)
        n = 0
        while True:
            n += 1
            arena.put_record("x", record(n % 4096))
            arena.put_document("d", b"%d" % n * 1000)
        """
    for _ in range(3):
        process = child(code, shm / "a")
        assert process.stdout.readline() == "ready\n"
        document = shm / "a" / "d.doc"
        for _ in range(50):
            wire.unpack((shm / "a" / "x.rec").read_bytes(), FileRecord)
            assert not document.exists() or len(document.read_bytes()) % 1000 == 0
        end(process)
        with opened(shm / "a") as arena:
            assert len(arena.adopt()) == 1
            arena.remove("x")


# -- the default budget ----------------------------------------------------------------------------


@as_root
def test_default_budget_is_half_of_a_small_tmpfs_and_steady_over_restarts(small_tmpfs):
    before, why = default_budget(small_tmpfs / "a")
    assert 30 * MB < before <= 32 * MB
    assert str(small_tmpfs) in why
    with opened(small_tmpfs / "a", before) as arena:
        asyncio.run(arena.reserve("x", 20 * MB))
        arena.put_record("x", record(1))
    after, why = default_budget(small_tmpfs / "a")
    assert abs(after - before) < MB
    assert str(20 * MB) in why


CGROUP_V1 = Path("/sys/fs/cgroup/memory")


@pytest.mark.skipif(
    not os.access(CGROUP_V1 / "memory.limit_in_bytes", os.W_OK), reason="needs cgroup v1 as root"
)
def test_default_budget_keeps_below_a_real_cgroup_limit(shm):
    """B062."""
    group = CGROUP_V1 / f"p2pckpt-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(256 * MB))
        code = """
            import asyncio, os, sys
            open(sys.argv[2] + "/cgroup.procs", "w").write(str(os.getpid()))
            from p2pckpt.backends.arena import TmpfsArena
            from p2pckpt.backends.budget import default_budget
            from p2pckpt.errors import NoRoom
            budget, why = default_budget(sys.argv[1])
            arena = TmpfsArena(sys.argv[1], budget)
            try:
                asyncio.run(arena.reserve("slot", 300 << 20))
            except NoRoom:
                asyncio.run(arena.reserve("slot", budget))
                print(budget, why, flush=True)
            """
        process = child(code, shm / "a", group)
        out, _ = process.communicate(timeout=30)
        assert process.returncode == 0
        budget, why = out.split(" ", 1)
        assert 64 * MB < int(budget) <= 128 * MB
        assert str(group / "memory.limit_in_bytes") in why
    finally:
        subprocess.run(["rm", "-rf", shm / "a"], check=True)
        group.rmdir()


def test_default_budget_reads_cgroup_v2_of_the_process_and_above_it(tmp_path):
    group = tmp_path / "sys/fs/cgroup/pod/box"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/box\n")
    mounted = "41 31 0:38 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw\n"
    (tmp_path / "proc/self/mountinfo").write_text(mounted)
    for place, most, now, file in (
        (group, "max", 5, 0),
        (group.parent, 100 * MB, 30 * MB, 10 * MB),
    ):
        (place / "memory.max").write_text(f"{most}\n")
        (place / "memory.current").write_text(f"{now}\n")
        (place / "memory.stat").write_text(f"anon 1\ninactive_file {file}\nactive_file 7\n")
    budget, why = default_budget("/dev/shm/absent-arena", tmp_path)
    assert budget == 40 * MB
    assert "pod/memory.max" in why
    (group / "memory.high").write_text(f"{20 * MB + 5}\n")
    assert default_budget("/dev/shm/absent-arena", tmp_path)[0] == 10 * MB
    (tmp_path / "proc/self/cgroup").write_text("0::/../outside\n")  # seen from a namespace
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{2 * MB}\n")
    (tmp_path / "sys/fs/cgroup/memory.current").write_text("0\n")
    (tmp_path / "sys/fs/cgroup/memory.stat").write_text("")
    assert default_budget("/dev/shm/absent-arena", tmp_path)[0] == MB


# -- workers and chance ----------------------------------------------------------------------------


def test_workers_are_bounded_and_cancelling_waits_for_work_that_runs():
    async def story(workers):
        assert await workers.run(lambda: 42, 0) == 42
        with pytest.raises(NoRoom):
            await workers.run(lambda: (_ for _ in ()).throw(NoRoom("x")), 0)
        begun, go, ran = threading.Event(), threading.Event(), []

        def slow():
            begun.set()
            assert go.wait(10)
            ran.append("slow")

        running = asyncio.create_task(workers.run(slow, 0))
        waiting = asyncio.create_task(workers.run(lambda: ran.append("waiting"), 0))
        async with asyncio.timeout(10):
            while not begun.is_set():
                await asyncio.sleep(0.001)
        waiting.cancel()
        running.cancel()
        await asyncio.wait([waiting], timeout=5)
        assert waiting.cancelled()
        running.cancel()
        await asyncio.sleep(0)
        assert not running.done()
        asyncio.get_running_loop().call_soon(go.set)
        with pytest.raises(asyncio.CancelledError):
            await running
        assert ran == ["slow"]

    workers = ThreadWorkers(1)
    asyncio.run(story(workers))
    workers.close()
    with pytest.raises(UsageError):
        asyncio.run(workers.run(lambda: 1, 0))
    with pytest.raises(UsageError):
        ThreadWorkers(0)


def test_what_no_job_waits_for_leaves_threads_to_a_restore():
    """One of four threads for the background: the second piece waits, a restore does not."""

    async def story(workers):
        begun, go, ran = threading.Event(), threading.Event(), []

        def slow():
            begun.set()
            assert go.wait(10)
            ran.append("slow")

        kinds = (Traffic.SAVE, Traffic.SCRUB, Traffic.OFFLOAD)
        first = asyncio.create_task(workers.run(slow, 0, kinds[0]))
        async with asyncio.timeout(10):
            while not begun.is_set():
                await asyncio.sleep(0.001)
        rest = [
            asyncio.create_task(workers.run(lambda kind=kind: ran.append(kind), 0, kind))
            for kind in kinds[1:]
        ]
        for _ in range(20):
            assert await workers.run(lambda: 42, 0) == 42
        assert ran == []
        rest[0].cancel()
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(first, *rest, return_exceptions=True)
        assert ran == ["slow", Traffic.OFFLOAD]

    workers = ThreadWorkers(4, 1)
    asyncio.run(story(workers))
    workers.close()


def test_ids_are_32_hex_digits_and_delays_lie_within_their_bounds():
    ids = SystemIds()
    made = {ids.new() for _ in range(1000)}
    assert len(made) == 1000
    assert all(len(i) == 32 and int(i, 16) >= 0 for i in made)
    assert all(0.5 <= ids.uniform(0.5, 2) <= 2 for _ in range(1000))
