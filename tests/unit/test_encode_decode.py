"""A rank's snapshot to shards and back, for all small layouts and awkward lengths; and the holder's
check, which must refuse every kind of damage with an error that names it.
"""

import hashlib
import json
from itertools import combinations

import numpy as np
import pytest
from ledger_world import Book
from msgspec import structs

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.serve import check_shard, decide_offer
from p2pckpt.coding.checksum import ALGORITHM, chunk_table, crc32c
from p2pckpt.coding.reed_solomon import Code
from p2pckpt.errors import CodingError, FormatError, IntegrityError, UsageError
from p2pckpt.restore.decode import decode_rank
from p2pckpt.restore.verify import bad_chunks, open_manifest, snapshot_table
from p2pckpt.save.encode import COLUMN_BYTES, encode_rank, header_of, shard_bytes
from p2pckpt.wire import pack

CHUNK = 512
LAYOUTS = [r.Layout(k, m) for k in (1, 2, 3, 4) for m in (0, 1, 2, 3)]
LENGTHS = sorted(
    {0, 1, 7, 8, 9, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1}
    | {3 * CHUNK, 4 * CHUNK - 1, 4 * CHUNK, 4 * CHUNK + 1, 13 * CHUNK + 5}
)
A = r.Attempt("1" * 32, "1000.job", 1, 2, 3)


def noise(length, seed=1):
    return bytearray(np.random.default_rng(seed).integers(0, 256, length, np.uint8).tobytes())


def encoded(image, layout, chunk=CHUNK, rank=0):
    size = shard_bytes(len(image), layout, chunk)
    parity = [bytearray(b"\xa5") * size for _ in range(layout.m)]
    entry = encode_rank(rank, memoryview(image), [memoryview(p) for p in parity], layout, chunk)
    return entry, parity


def data_shards(image, entry, layout):
    """The stored data shards, cut by the definition and not by the code under test."""
    size = entry.shard_bytes
    return [bytes(image[i * size : (i + 1) * size]) for i in range(layout.k)]


# -- encode ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_encode_is_the_code_over_padded_shards(layout):
    for length in LENGTHS:
        image = noise(length)
        entry, parity = encoded(image, layout)
        size = entry.shard_bytes
        assert size * layout.k >= length
        assert size % CHUNK == 0
        assert (size - CHUNK) * layout.k < length or size == 0
        shards = data_shards(image, entry, layout)
        padded = [s.ljust(size, b"\0") for s in shards]
        expected = [bytearray(size) for _ in range(layout.m)]
        Code(layout.k, layout.m).encode(padded, expected)
        assert parity == expected
        assert len(entry.tables) == layout.shards
        for index, stored in enumerate([*shards, *parity]):
            assert entry.stored_bytes(index, layout.k) == len(stored)
            assert entry.tables[index] == chunk_table(stored, CHUNK).tobytes()
        assert sum(entry.stored_bytes(i, layout.k) for i in range(layout.k)) == length


def test_encode_crosses_columns_without_a_seam():
    layout, chunk = r.Layout(2, 1), 256 * 1024
    for length in (2 * COLUMN_BYTES, 2 * COLUMN_BYTES + 1, 3 * COLUMN_BYTES + chunk - 1):
        image = noise(length)
        entry, parity = encoded(image, layout, chunk)
        low, high = (s.ljust(entry.shard_bytes, b"\0") for s in data_shards(image, entry, layout))
        expected = bytearray(entry.shard_bytes)
        Code(2, 1).encode([low, high], [expected])
        assert parity[0] == expected
        assert entry.tables[2] == chunk_table(expected, chunk).tobytes()


def test_encode_leaves_the_slot_as_it_was():
    image = noise(5 * CHUNK + 3)
    before = bytes(image)
    encoded(image, r.Layout(3, 2))
    assert bytes(image) == before
    encode_rank(0, memoryview(before), [memoryview(bytearray(2 * CHUNK))], r.Layout(3, 1), CHUNK)


@pytest.mark.parametrize("wrong", [[], [CHUNK], [CHUNK, CHUNK, CHUNK], [CHUNK, 2 * CHUNK], [0, 0]])
def test_encode_refuses_other_parity_buffers(wrong):
    parity = [memoryview(bytearray(n)) for n in wrong]
    with pytest.raises(UsageError, match="needs 2 parity buffers of 512 bytes"):
        encode_rank(0, memoryview(noise(700)), parity, r.Layout(2, 2), CHUNK)


@pytest.mark.parametrize("length", range(20))
def test_a_header_is_told_from_rubbish(length):
    assert header_of(memoryview(bytes(length))) == b""
    assert header_of(memoryview(b"\xff" * length)) == b""


def test_a_header_comes_without_its_padding():
    text = b'{"a":1}'
    image = (len(text) + 5).to_bytes(8, "little") + text + b" " * 5 + b"data"
    assert header_of(memoryview(image)) == text
    assert header_of(memoryview(image[:-5])) == b"", "a header that does not fit is none"


# -- decode ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_k_shards_give_the_snapshot_back(layout):
    for length in LENGTHS:
        image = noise(length)
        entry, parity = encoded(image, layout)
        for lost in range(min(layout.k, layout.m) + 1):
            for missing in combinations(range(layout.k), lost):
                for rows in combinations(range(layout.m), lost):
                    target = bytearray(image)
                    for i in missing:
                        size = entry.stored_bytes(i, layout.k)
                        start = min(i * entry.shard_bytes, length)
                        target[start : start + size] = b"\x5a" * size
                    views = {layout.k + j: memoryview(parity[j]) for j in rows}
                    decode_rank(entry, layout, memoryview(target), views, list(missing))
                    assert target == image, (length, missing, rows)


def test_decode_crosses_columns_without_a_seam():
    layout, chunk = r.Layout(2, 2), 256 * 1024
    image = noise(3 * COLUMN_BYTES + chunk + 77)
    entry, parity = encoded(image, layout, chunk)
    target = bytearray(len(image))
    views = {2: memoryview(parity[0]), 3: memoryview(parity[1])}
    decode_rank(entry, layout, memoryview(target), views, [1, 0])
    assert target == image


def test_too_few_shards_are_an_error_and_not_a_guess():
    layout = r.Layout(3, 2)
    image = noise(4000)
    entry, parity = encoded(image, layout)
    with pytest.raises(CodingError):
        decode_rank(entry, layout, memoryview(image), {3: memoryview(parity[0])}, [0, 1])


# -- the manifest's arithmetic, and verify -------------------------------------------------------


def share_of(lengths, layout, owner="n0"):
    """(manifest, shard files) of a share of several ranks."""
    entries, files = [], [b""] * layout.shards
    for rank, length in enumerate(lengths):
        image = noise(length, seed=rank)
        entry, parity = encoded(image, layout, rank=rank)
        entries.append(entry)
        for i, stored in enumerate([*data_shards(image, entry, layout), *parity]):
            files[i] += bytes(stored)
    manifest = r.Manifest(A, owner, "store", layout, CHUNK, ALGORITHM, tuple(entries))
    return manifest, files


LENGTHS_OF_SHARES = [(), (0,), (0, 0, 5), (1, 4 * CHUNK + 1, 0, CHUNK), (700, 700), (9000, 1, 3000)]


@pytest.mark.parametrize("layout", [r.Layout(1, 1), r.Layout(2, 1), r.Layout(4, 2)], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS_OF_SHARES, ids=str)
def test_the_manifest_finds_every_rank_in_every_shard_file(lengths, layout):
    manifest, files = share_of(lengths, layout)
    for index, file in enumerate(files):
        assert manifest.shard_file_bytes(index) == len(file)
        for entry in manifest.ranks:
            at = manifest.shard_offset(entry.rank, index)
            piece = memoryview(file)[at : at + entry.stored_bytes(index, layout.k)]
            assert bad_chunks(manifest, entry.rank, index, piece) == []
    for rank, length in enumerate(lengths):
        table = np.frombuffer(snapshot_table(manifest, rank), "<u4")
        assert table.tolist() == chunk_table(noise(length, seed=rank), CHUNK).tolist()


def test_open_manifest_believes_the_digest_only():
    packed = pack(share_of((700,), r.Layout(2, 1))[0])
    digest = hashlib.sha256(packed).hexdigest()
    assert pack(open_manifest(packed, digest)) == packed
    with pytest.raises(IntegrityError, match="needs"):
        open_manifest(packed + b" ", digest)
    other = pack(w.Sent())
    with pytest.raises(FormatError):
        open_manifest(other, hashlib.sha256(other).hexdigest())


# -- check_shard -----------------------------------------------------------------------------------


def offer_of(manifest, shard, **changes):
    packed = pack(manifest)
    known = {
        "attempt": manifest.attempt,
        "owner": manifest.owner,
        "index": shard,
        "lengths": tuple(e.stored_bytes(shard, manifest.layout.k) for e in manifest.ranks),
        "manifest_bytes": len(packed),
        "manifest_digest": hashlib.sha256(packed).hexdigest(),
    }
    return w.PutOffer(**{**known, **changes}), packed


@pytest.mark.parametrize("layout", [r.Layout(1, 1), r.Layout(2, 1), r.Layout(4, 2)], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS_OF_SHARES, ids=str)
def test_every_right_shard_is_accepted(lengths, layout):
    manifest, files = share_of(lengths, layout)
    for index, file in enumerate(files):
        offer, packed = offer_of(manifest, index)
        assert check_shard(offer, packed, memoryview(file)) == manifest


def test_every_flipped_bit_of_a_shard_is_refused():
    manifest, files = share_of((700, 1, 0, 513), r.Layout(2, 1))
    for index, file in enumerate(files):
        offer, packed = offer_of(manifest, index)
        for at in range(len(file)):
            damaged = bytearray(file)
            damaged[at] ^= 1 << at % 8
            with pytest.raises(IntegrityError, match=f"shard {index}"):
                check_shard(offer, packed, memoryview(damaged))


def test_every_flipped_bit_of_a_manifest_is_refused():
    manifest, files = share_of((700,), r.Layout(2, 1))
    offer, packed = offer_of(manifest, 0)
    for at in range(len(packed)):
        damaged = bytearray(packed)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(IntegrityError, match="manifest digest"):
            check_shard(offer, bytes(damaged), memoryview(files[0]))


def test_swapped_cut_and_lengthened_shards_are_refused():
    manifest, files = share_of((700, 900), r.Layout(2, 1))
    offer, packed = offer_of(manifest, 0)
    for image in (files[1], files[2], bytes(len(files[0]))):
        with pytest.raises((IntegrityError, FormatError)):
            check_shard(offer, packed, memoryview(image.ljust(len(files[0]), b"\0")))


@pytest.mark.parametrize(
    "changes",
    [
        {"attempt": r.Attempt("1" * 32, "1000.job", 1, 2, 4)},
        {"attempt": r.Attempt("2" * 32, "1000.job", 1, 2, 3)},
        {"owner": "n1"},
        {"index": 1},
        {"index": 3},
        {"index": 10**6},
        {"lengths": (512,)},
        {"lengths": (512, 899)},
        {"lengths": ()},
    ],
    ids=str,
)
def test_an_offer_that_differs_from_its_manifest_is_refused(changes):
    manifest, files = share_of((700, 300), r.Layout(2, 1))
    offer, packed = offer_of(manifest, 0, **changes)
    with pytest.raises(FormatError):
        check_shard(offer, packed, memoryview(files[0]))


def test_a_negative_shard_index_is_refused():
    manifest, files = share_of((700, 300), r.Layout(2, 1))
    offer, packed = offer_of(manifest, -1)
    with pytest.raises(FormatError):
        check_shard(offer, packed, memoryview(files[2]))


@pytest.mark.parametrize(
    "changes",
    [{"index": -1}, {"lengths": (512, -1)}, {"manifest_bytes": 0}, {"manifest_bytes": -1}],
    ids=str,
)
def test_an_offer_of_impossible_numbers_is_refused_for_a_save_and_for_a_repair(changes):
    manifest, _ = share_of((700, 300), r.Layout(2, 1))
    offer, _ = offer_of(manifest, 0)
    book = Book()
    for state in (book.state(), book.commit(A.step, ordinal=A.ordinal) and book.state()):
        assert decide_offer(offer, state, cut_off=False) == ""
        assert "need 0, 0, 1 or more" in decide_offer(
            structs.replace(offer, **changes), state, cut_off=False
        )
    assert state.committed(A)


SPOILT = [
    {"tables": []}, {"tables": ["YWJjZA=="]}, {"tables": ["YWJj"] * 3}, {"tables": [""] * 3},
    {"chunk_bytes": 0}, {"chunk_bytes": -1}, {"chunk_bytes": 256}, {"length": -1}, {"length": 0},
    {"length": 10**9}, {"shard_bytes": 0}, {"shard_bytes": 511}, {"shard_bytes": 1024},
    {"layout": {"k": 2, "m": 0}}, {"layout": {"k": 1, "m": 2}}, {"layout": {"k": 2, "m": 200}},
]  # fmt: skip


@pytest.mark.parametrize("changes", SPOILT, ids=str)
def test_a_manifest_that_disagrees_with_itself_is_a_format_error(changes):
    # Well-formed, with right digests: of an owner of another release, or one out of order.
    manifest, files = share_of((700,), r.Layout(2, 1))
    whole = json.loads(pack(manifest).partition(b"\n")[2])
    for name, value in changes.items():
        (whole if name in whole else whole["ranks"][0])[name] = value
    body = json.dumps(whole).encode()
    packed = b"p2pckpt/1 Manifest %d %08x\n%s" % (
        len(body),
        crc32c(body, crc32c(b"Manifest")),
        body,
    )
    digest = hashlib.sha256(packed).hexdigest()
    for index in range(3):
        offer, _ = offer_of(manifest, index, manifest_digest=digest, manifest_bytes=len(packed))
        with pytest.raises(FormatError, match=r"manifest of n0|layout"):
            check_shard(offer, packed, memoryview(files[index]))


@pytest.mark.parametrize("ranks", [(0, 0), (1, 0), (3, 1, 2)])
def test_the_ranks_of_a_manifest_rise(ranks):
    manifest, _ = share_of((700,) * len(ranks), r.Layout(2, 1))
    entries = [structs.replace(e, rank=n) for e, n in zip(manifest.ranks, ranks, strict=True)]
    with pytest.raises(UsageError, match="rising order"):
        structs.replace(manifest, ranks=tuple(entries))
