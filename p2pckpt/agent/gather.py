"""Pieces of the nodes of one group -> one record in the ledger.

Saving and restoring both need it: each node has a piece (its sealed share; the report of its
ranks), and at 1,250 nodes the ledger must not see 1,250 of them. So a node hands its piece to the
lowest living member of its group of 64, which writes one create-if-absent record when it has all;
if no record appears within `takeover_s`, the piece goes to the next member, and so on around.

Contract: pieces are immutable, so whoever has them all writes the same record, and writing it
twice is impossible. A piece that is missing stops the record, never the group: the attempt's or
ballot's deadline ends the wait.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from p2pckpt import records as r
from p2pckpt.agent.context import JobContext, Roster
from p2pckpt.errors import CheckpointError, Refused
from p2pckpt.wire import HandIn

Write = Callable[[int, list[HandIn]], Awaitable[bool]]
"""(group, pieces in roster order): puts the record, create-if-absent; True: it stands."""

LEAD_PAUSE_S = 0.02
"""Between the first two looks of the node that decides at once; then ever longer, up to"""

LEAD_PAUSES_S = 0.5

MAX_TOPICS = 256
"""Pieces of more topics than that are of attempts long over; the oldest are forgotten."""


def topic(piece: HandIn) -> str:
    """What a piece belongs to: an attempt or a ballot, of one ledger, as another counts anew."""
    if piece.attempt is not None:
        return f"save {piece.attempt.key} of {piece.ledger_id}"
    return f"restore {piece.generation}/{piece.ballot} of {piece.ledger_id}"


@dataclass
class Gathering:
    """Pieces that were handed to this node, by topic and node, until their topic is done."""

    pieces: dict[str, dict[str, HandIn]] = field(default_factory=dict)

    def take(self, piece: HandIn) -> None:
        """Keep a piece. A second one of the same node and topic must equal the first."""
        known = self.pieces.setdefault(topic(piece), {})
        if known.setdefault(piece.node, piece) != piece:
            raise Refused(f"{piece.node} handed in two different pieces for {topic(piece)}")
        while len(self.pieces) > MAX_TOPICS:
            del self.pieces[next(iter(self.pieces))]

    def complete(self, key: str, group: tuple[r.RosterNode, ...]) -> list[HandIn] | None:
        """All pieces of a group, in roster order, or None."""
        known = self.pieces.get(key, {})
        if any(n.node not in known for n in group):
            return None
        return [known[n.node] for n in group]

    def forget(self, key: str) -> None:
        """The topic is done."""
        self.pieces.pop(key, None)


async def hand_in(
    ctx: JobContext,
    roster: Roster,
    piece: HandIn,
    gathering: Gathering,
    write: Write,
    done: Callable[[], bool],
) -> None:
    """Hand in this node's piece, to one member after the other, until `done()` or the record
    stands by this node's own hand."""
    found = roster.find(ctx.home.node)
    assert found is not None, "only roster nodes have pieces"
    number, _ = found
    group, about = roster.group(number), topic(piece)
    takeover_s = ctx.home.config.takeover_s

    def complete() -> list[HandIn] | None:
        return gathering.complete(about, group)

    try:
        while not done():
            for lead in group:
                await _give(ctx, lead, piece, gathering)
                await ctx.until(lambda: done() or complete() is not None, takeover_s)
                if done():
                    return
                if pieces := complete():
                    if await _write(ctx, number, pieces, write):
                        return
                    await ctx.until(done, takeover_s)  # it failed: not again at once
    finally:
        gathering.forget(about)
        if piece.attempt is not None:
            ctx.hindered.pop(piece.attempt, None)


async def _give(ctx: JobContext, lead: r.RosterNode, piece: HandIn, gathering: Gathering) -> None:
    try:
        if lead.node == ctx.home.node:
            gathering.take(piece)
            return
        living = await ctx.home.living(ctx.home.config.keepalive_s)
        if member := living.members.get(lead.node):
            peers, timeout_s = ctx.home.doors.peers, ctx.home.config.peer_timeout_s
            await peers.call(member.peers_address, piece, timeout_s)
            return
        why = "it is no living member"
    except CheckpointError as e:
        why = str(e)
        ctx.note("hand_in_failed", lead=lead.node, topic=topic(piece), why=why)
    if piece.attempt is not None:
        words = f"{ctx.home.node} could not hand its share to {lead.node}: {why}"
        ctx.hindered[piece.attempt] = words


async def _write(ctx: JobContext, number: int, pieces: list[HandIn], write: Write) -> bool:
    try:
        return await write(number, pieces)
    except CheckpointError as e:
        ctx.note("group_record_failed", topic=topic(pieces[0]), why=str(e))
        return False


async def pause(ctx: JobContext, leads: bool, done: Callable[[], bool], looks: int = 0) -> None:
    """Before deciding for all: hardly any for the node of rank 0, a random while for others."""
    pause_s = min(LEAD_PAUSES_S, LEAD_PAUSE_S * 1.2 ** min(looks, 64)) if leads else ctx.turn_s()
    await ctx.until(done, pause_s)
