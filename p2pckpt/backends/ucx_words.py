"""What agent and mover tell each other, as JSON packets over the socket pair between them.

The agent says what is to be done (`ToMover`): expect a region, send one, cancel, keep to a rate.
The mover says what came of it (`FromMover`). Operations are known by numbers that the agent gives.

Contract: both are of one release, so there is no version; the field `type` names the kind. A file's
descriptor comes along with Expect and Send. `Ended` is the last word on an operation: it touches
its region no more.
"""

from __future__ import annotations

import msgspec

from p2pckpt.traffic import Traffic


class Expect(msgspec.Struct, tag=True, frozen=True):
    """Grant a write into a region; the file's descriptor comes along."""

    op: int
    nonce: str
    file: str
    offset: int
    length: int
    traffic: Traffic = Traffic.RESTORE


class Send(msgspec.Struct, tag=True, frozen=True):
    """Send a region to a grant of a peer's; the file's descriptor comes along."""

    op: int
    nonce: str
    file: str
    offset: int
    length: int
    host: str
    port: int
    traffic: Traffic = Traffic.RESTORE


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """End an operation; answered by Ended in any case."""

    op: int


class Unmap(msgspec.Struct, tag=True, frozen=True):
    """The file is gone; keep no mapping of it."""

    file: str


class Limit(msgspec.Struct, tag=True, frozen=True):
    """Bytes a second of each kind, each way, from now on; others have no bound."""

    rates: dict[Traffic, float]


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The mover is ready. `missing` != "": it cannot work, and why."""

    port: int = 0
    facts: dict[str, str] = {}
    missing: str = ""


class Granted(msgspec.Struct, tag=True, frozen=True):
    """A sender that shows the nonce is let in from now on."""

    op: int


class Received(msgspec.Struct, tag=True, frozen=True):
    """A piece landed."""

    op: int
    size_bytes: int


class Ended(msgspec.Struct, tag=True, frozen=True):
    """The operation touches its region no more. `error` == "": all went well."""

    op: int
    error: str = ""
    message: str = ""


ToMover = Expect | Send | Cancel | Unmap | Limit
FromMover = Hello | Granted | Received | Ended
