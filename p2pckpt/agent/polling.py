"""One question to many agents at once: who answers is heard, who does not is noted.

Most that a node must know to decide lies with others: what they hold, what they remember. It asks
all of them side by side, some at a time, each for `peer_timeout_s`.

Contract: raises nothing because of a peer; an answer of another kind than asked for counts as none.
What silence means is for the caller: it is never taken for "has nothing" here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TypeVar

from p2pckpt import records as r
from p2pckpt.agent.context import JobContext
from p2pckpt.errors import CheckpointError

AT_ONCE = 64

T = TypeVar("T", bound=r.Record)


async def poll(
    ctx: JobContext, query: r.Record, kind: type[T], members: Iterable[r.Member]
) -> dict[str, T]:
    """The answers of those of ``members`` that gave one, by node."""
    limit = asyncio.Semaphore(AT_ONCE)
    answers: dict[str, T] = {}

    async def ask(member: r.Member) -> None:
        async with limit:
            try:
                timeout_s = ctx.home.config.peer_timeout_s
                reply = await ctx.home.doors.peers.call(member.peers_address, query, timeout_s)
                if isinstance(reply, kind):
                    answers[member.node] = reply
            except CheckpointError as e:
                ctx.note("no_answer", node=member.node, why=str(e))

    async with asyncio.TaskGroup() as group:
        for member in sorted(members, key=lambda m: m.node):
            group.create_task(ask(member))
    return answers
