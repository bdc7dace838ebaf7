"""Every setting of an agent, in one frozen place, each bound with its reason beside it.

Settings come from flags, then `P2PCKPT_*` variables, then one TOML file, then the defaults below;
`resolve` merges them without any I/O and remembers where each value came from. An unknown key, a
wrong type or a value out of bounds is a ConfigError that names key, origin, what is allowed and,
for an unknown key, the nearest known one.

Contract: a Config is read once, never changed, and passed down. Whatever waits, retries, queues or
buffers takes its bound from here.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from p2pckpt.errors import ConfigError

_MIB = 1024 * 1024

NOT_SETTINGS = ("P2PCKPT_AGENT", "P2PCKPT_CONFIG")
"""Variables that are read elsewhere: where trainers find the agent, where the file is."""


WAITS_AT = 1 / 8
"""Of `floor_bytes_per_s`: what each kind of traffic keeps, whatever else is to be spared."""


def _setting(
    default: Any,
    why: str,
    low: float | None = None,
    high: float | None = None,
    secret: bool = False,
) -> Any:
    return field(default=default, metadata={"why": why, "low": low, "high": high, "secret": secret})


LARGEST = 2**63
"""Numbers stay below it, as everything that they are given to does."""


@dataclass(frozen=True)
class Config:
    """One agent's settings. Times in seconds, sizes in bytes."""

    # who and where
    node: str = _setting("", "name of this node; default: the host name")
    host_id: str = _setting("", "failure domain of the machine; default: /etc/machine-id")
    domains: str = _setting("", "failure domains above the host, as 'rack=r1,pod=p0'")
    spread: str = _setting("", "levels to spread shards over, e.g. 'rack,pod!' (! = required)")
    directory: str = _setting("/dev/shm/p2pckpt", "tmpfs directory that holds the RAM files")
    socket: str = _setting(
        "", "Unix socket for trainers; default: $XDG_RUNTIME_DIR/p2pckpt/agent.sock, else in /run"
    )
    listen: str = _setting("127.0.0.1", "address to listen on and to announce to peers")
    transport: str = _setting("ucx", "what moves payload: ucx")
    group: str = _setting("", "Unix group whose members' jobs are served too; default: own uid")
    job_quota_bytes: int = _setting(0, "RAM that one job may take here; 0 = the whole budget", 0)
    ram_budget_bytes: int = _setting(0, "0 = half of what tmpfs and cgroup leave free", 0)

    # etcd
    endpoints: str = _setting("127.0.0.1:2379", "etcd endpoints, comma separated")
    cacert: str = _setting("", "CA of the etcd servers")
    cert: str = _setting("", "client certificate for etcd")
    key: str = _setting("", "client key for etcd", secret=True)
    trial: bool = _setting(False, "accept etcd versions known to lose commits (trials only)")

    # deadlines and bounds (PROTOCOL.md section 8)
    rpc_timeout_s: float = _setting(
        1.0, "one etcd RPC: longer means a sick member, rotate", 0.05, 60
    )
    ledger_timeout_s: float = _setting(10.0, "one ledger operation over all endpoints", 0.1, 600)
    lease_s: float = _setting(10.0, "life of a session without keepalive", 1, 600)
    keepalive_s: float = _setting(2.5, "a quarter of the lease: three may be lost", 0.1, 150)
    lost_grace_s: float = _setting(
        5.0, "after the lease is gone, for an agent that restarts", 0, 600
    )
    peer_timeout_s: float = _setting(2.0, "one control request to a peer", 0.05, 60)
    silent_holder_s: float = _setting(5.0, "then a holder is replaced, once, before seal", 0.1, 600)
    attempt_timeout_s: float = _setting(30.0, "then anyone writes ABORT", 1, 3600)
    skip_wait_s: float = _setting(1.0, "how long a save waits for a free slot", 0, 60)
    takeover_s: float = _setting(1.0, "a silent group writer's place is taken after this", 0.05, 60)
    commit_delay_low_s: float = _setting(0.5, "others than rank 0's agent commit after", 0, 60)
    commit_delay_high_s: float = _setting(2.0, "a random delay, so that they do not collide", 0, 60)
    restore_timeout_s: float = _setting(60.0, "one ballot; more for large snapshots", 1, 7200)
    decide_wait_s: float = _setting(
        30.0, "for known stores to return before an older step", 0, 3600
    )
    join_timeout_s: float = _setting(300.0, "for all ranks of a launch to join", 1, 7200)
    max_ballots: int = _setting(5, "then restore() raises", 1, 100)
    stop_grace_s: float = _setting(10.0, "SIGTERM ends in-flight saves within this", 0, 600)
    scrub_period_s: float = _setting(
        3600.0, "all that is held is read again within this; 0 = never", 0, 30 * 86400
    )
    notice_s: float = _setting(
        1.0, "a changed save schedule has reached every rank by then; by their step time", 0, 600
    )
    floor_bytes_per_s: int = _setting(50 * _MIB, "slowest link that deadlines allow for", 1)

    # what saves, repair, drain and offload may take while a job trains; a restore may take all
    nic_bytes_s: int = _setting(0, "what the network gives each way; 0 = measured at start", 0)
    background_share: float = _setting(
        1.0, "part of it that they have while training does not slow down", 0.01, 1
    )
    background_cores: int = _setting(
        0, "threads that code, check, and as many that upload, at once; 0 = no bound", 0, 64
    )

    # object store (empty s3_url: none). Credentials: boto3's own chain, as the AWS tools have it
    s3_url: str = _setting("", "where offloaded checkpoints go, as 's3://bucket/prefix'")
    s3_endpoint: str = _setting("", "URL of an S3 compatible store; default: AWS of the region")
    s3_region: str = _setting("", "region of the bucket; default: as boto3 finds it")
    s3_addressing: str = _setting("auto", "path, virtual, or auto: path if s3_endpoint is set")
    s3_timeout_s: float = _setting(
        60.0, "one request with its retries; longer means the store is away", 1, 3600
    )
    s3_workers: int = _setting(8, "threads, that is requests to the store at once", 1, 64)
    offload_every: int = _setting(0, "every Nth committed step goes to the store; 0 = off", 0)
    offload_keep: int = _setting(2, "offloaded steps of a lineage that stay in the store", 1, 1000)

    # how often to save, where the hook says every="auto"
    mtbf_prior_s: float = _setting(
        21600.0, "time between failures of a whole job, before any was seen (Llama 3: 2.7 h)", 60
    )
    every_low_s: float = _setting(1.0, "never save more often, whatever it costs", 0.01)
    every_high_s: float = _setting(1800.0, "nor less often: what a failure may cost", 0.01)
    deep_share_prior: float = _setting(
        0.01, "of all failures, those that peers cannot recover (Minder: 1 % hit many nodes)", 0, 1
    )
    offload_low_s: float = _setting(
        600.0, "nor to the store more often: it has other costs than time", 0.01
    )
    offload_high_s: float = _setting(
        21600.0, "nor less often: what a failure beyond RAM may cost", 0.01
    )

    # sizes
    chunk_bytes: int = _setting(256 * 1024, "unit of CRC32C and of repair", 512, 512 * 1024)
    piece_bytes: int = _setting(8 * _MIB, "one grant of the transport", 64 * 1024, 64 * _MIB)
    open_pieces: int = _setting(8, "grants open at once: enough to fill a link", 1, 64)
    slot_round_bytes: int = _setting(2 * _MIB, "slots are rounded up to huge pages", 1)
    workers: int = _setting(2, "threads for coding and checking", 1, 64)
    min_spare: int = _setting(-1, "node losses a commit must survive; -1 = max(1, m)", -1, 255)

    def shown(self) -> dict[str, Any]:
        """Every setting's value, for people; secrets masked."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        secret = {f.name: "***" for f in fields(self) if f.metadata["secret"] and values[f.name]}
        return {**values, **secret}

    def patience_s(self, size_bytes: int, can_wait: bool = False) -> float:
        """How long a transfer of so many bytes may take; much more if it ``can_wait``: it may go at
        WAITS_AT of the slowest link, beside seven others."""
        least = self.floor_bytes_per_s * (WAITS_AT / 8 if can_wait else 1)
        return self.silent_holder_s + size_bytes / least

    @property
    def domain_map(self) -> dict[str, str]:
        """``domains`` as a mapping from level to name. Raises ConfigError."""
        found: dict[str, str] = {}
        for part in filter(None, self.domains.split(",")):
            level, eq, name = part.strip().partition("=")
            if not eq or not level or not name:
                raise ConfigError(f"domains: {part!r}: needs level=name, as rack=r1")
            if level.strip() in found:
                raise ConfigError(f"domains: level {level.strip()!r} is given twice")
            found[level.strip()] = name.strip()
        return found

    @property
    def s3_place(self) -> tuple[str, str] | None:
        """``s3_url`` as (bucket, prefix without slashes around it). Raises ConfigError."""
        if not self.s3_url:
            return None
        scheme, _, rest = self.s3_url.partition("://")
        bucket, _, prefix = rest.partition("/")
        if scheme != "s3" or not bucket:
            raise ConfigError(f"s3_url: {self.s3_url!r}: needs s3://bucket or s3://bucket/prefix")
        if self.s3_addressing not in ("auto", "path", "virtual"):
            raise ConfigError(f"s3_addressing: {self.s3_addressing!r}: needs auto, path or virtual")
        return bucket, prefix.strip("/")

    @property
    def spread_levels(self) -> tuple[tuple[str, bool], ...]:
        """``spread`` as (level, required) pairs; default: every level in ``domains``, preferred."""
        given = [s.strip() for s in self.spread.split(",") if s.strip()]
        return tuple((s.rstrip("!"), s.endswith("!")) for s in given or self.domain_map)


@dataclass(frozen=True)
class Resolved:
    """A Config and the origin of each value: 'flag', 'P2PCKPT_X', 'FILE:LINE' or 'default'."""

    config: Config
    origins: Mapping[str, str]

    def shown(self) -> dict[str, dict[str, Any]]:
        """For ``config show``: value, origin and reason by key; secrets masked."""
        values = self.config.shown()
        return {
            f.name: {
                "value": values[f.name],
                "origin": self.origins[f.name],
                "why": f.metadata["why"],
            }
            for f in fields(Config)
        }


def resolve(
    flags: Mapping[str, Any], environ: Mapping[str, str], text: str = "", file: str = "config"
) -> Resolved:
    """Merge flags > `P2PCKPT_*` > TOML text > defaults. Raises ConfigError on the first error."""
    values: dict[str, Any] = {}
    origins = {f.name: "default" for f in fields(Config)}
    for key, value in _parse(text, file).items():
        origin = f"{file}:{_line_of(text, key)}"
        values[_known(key, origin)] = None
        values[key], origins[key] = _checked(key, value, origin), origin
    for variable in environ:
        if variable.startswith("P2PCKPT_") and variable not in NOT_SETTINGS:
            _known(variable.removeprefix("P2PCKPT_").lower(), variable)
    for f in fields(Config):
        variable = "P2PCKPT_" + f.name.upper()
        if variable in environ:
            values[f.name] = _checked(f.name, environ[variable], variable)
            origins[f.name] = variable
    for key, value in flags.items():
        if value is not None:
            _known(key, "flag")
            values[key] = _checked(key, value, f"--{key.replace('_', '-')}")
            origins[key] = "flag"
    config = Config(**values)
    _ = config.domain_map
    if config.s3_place is None and config.offload_every:
        raise ConfigError(f"offload_every: {config.offload_every}, needs s3_url as well")
    if config.keepalive_s * 2 > config.lease_s:
        raise ConfigError(
            f"keepalive_s: {config.keepalive_s}, needs at most half of lease_s ({config.lease_s})"
        )
    for tier in ("every", "offload"):
        low, high = getattr(config, f"{tier}_low_s"), getattr(config, f"{tier}_high_s")
        if low > high:
            raise ConfigError(f"{tier}_low_s: {low}, needs at most {tier}_high_s ({high})")
    if config.commit_delay_low_s > config.commit_delay_high_s:
        raise ConfigError(
            f"commit_delay_low_s: {config.commit_delay_low_s}, needs at most "
            f"commit_delay_high_s ({config.commit_delay_high_s})"
        )
    return Resolved(config, origins)


def _parse(text: str, file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as e:  # also a number of too many digits, and deep nesting
        raise ConfigError(f"{file}: no TOML: {e}") from None


def _line_of(text: str, key: str) -> int:
    lines = enumerate(text.splitlines(), 1)
    return next((n for n, line in lines if line.partition("=")[0].strip() == key), 0)


def shown(value: Any) -> str:
    """A value for a message: short, however large or deep it is."""
    try:
        return repr(value)[:200]
    except RecursionError:
        return f"a {type(value).__name__}, nested too deep"


def _known(key: str, origin: str) -> str:
    names = [f.name for f in fields(Config)]
    if key not in names:
        near = difflib.get_close_matches(key, names, 1)
        hint = f"; nearest: {near[0]}" if near else f"; known: {', '.join(names)}"
        raise ConfigError(f"{origin}: unknown key {key!r}{hint}")
    return key


def _checked(key: str, value: Any, origin: str) -> Any:
    """The value as the key's type, within its bounds. Text (flags, variables) is converted."""
    spec = next(f for f in fields(Config) if f.name == key)
    kind = type(spec.default)
    try:
        if kind is bool and isinstance(value, str):
            value = {"1": True, "true": True, "0": False, "false": False}[value.lower()]
        elif kind in (int, float) and isinstance(value, str):
            value = kind(value)
        elif kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
    except (KeyError, ValueError, OverflowError):
        raise ConfigError(f"{origin}: {key} = {value!r}, needs {kind.__name__}") from None
    if type(value) is not kind:
        raise ConfigError(f"{origin}: {key} = {shown(value)}, needs {kind.__name__}")
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{origin}: {key} = {value!r}, needs text without a zero byte")
    if isinstance(value, int | float) and not abs(value) < LARGEST:
        raise ConfigError(f"{origin}: {key} = {str(value)[:40]}, needs less than 2^63")
    low, high = spec.metadata["low"], spec.metadata["high"]
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        raise ConfigError(
            f"{origin}: {key} = {value!r}, needs {low if low is not None else '-inf'}"
            f" to {high if high is not None else 'inf'}"
        )
    return value
