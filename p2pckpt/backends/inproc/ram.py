"""The fake RAM of a node: files as bytearrays that outlive the agent, and faults to switch on.

Intuition. `Store` is what lies in the node's memory; `FakeArena` is one agent's use of it. When the
agent dies the store stays, as a tmpfs directory does, unless it is wiped.

Contract. `FakeArena` is a `ports.Arena`. Records are kept packed, so a flipped bit in one makes it
invalid, as on a real tmpfs. A removed file's bytes live on for who still has a view or a descriptor
of it, and nobody else sees them: writes of an old writer go nowhere.

Consequence. `adopt` keeps exactly the files whose record is valid, says WHOLE and fits the file;
bytes that rotted below a valid record are for the reader's digests to find.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Set
from typing import Any

from p2pckpt import wire
from p2pckpt.errors import FormatError, NoRoom, UsageError
from p2pckpt.ports import Kept, Region
from p2pckpt.records import FileRecord, FileState

Log = Callable[[str, dict[str, Any]], None]


class Store:
    """One life of a node's bytes: `store_id` is made anew by `wipe`.

    ``new_id()`` makes store_ids; ``log(what, facts)`` is told of every record, removal and fault.
    """

    def __init__(self, new_id: Callable[[], str], log: Log) -> None:
        self._new_id = new_id
        self.log = log
        self.store_id = new_id()
        self.files: dict[str, bytearray] = {}
        self.records: dict[str, bytes] = {}
        self.documents: dict[str, bytes] = {}
        self.ballast_bytes = 0

    def descriptor(self, file: str) -> bytearray:
        """The file's bytes, as a descriptor would give them: they outlive its name."""
        if file not in self.files:
            raise UsageError(f"arena: no file {file!r}")
        return self.files[file]

    def remove(self, name: str) -> None:
        """Remove a file with its record, or a document; absent is fine."""
        self.records.pop(name, None)
        gone = self.files.pop(name, None) is not None
        if (self.documents.pop(name, None) is not None) or gone:
            self.log("ram.remove", {"name": name})

    def flip(self, file: str, offset: int, bit: int) -> None:
        """Turn one bit of a file around."""
        self.descriptor(file)[offset] ^= 1 << bit
        self.log("fault.ram.flip", {"file": file, "offset": offset, "bit": bit})

    def flip_record(self, file: str, offset: int, bit: int) -> None:
        """Turn one bit of a file's record around."""
        packed = bytearray(self.records[file])
        packed[offset] ^= 1 << bit
        self.records[file] = bytes(packed)
        self.log("fault.ram.flip_record", {"file": file, "offset": offset, "bit": bit})

    def fill(self, ballast_bytes: int) -> None:
        """Somebody else takes so much of the node's memory; 0: nobody any more."""
        self.ballast_bytes = ballast_bytes
        self.log("fault.ram.fill", {"bytes": ballast_bytes})

    def wipe(self) -> None:
        """All is lost: files, records, documents and the store's identity."""
        self.log("fault.ram.wipe", {"store_id": self.store_id})
        self.files, self.records, self.documents = {}, {}, {}
        self.store_id = self._new_id()


class FakeArena:
    """`ports.Arena` on a `Store`. Reserving takes bytes / ``fault_bytes_per_s`` of loop time."""

    def __init__(self, store: Store, budget_bytes: int, fault_bytes_per_s: float = 2e9) -> None:
        self._store = store
        self._budget_bytes = budget_bytes
        self._fault_bytes_per_s = fault_bytes_per_s

    @property
    def store_id(self) -> str:
        """Dies with the bytes."""
        return self._store.store_id

    @property
    def budget_bytes(self) -> int:
        """What all files together may take."""
        return self._budget_bytes

    @property
    def used_bytes(self) -> int:
        """Capacity of all files."""
        return sum(len(held) for held in self._store.files.values())

    async def reserve(self, file: str, capacity: int) -> None:
        """Make a file of zeros. Raises NoRoom naming need and have, UsageError."""
        _check_name(file)
        if file in self._store.files:
            raise UsageError(f"arena: file {file!r} is there already")
        if capacity < 0:
            raise UsageError(f"arena: capacity of {file!r} is {capacity}, needs >= 0")
        have = self._budget_bytes - self.used_bytes - self._store.ballast_bytes
        if capacity > have:
            raise NoRoom(
                f"arena: file {file!r} needs {capacity} bytes, has {have} of {self._budget_bytes}"
            )
        held = self._store.files[file] = bytearray(capacity)
        self._store.log("ram.reserve", {"file": file, "capacity": capacity})
        try:
            await asyncio.sleep(capacity / self._fault_bytes_per_s)
        except asyncio.CancelledError:
            if self._store.files.get(file) is held:
                self._store.remove(file)
            raise

    def view(self, region: Region) -> memoryview:
        """Writable view of a region. Raises UsageError outside of the file."""
        held = self._store.descriptor(region.file)
        end = region.offset + region.length
        if region.offset < 0 or region.length < 0 or end > len(held):
            raise UsageError(
                f"arena: {region.file!r} from {region.offset} to {end}: has {len(held)} bytes"
            )
        return memoryview(held)[region.offset : end]

    def put_record(self, file: str, record: FileRecord) -> None:
        """Replace the file's record."""
        self._store.descriptor(file)
        self._store.records[file] = wire.pack(record)
        facts = {"file": file, "state": record.state.value, "attempt": record.attempt.key}
        self._store.log("ram.record", {**facts, "digest": record.manifest_digest})

    def put_document(self, name: str, packed: bytes) -> None:
        """Write a small document."""
        _check_name(name)
        self._store.documents[name] = bytes(packed)
        self._store.log("ram.document", {"name": name, "bytes": len(packed)})

    def document(self, name: str) -> bytes | None:
        """Read a document back, None if absent."""
        return self._store.documents.get(name)

    def documents(self) -> Set[str]:
        """Names of all documents."""
        return self._store.documents.keys()

    def adopt(self) -> tuple[Kept, ...]:
        """Files with a valid WHOLE record, by name; all other files are removed."""
        kept = []
        for file, held in sorted(self._store.files.items()):
            record = _whole(self._store.records.get(file), len(held))
            if record is None:
                self._store.remove(file)
            else:
                kept.append(Kept(file, len(held), record))
        return tuple(kept)

    def remove(self, name: str) -> None:
        """Remove a file with its record, or a document; absent is fine."""
        self._store.remove(name)


def _whole(packed: bytes | None, capacity: int) -> FileRecord | None:
    """The record, if it can be believed."""
    if packed is None:
        return None
    try:
        record = wire.unpack(packed, FileRecord)
    except FormatError:
        return None
    believed = record.state is FileState.WHOLE and 0 <= record.length <= capacity
    return record if believed else None


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z0-9._-]+", name):
        raise UsageError(f"arena: name {name!r} needs [a-z0-9._-]+")
