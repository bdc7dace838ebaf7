"""One valid example of every record and message, made from the types' own annotations.

A mutation that begins with a valid input gets further than noise does. Records whose fields have
to agree with each other are written out here.
"""

from enum import StrEnum
from functools import cache
from types import NoneType
from typing import get_args, get_origin, get_type_hints

from p2pckpt import records as r
from p2pckpt.coding.checksum import crc32c
from p2pckpt.wire import KINDS, pack

CHUNK = 8
ATTEMPT = r.Attempt("ledger", "1000.job", 1, 2, 3)
LENGTH = 20
FULL, LAST = (crc32c(bytes(n)).to_bytes(4, "little") for n in (CHUNK, LENGTH % CHUNK))
ENTRY = r.RankSnapshot(0, LENGTH, 16, (FULL * 2, LAST, FULL * 2), b"{}", "{}")
OWN = {
    r.Layout: r.Layout(2, 1),
    r.Job: r.Job(1000, "job"),
    r.Attempt: ATTEMPT,
    r.RankSnapshot: ENTRY,
    r.Manifest: r.Manifest(ATTEMPT, "n1", "s1", r.Layout(2, 1), CHUNK, "crc32c", (ENTRY,), None),
    r.Schedule: r.Schedule(1, 2, ((0, 5), (10, 3)), (7,), 20, "n1", "because"),
}
PLAIN = {str: "a", int: 1, float: 0.5, bool: True, bytes: b"\0\1", NoneType: None}


def of(hint):
    """An example of a type annotation of a record."""
    if hint in OWN:
        return OWN[hint]
    if hint in PLAIN:
        return PLAIN[hint]
    if isinstance(hint, type) and issubclass(hint, r.Record):
        hints = get_type_hints(hint)
        return hint(**{name: of(hints[name]) for name in hint.__struct_fields__})
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return next(iter(hint))
    origin, inner = get_origin(hint), get_args(hint)
    if origin is tuple:
        return tuple(of(one) for one in inner if one is not ...)
    if origin is dict:
        return {of(inner[0]): of(inner[1])}
    return of(next(one for one in inner if one is not NoneType))  # a union


@cache
def envelopes():
    """Every kind of record and message, packed."""
    return tuple(pack(of(kind)) for kind in KINDS.values())


def enveloped(kind, body):
    """Any body under a first line that is right for it, so that what is looked at is the body."""
    crc = crc32c(body, crc32c(kind.encode()))
    return b"p2pckpt/1 %s %d %08x\n%s" % (kind.encode(), len(body), crc, body)


def body_of(record):
    """The JSON of a record."""
    return pack(record).partition(b"\n")[2]
