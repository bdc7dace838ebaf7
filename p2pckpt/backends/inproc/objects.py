"""The fake object store: objects in a dictionary, and faults to switch on.

Intuition. `FakeBucket` is one bucket for the whole cluster; `ObjectsDoor` is one agent's way to it.
A multipart upload shows nothing until it is completed, and one that its uploader left stays behind
as pending, as in S3.

Contract. `ObjectsDoor` is a `ports.ObjectStore`. Everything takes loop time by `bytes_per_s`. In an
outage each call ends with ObjectStoreUnavailable after `timeout_s`, as a client does that has
retried long enough. `error_after_the_fact` lets the next calls do what they were asked and then
fail: the answer was lost.

Consequence. Bytes that rot in the bucket are served as they are: finding that is the reader's task.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

from p2pckpt.backends.inproc.net import true_time
from p2pckpt.errors import IntegrityError, ObjectAbsent, ObjectStoreUnavailable
from p2pckpt.ports import Pending, Stored, Upload

Log = Callable[[str, str, dict[str, Any]], None]

MIN_PART_BYTES = 64 * 1024


class FakeBucket:
    """Objects by name. ``log(who, what, facts)`` is told of every write and fault."""

    def __init__(self, log: Log, bytes_per_s: float = 100e6, timeout_s: float = 10.0) -> None:
        self.log = log
        self.objects: dict[str, bytes] = {}
        self.begun: dict[str, tuple[str, float]] = {}
        self.bytes_per_s = bytes_per_s
        self.timeout_s = timeout_s
        self.calls = 0
        self._away_until = -math.inf
        self._late_errors = 0
        self._uploads = 0

    # -- faults -----------------------------------------------------------------------------------

    def outage(self, lasts_s: float = math.inf) -> None:
        """Nothing is answered for so long; 0 ends it."""
        self._away_until = true_time() + lasts_s
        self.log("bucket", "fault.bucket.outage", {"lasts_s": min(lasts_s, 1e9)})

    def slow(self, bytes_per_s: float) -> None:
        """Another speed from now on."""
        self.bytes_per_s = bytes_per_s
        self.log("bucket", "fault.bucket.slow", {"bytes_per_s": bytes_per_s})

    def error_after_the_fact(self, calls: int = 1) -> None:
        """The next calls that change something do so, and fail."""
        self._late_errors = calls

    def flip(self, name: str, offset: int, bit: int = 0) -> None:
        """Turn one bit of an object around."""
        wrong = bytearray(self.objects[name])
        wrong[offset] ^= 1 << bit
        self.objects[name] = bytes(wrong)
        self.log("bucket", "fault.bucket.flip", {"name": name, "offset": offset})

    def truncate(self, name: str, length: int) -> None:
        """Cut an object's end off."""
        self.objects[name] = self.objects[name][:length]
        self.log("bucket", "fault.bucket.truncate", {"name": name, "length": length})

    def lose(self, name: str) -> None:
        """An object is gone, and nobody of ours deleted it."""
        del self.objects[name]
        self.log("bucket", "fault.bucket.lose", {"name": name})

    # -- what the door is made of -----------------------------------------------------------------

    async def reach(self, count: int = 0) -> None:
        """Take the time of a request of `count` bytes, or fail; an outage stops what goes on."""
        self.calls += 1
        end = true_time() + 0.005 + count / self.bytes_per_s
        while True:
            away_s = self._away_until - true_time()
            if away_s > 0:
                await asyncio.sleep(min(self.timeout_s, away_s))
                if self._away_until > true_time() or away_s >= self.timeout_s:
                    raise ObjectStoreUnavailable("bucket: no answer")
                end = max(end, true_time())
            if (left_s := end - true_time()) < 1e-6:  # below any clock
                return
            await asyncio.sleep(min(left_s, 0.25))

    def changed(self) -> None:
        """Something was done; fail now if the answer is to be lost."""
        if self._late_errors > 0:
            self._late_errors -= 1
            raise ObjectStoreUnavailable("bucket: the answer was lost")

    def begin(self, name: str) -> str:
        """A multipart upload's id."""
        self._uploads += 1
        upload_id = f"upload-{self._uploads}"
        self.begun[upload_id] = (name, true_time())
        return upload_id

    def store(self, who: str, name: str, data: bytes) -> None:
        """Put an object."""
        self.objects[name] = data
        self.log(who, "bucket.put", {"name": name, "bytes": len(data)})


class ObjectsDoor:
    """`ports.ObjectStore` of one node."""

    def __init__(self, bucket: FakeBucket, node: str) -> None:
        self._bucket = bucket
        self._node = node

    async def put(self, upload: Upload) -> None:
        """See ports: part by part, invisible until the end; a failed one is aborted if it can."""
        bucket = self._bucket
        step = -(-MIN_PART_BYTES // upload.unit_bytes) * upload.unit_bytes
        await bucket.reach()
        upload_id = bucket.begin(upload.name)
        parts = []
        try:
            for offset in range(0, upload.length, step):
                await upload.ready(min(step, upload.length - offset))
                part = upload.part(offset, min(step, upload.length - offset))
                await bucket.reach(len(part))
                parts.append(part)
        except ObjectStoreUnavailable:
            raise  # who cannot be reached cannot be told to abort
        except Exception:
            bucket.begun.pop(upload_id, None)
            raise
        data = b"".join(parts)
        if len(data) != upload.length:
            raise IntegrityError(f"{upload.name}: parts are {len(data)} of {upload.length} bytes")
        if upload_id not in bucket.begun:
            raise ObjectStoreUnavailable(f"{upload.name}: the upload was aborted meanwhile")
        del bucket.begun[upload_id]
        bucket.store(self._node, upload.name, data)
        bucket.changed()

    async def put_absent(self, name: str, data: bytes) -> bool:
        """See ports."""
        await self._bucket.reach(len(data))
        if name in self._bucket.objects:
            return False
        self._bucket.store(self._node, name, bytes(data))
        self._bucket.changed()
        return True

    async def get(self, name: str) -> bytes:
        """See ports."""
        data = self._bucket.objects.get(name, b"")
        await self._bucket.reach(len(data))
        return self._object(name)

    async def get_into(self, name: str, offset: int, into: memoryview) -> None:
        """See ports."""
        await self._bucket.reach(len(into))
        data = self._object(name)[offset : offset + len(into)]
        if len(data) != len(into):
            raise IntegrityError(f"{name}: {len(data)} bytes at {offset}, needs {len(into)}")
        into[:] = data

    async def head(self, name: str) -> Stored | None:
        """See ports."""
        await self._bucket.reach()
        data = self._bucket.objects.get(name)
        return None if data is None else Stored(name, len(data))

    async def list(self, prefix: str) -> tuple[Stored, ...]:
        """See ports."""
        await self._bucket.reach()
        found = sorted(n for n in self._bucket.objects if n.startswith(prefix))
        return tuple(Stored(n, len(self._bucket.objects[n])) for n in found)

    async def delete(self, names: Sequence[str]) -> None:
        """See ports."""
        for name in names:
            await self._bucket.reach()
            if self._bucket.objects.pop(name, None) is not None:
                self._bucket.log(self._node, "bucket.delete", {"name": name})
        self._bucket.changed()

    async def pending(self, prefix: str) -> tuple[Pending, ...]:
        """See ports."""
        await self._bucket.reach()
        now = true_time()
        return tuple(
            Pending(name, upload_id, now - begun)
            for upload_id, (name, begun) in self._bucket.begun.items()
            if name.startswith(prefix)
        )

    async def abort(self, pending: Pending) -> None:
        """See ports."""
        await self._bucket.reach()
        self._bucket.begun.pop(pending.upload_id, None)
        self._bucket.changed()

    async def close(self) -> None:
        """See ports."""

    def _object(self, name: str) -> bytes:
        data = self._bucket.objects.get(name)
        if data is None:
            raise ObjectAbsent(f"{name}: there is no such object")
        return data
