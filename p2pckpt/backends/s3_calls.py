"""What the S3 backend and boto3 say to each other: the client, bodies, and what an error means.

An answer is judged once, here: good; not there; wrong bytes; try again (throttled, overloaded, cut
off, expired credentials); or no use trying (refused). The words of the store stay in the message,
because they are what an operator needs.

Contract: `judged` knows every exception that a boto3 call raises; nothing else in the backend looks
at error codes, but for the few that are normal answers of one call.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from p2pckpt.coding.checksum import crc32c
from p2pckpt.errors import (
    CheckpointError,
    IntegrityError,
    MissingDependency,
    ObjectAbsent,
    ObjectStoreUnavailable,
    UsageError,
)

try:
    import boto3
    from botocore.config import Config as ClientConfig
    from botocore.exceptions import BotoCoreError
    from botocore.exceptions import ClientError as ClientError
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError
except ImportError as e:  # the extra is not installed
    raise MissingDependency("boto3 is absent: pip install 'p2pckpt[s3]'") from e

T = TypeVar("T")

MIB = 1024 * 1024
PART_BYTES = 16 * MIB
MAX_PARTS = 10_000
"""S3's bound of a multipart upload (S3 user guide, "multipart upload limits")."""

FOREIGN = (
    *(ClientError, BotoCoreError, OSError, HTTPError),
    *(ResponseParserError, KeyError),  # an answer that is no store's: no XML, or a field lacks
    RecursionError,  # boto3 follows a redirect by a request that is redirected
)
"""What a request may raise that is not ours."""

ABSENT = {"NoSuchKey", "NotFound", "404"}
GONE_UPLOAD = {"NoSuchUpload", *ABSENT}
BAD_BODY = {"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "InvalidChecksum"}
EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidAccessKeyId"}
AGAIN = {
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "RequestTimeout",
    "InternalError",
    "ServiceUnavailable",
    "OperationAborted",
}


@dataclass(frozen=True)
class Place:
    """Where the objects are: bucket, prefix, and how the store is spoken to.

    ``timeout_s`` bounds one request with all its retries.
    """

    bucket: str
    prefix: str
    endpoint: str = ""
    region: str = ""
    addressing: str = "auto"
    timeout_s: float = 60.0
    part_bytes: int = PART_BYTES
    max_parts: int = MAX_PARTS


def open_client(place: Place) -> Any:
    """A client of its own session: credentials by boto3's chain, no retries. UsageError."""
    addressing = place.addressing
    if addressing == "auto" and place.endpoint:
        addressing = "path"
    config = ClientConfig(
        connect_timeout=min(5.0, place.timeout_s),
        read_timeout=min(20.0, place.timeout_s),
        retries={"total_max_attempts": 1},
        max_pool_connections=16,
        tcp_keepalive=True,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": addressing, "payload_signing_enabled": False},
    )
    try:
        return boto3.session.Session().client(
            "s3",
            endpoint_url=place.endpoint or None,
            region_name=place.region or ("us-east-1" if place.endpoint else None),
            config=config,
        )
    except (BotoCoreError, ValueError) as e:
        raise UsageError(f"s3_endpoint {place.endpoint!r}, s3_region {place.region!r}: {e}") from e


def body_of(data: bytes) -> dict[str, Any]:
    """Request fields of a body with its CRC32C (big-endian, base64: S3's form)."""
    digest = crc32c(data).to_bytes(4, "big")
    return {"Body": data, "ChecksumCRC32C": base64.b64encode(digest).decode("ascii")}


def read_into(body: Any, into: memoryview, name: str) -> None:
    """Exactly `into` from a streaming answer; OSError if it breaks off."""
    at = 0
    while at < len(into):
        count = body.readinto(into[at : at + MIB])
        if not count:
            body.close()
            raise OSError(f"{name}: the answer broke off after {at} of {len(into)} bytes")
        at += count


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order; when one fails the others are ended before that is raised."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def code_of(error: ClientError) -> str:
    """The store's error code."""
    return str(error.response.get("Error", {}).get("Code", ""))


@dataclass(frozen=True)
class Judgement:
    """What an exception comes to: an error of ours, in the store's words, and whether the same
    request may be answered otherwise soon; `renew`: with the credentials read anew."""

    error: type[CheckpointError]
    why: str
    again: bool
    renew: bool = False


def judged(error: Exception) -> Judgement:
    """Of one exception of FOREIGN."""
    if isinstance(error, RecursionError):
        why = "it redirects without end: is s3_endpoint right, https or http?"
        return Judgement(ObjectStoreUnavailable, why, False)
    if not isinstance(error, ClientError):
        refused = type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError")
        return Judgement(ObjectStoreUnavailable, f"{type(error).__name__}: {error}", not refused)
    code = code_of(error)
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    why = f"{status} {code}: {error.response.get('Error', {}).get('Message', '')}"
    if code == "RequestTimeTooSkewed":
        offset_s = (datetime.now(UTC) - date_of(error.response)).total_seconds()
        why = f"{why}; this clock is {offset_s:+.0f} s off the store's"
    if code in ABSENT:
        return Judgement(ObjectAbsent, why, False)
    if code in BAD_BODY:
        return Judgement(IntegrityError, why, True)
    if code in EXPIRED:
        return Judgement(ObjectStoreUnavailable, why, True, renew=True)
    again = status >= 500 or status == 429 or code in AGAIN
    return Judgement(ObjectStoreUnavailable, why, again)


def retry_after_s(error: Exception) -> float | None:
    """The store's own wish, in seconds (RFC 9110, 10.2.3)."""
    if not isinstance(error, ClientError):
        return None
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    try:
        return max(0.0, float(headers.get("retry-after", "")))
    except ValueError:
        return None


def date_of(response: Any) -> datetime:
    """The time that an answer carries, else ours."""
    headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    try:
        return parsedate_to_datetime(headers["date"])
    except (KeyError, ValueError, TypeError):
        return datetime.now(UTC)
