"""What stores and proxies answer that no document of S3 has: boto3 itself, and no network."""

from types import SimpleNamespace

import pytest
from botocore.awsrequest import AWSResponse

from p2pckpt.backends.s3 import Place, S3Objects
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
    told = SimpleNamespace(objects=objects, asked=asked, answer=lambda method, path: (200, {}, b""))

    def send(request, **_):
        path = request.url.partition("store.invalid/bucket")[2]
        asked.append((request.method, path))
        status, headers, body = told.answer(request.method, path)
        raw = SimpleNamespace(stream=lambda *_, **__: iter([body]), read=lambda *_: body)
        return AWSResponse(request.url, status, headers, raw)

    objects._client.meta.events.register("before-send.s3", send)
    return told


def test_deleting_what_is_not_there_is_fine_where_a_store_says_404(store):
    """As Google's does (XML API, DELETE Object), also to a delete that is repeated."""
    gone = b"<Error><Code>NoSuchKey</Code><Message>no such object</Message></Error>"
    store.answer = lambda _, path: (404, {}, gone) if path.endswith("/a") else (204, {}, b"")
    clock.run(store.objects.delete(["a", *(f"b{i}" for i in range(9))]), limit_s=60.0)
    assert len(store.asked) == 10
