"""Invariants of the coding layer over random codes, lengths, losses, offsets and splits."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pckpt.coding.checksum import (
    chunk_table,
    copy_and_check,
    crc32c,
    extend_with_zeros,
    verify_chunks,
)
from p2pckpt.coding.reed_solomon import Code

few = settings(max_examples=150, deadline=None)
byte_strings = st.binary(max_size=600)


@st.composite
def coded(draw):
    """(code, all shards, lost shard numbers): at most m lost."""
    code = Code(draw(st.integers(1, 20)), draw(st.integers(0, 12)))
    length = draw(st.integers(0, 400))
    seed = draw(st.integers(0, 2**32 - 1))
    shards = np.zeros((code.k + code.m, length), dtype=np.uint8)
    shards[: code.k] = np.random.default_rng(seed).integers(0, 256, (code.k, length))
    code.encode(list(shards[: code.k]), list(shards[code.k :]))
    numbers = st.integers(0, code.k + code.m - 1)
    lost = draw(st.lists(numbers, max_size=code.m, unique=True))
    return code, shards, lost


def repaired(code, shards, lost):
    out = {index: np.full(shards.shape[1], 0xA5, dtype=np.uint8) for index in lost}
    code.decode({i: row for i, row in enumerate(shards) if i not in lost}, out)
    return out


@few
@given(coded())
def test_encode_then_lose_then_decode_is_identity(case):
    code, shards, lost = case
    assert all(np.array_equal(got, shards[i]) for i, got in repaired(code, shards, lost).items())


@few
@given(coded(), st.data())
def test_any_range_decodes_to_the_slice(case, data):
    code, shards, lost = case
    start = data.draw(st.integers(0, shards.shape[1]))
    stop = data.draw(st.integers(start, shards.shape[1]))
    part = repaired(code, shards[:, start:stop], lost)
    assert all(np.array_equal(got, shards[i, start:stop]) for i, got in part.items())


@few
@given(coded(), st.integers(0, 2**32 - 1))
def test_the_code_is_linear(case, seed):
    """Parity of a xor b is parity of a xor parity of b."""
    code, shards, _ = case
    other = np.random.default_rng(seed).integers(0, 256, shards.shape, dtype=np.uint8)
    mixed = shards ^ other
    for words in (other, mixed):
        code.encode(list(words[: code.k]), list(words[code.k :]))
    assert np.array_equal(mixed, shards ^ other)


@few
@given(st.lists(byte_strings, max_size=8), st.integers(0, 500))
def test_crc_in_parts_equals_crc_in_one(parts, zero_bytes):
    value = 0
    for part in parts:
        value = crc32c(part, value)
    whole = b"".join(parts)
    assert value == crc32c(whole)
    assert extend_with_zeros(value, zero_bytes) == crc32c(whole + bytes(zero_bytes))


@few
@given(byte_strings, st.integers(1, 700), st.data())
def test_exactly_the_changed_chunks_are_named_and_kept_out(content, chunk_bytes, data):
    src = bytearray(content)
    table = chunk_table(src, chunk_bytes)
    changed = data.draw(st.sets(st.integers(0, max(0, len(table) - 1)))) if len(table) else set()
    for chunk in changed:  # one changed byte a chunk: a burst of 8 bits, which a CRC always finds
        src[chunk * chunk_bytes] ^= data.draw(st.integers(1, 255))
    dst = bytearray(len(src))
    assert verify_chunks(src, chunk_bytes, table) == sorted(changed)
    assert copy_and_check(dst, src, chunk_bytes, table) == sorted(changed)
    for chunk in range(len(table)):
        part = slice(chunk * chunk_bytes, (chunk + 1) * chunk_bytes)
        assert dst[part] == (bytes(len(src[part])) if chunk in changed else content[part])
