"""Laws of the envelope, for every kind of record: there and back, and nothing else passes.

Records are made from the types' own annotations, so a new kind is covered on the day it is added.
"""

from typing import get_type_hints

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from msgspec import structs

from p2pckpt import records as r
from p2pckpt import wire
from p2pckpt.coding.checksum import crc32c
from p2pckpt.errors import FormatError, UsageError
from p2pckpt.wire import KINDS, LASTING, pack, unpack, unpack_any

few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
layouts = st.integers(1, r.MAX_SHARDS).flatmap(
    lambda k: st.builds(r.Layout, k=st.just(k), m=st.integers(0, r.MAX_SHARDS - k))
)


@st.composite
def schedules(draw):
    """A schedule whose plan is one: ascending starts, each with an interval."""
    number = st.integers(0, 2**63 - 1)
    starts = sorted(draw(st.sets(number, min_size=1, max_size=3)))
    plan = tuple((start, draw(st.integers(1, 2**63 - 1))) for start in starts)
    extra = tuple(draw(st.lists(number, max_size=3)))
    last = draw(st.none() | number)
    return r.Schedule(draw(number), draw(number), plan, extra, last, draw(texts), draw(texts))


@st.composite
def manifests(draw):
    """A manifest that agrees with itself: its tables have an entry for each stored chunk."""
    layout, chunk = draw(layouts), draw(st.integers(1, 8))
    entries = []
    for rank in sorted(draw(st.sets(st.integers(0, 2**40), max_size=3))):
        length = draw(st.integers(0, 40))
        size = (-(-length // layout.k) + chunk - 1) // chunk * chunk
        stored = [max(0, min(size, length - i * size)) for i in range(layout.k)]
        stored += [size] * layout.m
        tables = tuple(draw(st.binary(min_size=n, max_size=n))
                       for n in (4 * -(-s // chunk) for s in stored))  # fmt: skip
        header, meta = draw(st.binary(max_size=12)), draw(texts)
        entries.append(r.RankSnapshot(rank, length, size, tables, header, meta))
    words = [draw(texts) for _ in range(3)]
    return r.Manifest(
        draw(OWN[r.Attempt]), words[0], words[1], layout, chunk, words[2], tuple(entries),
        draw(st.none() | texts),
    )  # fmt: skip


OWN = {
    r.Layout: layouts,
    r.Manifest: manifests(),
    r.Job: st.builds(
        r.Job, st.integers(0, 2**32), st.from_regex(r"[a-z][a-z_-]{0,9}", fullmatch=True)
    ),
    r.Attempt: st.builds(r.Attempt, texts, texts, *(st.integers(0, 2**63 - 1) for _ in range(3))),
    r.Schedule: schedules(),
}
BY_TYPE = {
    str: texts,
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    bytes: st.binary(max_size=12),
    type(None): st.none(),
}


def of_type(hint):
    """A strategy for a type annotation of a record."""
    if hint in OWN:
        return OWN[hint]
    if hint in BY_TYPE:
        return BY_TYPE[hint]
    if isinstance(hint, type) and issubclass(hint, r.Record):
        return of_record(hint)
    if isinstance(hint, type) and issubclass(hint, str):  # a StrEnum
        return st.sampled_from(list(hint))
    origin, args = getattr(hint, "__origin__", None), getattr(hint, "__args__", ())
    if origin is tuple and args[1:] == (...,):
        return st.lists(of_type(args[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*(of_type(arg) for arg in args))
    if origin is dict:
        return st.dictionaries(of_type(args[0]), of_type(args[1]), max_size=3)
    if (args and origin is None) or str(origin) == "typing.Union":
        return st.one_of(*(of_type(arg) for arg in args))
    raise TypeError(f"no strategy for {hint}")


def of_record(kind):
    hints = get_type_hints(kind)
    return st.builds(kind, **{name: of_type(hints[name]) for name in kind.__struct_fields__})


RECORDS = {
    name: OWN[kind] if kind in OWN else of_record(kind) for name, kind in sorted(KINDS.items())
}
any_record = st.sampled_from(sorted(RECORDS)).flatmap(RECORDS.__getitem__)


@pytest.mark.parametrize("name", list(RECORDS))
@few
@given(data=st.data())
def test_there_and_back(name, data):
    record = data.draw(RECORDS[name])
    packed = pack(record)
    assert packed.startswith(b"p2pckpt/1 " + name.encode() + b" ")
    back = unpack(packed, KINDS[name])
    assert back == record
    assert type(back) is type(record)
    assert pack(back) == packed, "equal records have equal bytes"
    assert unpack_any(memoryview(packed)) == record


@pytest.mark.parametrize("name", sorted(kind.__name__ for kind in LASTING))
@few
@given(data=st.data())
def test_equal_envelopes_give_one_record_and_nothing_in_it_can_be_changed(name, data):
    record = data.draw(RECORDS[name])
    packed = pack(record)
    first = unpack(packed, KINDS[name])
    assert unpack(memoryview(bytearray(packed)), KINDS[name]) is first
    if name == "Member":  # labels; nobody writes there
        first = structs.replace(first, domains=None)
    assert isinstance(hash(first), int), "hashable: no list, no dictionary"


@settings(max_examples=60, deadline=None)
@given(any_record)
def test_every_flipped_bit_and_every_truncation_is_noticed(record):
    packed = pack(record)
    assume(len(packed) < 1500)
    for at in range(len(packed)):
        damaged = bytearray(packed)
        damaged[at] ^= 1 << (at % 8)
        with pytest.raises(FormatError):
            unpack_any(bytes(damaged))
        with pytest.raises(FormatError):
            unpack_any(packed[:at])


@settings(max_examples=15, deadline=None)
@given(any_record)
def test_all_eight_bits_of_the_head_and_some_of_the_body(record):
    packed = pack(record)
    head = packed.index(b"\n") + 1
    for at in [*range(head), *range(head, len(packed), 7)]:
        for bit in range(8):
            damaged = bytearray(packed)
            damaged[at] ^= 1 << bit
            with pytest.raises(FormatError):
                unpack_any(bytes(damaged))


@settings(max_examples=100, deadline=None)
@given(any_record, st.binary(min_size=1, max_size=20))
def test_nothing_may_follow_or_precede(record, more):
    packed = pack(record)
    for damaged in (packed + more, packed + packed, packed + b"\n"):
        with pytest.raises(FormatError):
            unpack_any(damaged)
    if not (more + packed).startswith(packed):
        with pytest.raises(FormatError):
            unpack_any(more + packed)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.binary(max_size=200), st.binary(max_size=80).map(lambda b: b"p2pckpt/1 " + b)))
def test_random_bytes_are_a_format_error_and_nothing_else(data):
    with pytest.raises(FormatError):
        unpack_any(data)


@settings(max_examples=200, deadline=None)
@given(any_record, st.sampled_from(sorted(KINDS)), st.binary(max_size=60))
def test_a_right_digest_over_a_wrong_body_is_a_format_error(record, name, noise):
    # Whoever can write the ledger can make digests: types and validity must hold by themselves.
    body = pack(record).partition(b"\n")[2]
    for content in (body, noise, body[:-1] + noise):
        kind = name.encode()
        crc = crc32c(content, crc32c(kind))
        forged = b"p2pckpt/1 %s %d %08x\n%s" % (kind, len(content), crc, content)
        try:
            found = unpack_any(forged)
        except FormatError:
            continue
        assert type(found) is KINDS[name]


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(sorted(KINDS)))
def test_a_kind_that_was_not_asked_for(data, name):
    record = data.draw(any_record)
    assume(type(record) is not KINDS[name])
    with pytest.raises(FormatError):
        unpack(pack(record), KINDS[name])


@settings(max_examples=30, deadline=None)
@given(any_record)
def test_the_head_is_short_and_the_size_is_what_it_says(record):
    head, _, body = pack(record).partition(b"\n")
    assert len(head) < 96
    assert int(head.split(b" ")[2]) == len(body) <= wire.MAX_FRAME_BYTES


@given(st.one_of(st.none(), st.integers(), st.binary(), st.dictionaries(texts, texts)))
def test_pack_takes_records_only(thing):
    with pytest.raises(UsageError):
        pack(thing)
