"""A real agent: the backends behind the doors, opened and closed in order.

    tmpfs arena -> etcd -> gRPC peers -> UCX mover (timed) -> trainers' socket -> Agent.run

What can be wrong before anything is promised (no room, an etcd release that loses commits, a taken
port, no UCX) is an error here, at start, and not at the first save.

Contract: `run_node` returns after `stop` was set and saves in flight have ended within
`stop_grace_s`; the RAM files stay for the next start. Every door that was opened is closed.
"""

from __future__ import annotations

import asyncio
import grp
import hashlib
import os
import pwd
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from p2pckpt import records as r
from p2pckpt.agent.daemon import Agent
from p2pckpt.backends import descriptors
from p2pckpt.backends.arena import TmpfsArena
from p2pckpt.backends.budget import default_budget, file_system
from p2pckpt.backends.etcd import Etcd
from p2pckpt.backends.nic import PROBE, measure
from p2pckpt.backends.peers import GrpcPeers
from p2pckpt.backends.trainers import SocketTrainers
from p2pckpt.backends.ucx import UcxTransport
from p2pckpt.backends.ucx_flow import Limits
from p2pckpt.backends.workers import SystemIds, ThreadWorkers
from p2pckpt.config import Config
from p2pckpt.errors import ConfigError, cause_of
from p2pckpt.ports import Doors, ObjectStore
from p2pckpt.restore.fetch import OBJECT_STORE
from p2pckpt.telemetry import Telemetry

Notes = Callable[[str, dict[str, Any]], None]


async def run_node(config: Config, socket: str, tell: Notes, stop: asyncio.Event) -> None:
    """Run one node's agent until `stop` is set. ``socket``: where trainers find it. ``tell`` hears
    of every event, as the telemetry does.
    """
    telemetry = Telemetry(asyncio.get_running_loop().time)

    def notes(what: str, facts: dict[str, Any]) -> None:
        telemetry.note(what, facts)
        tell(what, facts)

    if config.transport != "ucx":
        raise ConfigError(f"transport = {config.transport!r}: this release has 'ucx' only")
    notes("open_files", {"limit": descriptors.raise_limit()})
    async with AsyncExitStack() as stack:
        arena = _arena(config, notes)
        stack.callback(arena.close)
        workers = ThreadWorkers(config.workers, config.background_cores)
        stack.callback(workers.close)
        etcd = await stack.enter_async_context(_etcd(config))
        notes("etcd", dict(await etcd.check_version(config.trial)))
        peers = await GrpcPeers.start(config.listen)
        stack.push_async_callback(peers.close)
        pieces = {"piece_bytes": config.piece_bytes, "open_pieces": config.open_pieces}
        limits = Limits(**pieces, floor_bytes_per_s=config.floor_bytes_per_s)
        transport = await UcxTransport.start(arena.descriptor, config.listen, limits=limits)
        stack.push_async_callback(transport.close)
        notes("transport", dict(transport.describe()))
        config, nic = await _measured(config, arena, transport)
        uids, group = served(config.group)
        trainers = SocketTrainers(socket, arena.descriptor, uids, group)
        stack.push_async_callback(trainers.close)
        doors = Doors(
            etcd.ledger,
            etcd.membership,
            peers,
            transport,
            arena,
            trainers,
            workers,
            SystemIds(),
            notes,
            await _objects(config, stack),
            telemetry,
        )
        agent = Agent(config, doors, member_of(config, arena.store_id))
        agent.home.governing.nic = nic
        running = asyncio.create_task(agent.run(), name="agent")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        ready = asyncio.create_task(_tell_ready(agent, socket, notes), name="ready")
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            await agent.stop()
        for task in (running, stopping, ready):
            task.cancel()
        results = await asyncio.gather(running, stopping, ready, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise cause_of(results[0])


def _arena(config: Config, notes: Notes) -> TmpfsArena:
    """The RAM files, within a budget that is told, with a warning if it is more than there is."""
    half, why = default_budget(config.directory)
    budget = config.ram_budget_bytes or half
    if budget > 2 * half:
        facts = {"ram_budget_bytes": budget, "free_bytes": 2 * half}
        so = "saves end in NoRoom or, at the limit of a memory cgroup, this agent is killed"
        notes("WARNING", {**facts, "so": f"{so}; see p2pckpt doctor"})
    why = "as configured" if config.ram_budget_bytes else why
    notes("budget", {"bytes": budget, "why": why})
    arena = TmpfsArena(config.directory, budget)
    if (kind := file_system(config.directory)) not in ("tmpfs", "ramfs"):
        advice = "every save goes to a disk; use a directory on tmpfs, as /dev/shm"
        notes("WARNING", {"directory": config.directory, "is_on": kind, "so": advice})
    return arena


async def _measured(
    config: Config, arena: TmpfsArena, transport: UcxTransport
) -> tuple[Config, str]:
    """The settings with `nic_bytes_s`, and how that is known."""
    if config.nic_bytes_s:
        return config, "as configured"
    found, how = await measure(arena, transport, config.listen)
    transport.forget(PROBE)
    return replace(config, nic_bytes_s=found), how


def served(group: str) -> tuple[set[int], int | None]:
    """Whose processes may use the agent, and the socket's group. Raises ConfigError."""
    own = {os.geteuid()}
    if not group:
        return own, None
    try:
        found = grp.getgrnam(group)
    except KeyError:
        raise ConfigError(f"group = {group!r}: this machine has no such group") from None
    members = {u.pw_uid for u in pwd.getpwall() if u.pw_gid == found.gr_gid}
    members |= {u.pw_uid for u in pwd.getpwall() if u.pw_name in found.gr_mem}
    return own | members, found.gr_gid


def member_of(config: Config, store_id: str) -> r.Member:
    """Who this node is. Raises ConfigError."""
    if not config.node:
        raise ConfigError("node: needs a name that no other agent has")
    if config.node == OBJECT_STORE:
        raise ConfigError(f"node: {config.node!r} is what the object store is called")
    host = config.host_id or machine_host()
    if not host:
        raise ConfigError("host_id: /etc/machine-id is empty or absent; set host_id")
    return r.Member(config.node, host, store_id, "", "", "", config.domain_map)


def machine_host() -> str:
    """The host where `host_id` is not set: a digest of the machine id; "" if there is none."""
    machine = Path("/etc/machine-id")
    text = machine.read_text().strip() if machine.exists() else ""
    return hashlib.sha256(b"p2pckpt " + text.encode()).hexdigest()[:16] if text else ""


async def _tell_ready(agent: Agent, socket: str, notes: Notes) -> None:
    """Trainers can join; and what the background may take of the network."""
    await agent.ready.wait()
    governing = agent.home.governing
    network = {"nic_bytes_s": governing.config.nic_bytes_s, "nic": governing.nic}
    budget = round(governing.budget_bytes_s)
    facts = {"node": agent.home.node, "socket": socket, **network, "background_bytes_s": budget}
    notes("ready", facts)


async def _objects(config: Config, stack: AsyncExitStack) -> ObjectStore | None:
    """The object store, if one is configured. Raises MissingDependency without boto3."""
    place = config.s3_place
    if place is None:
        return None
    from p2pckpt.backends.s3 import Place, S3Objects

    workers = ThreadWorkers(config.s3_workers, config.background_cores)
    stack.callback(workers.close)
    objects = S3Objects(
        Place(
            *place,
            endpoint=config.s3_endpoint,
            region=config.s3_region,
            addressing=config.s3_addressing,
            timeout_s=config.s3_timeout_s,
        ),
        workers,
    )
    stack.push_async_callback(objects.close)
    return objects


def _etcd(config: Config) -> Etcd:
    files = [Path(f) for f in (config.cacert, config.cert, config.key) if f]
    if len(files) not in (0, 3):
        raise ConfigError("cacert, cert, key: needs all three or none")
    scheme = "https" if files else "http"
    endpoints = [
        e if "://" in e else f"{scheme}://{e}"
        for e in (part.strip() for part in config.endpoints.split(","))
        if e
    ]
    tls = (files[0], files[1], files[2]) if files else None
    return Etcd(endpoints, tls, config.rpc_timeout_s, config.ledger_timeout_s)
