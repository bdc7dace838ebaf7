"""What stores and proxies answer that no document of S3 has: boto3 itself, and no network."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from botocore.awsrequest import AWSResponse
from urllib3.exceptions import SSLError

from p2pckpt.backends.s3 import Place, S3Objects
from p2pckpt.backends.s3_calls import MIB
from p2pckpt.errors import ObjectStoreUnavailable
from p2pckpt.ports import Pending, Upload
from simulations.world import clock

PLACE = Place("bucket", "runs", "http://store.invalid", timeout_s=5.0)


class Inline:
    """`ports.Workers` that do it here and now."""

    async def run(self, work, cost_bytes, traffic=None):
        return work()


@pytest.fixture
def store(monkeypatch):
    """The objects, and what answers: (method, path) -> (status, headers, body)."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    objects, asked = S3Objects(PLACE, Inline()), []
    told = SimpleNamespace(objects=objects, asked=asked, answer=None, raw=None)

    def send(request, **_):
        path = request.url.partition("store.invalid/bucket")[2]
        asked.append((request.method, path))
        status, headers, body = told.answer(request.method, path)
        raw = SimpleNamespace(stream=lambda *_, **__: iter([body]), read=lambda *_: body)
        return AWSResponse(request.url, status, headers, told.raw or raw)

    objects._client.meta.events.register("before-send.s3", send)
    return told


def test_deleting_what_is_not_there_is_fine_where_a_store_says_404(store):
    """As Google's does (XML API, DELETE Object), also to a delete that is repeated."""
    gone = b"<Error><Code>NoSuchKey</Code><Message>no such object</Message></Error>"
    store.answer = lambda _, path: (404, {}, gone) if path.endswith("/a") else (204, {}, b"")
    clock.run(store.objects.delete(["a", *(f"b{i}" for i in range(9))]), limit_s=60.0)
    assert len(store.asked) == 10


CALLS = {
    "list": lambda objects: objects.list("job/"),
    "get": lambda objects: objects.get("name"),
    "get_into": lambda objects: objects.get_into("name", 0, memoryview(bytearray(4))),
    "head": lambda objects: objects.head("name"),
    "put": lambda objects: objects.put(Upload("name", 4, 1, lambda at, n: b"data"[at : at + n])),
    "parts": lambda objects: objects.put(Upload("name", 32 * MIB, MIB, lambda _, n: bytes(n))),
    "put_absent": lambda objects: objects.put_absent("name", b"data"),
    "delete": lambda objects: objects.delete(["name"]),
    "pending": lambda objects: objects.pending("job/"),
    "abort": lambda objects: objects.abort(Pending("name", "id", 0.0)),
}
ANSWERS = {
    "no XML": ((206, {"content-type": "text/html"}, b"this is a proxy"), set()),
    "https": ((301, {"location": "https://store.invalid/"}, b"<html>moved</html>"), set()),
    "an empty one": ((200, {}, b""), {"list", "put", "delete", "pending", "abort"}),
}
"""What is answered to everything, and the calls that find nothing wrong with it."""


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("answer", ANSWERS)
def test_what_no_store_answers_is_told_as_a_store_that_is_away(store, call, answer):
    """A proxy's answer, or one of a port that redirects: boto3 raises what is no error of its."""
    told, fine = ANSWERS[answer]
    store.answer = lambda *_: told
    wrong = nullcontext() if call in fine else pytest.raises(ObjectStoreUnavailable)
    with wrong:
        clock.run(CALLS[call](store.objects), limit_s=60.0)


@pytest.mark.parametrize("call", ["get", "get_into"])
def test_a_record_of_tls_that_is_damaged_on_the_way_is_a_store_that_is_away(store, call):
    class Damaged:
        """The body of an answer."""

        def read(self, amount=None):
            raise SSLError("DECRYPTION_FAILED_OR_BAD_RECORD_MAC")

        readinto = read

    store.raw = Damaged()
    store.answer = lambda *_: (206, {"content-length": "4"}, b"")
    with pytest.raises(ObjectStoreUnavailable, match="BAD_RECORD_MAC"):
        clock.run(CALLS[call](store.objects), limit_s=60.0)
