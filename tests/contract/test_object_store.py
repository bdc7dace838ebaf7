"""The port ObjectStore: immutable objects, put whole or not at all, read by ranges."""

import asyncio
import random

import pytest

from p2pckpt.errors import IntegrityError, ObjectAbsent
from p2pckpt.ports import Stored, Upload

from .harness import BIG_BYTES

UNIT = 4096


def upload(name, data, part=None):
    return Upload(name, len(data), UNIT, part or (lambda at, n: data[at : at + n]))


def noise(length, seed=1):
    return random.Random(seed).randbytes(length)


@pytest.mark.parametrize("length", [0, 1, UNIT, 100_000, BIG_BYTES])
def test_an_object_reads_back_whole_and_by_ranges(stores, length):
    async def story(rig):
        data = noise(length)
        await rig.a.put(upload("d/x", data))
        assert await rig.b.get("d/x") == data
        assert await rig.b.head("d/x") == Stored("d/x", length)
        for at, n in [(0, length), (length // 3, length // 2), (length, 0), (length - 1, 1)]:
            if at >= 0 and n >= 0:
                into = bytearray(n)
                await rig.b.get_into("d/x", at, memoryview(into))
                assert bytes(into) == data[at : at + n]

    stores.run(story)


def test_parts_begin_at_multiples_of_the_unit_and_cover_the_object_once(stores):
    async def story(rig):
        data, asked = noise(BIG_BYTES), []

        def part(at, n):
            asked.append((at, n))
            return data[at : at + n]

        await rig.a.put(upload("x", data, part))
        asked.sort()
        assert len(asked) > 1
        assert all(at % UNIT == 0 for at, _ in asked)
        assert [at for at, _ in asked] == [0, *(at + n for at, n in asked[:-1])]
        assert sum(n for _, n in asked) == BIG_BYTES

    stores.run(story)


def test_bytes_leave_when_they_are_ready_and_not_before(stores):
    async def story(rig):
        data, asked, ready, gate = noise(BIG_BYTES), [], [], asyncio.Event()

        def part(at, n):
            asked.append(n)
            assert sum(asked) <= sum(ready)
            return data[at : at + n]

        async def hold_back(n):
            if ready:
                await gate.wait()
            ready.append(n)

        putting = asyncio.create_task(rig.a.put(Upload("x", BIG_BYTES, UNIT, part, hold_back)))
        await asyncio.sleep(0.3)
        assert not putting.done()
        assert len(asked) <= 1
        gate.set()
        await putting
        assert sum(ready) == sum(asked) == BIG_BYTES
        assert await rig.b.get("x") == data

    stores.run(story)


def test_what_a_part_raises_comes_out_and_nothing_is_there(stores):
    async def story(rig):
        data = noise(BIG_BYTES)

        def part(at, n):
            if at:
                raise IntegrityError("chunk 7 is wrong")
            return data[at : at + n]

        with pytest.raises(IntegrityError, match="chunk 7"):
            await rig.a.put(upload("x", data, part))
        assert await rig.a.head("x") is None
        assert await rig.b.pending("") == ()

    stores.run(story)


def test_the_same_name_again_replaces_the_object(stores):
    async def story(rig):
        await rig.a.put(upload("x", b"one"))
        await rig.b.put(upload("x", b"second"))
        assert await rig.a.get("x") == b"second"

    stores.run(story)


def test_put_absent_puts_once(stores):
    async def story(rig):
        assert await rig.a.put_absent("x", b"mine")
        assert not await rig.b.put_absent("x", b"yours")
        assert await rig.b.get("x") == b"mine"

    stores.run(story)


def test_many_put_absent_at_once_leave_one_whole_object(stores):
    """B048."""

    async def story(rig):
        tries = [(rig.a, rig.b)[i % 2].put_absent("x", b"%d" % i * 1000) for i in range(8)]
        won = await asyncio.gather(*tries)
        assert sum(won) == 1
        assert await rig.a.get("x") == b"%d" % won.index(True) * 1000

    stores.run(story)


def test_an_absent_object_is_absent(stores):
    async def story(rig):
        assert await rig.a.head("x") is None
        for read in (rig.a.get("x"), rig.a.get_into("x", 0, memoryview(bytearray(9)))):
            with pytest.raises(ObjectAbsent, match="x"):
                await read

    stores.run(story)


def test_a_range_beyond_the_end_is_an_error_not_fewer_bytes(stores):
    async def story(rig):
        await rig.a.put(upload("x", noise(1000)))
        for at, n in [(500, 501), (1000, 1), (5000, 10)]:
            with pytest.raises(IntegrityError, match="x"):
                await rig.a.get_into("x", at, memoryview(bytearray(n)))

    stores.run(story)


def test_lists_by_prefix_in_order_of_names(stores):
    async def story(rig):
        for name in ("b/2", "a", "b/10/x", "b1", "c"):
            await rig.a.put(upload(name, name.encode() * 3))
        assert await rig.b.list("b/") == (Stored("b/10/x", 18), Stored("b/2", 9))
        assert [s.name for s in await rig.b.list("")] == ["a", "b/10/x", "b/2", "b1", "c"]
        assert await rig.b.list("nothing/") == ()

    stores.run(story)


def test_names_may_hold_what_node_names_hold(stores):
    async def story(rig):
        names = ["1000.job/a-b_c.d/rank-0.safetensors", "j/node%2F1/x", "j/n ode+1/x"]
        for name in names:
            await rig.a.put(upload(name, name.encode()))
        for name in names:
            assert await rig.b.get(name) == name.encode()
        assert sorted(names) == [s.name for s in await rig.b.list("")]

    stores.run(story)


def test_delete_takes_exactly_the_named_ones_and_absent_is_fine(stores):
    async def story(rig):
        for name in ("a/1", "a/2", "a/20"):
            await rig.a.put(upload(name, b"."))
        await rig.b.delete(["a/2", "never/was"])
        assert [s.name for s in await rig.a.list("")] == ["a/1", "a/20"]
        await rig.b.delete([])

    stores.run(story)


def test_a_cancelled_upload_is_invisible_pending_and_can_be_aborted(stores):
    """B095."""

    async def story(rig):
        data, begun = noise(BIG_BYTES), asyncio.Event()
        loop = asyncio.get_running_loop()

        def part(at, n):
            loop.call_soon_threadsafe(begun.set)
            return data[at : at + n]

        putting = asyncio.create_task(rig.a.put(upload("p/x", data, part)))
        await asyncio.wait_for(begun.wait(), 20)
        putting.cancel()
        await asyncio.wait([putting], timeout=40)
        assert putting.cancelled()
        assert await rig.b.head("p/x") is None
        assert await rig.b.pending("q/") == ()
        (left,) = await rig.b.pending("p/")
        assert left.name == "p/x"
        assert 0 <= left.age_s < 120
        await rig.b.abort(left)
        assert await rig.b.pending("") == ()
        await rig.b.abort(left)

    stores.run(story)
