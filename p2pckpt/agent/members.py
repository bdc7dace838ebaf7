"""This agent's own membership: a lease that is kept, and what happens when it is lost.

The session carries the lease; the store carries the bytes. Losing the lease (a pause, a partition,
an etcd outage longer than `lease_s`) ends the session, not the store: the agent opens a new one and
says again which trainers live. Meanwhile it grants nothing new (`Home.cut_off`), but it reads.

Contract: renewal runs for ever and never raises; `on_session` is called after every new session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from msgspec import structs

from p2pckpt.agent.context import RETRY_S, Home
from p2pckpt.errors import CheckpointError, UsageError
from p2pckpt.ports import Session


async def keep_session(home: Home, on_session: Callable[[], Awaitable[None]]) -> None:
    """Open a session, renew it, open the next one when it is gone."""
    told = False
    while True:
        pause_s = RETRY_S
        try:
            if home.session is None:
                await _open(home)
                told = False
            else:
                await _renew(home, home.session)
            if not told and home.session is not None:
                await on_session()
                told = True
            pause_s = home.config.keepalive_s if told else RETRY_S
        except CheckpointError as e:
            home.doors.notes("session_later", {"node": home.node, "why": str(e)})
            if isinstance(e, UsageError):  # another store has our name: its lease must end first
                pause_s = home.config.lease_s
        await asyncio.sleep(pause_s)


async def _renew(home: Home, session: Session) -> None:
    asked_at = home.now()
    if await home.doors.membership.keep(session):
        home.kept(asked_at)
    else:
        home.doors.notes("session_lost", {"node": home.node})
        home.session = None


async def _open(home: Home) -> None:
    asked_at = home.now()
    member = structs.replace(
        home.member,
        session=home.doors.ids.new(),
        peers_address=home.doors.peers.address,
        transport_address=home.doors.transport.address,
    )
    session = await home.doors.membership.open(member, home.config.lease_s)
    # A drain may have been asked for, or ended, while the ledger was waited for.
    home.member = structs.replace(member, draining=home.member.draining)
    home.session = session
    home.kept(asked_at, anew=True)
    home.doors.notes("session", {"node": home.node, "revision": session.revision})
