"""What stores say no to: headers that are new, a wrong clock, keys that expired, too many calls.

The store is a small one of our own (`s3_fake`), as no real one does these on demand; the client is
the real one. What the real store does is in test_s3.py.
"""

import asyncio
import itertools
import random
from datetime import timedelta

import pytest
from s3_fake import fake_s3
from test_s3 import MIB, client, run, upload

from p2pckpt.backends.s3 import Place
from p2pckpt.errors import ObjectStoreUnavailable

TOO_LATE = timedelta(minutes=15)
"""What S3 allows between a signature and its own clock (S3 API reference, RequestTimeTooSkewed)."""


@pytest.fixture
def store(monkeypatch, tmp_path):
    """A store, and the file with our keys."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    with fake_s3() as (made, endpoint):
        made.place = Place("bucket", "t", endpoint, part_bytes=5 * MIB, timeout_s=20.0)
        made.keys = lambda key: (tmp_path / "credentials").write_text(
            f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret\n"
        )
        made.keys("first")
        yield made


NEW = ("x-amz-sdk-checksum-algorithm", "x-amz-trailer", "x-amz-decoded-content-length")
"""What the SDK adds by default since 1.36, and stores without trailing checksums refuse."""


def test_a_store_that_knows_no_new_headers_and_wants_an_md5_of_batches_is_served(store):
    """B094: what the SDK would add by itself is not sent, nor a batch delete: whole and in parts,
    an object is put, listed, read and deleted; its digest is our own."""

    def refuse(request):
        chunked = "aws-chunked" in request.headers.get("content-encoding", "")
        if chunked or any(name in request.headers for name in NEW):
            return 501, "NotImplemented", {}
        batch = "delete" in request.query and "content-md5" not in request.headers
        return (400, "InvalidRequest", {}) if batch else None

    store.refuse = refuse

    async def story():
        async with client(store.place) as objects:
            for data in (b"small", random.Random(2).randbytes(6 * MIB)):
                await objects.put(upload("d/x", data))
                assert await objects.put_absent("d/once", b"1")
                assert [s.length for s in await objects.list("d/")] == [1, len(data)]
                assert await objects.get("d/x") == data
                await objects.delete(["d/x", "d/once"])
                assert await objects.list("d/") == ()
        sent = [request for request in store.asked if request.method == "PUT"]
        assert len(sent) == 1 + 2 + 2
        assert all("x-amz-checksum-crc32c" in request.headers for request in sent)

    run(story)


@pytest.mark.parametrize("off_s", [1200, -1200])
def test_a_wrong_clock_is_said_to_be_one_with_how_far_it_is_off(store, off_s):
    """B100: our clock and the store's are 20 minutes apart. When they agree again, so do they."""
    store.clock_off_s = off_s
    store.refuse = lambda request: (
        (403, "RequestTimeTooSkewed", {}) if abs(store.now() - request.signed) > TOO_LATE else None
    )

    async def story():
        async with client(store.place) as objects:
            sign = "[+]" if off_s < 0 else "-"
            why = f"RequestTimeTooSkewed.*this clock is {sign}(1199|1200|1201) s off the store's"
            with pytest.raises(ObjectStoreUnavailable, match=why):
                await objects.put(upload("x", b"data"))
            store.clock_off_s = 0.0
            await objects.put(upload("x", b"data"))
            assert await objects.get("x") == b"data"

    run(story)


def test_a_request_that_is_repeated_is_signed_anew(store):
    """B100: each try has the date of its own sending, so none is too old however long it takes."""
    store.refuse = lambda request: (
        (503, "SlowDown", {"Retry-After": "1.1"}) if len(store.asked) < 4 else None
    )

    async def story():
        async with client(store.place) as objects:
            await objects.put(upload("x", b"data"))
        dates = [request.signed for request in store.asked]
        assert len(dates) == 4
        assert all(b - a >= timedelta(seconds=1) for a, b in itertools.pairwise(dates))

    run(story)


def test_keys_that_expire_in_mid_upload_are_read_anew_and_the_upload_goes_on(store):
    """B101: after its second part the store takes the first keys no more, and a while later there
    are new ones in the file. The same upload goes on with those."""

    def refuse(request):
        begun = any(2 in parts for parts in store.uploads.values())
        return (400, "ExpiredToken", {}) if begun and request.key == "first" else None

    store.refuse = refuse
    data = random.Random(4).randbytes(31 * MIB)

    async def story():
        async with client(store.place) as objects:
            putting = asyncio.create_task(objects.put(upload("x", data)))
            while sum(request.key == "first" for request in store.asked) < 12:  # it was refused
                await asyncio.sleep(0.01)
            assert not putting.done()
            store.keys("second")
            await putting
        assert len(store.uploads) == 1
        assert store.objects == {"/bucket/t/x": data}
        assert {request.key for request in store.asked} == {"first", "second"}

    run(story)


def test_many_uploads_at_once_get_through_a_store_that_is_busy(store):
    """B097: seven of ten requests are turned away for three seconds. All of 16 uploads end, and
    with fewer calls than tries at once would make."""
    chance, until_s = random.Random(7), 3.0

    def refuse(request):
        busy = request.at_s - store.asked[0].at_s < until_s
        return (503, "SlowDown", {}) if busy and chance.random() < 0.7 else None

    store.refuse = refuse

    async def story():
        async with client(store.place) as objects:
            await asyncio.gather(*(objects.put(upload(f"{i}", b"%d" % i)) for i in range(16)))
        assert store.objects == {f"/bucket/t/{i}": b"%d" % i for i in range(16)}
        assert 16 < len(store.asked) < 16 * 6
        names = [request.name for request in store.asked]
        gaps = [
            b.at_s - a.at_s
            for name in set(names)
            for a, b in itertools.pairwise(r for r in store.asked if r.name == name)
        ]
        assert len({round(gap, 2) for gap in gaps}) > len(gaps) // 3, "no jitter"

    run(story)
