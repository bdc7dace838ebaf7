"""CRC32C: known answers, a bitwise reference, chunk tables that find exactly what is bad."""

import mmap

import numpy as np
import pytest

from p2pckpt.coding import checksum
from p2pckpt.coding.checksum import (
    chunk_table,
    copy_and_check,
    crc32c,
    extend_with_zeros,
    verify_chunks,
)
from p2pckpt.errors import CodingError, UsageError


def reference(data, value=0):
    """CRC32C one bit at a time."""
    crc = value ^ 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def random_bytes(length, seed=0):
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_known_answers(message, expected):
    """B108."""
    assert crc32c(message) == expected == reference(message)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 255, 767, 768, 769, 24_575, 24_576, 24_577, 40_000])
def test_equals_the_bitwise_reference(length):
    """B108."""
    data = random_bytes(length)
    assert crc32c(data) == reference(data.tobytes())


def test_every_split_gives_the_same_value():
    """B108."""
    data = random_bytes(2000).tobytes()
    whole = crc32c(data)
    assert all(crc32c(data[at:], crc32c(data[:at])) == whole for at in range(len(data) + 1))


def test_unaligned_buffers():
    """B108."""
    area = random_bytes(40_100)
    copies = {
        crc32c(np.concatenate([np.zeros(at, np.uint8), area[:40_000]])[at:]) for at in range(65)
    }
    assert copies == {crc32c(area[:40_000])}


def test_every_kind_of_buffer():
    data = np.arange(1024, dtype=np.float32)
    raw = data.tobytes()
    with mmap.mmap(-1, len(raw)) as area:
        area[:] = raw
        kinds = [raw, bytearray(raw), memoryview(raw), data, data.reshape(32, 32), area]
        assert {crc32c(kind) for kind in kinds} == {reference(raw)}


@pytest.mark.parametrize(
    "wrong", [np.zeros(8, np.uint8)[::2], memoryview(bytes(8))[::2], "text", 5]
)
def test_no_contiguous_buffer(wrong):
    with pytest.raises(UsageError, match="needs a C-contiguous buffer"):
        crc32c(wrong)


@pytest.mark.slow
def test_more_than_4_gib():
    """B108."""
    length = (4 << 30) + 12_345
    with mmap.mmap(-1, length) as area:  # never written: reads map the kernel's zero page
        assert crc32c(area) == extend_with_zeros(0, length)


@pytest.mark.parametrize("zero_bytes", [0, 1, 3, 64, 1000, 262_144, 1_000_003])
def test_extending_by_zeros_equals_hashing_them(zero_bytes):
    for head in (b"", b"\0", b"123456789", random_bytes(77).tobytes()):
        assert extend_with_zeros(crc32c(head), zero_bytes) == crc32c(head + bytes(zero_bytes))


def test_extending_by_a_negative_count():
    with pytest.raises(UsageError, match="zero_bytes: needs 0 or more, found -1"):
        extend_with_zeros(0, -1)


def test_a_package_that_computes_something_else_is_refused(monkeypatch):
    checksum._prove.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(checksum, "_KNOWN_ANSWERS", ((b"123456789", 0xCBF43926),))  # CRC-32
        with pytest.raises(CodingError, match="need cbf43926, found e3069283"):
            crc32c(b"abc")
    assert crc32c(b"123456789") == 0xE3069283


# -- tables ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 99, 100, 101, 1000, 1001])
def test_table_has_one_value_a_chunk(length):
    data = random_bytes(length)
    table = chunk_table(data, 100)
    expected = [reference(data[at : at + 100].tobytes()) for at in range(0, length, 100)]
    assert table.tolist() == expected
    assert table.tobytes() == b"".join(value.to_bytes(4, "little") for value in expected)


@pytest.mark.parametrize("logical", [250, 251, 300, 301, 1000])
def test_table_over_a_tail_of_implicit_zeros(logical):
    data = random_bytes(250)
    padded = np.concatenate([data, np.zeros(logical - 250, np.uint8)])
    assert chunk_table(data, 100, logical).tolist() == chunk_table(padded, 100).tolist()
    assert verify_chunks(data, 100, chunk_table(padded, 100), logical) == []


def test_every_flipped_bit_names_its_chunk():
    data = random_bytes(70)
    table = chunk_table(data, 32)
    assert verify_chunks(data, 32, table) == []
    for bit in range(70 * 8):
        data[bit // 8] ^= 1 << bit % 8
        assert verify_chunks(data, 32, table) == [bit // 8 // 32]
        assert verify_chunks(data, 32, table, first_chunk=40) == [40 + bit // 8 // 32]
        data[bit // 8] ^= 1 << bit % 8


def test_swapped_zeroed_and_shortened_chunks():
    data = random_bytes(1000)
    table = chunk_table(data, 100).tolist()
    swapped = np.concatenate([data[:200], data[300:400], data[200:300], data[400:]])
    assert verify_chunks(swapped, 100, table) == [2, 3]
    data[500:600] = 0
    assert verify_chunks(data, 100, table) == [5]
    assert verify_chunks(data[:-1], 100, table) == [5, 9]


def test_wrong_sizes():
    data = random_bytes(1000)
    table = chunk_table(data, 100)
    with pytest.raises(UsageError, match="table: needs 9 values, one a chunk, found 10"):
        verify_chunks(data[:900], 100, table)
    with pytest.raises(UsageError, match="chunk_bytes: needs 1 or more, found 0"):
        chunk_table(data, 0)
    with pytest.raises(UsageError, match="logical_bytes: needs the buffer's 1000 or more, found 9"):
        chunk_table(data, 100, 999)


# -- copy -----------------------------------------------------------------------------------------


def test_copies_the_right_chunks_and_keeps_bad_ones_out():
    src = random_bytes(1050)
    table = chunk_table(src, 100)
    src[250] ^= 1
    src[1049] ^= 0x80
    dst = bytearray(b"\xee" * 1050)
    assert copy_and_check(dst, src, 100, table) == [2, 10]
    expected = src.copy()
    expected[200:300] = expected[1000:] = 0xEE
    assert dst == expected.tobytes()


def test_copy_of_a_part_of_a_shard():
    shard = random_bytes(1000)
    table = chunk_table(shard, 100)
    part = shard[300:600].copy()
    part[100] ^= 4
    dst = np.zeros(300, dtype=np.uint8)
    assert copy_and_check(dst, part, 100, table[3:6], first_chunk=3) == [4]
    assert copy_and_check(dst, shard[300:600], 100, table[3:6], first_chunk=3) == []
    assert np.array_equal(dst, shard[300:600])


def test_empty_copy():
    assert copy_and_check(bytearray(), b"", 100, []) == []


def test_copy_that_does_not_fit_writes_nothing():
    src = random_bytes(300).tobytes()
    table = chunk_table(src, 100)
    dst = bytearray(300)
    with pytest.raises(UsageError, match="dst: needs the 299 bytes of src, found 300"):
        copy_and_check(dst, src[:299], 100, table)
    with pytest.raises(UsageError, match="table: needs 3 values, one a chunk, found 2"):
        copy_and_check(dst, src, 100, table[:2])
    with pytest.raises(UsageError, match="dst: needs a writable buffer"):
        copy_and_check(bytes(300), src, 100, table)
    assert dst == bytes(300)
