"""The envelope: one form for each record, readable, and nothing else gets through.

(The general laws are in tests/property/test_wire_property.py.)
"""

import msgspec
import pytest
from ledger_world import LEDGER, attempt
from msgspec import structs

from p2pckpt import errors, wire
from p2pckpt import records as r
from p2pckpt.agent.closing import Ballot, report_of
from p2pckpt.agent.context import Home
from p2pckpt.agent.holdings import Holdings, document_name
from p2pckpt.agent.serve import Serving
from p2pckpt.backends.inproc.cluster import FakeCluster
from p2pckpt.backends.inproc.peers import MAX_MESSAGE_BYTES
from p2pckpt.coding.checksum import crc32c
from p2pckpt.config import Config
from p2pckpt.errors import FormatError, UsageError
from p2pckpt.wire import pack, unpack, unpack_any
from simulations.world import clock

PING = wire.Ping(store_id="s")


def envelope(kind, body, version=1, length=None, crc=None):
    """An envelope as anybody could forge it: a right digest over whatever body."""
    kind, body = kind.encode(), body.encode() if isinstance(body, str) else body
    length = len(body) if length is None else length
    crc = crc32c(body, crc32c(kind)) if crc is None else crc
    return b"p2pckpt/%d %s %d %08x\n%s" % (version, kind, length, crc, body)


def test_the_form_never_changes_within_a_version():
    # What stands in ledgers and beside RAM files today must be readable by the next release.
    expected = (
        b"p2pckpt/1 Attempt 101 abeaba8b\n"
        b'{"ledger_id":"11111111111111111111111111111111","job":"1000.job",'
        b'"generation":1,"ordinal":2,"step":3}'
    )
    assert pack(attempt(2, 3)) == expected
    assert unpack(expected, r.Attempt) == attempt(2, 3)


def test_fields_of_maps_are_in_one_order():
    facts = ("n", "h", "s", "ses", "p", "t")
    a = r.Member(*facts, {"rack": "r1", "pod": "p0"})
    b = r.Member(*facts, {"pod": "p0", "rack": "r1"})
    assert a == b
    assert pack(a) == pack(b)


def test_kinds_are_all_records_and_messages_and_their_names_are_unique():
    classes = [
        c
        for module in (r, wire)
        for c in vars(module).values()
        if isinstance(c, type) and issubclass(c, r.Record) and c is not r.Record
    ]
    assert set(wire.KINDS.values()) == set(classes)
    assert len(wire.KINDS) == len({id(c) for c in classes})
    assert all(name.isascii() and len(name) < 30 for name in wire.KINDS)


def test_the_bytes_may_be_a_view_of_ram():
    assert unpack_any(memoryview(bytearray(pack(PING)))) == PING


FORGED = {
    "an unknown kind": envelope("Pickle", "{}"),
    "an unknown version": envelope("Ping", '{"store_id":"s"}', version=2),
    "version 0": envelope("Ping", '{"store_id":"s"}', version=0),
    "a wrong length": envelope("Ping", '{"store_id":"s"}', length=17),
    "a negative length": envelope("Ping", "", length=-1),
    "a wrong digest": envelope("Ping", '{"store_id":"s"}', crc=0),
    "an unknown field": envelope("Ping", '{"store_id":"s","more":1}'),
    "a missing field": envelope("Pong", '{"store_id":"s"}'),
    "a wrong type": envelope("Ping", '{"store_id":1}'),
    "no object": envelope("Ping", "[]"),
    "two bodies": envelope("Ping", '{"store_id":"s"}{"store_id":"s"}'),
    "no JSON": envelope("Ping", "store_id"),
    "no UTF-8": envelope("Ping", b'{"store_id":"\xff"}'),
    "a record that is not valid": envelope("Layout", '{"k":0,"m":0}'),
    "another negative number": envelope(
        "Attempt", '{"ledger_id":"","job":"","generation":-1,"ordinal":0,"step":0}'
    ),
    "a number beyond 64 bits": envelope("Layout", f'{{"k":{10**30},"m":0}}'),
    "a float for a count": envelope("Layout", '{"k":1.5,"m":0}'),
    "a truth for a count": envelope("Layout", '{"k":true,"m":0}'),
    "nested beyond reason": envelope("Ping", "[" * 100_000 + "]" * 100_000),
    "an unknown verdict": envelope("Closed", '{"generation":1,"ballot":1,"close":"no","by":""}'),
    "spaces in the head": pack(PING).replace(b" Ping", b"  Ping", 1),
    "a plus sign": pack(PING).replace(b" Ping 1", b" Ping +1", 1),
    "a leading zero": pack(PING).replace(b" Ping ", b" Ping 0", 1),
    "upper case": pack(PING).partition(b"\n")[0].upper() + b"\n" + pack(PING).partition(b"\n")[2],
    "one more word": pack(PING).replace(b"\n", b" x\n", 1),
    "an empty head": b"\n",
    "the magic alone": b"p2pckpt/",
    "an endless head": b"p2pckpt/1 Ping " + b"9" * 10_000,
    "an endless number": b"p2pckpt/1 Ping " + b"9" * 75 + b" 0\n",
    "nothing": b"",
    "a pickle": b"\x80\x04\x95",
}


@pytest.mark.parametrize("what", list(FORGED))
def test_whatever_is_forged_is_a_format_error(what):
    with pytest.raises(FormatError) as caught:
        unpack_any(FORGED[what])
    assert len(str(caught.value)) < 500, "an error names what was found, it does not repeat it"


def test_an_unknown_version_is_refused_with_both_numbers():
    with pytest.raises(FormatError, match=r"version 7, this release reads \(1,\)"):
        unpack_any(envelope("Ping", "{}", version=7))


def test_a_kind_that_was_not_asked_for_is_named_with_the_one_that_was():
    with pytest.raises(FormatError, match=r"needs a Pong, has a Ping"):
        unpack(pack(PING), wire.Pong)


def test_only_records_of_the_protocol_are_packed():
    class Ping(r.Record, frozen=True):
        store_id: str = ""

    for stranger in (Ping(), msgspec.Raw(b""), "Ping", None):
        with pytest.raises(UsageError):
            pack(stranger)


def test_bound_of_an_envelope():
    with pytest.raises(FormatError, match="need at most"):
        pack(wire.ManifestReply(total=1, packed=bytes(wire.MAX_FRAME_BYTES * 3 // 4 + 16)))


def large_manifest(length, ranks=8, chunk=256 * 1024):
    """Of `ranks` snapshots of `length` bytes."""
    layout = r.Layout(4, 2)
    shard = -(-length // layout.k // chunk) * chunk
    empty = r.RankSnapshot(0, length, shard, (), header=b" " * 10**6)
    chunks = [-(-empty.stored_bytes(i, layout.k) // chunk) for i in range(layout.shards)]
    tables = tuple(bytes(4 * n) for n in chunks)
    entries = tuple(structs.replace(empty, rank=rank, tables=tables) for rank in range(ranks))
    return r.Manifest(attempt(1, 1), "n", "s", layout, chunk, "crc32c/1", entries)


def test_a_manifest_of_a_terabyte_share_stays_below_the_bound():
    assert len(pack(large_manifest(10**12 // 8))) < wire.MAX_FRAME_BYTES


def test_a_manifest_of_a_large_share_is_fetched_in_messages_that_fit():
    # 8 ranks of 80 GB; messages between peers have at most 4 MiB.
    packed = pack(large_manifest(80 * 10**9))
    assert len(packed) > 4 * MAX_MESSAGE_BYTES

    async def fetch():
        doors = FakeCluster(1).node("n", budget_bytes=10**6).doors()
        member = r.Member("n", "n", doors.arena.store_id, "", "", "")
        home = Home("n", Config(), doors, Holdings(doors.arena, doors.ids.new), None, member)
        serving = Serving(home, None)
        doors.arena.put_document(document_name("d"), packed)
        parts = [b""]
        while len(whole := b"".join(parts)) < len(packed):
            reply = serving.manifest(wire.GetManifest(attempt(1, 1), "n", "d", len(whole)))
            assert reply.packed
            assert reply.total == len(packed)
            assert len(pack(reply)) <= MAX_MESSAGE_BYTES
            parts.append(reply.packed)
        return whole

    assert clock.run(fetch(), limit_s=60.0) == packed


@pytest.mark.parametrize("ranks_a_node", [1, 8, 16])
def test_a_group_report_fits_the_ledger_even_if_every_rank_failed(ranks_a_node):
    decision = r.Decision(1, 1, r.Choice.RESTORE, "n0", "because")
    reports = []
    for i in range(r.GROUP_NODES):
        ranks = tuple(range(100_000 + ranks_a_node * i, 100_000 + ranks_a_node * (i + 1)))
        ballot = Ballot(decision, ranks, "")
        for rank in ranks:
            ballot.results[rank] = wire.RestoreDone(1, f"peer of {rank} is away" + "x" * 500, True)
        reports.append(report_of(f"gpu-{i:04d}.example.com", ballot))
        assert [rank for rank, why in reports[-1].failed if str(rank) in why] == list(ranks)
    assert len(pack(r.GroupReport(1, 1, 0, tuple(reports)))) <= wire.MAX_RECORD_BYTES


@pytest.mark.parametrize(
    "record",
    [
        wire.SaveStatus(ordinal=1, step=1, wait_s=float("inf")),
        wire.RestoreCall(ordinal=0, timeout_s=float("nan")),
        wire.RestoreFile(1, 1, "f", 1, 1, b"", "ram", seconds={"fetch": float("-inf")}),
        wire.Skipped(reason="file caf\udce9 not found"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_cannot_come_back_is_not_packed(record):
    try:
        packed = pack(record)
    except (UsageError, FormatError):
        return
    assert unpack_any(packed) == record


def test_ledger_id_has_no_envelope_and_stays_text():
    assert LEDGER.encode().decode("ascii") == LEDGER
    assert issubclass(errors.FormatError, errors.CheckpointError)
