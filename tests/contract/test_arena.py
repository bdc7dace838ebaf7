"""The port Arena: RAM files that outlive the agent, their records, and documents."""

import pytest

from p2pckpt.errors import NoRoom, UsageError
from p2pckpt.ports import Region

from .harness import file_record, fill, read


def test_a_file_is_writable_memory_of_its_capacity(arenas):
    async def story(rig):
        arena = rig.arena
        await arena.reserve("slot-0", 8192)
        view = arena.view(Region("slot-0", 0, 8192))
        assert (len(view), view.readonly) == (8192, False)
        view[4096:4100] = b"abcd"
        assert read(arena, "slot-0", 4, offset=4096) == b"abcd"
        assert len(arena.view(Region("slot-0", 8192, 0))) == 0

    arenas.run(story)


def test_room_is_counted_and_refused_with_need_and_have(arenas):
    async def story(rig):
        arena = rig.arena
        before = arena.used_bytes
        await arena.reserve("a", 4 * 4096)
        assert arena.used_bytes == before + 4 * 4096
        need = arena.budget_bytes
        with pytest.raises(NoRoom) as refused:
            await arena.reserve("b", need)
        assert str(need) in str(refused.value)
        assert str(arena.budget_bytes - arena.used_bytes) in str(refused.value)
        with pytest.raises(UsageError):
            arena.view(Region("b", 0, 1))
        arena.remove("a")
        assert arena.used_bytes == before

    arenas.run(story)


def test_the_budget_can_be_used_to_the_last_page_and_again(arenas):
    async def story(rig):
        arena = rig.arena
        for _ in range(3):
            await arena.reserve("all", arena.budget_bytes - arena.used_bytes)
            with pytest.raises(NoRoom):
                await arena.reserve("one-more", 4096)
            arena.remove("all")

    arenas.run(story)


@pytest.mark.parametrize("region", [(-1, 2), (0, 4097), (4096, 1), (1, -1)])
def test_views_outside_of_a_file_are_refused(arenas, region):
    async def story(rig):
        await rig.arena.reserve("a", 4096)
        with pytest.raises(UsageError):
            rig.arena.view(Region("a", *region))

    arenas.run(story)


@pytest.mark.parametrize("name", ["", "A", "a/b", "../a", "a b", "ä"])
def test_names_are_plain(arenas, name):
    async def story(rig):
        with pytest.raises(UsageError):
            await rig.arena.reserve(name, 4096)
        with pytest.raises(UsageError):
            rig.arena.put_document(name, b"")

    arenas.run(story)


def test_a_name_is_reserved_once_and_unknown_files_are_refused(arenas):
    async def story(rig):
        await rig.arena.reserve("a", 4096)
        with pytest.raises(UsageError):
            await rig.arena.reserve("a", 4096)
        with pytest.raises(UsageError):
            rig.arena.put_record("b", file_record())
        rig.arena.remove("b")

    arenas.run(story)


def test_documents_are_kept_replaced_and_removed(arenas):
    async def story(rig):
        arena = rig.arena
        assert set(arena.documents()) == set()
        assert arena.document("m.1") is None
        arena.put_document("m.2", b"two")
        arena.put_document("m.1", b"one")
        arena.put_document("m.1", b"ONE" * 100_000)
        assert set(arena.documents()) == {"m.1", "m.2"}
        assert arena.document("m.1") == b"ONE" * 100_000
        arena.remove("m.1")
        arena.remove("m.1")
        assert set(arena.documents()) == {"m.2"}

    arenas.run(story)


def test_a_restart_keeps_exactly_the_whole_files_and_all_documents(arenas):
    async def story(rig):
        arena = rig.arena
        store_id = arena.store_id
        for file in ("whole", "filling", "no-record", "spoiled", "was-filling", "too-long"):
            await fill(arena, file, file.encode() * 9)
        arena.put_record("whole", file_record(length=45))
        arena.put_record("filling", file_record("whole"))
        arena.put_record("filling", file_record("filling"))
        arena.put_record("spoiled", file_record())
        arena.put_record("was-filling", file_record("filling"))
        arena.put_record("was-filling", file_record(step=8))
        arena.put_record("too-long", file_record(length=4097))
        arena.put_document("m.1", b"one")
        rig.spoil_record("spoiled")

        arena = rig.restart()
        kept = arena.adopt()
        assert [(k.file, k.capacity) for k in kept] == [("was-filling", 4096), ("whole", 4096)]
        assert [k.record for k in kept] == [file_record(step=8), file_record(length=45)]
        assert read(arena, "whole", 45) == b"whole" * 9
        assert arena.used_bytes == 2 * 4096
        assert set(arena.documents()) == {"m.1"}
        assert arena.document("m.1") == b"one"
        assert arena.store_id == store_id
        await arena.reserve("filling", 4096)  # its name is free, its bytes are gone
        assert read(arena, "filling", 4096) == bytes(4096)

    arenas.run(story)


def test_a_removed_file_is_not_adopted_and_a_new_one_has_no_record(arenas):
    async def story(rig):
        arena = rig.arena
        await fill(arena, "a", b"old")
        arena.put_record("a", file_record())
        arena.remove("a")
        await fill(arena, "a", b"new")
        assert rig.restart().adopt() == ()

    arenas.run(story)


def test_a_view_of_a_removed_file_does_not_reach_its_successor(arenas):
    async def story(rig):
        await rig.arena.reserve("a", 4096)
        old = rig.arena.view(Region("a", 0, 4096))
        rig.arena.remove("a")
        await rig.arena.reserve("a", 4096)
        try:
            old[:3] = b"old"
        except ValueError:
            pass  # a backend may release the view instead
        assert read(rig.arena, "a", 3) == bytes(3)

    arenas.run(story)
