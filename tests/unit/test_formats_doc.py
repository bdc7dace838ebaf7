"""FORMATS.md and PROTOCOL.md against the code: every example is run, every name is looked up."""

import json
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from p2pckpt import records as r
from p2pckpt import wire
from p2pckpt.backends.etcd_txn import MAX_TXN_COMPARES, MAX_TXN_OPERATIONS
from p2pckpt.backends.peers import MAX_MESSAGE_BYTES
from p2pckpt.backends.trainers import SocketLimits
from p2pckpt.backends.ucx_flow import FRAME_BYTES, Frame, Kind
from p2pckpt.coding import tree
from p2pckpt.coding.reed_solomon import generator_matrix
from p2pckpt.config import Config
from p2pckpt.save.commit import Demand
from p2pckpt.save.encode import encode_rank, shard_bytes

PACKAGE = Path(__file__).parents[2] / "p2pckpt"
FORMATS = (PACKAGE / "FORMATS.md").read_text()
PROTOCOL = (PACKAGE / "PROTOCOL.md").read_text()


def examples(kind):
    """(what stands behind the kind, text) of every block of a kind."""
    found = re.findall(rf"^```{kind} (.*)\n((?:.*\n)*?)```$", FORMATS, re.MULTILINE)
    assert found, f"FORMATS.md has no example of kind {kind}"
    return found


def unhex(text):
    return bytes.fromhex("".join(text.split()))


@pytest.mark.parametrize(("kind", "text"), examples("envelope"))
def test_an_envelope_is_unpacked_and_packed_to_the_same_bytes(kind, text):
    record = wire.unpack(text.removesuffix("\n").encode(), wire.KINDS[kind])
    assert wire.pack(record) == text.removesuffix("\n").encode()


@pytest.mark.parametrize(("kind", "text"), examples("envelope"))
def test_an_envelope_with_any_letter_changed_is_refused(kind, text):
    packed = bytearray(text.removesuffix("\n").encode())
    for at in range(len(packed)):
        packed[at] ^= 1
        with pytest.raises(wire.FormatError):
            wire.unpack(packed, wire.KINDS[kind])
        packed[at] ^= 1


@pytest.mark.parametrize(("state", "text"), examples("tree"))
def test_a_tree_has_the_bytes_shown(state, text):
    wanted = json.loads(state)
    root = tree.Dict("dict", list(wanted), list(wanted.values()))
    assert tree.encode(root) == unhex(text)
    assert tree.decode(unhex(text)) == root


@pytest.mark.parametrize(("what", "text"), examples("frame"))
def test_a_frame_has_the_bytes_shown(what, text):
    kind, nonce, offset, length, tag = what.split()
    frame = Frame(Kind[kind], nonce, int(offset), int(length), int(tag, 16))
    shown = unhex(text)
    assert frame.pack() == shown[:-4].ljust(FRAME_BYTES - 4, b"\0") + shown[-4:]
    assert Frame.unpack(frame.pack()) == frame


@pytest.mark.parametrize(("layout", "text"), examples("matrix"))
def test_the_parity_matrix_is_the_one_shown(layout, text):
    k, m = r.Layout.parse(layout).k, r.Layout.parse(layout).m
    shown = np.frombuffer(unhex(text), np.uint8).reshape(m, k)
    assert np.array_equal(generator_matrix(k, m)[k:], shown)


@pytest.mark.parametrize("line", re.search(r"```shards\n((?:.*\n)*?)```", FORMATS)[1].splitlines())
def test_shards_have_the_lengths_shown(line):
    layout, chunk, length, shard, stored = re.fullmatch(
        r"(\S+) chunk (\d+) length (\d+): shard (\d+), stored ([\d ]+)", line
    ).groups()
    layout, chunk, length = r.Layout.parse(layout), int(chunk), int(length)
    assert shard_bytes(length, layout, chunk) == int(shard)
    parity = [memoryview(bytearray(int(shard))) for _ in range(layout.m)]
    entry = encode_rank(0, memoryview(bytes(length)), parity, layout, chunk)
    lengths = [entry.stored_bytes(i, layout.k) for i in range(layout.shards)]
    assert lengths == [int(n) for n in stored.split()]
    assert [len(t) for t in entry.tables] == [4 * -(-n // chunk) for n in lengths]


def test_every_record_message_and_field_is_named():
    lacking = []
    for name, kind in wire.KINDS.items():
        if not re.search(rf"\b{name}\b", FORMATS):
            lacking.append(name)
        lacking += [
            f"{name}.{field}"
            for field in kind.__struct_fields__
            if f"`{field}`" not in FORMATS and f"`{field}," not in FORMATS
        ]
    assert not lacking, f"FORMATS.md says nothing of {lacking}"


def test_every_ledger_key_is_in_the_table():
    keys = r.JobKeys("JOB")
    attempt = r.Attempt("id", "JOB", 1, 2, 3)
    made = {
        *(v for k, v in vars(keys).items() if k not in ("job", "root", "state")),
        keys.report(1, 2, 3), keys.join("t", "n"), keys.trainers(1, "n"),
        keys.roster("d", 0), keys.readers(attempt),
    }  # fmt: skip
    for key in made:
        parts = key.removeprefix(keys.root).split("/")
        head = "/".join(parts[: 2 if parts[0] == "state" else 1])
        assert re.search(rf"^\| `{head}[/`]", FORMATS, re.MULTILINE), f"no row for {key}"
    assert f"`{r.MEMBERS.removeprefix(r.ROOT)}NODE`" in FORMATS


def test_the_bounds_are_those_of_the_code():
    assert wire.MAX_RECORD_BYTES == 64 * 1024
    assert wire.MAX_FRAME_BYTES == 64 * 1024 * 1024
    assert MAX_MESSAGE_BYTES == 4 * 1024 * 1024
    assert SocketLimits().frame_bytes == 1024 * 1024
    assert (MAX_TXN_COMPARES, MAX_TXN_OPERATIONS) == (128, 128)
    assert (r.GROUP_NODES, r.MAX_SHARDS) == (64, 20)


def test_a_full_group_takes_the_bytes_named_and_fits_a_ledger_value():
    attempt = r.Attempt("0" * 32, "1000.gpt", 3, 7, 500)
    shown = re.search(r"(\d+) KB with 6 shards, (\d+) KB with 12, (\d+) KB with (20)", FORMATS)
    for shards, kilobytes in ((6, shown[1]), (12, shown[2]), (r.MAX_SHARDS, shown[3])):
        ranks, holders = tuple(range(8)), ("0" * 32,) * shards
        share = r.SealedShare("node-0001", "0" * 32, ranks, "0" * 64, 10**12, holders)
        size = len(wire.pack(r.GroupRecord(attempt, 0, (share,) * r.GROUP_NODES)))
        assert abs(size / 1000 - int(kilobytes)) < 3
        assert size < wire.MAX_RECORD_BYTES


def test_deadlines_are_those_of_the_config():
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", PROTOCOL, re.MULTILINE))
    assert rows
    assert rows == {name: f"{getattr(Config(), name):g}" for name in rows} | {
        name: str(getattr(Config(), name)) for name in rows if "bytes" in name
    }
    named = {f.name for f in fields(Config)}
    timed = {n for n in named if n.endswith("_s") and not n.startswith("s3_")}
    assert timed <= rows.keys(), f"PROTOCOL.md lacks {timed - rows.keys()}"


def test_min_spare_means_what_the_protocol_says():
    generation = r.Generation(1, "n", "t", 1, "d", 1, r.Layout(4, 2), 1)
    assert Demand.of(generation, -1).min_spare == 2
    assert Demand.of(generation, 0).min_spare == 0
    assert "max(1, m)" in PROTOCOL
