"""`p2pckpt doctor`: is everything here that an agent needs, and what to do if not.

Each check looks at the real thing: the file system of the RAM directory, the limits of the process,
a UCX mover that is started and asked, the coding and checksum libraries computing known answers, a
linearizable read from every etcd, the agent's socket. A check that cannot look says so; it never
ends the others.

Contract: changes nothing but a mover process of its own, which is gone afterwards. Settings are
read as `p2pckpt agent` reads them. Exit codes: 0 all is well, 4 warnings only, 1 something fails.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import crc32c as crc32c_package

from p2pckpt import wire as w
from p2pckpt.backends.agent_link import AgentLink
from p2pckpt.backends.budget import default_budget
from p2pckpt.backends.etcd import Etcd, version_flaw
from p2pckpt.backends.trainers import default_socket_paths
from p2pckpt.backends.ucx import UcxTransport
from p2pckpt.cli.agent import config_options, read_config
from p2pckpt.cli.output import (
    EXIT_DEGRADED,
    EXIT_DONE,
    EXIT_FAILED,
    agent_option,
    finish,
    json_option,
)
from p2pckpt.coding import checksum, reed_solomon
from p2pckpt.config import Config
from p2pckpt.errors import CheckpointError, ConfigError
from p2pckpt.records import ROOT, Layout

OK, WARN, FAIL = "ok", "warn", "fail"
SMALL_BYTES = 1 << 30
"""A budget below this holds checkpoints of toys only."""
SLOW_LEDGER_S = 0.1
"""A linearizable read that takes longer delays every commit."""
READS = 5
RDMA = re.compile(r"(rc|dc|ud)[^/]*/(\S+)")
"""A transport over InfiniBand or RoCE in UCX's list, as "rc_mlx5/mlx5_0:1"."""
GET_RDMA = (
    "for RDMA install a system UCX built with verbs (the UCX wheel has none) and set "
    "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true for the agent"
)


@dataclass(frozen=True)
class Check:
    """One verdict line: "ok", "warn" or "fail", what was found, and what to do about it."""

    name: str
    verdict: str
    found: str
    do: str = ""


@click.command()
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
    wanted, config = Layout.parse(layout), read_config(config_file, flags).config
    checks = list(check_all(config, wanted, agent))
    verdicts = {check.verdict for check in checks}
    code = EXIT_FAILED if FAIL in verdicts else EXIT_DEGRADED if WARN in verdicts else EXIT_DONE
    bad = [c for c in checks if c.verdict == FAIL] or [c for c in checks if c.verdict == WARN]
    advice = f"first: {bad[0].name}: {bad[0].do}" if bad else ""
    lines = []
    for check in checks:
        lines.append(f"{check.verdict:4}  {check.name:13}  {check.found}")
        if check.do and check.verdict != OK:
            lines.append(f"{'':21}-> {check.do}")
    document = {"checks": [asdict(check) for check in checks]}
    finish("doctor", json_file, document, "\n".join(lines), code, advice)


def check_all(config: Config, layout: Layout, agent: str | None) -> Iterable[Check]:
    """All checks, in the order in which an agent would meet the trouble."""
    budget, why = budget_of(config)
    yield from _guarded("memory", lambda: check_memory(config, budget, why))
    yield from _guarded("directory", lambda: check_directory(config.directory, budget, _mounts()))
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yield check_locked(limit, budget)
    yield from _guarded("ucx", _ucx)
    yield from _guarded("coding", _coding)
    yield from _guarded("checksum", _checksum)
    yield from _guarded("etcd", lambda: asyncio.run(_etcd(config, layout)))
    yield _agent(agent or config.socket)


def _guarded(name: str, look: Callable[[], Check | list[Check]]) -> Iterable[Check]:
    try:
        found = look()
    except (CheckpointError, OSError, ValueError) as e:
        found = Check(name, FAIL, f"{type(e).__name__}: {e}", "put right what it names")
    return [found] if isinstance(found, Check) else found


# -- memory ----------------------------------------------------------------------------------------


def budget_of(config: Config) -> tuple[int, str]:
    """What an agent would take, in bytes, and why: as its settings say, or half of what is free."""
    free, why = default_budget(config.directory)
    return (config.ram_budget_bytes or free), why


def check_memory(config: Config, budget: int, why: str) -> Check:
    """The budget against what tmpfs, machine and cgroups leave free. Pure."""
    free = 2 * default_budget(config.directory)[0]
    found = f"an agent would take {_mib(budget)} ({why})"
    if budget > free:
        do = f"set ram_budget_bytes to {free} at most, or make room: bigger writes are killed"
        return Check("memory", FAIL, f"budget {_mib(budget)}, but free are {_mib(free)}", do)
    if budget < SMALL_BYTES:
        do = "raise the limit that is named as the least (tmpfs size=, cgroup memory limit)"
        return Check("memory", WARN, found, do)
    return Check("memory", OK, found)


def check_directory(directory: str, budget: int, mounts: Mapping[str, str]) -> Check:
    """Is the directory in RAM, and its file system large enough? ``mounts``: type by path."""
    place = Path(directory).absolute()
    while not place.exists():
        place = place.parent
    disk = os.statvfs(place)
    size = disk.f_blocks * disk.f_frsize
    on = max((m for m in mounts if place == Path(m) or Path(m) in place.parents), key=len)
    found = f"{directory}: {mounts[on]} of {_mib(size)} at {on}"
    if place != Path(directory).absolute() and place != Path(directory).absolute().parent:
        return Check("directory", FAIL, f"{directory}: {place} is as far as it exists", "make it")
    if mounts[on] not in ("tmpfs", "ramfs"):
        do = "use a directory on tmpfs, as /dev/shm; here every save would go to a disk"
        return Check("directory", WARN, found, do)
    if size < budget:
        do = "mount it larger (docker run --shm-size=..., mount -o remount,size=...)"
        return Check("directory", FAIL, found, do)
    return Check("directory", OK, found)


def _mounts() -> dict[str, str]:
    lines = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return {fields[1].encode().decode("unicode_escape"): fields[2] for fields in lines}


def check_locked(limit: int, budget: int) -> Check:
    """RDMA locks the memory that it moves; TCP does not. ``limit``: RLIMIT_MEMLOCK in bytes."""
    if limit == resource.RLIM_INFINITY or limit >= budget:
        return Check("locked memory", OK, "no limit" if limit < 0 else _mib(limit))
    found = f"ulimit -l is {limit // 1024} KiB; RDMA needs {budget // 1024} KiB, TCP none"
    do = "for RDMA: LimitMEMLOCK=infinity in the unit, docker run --ulimit memlock=-1"
    return Check("locked memory", WARN, found, do)


# -- libraries -------------------------------------------------------------------------------------


def _ucx() -> list[Check]:
    async def ask() -> dict[str, str]:
        transport = await UcxTransport.start(_no_file, "127.0.0.1")
        try:
            return transport.describe()
        finally:
            await transport.close()

    devices = sorted(p.name for p in Path("/sys/class/infiniband").glob("*"))
    return check_ucx(asyncio.run(ask()), devices)


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
        out.append(Check("rdma", OK, f"no device on this machine, TCP is used; {GET_RDMA}"))
    return out


def _coding() -> Check:
    path = reed_solomon.library_path()
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
        raise ConfigError("cacert, cert, key: needs all three or none")
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


def check_members(hosts: Mapping[str, str], layout: Layout) -> Check:
    """Are there hosts enough for every shard and the owner to lie apart? Pure."""
    have, need = len(set(hosts.values())), layout.shards + 1
    found = f"{len(hosts)} agents on {have} hosts; {layout} needs {need} hosts"
    if have >= need:
        return Check("members", OK, found)
    do = f"start agents on {need - have} more hosts, or choose a smaller layout"
    return Check("members", WARN, found, do)


def _agent(agent: str) -> Check:
    paths = (agent,) if agent else default_socket_paths(os.environ)
    try:
        with AgentLink(paths) as link:
            reply = link.call(w.StatusQuery(), 30.0)
    except CheckpointError as e:
        do = "start `p2pckpt agent`, or set P2PCKPT_AGENT where trainers and commands run"
        return Check("agent", WARN, str(e), do)
    assert isinstance(reply, w.StatusReply)
    facts = json.loads(reply.document)
    if facts["cut_off"]:
        found = f"{facts['node']} runs, but is cut off from etcd"
        return Check("agent", FAIL, found, "see etcd above; the agent tries again by itself")
    looked = ", ".join(paths)
    return Check("agent", OK, f"{facts['node']} answers (looked at {looked})")


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
