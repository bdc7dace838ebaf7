"""The S3 backend against a real SeaweedFS and a small fake that throttles; and real agents on it.

What any object store must do is in tests/contract/test_object_store.py, run on both backends.
"""

import asyncio
import http.server
import itertools
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from p2pckpt.backends import s3
from p2pckpt.backends.s3 import Place, S3Objects, part_size
from p2pckpt.backends.seaweed import Seaweed
from p2pckpt.backends.workers import ThreadWorkers
from p2pckpt.errors import IntegrityError, ObjectStoreUnavailable, UsageError
from p2pckpt.ports import Upload
from p2pckpt.save.offload import checkpoint_name

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from s3_rig import CONFIG, RANKS, tell

MIB = 1024 * 1024
STORY_S = 60.0


@pytest.fixture(scope="module")
def server():
    with tempfile.TemporaryDirectory(prefix="p2pckpt-s3-") as place:
        with Seaweed.start(Path(place)) as running:
            yield running
        assert running.pid is None


@pytest.fixture
def place(server, monkeypatch):
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return Place(server.bucket, f"t/{os.urandom(6).hex()}", server.endpoint, part_bytes=5 * MIB)


@asynccontextmanager
async def client(place):
    workers = ThreadWorkers(4)
    objects = S3Objects(place, workers)
    try:
        yield objects
    finally:
        await objects.close()
        workers.close()


def run(story):
    async def main():
        async with asyncio.timeout(STORY_S):
            await story()

    asyncio.run(main())


def upload(name, data, unit=4096):
    return Upload(name, len(data), unit, lambda at, n: data[at : at + n])


# -- part sizes -----------------------------------------------------------------------------------


def test_part_sizes_are_worked_out_before_the_start():
    """B096."""
    place = Place("bucket", "")

    def size(length, unit=256 * 1024):
        return part_size(Upload("x", length, unit, lambda at, n: b""), place)

    assert size(0) == size(1) == size(16 * MIB) == 16 * MIB
    for length in (160_000 * MIB, 160_000 * MIB + 1, 700_000 * MIB + 12345, 5 * MIB * MIB):
        for unit in (512, 1000, 256 * 1024):
            assert size(length, unit) % unit == 0
            assert -(-length // size(length, unit)) <= 10_000
    with pytest.raises(UsageError, match="at most"):
        size(10_000 * 5 * 1024 * MIB + 1)


def test_objects_around_the_limit_of_parts(place):
    """B096."""

    async def story():
        async with client(replace(place, max_parts=2)) as objects:
            for length in (10 * MIB - 1000, 10 * MIB, 10 * MIB + 1, 11 * MIB):
                data = random.Random(length).randbytes(length)
                await objects.put(upload("x", data))
                assert await objects.get("x") == data

    run(story)


# -- a server that is away, or refuses ------------------------------------------------------------


def test_a_frozen_server_is_unavailable_within_the_deadline_and_then_again_there(server, place):
    async def story():
        async with client(replace(place, timeout_s=2.0)) as objects:
            await objects.put(upload("x", b"before"))
            server.freeze()
            try:
                began = time.monotonic()
                with pytest.raises(ObjectStoreUnavailable, match=place.prefix):
                    await objects.get("x")
                assert time.monotonic() - began < 8.0
            finally:
                server.thaw()
            assert await objects.get("x") == b"before"

    run(story)


@pytest.mark.slow
def test_a_request_outlives_a_restart_of_the_server(server, place):
    async def story():
        async with client(replace(place, timeout_s=50.0)) as objects:
            await objects.put(upload("x", b"before"))
            server.kill()
            reading = asyncio.create_task(objects.get("x"))
            await asyncio.sleep(1.0)
            assert not reading.done()
            server.spawn()
            assert await reading == b"before"

    try:
        run(story)
    finally:
        if server.pid is None:
            server.spawn()
        server.wait_ready()


def test_a_wrong_secret_and_a_wrong_bucket_are_named(place, monkeypatch):
    async def story():
        async with client(replace(place, bucket="no-such-bucket", timeout_s=2.0)) as objects:
            with pytest.raises(ObjectStoreUnavailable, match="no-such-bucket"):
                await objects.put(upload("x", b"data"))
            with pytest.raises(ObjectStoreUnavailable, match="NoSuchBucket"):
                await objects.list("")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        async with client(replace(place, timeout_s=2.0)) as objects:
            with pytest.raises(ObjectStoreUnavailable, match="SignatureDoesNotMatch"):
                await objects.put(upload("x", b"data"))

    run(story)


def test_credentials_that_change_are_read_anew(server, place, monkeypatch, tmp_path):
    """B101: the real store, which knows the first keys not at all."""
    file = tmp_path / "credentials"

    def write(key, secret):
        lines = ["[default]", f"aws_access_key_id = {key}", f"aws_secret_access_key = {secret}"]
        file.write_text("\n".join(lines))

    for name in server.environment:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    write("expired", "expired")
    data = random.Random(3).randbytes(11 * MIB)

    async def story():
        async with client(replace(place, timeout_s=20.0)) as objects:
            putting = asyncio.create_task(objects.put(upload("x", data)))
            await asyncio.sleep(1.0)
            assert not putting.done()
            write(server.access_key, server.secret_key)
            await putting
            assert await objects.get("x") == data

    run(story)


def test_the_server_checks_our_crc_so_damage_on_the_way_is_found(place, monkeypatch):
    right = s3.body_of
    broken = [True]

    def spoil(data):
        body = right(data)
        if broken[0]:
            body["Body"] = bytes([data[0] ^ 1]) + data[1:]
        return body

    monkeypatch.setattr(s3, "body_of", spoil)

    async def story():
        async with client(replace(place, timeout_s=1.5)) as objects:
            for data in (b"small", random.Random(1).randbytes(6 * MIB)):
                with pytest.raises(IntegrityError):
                    await objects.put(upload("x", data))
                assert await objects.head("x") is None
            assert await objects.pending("") == ()
            broken[0] = False
            await objects.put(upload("x", data))
            assert await objects.get("x") == data

    run(story)


UPLOADER = """
import asyncio, os, sys, time
from p2pckpt.backends.s3 import Place, S3Objects
from p2pckpt.backends.workers import ThreadWorkers
from p2pckpt.ports import Upload
bucket, prefix, endpoint, name = sys.argv[1:]
def part(at, n):
    if at:  # the first part is there, or on its way
        os.write(1, b"uploads\\n")  # at once: two parts may be asked for at the same time
        time.sleep(30)
    return bytes(n)
place = Place(bucket, prefix, endpoint, part_bytes=5 << 20)
upload = Upload(name, 15 << 20, 4096, part)
asyncio.run(S3Objects(place, ThreadWorkers(4)).put(upload))
"""


def test_uploads_of_killed_processes_are_found_and_aborted(place):
    """B095: kill -9 in mid-upload, five times; what others began stays."""
    for i in range(6):
        name = f"mine/{i}" if i else "other/x"
        where = (place.bucket, place.prefix, place.endpoint, name)
        command = [sys.executable, "-c", UPLOADER, *where]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as uploader:
            told = uploader.stdout.readline()
            uploader.kill()
            assert told == "uploads\n"

    async def story():
        async with client(place) as objects:
            left = await objects.pending("mine/")
            assert [p.name for p in sorted(left, key=lambda p: p.name)] == [
                f"mine/{i}" for i in range(1, 6)
            ]
            for pending in left:
                await objects.abort(pending)
            assert [p.name for p in await objects.pending("")] == ["other/x"]
            assert await objects.list("") == ()

    run(story)


# -- throttling -----------------------------------------------------------------------------------


class Throttling(http.server.BaseHTTPRequestHandler):
    """Answers SlowDown `refuse` times, then with an object of 4 bytes; keeps when it was asked."""

    refuse = 0
    retry_after = ""
    asked: list = []

    def do_GET(self):
        self.asked.append(time.monotonic())
        slow = len(self.asked) <= self.refuse
        body = b"<Error><Code>SlowDown</Code><Message>slow</Message></Error>" if slow else b"data"
        self.send_response(503 if slow else 200)
        if slow and self.retry_after:
            self.send_header("Retry-After", self.retry_after)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def throttling(refuse, retry_after=""):
    handler = type("H", (Throttling,), {"refuse": refuse, "retry_after": retry_after, "asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as fake:
        thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{fake.server_port}", handler.asked
        finally:
            fake.shutdown()
            thread.join()


def test_throttling_is_waited_out_as_the_server_wishes(place):
    """B097."""

    async def story(endpoint, asked):
        async with client(replace(place, endpoint=endpoint)) as objects:
            assert await objects.get("x") == b"data"
        gaps = [b - a for a, b in itertools.pairwise(asked)]
        assert len(gaps) == 2
        assert min(gaps) >= 1.0

    with throttling(2, "1") as (endpoint, asked):
        run(lambda: story(endpoint, asked))


def test_throttling_without_end_is_unavailable_after_a_few_spaced_tries(place):
    async def story(endpoint, asked):
        async with client(replace(place, endpoint=endpoint, timeout_s=3.0)) as objects:
            with pytest.raises(ObjectStoreUnavailable, match="SlowDown"):
                await objects.get("x")
        assert 3 <= len(asked) <= 8

    with throttling(10**6) as (endpoint, asked):
        run(lambda: story(endpoint, asked))


# -- real agents on a real store ------------------------------------------------------------------


def test_agents_offload_to_the_real_store_and_restore_from_it_after_all_ram_is_lost(place):
    config = replace(CONFIG, decide_wait_s=1.0, lease_s=2.0, keepalive_s=0.5, lost_grace_s=0.5)

    async def story(rig):
        await rig.train(1, 2)
        await rig.until(lambda: rig.offloaded() == [2], 20.0)
        names = [s.name for s in await rig.objects.list("")]
        assert checkpoint_name(rig.attempt(2)) in names
        assert len(names) == 2 * RANKS + 1
        await rig.lose_all(settle_s=4.0)
        await rig.launch()
        assert await rig.restore() == (2, ["s3"] * RANKS)

    async def main():
        async with client(place) as objects:
            await tell(story, config=config, objects=objects)

    run(main)
