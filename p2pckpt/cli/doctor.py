"""`p2pckpt doctor`: is everything here that an agent needs, and what to do if not.

Each check looks at the real thing: the file system of the RAM directory, the limits of the process,
a UCX mover that is started and asked, the coding and checksum libraries computing known answers, a
linearizable read from every etcd, a network that is timed as an agent times it, the agent's socket.
A check that cannot look says so; it never ends the others.

Contract: changes nothing but mover processes of its own, which are gone afterwards. If an agent
answers on the socket, its settings are what is checked, else those that an agent started now would
have; a flag of the doctor's own overrules both, and the first line says which. Exit codes: 0 all
is well, 4 warnings only, 1 something fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import crc32c as crc32c_package

from p2pckpt import wire as w
from p2pckpt.backends.agent_link import AgentLink
from p2pckpt.backends.etcd import Etcd, Room, version_flaw
from p2pckpt.backends.nic import Scratch, measure
from p2pckpt.backends.trainers import default_socket_paths
from p2pckpt.backends.ucx import UcxTransport
from p2pckpt.cli import memory
from p2pckpt.cli.agent import config_options, read_config
from p2pckpt.cli.memory import FAIL, OK, WARN, Check
from p2pckpt.cli.output import (
    EXIT_DEGRADED,
    EXIT_DONE,
    EXIT_FAILED,
    agent_option,
    finish,
    json_option,
    plural,
    waiting,
)
from p2pckpt.coding import checksum, reed_solomon
from p2pckpt.config import Config
from p2pckpt.errors import CheckpointError, ConfigError
from p2pckpt.records import ROOT, Layout

SLOW_LEDGER_S = 0.1
"""A linearizable read that takes longer delays every commit."""
READS = 5
RDMA = re.compile(r"(rc|dc|ud)[^/]*/(\S+)")
"""A transport over InfiniBand or RoCE in UCX's list, as "rc_mlx5/mlx5_0:1"."""
GET_RDMA = (
    "for RDMA install a system UCX built with verbs (the UCX wheel has none) and set "
    "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true for the agent"
)
MASKED = "***"


@click.command(short_help="Check what this node lacks, and what to do.")
@click.option(
    "--layout", default="rs:4,2", show_default=True, help="Are there hosts enough for it?"
)
@agent_option
@json_option
@config_options
def doctor(
    layout: str,
    agent: str | None,
    json_file: str | None,
    config_file: str | None,
    **flags: Any,
) -> None:
    """Check this node: memory, limits, UCX, libraries, etcd, the agent, and hosts for a layout."""
    wanted, read = Layout.parse(layout), read_config(config_file, flags)
    chosen = agent or read.config.socket
    paths = (chosen,) if chosen else default_socket_paths(os.environ)
    with waiting("looking"):
        answered = ask_agent(paths)
        told = answered if isinstance(answered, dict) else None
        config, origin = settings(read.config, flags, told)
        checks = [Check("settings", OK, origin), *check_all(config, wanted)]
        network, nic = network_of(config, None if flags["nic_bytes_s"] else told)
        checks += [check_nic(network, nic, config.background_share), check_agent(answered)]
    verdicts = {check.verdict for check in checks}
    code = EXIT_FAILED if FAIL in verdicts else EXIT_DEGRADED if WARN in verdicts else EXIT_DONE
    bad = [c for c in checks if c.verdict == FAIL] or [c for c in checks if c.verdict == WARN]
    advice = ""
    if bad:
        say = plural(len(bad), "check says", "checks say")
        advice = f"{say} {bad[0].verdict}\nfirst: {bad[0].name}: {bad[0].do}"
    lines = []
    for check in checks:
        lines.append(f"{check.verdict:4}  {check.name:13}  {check.found}")
        if check.do:
            lines.append(f"{'':21}-> {check.do}")
    shown = [asdict(check) for check in checks]
    document = {"checks": shown, "nic_bytes_s": network, "nic": nic}
    finish("doctor", json_file, document, "\n".join(lines), code, advice)


def check_all(config: Config, layout: Layout) -> Iterable[Check]:
    """All checks but the agent's, in the order in which an agent would meet the trouble."""
    budget, why = memory.budget_of(config)
    mounts, devices = memory.mounts_here(), memory.rdma_devices()
    yield from _guarded("memory", lambda: memory.check_memory(config, budget, why))
    yield from _guarded(
        "directory", lambda: memory.check_directory(config.directory, budget, mounts)
    )
    yield from memory.check_huge(config.directory, mounts, memory.shmem_setting())
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yield memory.check_locked(limit, budget, devices)
    yield memory.check_files(resource.getrlimit(resource.RLIMIT_NOFILE))
    yield from _guarded("ucx", lambda: check_ucx(_mover_facts(), devices))
    yield from _guarded("coding", _coding)
    yield from _guarded("checksum", _checksum)
    yield from _guarded("etcd", lambda: asyncio.run(_etcd(config, layout)))


def _guarded(name: str, look: Callable[[], Check | list[Check]]) -> Iterable[Check]:
    try:
        found = look()
    except (CheckpointError, OSError, ValueError) as e:
        found = Check(name, FAIL, f"{type(e).__name__}: {e}", "put right what it names")
    return [found] if isinstance(found, Check) else found


# -- the agent -------------------------------------------------------------------------------------


def ask_agent(paths: tuple[str, ...]) -> dict[str, Any] | str:
    """The status document of the agent that answers there, or why none does."""
    try:
        with AgentLink(paths) as link:
            reply = link.call(w.StatusQuery(), 30.0)
    except CheckpointError as e:
        return str(e)
    assert isinstance(reply, w.StatusReply)
    facts: dict[str, Any] = json.loads(reply.document)
    return facts


def settings(
    read: Config, flags: Mapping[str, Any], told: Mapping[str, Any] | None
) -> tuple[Config, str]:
    """What is checked, and whose settings these are. Pure.

    A masked secret is not told by the agent: the doctor's own is taken.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    if told is None:
        return read, "no agent answers: those that `p2pckpt config show` shows"
    values = {k: v for k, v in told.get("config", {}).items() if v != MASKED}
    values["ram_budget_bytes"] = told["ram"]["budget_bytes"]
    known = {k: v for k, v in values.items() if hasattr(read, k) and k not in given}
    but = f", but {', '.join('--' + name.replace('_', '-') for name in given)}" if given else ""
    return replace(read, **known), f"those of the agent of {told['node']}, which runs{but}"


def check_agent(answered: Mapping[str, Any] | str) -> Check:
    """Does one run, and does it reach etcd? Pure."""
    if isinstance(answered, str):
        do = "start `p2pckpt agent`, or set P2PCKPT_AGENT where trainers and commands run"
        return Check("agent", WARN, answered, do)
    if answered["cut_off"]:
        found = f"{answered['node']} runs, but is cut off from etcd"
        return Check("agent", FAIL, found, "see etcd above; the agent tries again by itself")
    return Check("agent", OK, f"{answered['node']} answers")


# -- libraries -------------------------------------------------------------------------------------


def _mover_facts() -> dict[str, str]:
    async def ask() -> dict[str, str]:
        transport = await UcxTransport.start(_no_file, "127.0.0.1")
        try:
            return transport.describe()
        finally:
            await transport.close()

    return asyncio.run(ask())


def _no_file(file: str, writable: bool) -> int:
    raise CheckpointError(f"doctor moves nothing ({file}, {writable})")


def check_ucx(facts: Mapping[str, str], devices: list[str]) -> list[Check]:
    """From what a mover said, and the InfiniBand devices of the machine. Pure."""
    transports = facts["transports"]
    origin = "wheel" if "site-packages" in facts["library"] else "system library"
    found = f"{facts['ucx']}, {origin} {facts['library']}; transports {transports}"
    out = [Check("ucx", OK, found)]
    if not any(name.startswith("tcp/") for name in transports.split()):
        out = [Check("ucx", WARN, found, "without tcp only RDMA peers can be reached: see UCX_TLS")]
    used = sorted({m[2] for m in map(RDMA.fullmatch, transports.split()) if m})
    if used:
        out.append(Check("rdma", OK, f"in use: {' '.join(used)}"))
    elif devices:
        found = f"devices {' '.join(devices)} are there, UCX does not use them"
        out.append(Check("rdma", WARN, found, GET_RDMA))
    else:
        out.append(Check("rdma", OK, "no device on this machine: TCP is used"))
    return out


def network_of(config: Config, told: Mapping[str, Any] | None) -> tuple[int, str]:
    """Bytes a second each way that an agent counts on, and how that is known: what the one that
    answers has found or was told, else what one that is started now would find."""
    if told is not None:
        return told["bandwidth"]["nic_bytes_s"], told["bandwidth"]["nic"]
    if config.nic_bytes_s:
        return config.nic_bytes_s, "as configured"
    try:
        return asyncio.run(_measured(config.listen))
    except CheckpointError as e:
        return 0, f"not measured: {type(e).__name__}: {e}"


async def _measured(address: str) -> tuple[int, str]:
    scratch = Scratch()
    transport = await UcxTransport.start(scratch.descriptor, address)
    try:
        return await measure(scratch, transport, address)
    finally:
        await transport.close()


def check_nic(network: int, how: str, share: float) -> Check:
    """Is the network known, and what may go beside training? Pure."""
    if not network:
        do = "nothing is held back beside training: set --nic-bytes-s to what two machines get"
        return Check("nic", WARN, how, do)
    beside = f"{network * share / 1e9:.2f} GB/s of it for saves, repair, drain and offload"
    return Check("nic", OK, f"{network / 1e9:.2f} GB/s each way, {how}; {beside}")


def _coding() -> Check:
    path = reed_solomon.codec_library()
    return Check("coding", OK, f"ISA-L {path}: equals the reference on fixed vectors")


def _checksum() -> Check:
    checksum.crc32c(b"")  # proves the package by known answers, or raises CodingError
    if crc32c_package.hardware_based:
        return Check("checksum", OK, "CRC32C by the CPU's instruction: known answers are right")
    do = "the CPU has no CRC32C instruction: saves and restores will be slow"
    return Check("checksum", WARN, "CRC32C in software", do)


# -- the others ------------------------------------------------------------------------------------


async def _etcd(config: Config, layout: Layout) -> list[Check]:
    out, answer = [], []
    for endpoint in filter(None, (part.strip() for part in config.endpoints.split(","))):
        try:
            async with _client(config, endpoint) as etcd:
                (version,) = (await etcd.check_version(trial=True)).values()
                took = []
                for _ in range(READS):
                    begun = time.monotonic()
                    await etcd.ledger.get(ROOT)
                    took.append(time.monotonic() - begun)
                answer.append(endpoint)
                out.append(check_etcd(endpoint, version, statistics.median(took), config.trial))
                out.append(check_room(endpoint, await etcd.room()))
        except CheckpointError as e:
            do = "start it, or correct --endpoints (and --cacert, --cert, --key)"
            out.append(Check("etcd", FAIL, f"{endpoint}: {type(e).__name__}: {e}", do))
    if not answer:
        return [*out, Check("members", FAIL, "unknown: no etcd answers", "see etcd above")]
    async with _client(config, ",".join(answer)) as etcd:
        members = (await etcd.membership.living()).members
    return [*out, check_members({m.node: m.host for m in members.values()}, layout)]


def _client(config: Config, endpoints: str) -> Etcd:
    files = [Path(f) for f in (config.cacert, config.cert, config.key) if f]
    if len(files) not in (0, 3):
        raise ConfigError(
            "cacert, cert, key: needs all three or none (no agent tells its key: pass --key)"
        )
    scheme = "https" if files else "http"
    parts = (part.strip() for part in endpoints.split(","))
    urls = [e if "://" in e else f"{scheme}://{e}" for e in parts if e]
    tls = (files[0], files[1], files[2]) if files else None
    return Etcd(urls, tls, config.rpc_timeout_s, min(config.ledger_timeout_s, 5.0))


def check_etcd(endpoint: str, version: str, read_s: float, trial: bool) -> Check:
    """One endpoint: may its release be trusted, and how long does it take to answer? Pure."""
    found = f"{endpoint}: {version}, a linearizable read takes {read_s * 1000:.1f} ms"
    if why := version_flaw(version):
        do = f"update it: {why}" + ("" if trial else " (agents refuse it but with --trial)")
        return Check("etcd", WARN if trial else FAIL, found, do)
    if read_s > SLOW_LEDGER_S:
        do = "give etcd a faster disk or network: every commit waits for it"
        return Check("etcd", WARN, found, do)
    return Check("etcd", OK, found)


def check_room(endpoint: str, room: Room) -> Check:
    """Is there room in its database, and will there be? Pure."""
    found = f"{endpoint}: a database of {room.database_bytes / 2**20:.0f} MiB"
    if room.alarms:
        do = "for NOSPACE see README, When etcd is full; else its own documentation"
        return Check("etcd room", FAIL, f"{found}; alarms raised: {', '.join(room.alarms)}", do)
    if not room.forgets:
        do = "start etcd with --auto-compaction-retention=5m, or it grows until it is full"
        return Check("etcd room", WARN, f"{found}, and nobody compacts it", do)
    return Check("etcd room", OK, found)


def check_members(hosts: Mapping[str, str], layout: Layout) -> Check:
    """Are there hosts enough for every shard and the owner to lie apart? Pure."""
    have, need = len(set(hosts.values())), layout.shards + 1
    found = f"{plural(len(hosts), 'agent')} on {plural(have, 'host')}; {layout} needs {need} hosts"
    if have >= need:
        return Check("members", OK, found)
    do = f"start agents on {plural(need - have, 'more host')}, or choose a smaller layout"
    return Check("members", WARN, found, do)
