"""The object store on S3 and what speaks its dialect, by boto3 in worker threads.

Every request carries our own CRC32C, so a store that checks finds damage on the way; one that does
not is no danger, because readers check every chunk anyway. boto3's retries are off: here a request
is repeated with a back-off that doubles, has jitter and honours Retry-After, until its deadline,
and is signed anew each time. Bodies must be bytes (boto3 refuses views), so parts are copied one at
a time, PARTS_AT_ONCE of them at most.

Only calls that every S3 dialect has are used (reference: which store supports what): multipart
with a CRC32C a part, single deletes, If-None-Match only where a second writer of the same bytes
would do no harm. Part sizes follow from the length before the start, as 10,000 parts is the end.

Contract: `ports.ObjectStore`. Time-outs, throttling, refused credentials, a wrong clock or bucket
are ObjectStoreUnavailable with the store's own words; no botocore exception comes out. Cancelling
waits for the request that runs, so nobody writes into memory afterwards.
"""

from __future__ import annotations

import asyncio
import random
from builtins import list as listing
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from p2pckpt.backends.s3_calls import (
    FOREIGN,
    GONE_UPLOAD,
    MIB,
    ClientError,
    Place,
    all_of,
    body_of,
    code_of,
    date_of,
    judged,
    open_client,
    read_into,
    retry_after_s,
)
from p2pckpt.errors import (
    CheckpointError,
    IntegrityError,
    ObjectAbsent,
    ObjectStoreUnavailable,
    UsageError,
)
from p2pckpt.ports import Pending, Stored, Upload, Workers
from p2pckpt.traffic import Traffic

__all__ = ["Place", "S3Objects", "part_size"]

T = TypeVar("T")

MAX_PART_BYTES = 5 * 1024 * MIB
PARTS_AT_ONCE = 4
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 20.0
ABORTS = 5
"""An abort may miss a part that is in flight; so it is repeated until none is listed."""


def part_size(upload: Upload, place: Place) -> int:
    """Bytes of a part: multiples of the upload's unit, and never more than the allowed parts.

    Raises UsageError if the object is too long for the store.
    """
    unit = upload.unit_bytes
    least = max(place.part_bytes, -(-upload.length // place.max_parts))
    size = -(-least // unit) * unit
    if size > MAX_PART_BYTES:
        raise UsageError(
            f"{upload.name}: {upload.length} bytes need parts of {size} bytes, at most "
            f"{MAX_PART_BYTES} are allowed"
        )
    return size


class S3Objects:
    """:class:`p2pckpt.ports.ObjectStore` on a bucket. ``workers`` runs the blocking requests."""

    def __init__(self, place: Place, workers: Workers) -> None:
        self._place = place
        self._workers = workers
        self._client = open_client(place)
        self._root = f"{place.prefix}/" if place.prefix else ""
        self._where = f"s3://{place.bucket}/{self._root}"

    # -- the port ---------------------------------------------------------------------------------

    async def put(self, upload: Upload) -> None:
        """See ports."""
        size = part_size(upload, self._place)
        if upload.length <= size:
            await upload.ready(upload.length)
            await self._try(upload.name, lambda: self._put_whole(upload), Traffic.OFFLOAD)
            return
        upload_id = await self._try(upload.name, lambda: self._begin(upload))
        try:
            parts = await self._parts(upload, upload_id, size)
            await self._try(upload.name, lambda: self._complete(upload, upload_id, parts))
        except ObjectStoreUnavailable:
            raise  # who cannot be reached cannot be told to abort: it is found by age
        except CheckpointError:
            await self._give_up(Pending(upload.name, upload_id, 0.0))
            raise

    async def put_absent(self, name: str, data: bytes) -> bool:
        """See ports."""
        if await self.head(name) is not None:
            return False

        def work() -> bool:
            try:
                self._client.put_object(**self._key(name), **body_of(data), IfNoneMatch="*")
            except ClientError as e:
                if code_of(e) in ("PreconditionFailed", "412", "ConditionalRequestConflict"):
                    return False
                if code_of(e) not in ("NotImplemented", "501"):
                    raise
                self._client.put_object(**self._key(name), **body_of(data))
            return True

        return await self._try(name, work)

    async def get(self, name: str) -> bytes:
        """See ports."""

        def work() -> bytes:
            answer = self._client.get_object(**self._key(name))
            data = bytes(answer["Body"].read())
            if len(data) != answer["ContentLength"]:
                raise OSError(f"{name}: the answer broke off at {len(data)} bytes")
            return data

        return await self._try(name, work)

    async def get_into(self, name: str, offset: int, into: memoryview) -> None:
        """See ports."""
        if not len(into):
            return
        last = offset + len(into) - 1

        def work() -> None:
            try:
                answer = self._client.get_object(**self._key(name), Range=f"bytes={offset}-{last}")
            except ClientError as e:
                if code_of(e) in ("InvalidRange", "416"):
                    raise IntegrityError(f"{name}: ends before byte {offset}") from None
                raise
            if answer["ContentLength"] != len(into):
                answer["Body"].close()
                raise IntegrityError(
                    f"{name}: {answer['ContentLength']} bytes at {offset}, needs {len(into)}"
                )
            read_into(answer["Body"], into, name)

        await self._try(name, work)

    async def head(self, name: str) -> Stored | None:
        """See ports."""

        def work() -> Stored:
            answer = self._client.head_object(**self._key(name))
            return Stored(name, int(answer["ContentLength"]))

        try:
            return await self._try(name, work)
        except ObjectAbsent:
            return None

    async def list(self, prefix: str) -> tuple[Stored, ...]:
        """See ports. The deadline is one page's."""
        found: listing[Stored] = []
        token: dict[str, str] = {}
        while True:
            page = await self._try(prefix, lambda: self._list_page(prefix, token))  # noqa: B023
            for item in page.get("Contents", ()):
                found.append(Stored(item["Key"][len(self._root) :], int(item["Size"])))
            if not page.get("IsTruncated"):
                return tuple(sorted(found, key=lambda s: s.name))
            token = {"ContinuationToken": page["NextContinuationToken"]}

    async def delete(self, names: Sequence[str]) -> None:
        """See ports. One by one: batch deletes want a Content-MD5 on some stores."""
        limit = asyncio.Semaphore(PARTS_AT_ONCE)

        async def one(name: str) -> None:
            async with limit:
                try:
                    await self._try(name, lambda: self._client.delete_object(**self._key(name)))
                except ObjectAbsent:
                    pass  # so some stores say it, also to a delete that is repeated

        await all_of(one(name) for name in names)

    async def pending(self, prefix: str) -> tuple[Pending, ...]:
        """See ports. Ages are by the store's own clock."""
        found: listing[Pending] = []
        marks: dict[str, str] = {}
        while True:
            page = await self._try(prefix, lambda: self._pending_page(prefix, marks))  # noqa: B023
            now = date_of(page)
            for item in page.get("Uploads", ()):
                name, age_s = item["Key"][len(self._root) :], (now - item["Initiated"])
                found.append(Pending(name, item["UploadId"], max(0.0, age_s.total_seconds())))
            if not page.get("IsTruncated"):
                return tuple(f for f in found if f.name.startswith(prefix))
            marks = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page["NextUploadIdMarker"],
            }

    async def abort(self, pending: Pending) -> None:
        """See ports."""
        for _ in range(ABORTS):
            if await self._try(pending.name, lambda: self._abort_once(pending)):
                return
        raise ObjectStoreUnavailable(f"{pending.name}: parts are left after {ABORTS} aborts")

    async def close(self) -> None:
        """See ports."""
        await self._workers.run(self._client.close, 0)

    # -- requests: these run on a worker ----------------------------------------------------------

    def _key(self, name: str) -> dict[str, str]:
        return {"Bucket": self._place.bucket, "Key": self._root + name}

    def _put_whole(self, upload: Upload) -> None:
        data = upload.part(0, upload.length) if upload.length else b""
        self._client.put_object(**self._key(upload.name), **body_of(data))

    def _begin(self, upload: Upload) -> str:
        key = self._key(upload.name)
        begun = self._client.create_multipart_upload(**key, ChecksumAlgorithm="CRC32C")
        return str(begun["UploadId"])

    def _put_part(self, upload: Upload, upload_id: str, number: int, size: int) -> dict[str, Any]:
        offset = (number - 1) * size
        body = body_of(upload.part(offset, min(size, upload.length - offset)))
        answer = self._client.upload_part(
            **self._key(upload.name), **body, UploadId=upload_id, PartNumber=number
        )
        return {
            "PartNumber": number,
            "ETag": answer["ETag"],
            "ChecksumCRC32C": body["ChecksumCRC32C"],
        }

    def _complete(self, upload: Upload, upload_id: str, parts: listing[dict[str, Any]]) -> None:
        """Complete; an upload that is gone was completed by an earlier try, if the object is
        there in its length."""
        key = self._key(upload.name)
        try:
            self._client.complete_multipart_upload(
                **key, UploadId=upload_id, MultipartUpload={"Parts": parts}
            )
        except ClientError as e:
            if code_of(e) not in GONE_UPLOAD:
                raise
        found = int(self._client.head_object(**key)["ContentLength"])
        if found != upload.length:
            raise IntegrityError(f"{upload.name}: {found} bytes stored, needs {upload.length}")

    def _list_page(self, prefix: str, token: dict[str, str]) -> Any:
        return self._client.list_objects_v2(
            Bucket=self._place.bucket, Prefix=self._root + prefix, **token
        )

    def _pending_page(self, prefix: str, marks: dict[str, str]) -> Any:
        return self._client.list_multipart_uploads(
            Bucket=self._place.bucket, Prefix=self._root + prefix, **marks
        )

    def _abort_once(self, pending: Pending) -> bool:
        """Abort, and look whether anything is left of it."""
        key = {**self._key(pending.name), "UploadId": pending.upload_id}
        try:
            self._client.abort_multipart_upload(**key)
            return not self._client.list_parts(**key).get("Parts")
        except ClientError as e:
            if code_of(e) in GONE_UPLOAD:
                return True
            raise

    # -- around them ------------------------------------------------------------------------------

    async def _parts(self, upload: Upload, upload_id: str, size: int) -> listing[dict[str, Any]]:
        limit = asyncio.Semaphore(PARTS_AT_ONCE)

        async def one(number: int) -> dict[str, Any]:
            async with limit:
                await upload.ready(min(size, upload.length - (number - 1) * size))
                work = partial(self._put_part, upload, upload_id, number, size)
                return await self._try(upload.name, work, Traffic.OFFLOAD)

        return await all_of(one(n) for n in range(1, -(-upload.length // size) + 1))

    async def _give_up(self, pending: Pending) -> None:
        try:
            await self.abort(pending)
        except ObjectStoreUnavailable:
            pass  # it stays pending, and is found by age

    async def _try(
        self, name: str, request: Callable[[], T], traffic: Traffic = Traffic.RESTORE
    ) -> T:
        """A request until it is answered for good, or the deadline."""
        loop = asyncio.get_running_loop()
        deadline, pause_s = loop.time() + self._place.timeout_s, FIRST_PAUSE_S
        while True:
            try:
                return await self._workers.run(request, 0, traffic)
            except FOREIGN as e:
                found = judged(e)
                wait_s = retry_after_s(e) or pause_s * random.uniform(0.5, 1.0)
            if not found.again or loop.time() + wait_s > deadline:
                raise found.error(f"{self._where}{name}: {found.why}")
            if found.renew:
                self._client = open_client(self._place)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            await asyncio.sleep(wait_s)
