"""Files change hands: a machine of random takes, seals, releases, deaths and restarts.

What must hold after every move: no file is handed out while somebody may write into it or its
attempt still owns it; the record beside a file says WHOLE exactly if it is; the arena's bytes are
the sum of the table's; nothing is in one and not in the other.
"""

import asyncio
from itertools import count
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from p2pckpt import records as r
from p2pckpt.agent.holdings import ROUND_BYTES as PAGE
from p2pckpt.agent.holdings import Holdings, Want, document_name
from p2pckpt.backends.inproc.ram import FakeArena, Store
from p2pckpt.errors import NoRoom, UsageError
from p2pckpt.wire import unpack
from simulations.world import clock

BUDGET = 10 * PAGE
KINDS = list(r.FileKind)


def attempt(step, job="1000.job"):
    return r.Attempt("1" * 32, job, 1, step, step)


def pages(capacity):
    return -(-capacity // PAGE) * PAGE


def new_store():
    ids = count()
    return Store(lambda: f"store-{next(ids)}", lambda *_: None)


def at_once(coroutine):
    """Run a coroutine that never really waits (the arena's reserve takes no time here)."""
    try:
        while True:
            coroutine.send(None)
    except StopIteration as done:
        return done.value


class Files(RuleBasedStateMachine):
    """The model is what the holder was told: per life of a file its attempt, writer and state."""

    lives = Bundle("lives")

    @initialize()
    def begin(self):
        self.store, self.names, self.writers = new_store(), count(), count()
        self.start()
        self.life = {}  # of a file: the handle's number that now owns it
        self.model = {}  # handle number -> what must be true of it
        self.numbers = count()

    def start(self):
        self.arena = FakeArena(self.store, BUDGET, fault_bytes_per_s=float("inf"))
        self.holdings = Holdings(self.arena, lambda: f"{next(self.names):06d}")

    def mine(self, number):
        """The handle, if its life has not ended."""
        facts = self.model.get(number)
        return facts if facts and self.life.get(facts["held"].file) == number else None

    def ends(self, facts):
        """The file is free: released, and nobody writes."""
        if facts["doomed"] and facts["writer"] is None:
            del self.life[facts["held"].file]

    @rule(
        target=lives,
        kind=st.sampled_from(KINDS),
        step=st.integers(0, 4),
        job=st.sampled_from(["1000.a", "1000.b"]),
        capacity=st.integers(1, 4 * PAGE),
        written=st.booleans(),
    )
    def take(self, kind, step, job, capacity, written):
        writer = f"writer {next(self.writers)}" if written else None
        want = Want(kind, attempt(step, job), "n0", step, capacity)
        owned = sum(self.model[n]["held"].capacity for n in self.life.values())
        if owned + pages(capacity) > BUDGET:
            with pytest.raises(NoRoom):
                at_once(self.holdings.take(want, writer))
            return -1
        held = at_once(self.holdings.take(want, writer))
        assert held.file not in self.life, "handed out while its attempt or writer is there"
        assert held.capacity >= capacity
        assert (held.attempt, held.whole, held.length) == (want.attempt, False, 0)
        assert unpack(self.store.records[held.file], r.FileRecord).state is r.FileState.FILLING
        number = next(self.numbers)
        self.life[held.file] = number
        self.model[number] = {
            "held": held, "writer": writer, "whole": False, "doomed": False,
            "attempt": want.attempt, "digest": "",
        }  # fmt: skip
        return number

    @rule(number=lives, part=st.floats(0, 1), digest=st.sampled_from(["", "d1", "d2"]))
    def seal(self, number, part, digest):
        if facts := self.mine(number):
            held = facts["held"]
            self.holdings.seal(held, int(part * held.capacity), digest)
            if digest:
                self.arena.put_document(document_name(digest), b"manifest")
            facts.update(whole=True, writer=None, digest=digest)
            self.ends(facts)

    @rule(number=lives)
    def writer_done(self, number):
        if facts := self.mine(number):
            self.holdings.writer_done(facts["held"])
            facts["writer"] = None
            self.ends(facts)

    @rule(number=lives)
    def release(self, number):
        if facts := self.mine(number):
            self.holdings.release(facts["held"])
            facts["doomed"] = True
            self.ends(facts)

    @rule(number=lives)
    def reopen(self, number):
        facts = self.mine(number)
        if facts and facts["whole"] and not facts["doomed"]:
            facts.update(whole=False, writer=f"writer {next(self.writers)}")
            self.holdings.reopen(facts["held"], facts["writer"])

    @rule(number=consumes(lives), over=st.integers(1, 5))
    def seal_beyond_the_file(self, number, over):
        if facts := self.mine(number):
            with pytest.raises(UsageError):
                self.holdings.seal(facts["held"], facts["held"].capacity + over, "")
            self.model.pop(number)
            self.holdings.release(facts["held"])
            self.holdings.writer_done(facts["held"])
            del self.life[facts["held"].file]

    @rule(
        kind=st.sampled_from(KINDS),
        job=st.sampled_from(["1000.a", "1000.b"]),
        capacity=st.integers(1, 3).map(lambda n: n * PAGE),
        count=st.integers(1, 3),
    )
    def prepare(self, kind, job, capacity, count):
        """Room ahead of time: what was taken stays what it was, as the invariants say."""

        def fit():
            return [h for h in self.holdings if (h.job, h.kind) == (job, kind)
                    and h.capacity >= capacity]  # fmt: skip

        before = fit()
        try:
            at_once(self.holdings.prepare(job, kind, capacity, count))
        except NoRoom:
            assert self.arena.used_bytes + capacity > BUDGET
            assert len(fit()) < count
        else:
            assert len(fit()) == max(count, len(before))

    @rule(job=st.sampled_from(["1000.a", "1000.b"]))
    def drop_free(self, job):
        self.holdings.drop_free(job)
        assert not [h for h in self.holdings if h.attempt is None and h.job == job]

    @rule()
    def sweep(self):
        self.holdings.sweep_documents()
        wanted = {self.model[n]["digest"] for n in self.life.values()} - {""}
        names = set(self.arena.documents())
        assert names <= {document_name(d) for d in ["d1", "d2"]}
        assert {document_name(d) for d in wanted} <= names

    @precondition(lambda self: self.life)
    @rule()
    def restart(self):
        """The agent is started again on the memory that stayed; old handles are void."""
        whole = {
            self.model[n]["held"].file: self.model[n]
            for n in self.life.values()
            if self.model[n]["whole"]
        }
        self.start()
        adopted = {h.file: h for h in self.holdings.adopt()}
        for file, facts in whole.items():
            held = adopted[file]
            assert (held.attempt, held.manifest_digest) == (facts["attempt"], facts["digest"])
        self.life, self.model = {}, {}
        for held in adopted.values():
            assert held.whole
            assert held.writer is None
            number = next(self.numbers)
            self.life[held.file] = number
            self.model[number] = {
                "held": held, "writer": None, "whole": True, "doomed": False,
                "attempt": held.attempt, "digest": held.manifest_digest,
            }  # fmt: skip
            # what the ledger settled long ago is released again, as JobContext does
            if held.file not in whole:
                self.release(number)

    @invariant()
    def bytes_are_the_sum_and_nothing_leaks(self):
        table = {h.file: h for h in self.holdings}
        assert set(table) == set(self.store.files)
        assert set(self.store.records) <= set(self.store.files)
        assert self.arena.used_bytes == sum(h.capacity for h in table.values()) <= BUDGET
        assert all(len(self.store.files[f]) == h.capacity for f, h in table.items())

    @invariant()
    def the_table_is_what_the_holders_were_told(self):
        for held in self.holdings:
            if held.file not in self.life:
                assert (held.attempt, held.writer, held.whole) == (None, None, False), held
                continue
            facts = self.model[self.life[held.file]]
            assert held.attempt == facts["attempt"]
            assert held.whole == facts["whole"]
            assert held.writer == facts["writer"]
            record = unpack(self.store.records[held.file], r.FileRecord)
            assert record.attempt == held.attempt
            if not held.doomed:
                assert (record.state is r.FileState.WHOLE) == held.whole
                assert record.length == held.length or not held.whole
        for facts in (self.model[n] for n in self.life.values()):
            held = facts["held"]
            found = self.holdings.find(held.attempt, held.kind, held.part, held.owner)
            assert (found is not None) >= facts["whole"]
            assert found is None or found.whole


TestFiles = Files.TestCase
TestFiles.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


# -- many at once, under virtual time ------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_many_takers_at_once_never_share_a_file(seed):
    async def main():
        rng, store, names = Random(seed), new_store(), count()
        arena = FakeArena(store, 12 * PAGE, fault_bytes_per_s=2.0 * PAGE)
        holdings = Holdings(arena, lambda: f"{next(names):06d}")
        owned, refused = {}, 0

        async def taker(i):
            nonlocal refused
            for step in range(6):
                want = Want(rng.choice(KINDS), attempt(i), "n0", i, rng.randrange(1, 3 * PAGE))
                try:
                    async with asyncio.timeout(rng.uniform(0.2, 4.0)):
                        held = await holdings.take(want, (i, step))
                except NoRoom:
                    refused += 1
                    continue
                except TimeoutError:  # a cancelled take
                    continue
                assert held.file not in owned, f"{held.file} of {owned[held.file]} given to {i}"
                owned[held.file] = i
                await asyncio.sleep(rng.uniform(0, 2))
                if rng.random() < 0.5:
                    holdings.seal(held, held.capacity, "")
                assert held.attempt == want.attempt
                del owned[held.file]
                holdings.release(held)
                holdings.writer_done(held)

        async with asyncio.TaskGroup() as group:
            for i in range(8):
                group.create_task(taker(i))
        assert not owned
        assert {h.file for h in holdings} == set(store.files)
        assert all(h.attempt is None for h in holdings)
        return refused

    assert clock.run(main(), limit_s=3600) >= 0


# -- stories ---------------------------------------------------------------------------------------


def one_file(pages=2):
    store, names = new_store(), count()
    arena = FakeArena(store, pages * PAGE, fault_bytes_per_s=float("inf"))
    return store, arena, Holdings(arena, lambda: f"{next(names):06d}")


def test_a_handle_of_a_past_life_does_not_touch_the_next_one():
    # Saving._save holds its staging file while its attempt is aborted elsewhere: the tracker frees
    # it, the next attempt takes it, and then the first one's `finally` releases it once more.
    _, _, holdings = one_file()
    first = at_once(holdings.take(Want(r.FileKind.STAGE, attempt(1), "n0", 0, PAGE)))
    holdings.release(first)  # by the tracker
    second = at_once(holdings.take(Want(r.FileKind.STAGE, attempt(2), "n0", 0, PAGE)))
    assert second.file == first.file
    holdings.release(first)  # by the save that ends late
    third = at_once(holdings.take(Want(r.FileKind.STAGE, attempt(3), "n0", 0, PAGE)))
    assert third.file != second.file, "two attempts stage into one file"


def test_a_take_that_fails_leaves_nothing():
    _, arena, holdings = one_file()

    def full(file, record):
        raise NoRoom("record: needs 1 page, has 0")

    keep, arena.put_record = arena.put_record, full
    with pytest.raises(NoRoom):
        at_once(holdings.take(Want(r.FileKind.SLOT, attempt(1), "n0", 0, 2 * PAGE), "writer"))
    arena.put_record = keep
    for held in holdings.of_attempt(attempt(1)):
        holdings.release(held)  # the tracker frees what the attempt holds
    assert at_once(holdings.take(Want(r.FileKind.SLOT, attempt(2), "n0", 0, 2 * PAGE), "other"))


def test_a_slot_of_a_living_old_writer_is_never_given_again():
    _, _, holdings = one_file()
    held = at_once(holdings.take(Want(r.FileKind.SLOT, attempt(1), "n0", 0, 2 * PAGE), "trainer"))
    holdings.release(held)
    with pytest.raises(NoRoom):
        at_once(holdings.take(Want(r.FileKind.SLOT, attempt(2), "n0", 0, 2 * PAGE), "next"))
    assert holdings.written_by("trainer") == [held]
    holdings.writer_done(held)
    assert at_once(holdings.take(Want(r.FileKind.SLOT, attempt(2), "n0", 0, 2 * PAGE), "next"))


def test_a_file_that_its_use_has_outgrown_goes():
    # The rank's snapshot grew by a page: its old free file is of no use to it; another's stays.
    store, _, holdings = one_file(pages=9)
    first, other = (
        at_once(holdings.take(Want(r.FileKind.SLOT, attempt(1), "n0", part, PAGE)))
        for part in (0, 1)
    )
    holdings.release(first)
    holdings.release(other)
    at_once(holdings.prepare("1000.job", r.FileKind.SLOT, PAGE, 3))
    grown = at_once(holdings.take(Want(r.FileKind.SLOT, attempt(2), "n0", 0, 2 * PAGE)))
    assert sorted(h.capacity for h in holdings) == [PAGE, PAGE, 2 * PAGE]
    at_once(holdings.prepare("1000.job", r.FileKind.SLOT, 2 * PAGE, 2))
    assert {other.file, grown.file} < set(store.files)
    assert sorted(h.capacity for h in holdings) == [PAGE, 2 * PAGE, 2 * PAGE]


def test_a_damaged_record_is_not_adopted():
    store, _, holdings = one_file()
    held = at_once(holdings.take(Want(r.FileKind.SLOT, attempt(1), "n0", 0, 100)))
    holdings.seal(held, 100, "d")
    packed = store.records[held.file]
    for at in range(len(packed)):
        store.files[held.file] = bytearray(PAGE)
        store.records[held.file] = packed
        store.flip_record(held.file, at, at % 8)
        again = Holdings(FakeArena(store, 2 * PAGE), lambda: "x")
        assert again.adopt() == []
        assert not store.files


def test_a_file_that_is_being_made_is_waited_for_only_if_it_would_do():
    # Two ranks ask while two files of two pages are made; a third wants more than these have.
    async def main():
        names = count()
        arena = FakeArena(new_store(), 20 * PAGE, fault_bytes_per_s=2 * PAGE)  # a second for each
        holdings = Holdings(arena, lambda: f"{next(names):06d}")
        loop = asyncio.get_running_loop()

        async def take(part, size):
            await holdings.take(Want(r.FileKind.SLOT, attempt(1), "n0", part, size))
            return loop.time()

        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(holdings.prepare("1000.job", r.FileKind.SLOT, 2 * PAGE, 2))
            await asyncio.sleep(0.5)
            fit = [group.create_task(take(part, 2 * PAGE)) for part in (0, 1)]
            larger = group.create_task(take(2, 4 * PAGE))
        assert [task.result() for task in fit] == [1.0, 1.0]
        assert larger.result() == 2.5
        assert sorted(h.capacity for h in holdings) == [2 * PAGE, 2 * PAGE, 4 * PAGE]

    clock.run(main(), limit_s=60)


def test_a_free_file_goes_back_to_its_use():
    # The shard of n1 lies in three pages, that of n2 in two: they do not change places.
    _, _, holdings = one_file(pages=5)
    uses = [("n1", 3 * PAGE), ("n2", 2 * PAGE)]
    wants = [Want(r.FileKind.SHARD, attempt(1), owner, 0, size) for owner, size in uses]
    first = {want.owner: at_once(holdings.take(want)) for want in wants}
    for held in first.values():
        holdings.release(held)
    again = [Want(r.FileKind.SHARD, attempt(2), owner, 0, 2 * PAGE) for owner, _ in uses]
    assert [at_once(holdings.take(w)).file for w in again] == [h.file for h in first.values()]
