"""The snapshot as a file: what is refused, who can read it, how large it may be.

Case ids (B...) name the reported fault that a test stands for.
"""

import mmap
from collections import defaultdict, deque, namedtuple
from enum import Enum
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load as safetensors_load
from test_snapshot import save

from p2pckpt.coding import table as tables
from p2pckpt.errors import FormatError, NoRoom, StateMismatch, UnsupportedState, UsageError
from p2pckpt.restore.load import load, materialise, read_header
from p2pckpt.save.snapshot import plan, write

# -- refusals -----------------------------------------------------------------------------------

Point = namedtuple("Point", "x y")


class Colour(Enum):
    RED = 1


class Foo:
    pass


def test_what_cannot_be_stored_is_named():
    """B026: no pickle is made; all bad paths in one error."""
    with pytest.raises(UnsupportedState) as caught:
        plan({"opt": {"hook": Foo()}, "p": Point(1, 2), "e": [0, Colour.RED], "d": deque(),
              "dd": defaultdict(list), "f": len, "c": Foo, "o": np.array([None]),
              "k": {Point(1, 2): 1}})  # fmt: skip
    message = str(caught.value)
    assert "state['opt']['hook']: object of class" in message
    for part in ("Foo cannot be stored", "['p']", "['e'][1]", "deque", "defaultdict", "['f']",
                 "['c']", "numpy array of dtype object", "['k'][Point(x=1, y=2)]"):  # fmt: skip
        assert part in message
    with pytest.raises(UnsupportedState, match="and 15 more"):
        plan([Foo() for _ in range(25)])


def test_unusual_tensors_are_refused_by_name():
    sparse = torch.eye(3).to_sparse()

    class Sub(torch.Tensor):
        pass

    nested = torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)
    sub = torch.ones(1).as_subclass(Sub)
    with pytest.raises(UnsupportedState) as caught:
        plan({"s": sparse, "m": torch.empty(2, device="meta"), "sub": sub, "nested": nested})
    message = str(caught.value)
    for part in (
        "state['s']: tensor of layout torch.sparse_coo",
        "meta tensor",
        "Sub",
        "NestedTensor",
    ):
        assert part in message


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_tensors_are_refused_by_name():
    with pytest.raises(UnsupportedState, match=r"quantised tensor of dtype torch\.qint8"):
        plan(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))


def test_cycles_and_depth_are_refused_by_path():
    loop = {"a": []}
    loop["a"].append(loop)
    with pytest.raises(UnsupportedState, match=r"state\['a'\]\[0\]: a container that holds itself"):
        plan(loop)
    deep = []
    for _ in range(300):
        deep = [deep]
    with pytest.raises(UnsupportedState, match="nesting deeper"):
        plan(deep)
    shared = [1]
    assert materialise(save([shared, shared])) == [[1], [1]]


# -- the file -----------------------------------------------------------------------------------


def test_any_safetensors_reader_opens_it():
    state = {"a": torch.randn(3, 3).bfloat16(), "c": torch.randn(2, dtype=torch.complex128),
             "e": torch.zeros(0, 2), "b": torch.ones(5, dtype=torch.bool), "n": 1}  # fmt: skip
    data = save(state)
    found = safetensors_load(data)
    assert torch.equal(found["a"], state["a"])
    assert found["c"].view(-1).view(torch.complex128).tolist() == state["c"].tolist()
    table = read_header(data)
    assert table.data_start % 4096 == 0
    offsets = {entry.name: entry.offset for entry in table.entries}
    assert offsets["c"] < offsets["a"] < offsets["b"]
    assert table.tree_offset + table.tree_nbytes == len(data)


def test_the_buffer_is_checked():
    p = plan({"a": torch.ones(4)})
    with pytest.raises(NoRoom, match=f"need {p.snapshot_bytes} bytes, have 10"):
        write(p, bytearray(10))
    with pytest.raises(UsageError, match="read-only"):
        write(p, bytes(p.snapshot_bytes))
    assert p.capacity_bytes == 2 * 1024 * 1024
    w = torch.nn.Parameter(torch.zeros(2**20))
    fresh = plan({"w": w, "opt": torch.optim.AdamW([w])})
    assert fresh.capacity_bytes >= 3 * 4 * 2**20


def test_every_byte_is_checked_right_before_it_is_used():
    state = {"a": torch.ones(4), "b": np.ones(3), "c": b"x" * 70_000, "n": 3}
    data, seen = save(state), []
    load(data, None, lambda offset, length: seen.append((offset, length)))
    covered = sorted(seen)
    assert covered[0][0] == 0
    assert all(a + n == b for (a, n), (b, _) in pairwise(covered))
    assert sum(covered[-1]) == len(data)

    def bad(offset, length):
        raise FormatError(f"range {offset}")

    with pytest.raises(FormatError, match="range 0"):
        load(data, None, bad)


def test_a_pickle_in_the_tree_is_never_run(tmp_path):
    """B026: a pickle that would create a file lies where the tree should be."""
    proof = tmp_path / "proof"
    evil = f"cposix\nsystem\n(S'touch {proof}'\ntR.".encode()
    data = bytearray(save({"a": torch.ones(1), "text": "x" * 200}))
    table = read_header(bytes(data))
    data[table.tree_offset : table.tree_offset + len(evil)] = evil
    with pytest.raises(FormatError):
        materialise(bytes(data))
    assert not proof.exists()


def test_dtensors_come_back_sharded():
    """FSDP2's kind of state: local parts with their global place, also in a fresh optimizer."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))

        def make(fill):
            local = torch.full((2, 4), fill)
            whole = torch.Size([7, 4]), (4, 1)
            d = DTensor.from_local(local, mesh, [Shard(0)], run_check=False,
                                   shape=whole[0], stride=whole[1])  # fmt: skip
            w = torch.nn.Parameter(d)
            return w, torch.optim.AdamW([w], foreach=False)

        w, opt = make(1.0)
        w.grad = torch.ones_like(w)
        opt.step()
        p = plan({"w": w, "opt": opt})
        assert (p.parts[0].global_shape, p.parts[0].offset, p.parts[0].lengths) == (
            (7, 4), (2, 0), (2, 4))  # fmt: skip
        data = save({"w": w, "opt": opt})
        w2, opt2 = make(0.0)
        load(data, {"w": w2, "opt": opt2})
        assert torch.equal(w2.to_local(), w.to_local())
        moment = opt2.state[w2]["exp_avg"]
        assert isinstance(moment, DTensor)
        assert moment.shape == (7, 4)
        assert torch.equal(moment.to_local(), opt.state[w]["exp_avg"].to_local())
        with pytest.raises(StateMismatch, match="target float32"):
            load(data, {"w": torch.zeros(2, 4), "opt": opt2})
        replicated = DTensor.from_local(torch.zeros(2, 4), mesh, [Replicate()], run_check=False)
        with pytest.raises(StateMismatch, match="placements"):
            load(data, {"w": replicated, "opt": opt2})
        with pytest.raises(StateMismatch, match="none like it"):
            load(data, {"w": None, "opt": None})
        assert materialise(data)["w"].shape == (2, 4)
    finally:
        torch.distributed.destroy_process_group()


# -- large --------------------------------------------------------------------------------------


def sparse_map(path, nbytes):
    with open(path, "w+b") as file:
        file.truncate(nbytes)
        return mmap.mmap(file.fileno(), nbytes)


def test_offsets_beyond_4_gib(tmp_path):
    """B025: a table with a 4 GiB + 1 tensor, read from a file with holes."""
    big = 2**32 + 1
    data = save(
        {"big": torch.zeros(3, dtype=torch.int8), "z": torch.tensor([1, 2], dtype=torch.int8)}
    )
    small = read_header(data)
    table = tables.build([("big", "int8", (big,)), ("z", "int8", (2,))], {})
    tree = data[small.tree_offset :]
    mapped = sparse_map(tmp_path / "big", table.tree_offset + len(tree))
    header = table.header(len(tree))
    mapped[: len(header)] = header
    mapped[table.entries[1].offset : table.tree_offset] = b"\x05\x06"
    mapped[table.tree_offset :] = tree
    found = read_header(mapped)
    assert found.entries == table.entries
    assert found.entries[1].offset > 2**32
    seen = []
    target = {"big": torch.zeros(1, dtype=torch.int8), "z": torch.zeros(2, dtype=torch.int8)}
    with pytest.raises(StateMismatch, match=f"int8.{big}."):
        load(mapped, target, lambda *r: seen.append(r))
    assert seen == [(0, table.data_start), (table.tree_offset, len(tree))]


@pytest.mark.slow
def test_five_gib_and_many_small_tensors(tmp_path):
    """B025: a 5 GiB tensor, a bytes object of 4 GiB + 1, 100,000 small tensors."""
    state = {"t": torch.zeros(5 * 2**30, dtype=torch.int8), "b": bytes(2**32 + 1)}
    state["t"][-1] = 3
    p = plan(state)
    mapped = sparse_map(tmp_path / "big", p.snapshot_bytes)
    assert write(p, mapped) == p.snapshot_bytes
    size = len(state["b"])
    del state, p
    back = materialise(mapped)
    assert (back["t"].numpy().sum(), back["t"][-1], len(back["b"])) == (3, 3, size)
    del back
    many = {i: torch.full((i % 3,), i) for i in range(100_000)}
    back = materialise(save(many))
    assert all(torch.equal(back[i], many[i]) for i in many)
