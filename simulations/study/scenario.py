"""The nouns of the study: what a cluster is, how it fails, and what a stop costs.

Intuition: a simulated number is worth as much as the numbers that went in. So a scenario is a
TOML file in which every number stands beside its source, or beside the word ``guess``; the model
sees plain frozen records, and every table of results can say which of its inputs nobody measured.

Contract: `load` refuses a number without ``source`` or ``guess``, an unknown key, a missing key and
a value out of bounds, naming file and key. Records can be made in Python as well; then `notes` is
empty. Times in seconds, sizes in bytes, rates as their names say.

The host's memory has four fates. PROCESS: a process dies, the agent and its RAM stay in place.
GPU: the node must go, but its host still answers until it is evicted (with a chance `readable`).
UNREACHABLE: the RAM lives, nobody can read it, the node comes back after a while. LOST: it is gone.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from p2pckpt.config import shown
from p2pckpt.errors import ConfigError
from topology import Cluster, Node

YEAR_S = 365.25 * 86400.0
DAY_S = 86400.0
MOST_NODES = 1_000_000
LEFT_OUT = "left out"
"""Key of the notes that say which causes of failures are not counted."""
BUNDLED = Path(__file__).parent / "scenarios"


class Fate(StrEnum):
    """What a failure does to the memory of its hosts."""

    PROCESS = "process"
    GPU = "gpu"
    UNREACHABLE = "unreachable"
    LOST = "lost"


@dataclass(frozen=True)
class Cause:
    """One way to stop the job. Durations are medians; `Recovery.sigma` spreads them.

    At level "node" a cause takes its `share` (any unit, relative) of the node failures; at another
    level every domain has a clock of its own with `per_year` events, each of which hits a fraction
    `hit` of the domain's nodes at once (Marshall and Olkin 1967). A `planned` stop saves first,
    loses no work, is not detected, and comes `per_year` times a year to one node of the cluster.
    """

    name: str
    fate: Fate
    level: str = "node"
    share: float = 0.0
    per_year: float = 0.0
    hit: float = 1.0
    planned: bool = False
    evict: bool = True
    readable: float = 1.0
    detect_s: float = 0.0
    diagnose_s: float = 0.0
    away_s: float = 0.0
    away_sigma: float = 0.0


@dataclass(frozen=True)
class Hazards:
    """When failures come: `mtbf_s` is of the cluster, over all unplanned causes or node causes.

    `shape`: Weibull shape of each node's renewal process; 1 is Poisson. `lemon_shape`: gamma shape
    of the nodes' relative rates (mean 1; 0: all alike). `mtbf_counts`: "all" or "node".
    """

    mtbf_s: float
    causes: tuple[Cause, ...]
    mtbf_counts: str = "all"
    shape: float = 1.0
    lemon_shape: float = 0.0


@dataclass(frozen=True)
class Fleet:
    """The machines: `domains` are (level, nodes in one domain), narrow to wide, by node number.

    `labelled`: whether placement knows the domains; failures know them always. `places`: a real
    cluster, whose nodes and labels these are; then `domains` has the largest domain of each level.
    """

    nodes: int
    gpus_per_node: int = 8
    domains: tuple[tuple[str, int], ...] = ()
    labelled: bool = True
    spares: int = 0
    ram_bytes: float = 0.0
    places: Cluster | None = None

    def members(self, level: str) -> list[Sequence[int]]:
        """Node numbers by domain of `level` ("node" included); without a label: in none."""
        if self.places is not None:
            number = {node.name: i for i, node in enumerate(self.places.nodes)}
            found = self.places.members(level).items()
            return [[number[n] for n in names] for label, names in found if label is not None]
        size = 1 if level == "node" else dict(self.domains)[level]
        return [range(a, min(a + size, self.nodes)) for a in range(0, self.nodes, size)]

    def domain(self, level: str, node: int) -> int:
        """The number of a node's domain at `level`; -1 where it has no label."""
        if self.places is None:
            return node // dict(self.domains)[level]

        def numbers() -> dict[int, int]:
            found = enumerate(self.members(level))
            return {inner: number for number, nodes in found for inner in nodes}

        return self.places.derived(("numbers", level), numbers).get(node, -1)

    def cluster(self) -> Cluster:
        """As placement sees it; node i is the i-th by name."""
        if self.places is not None:
            return self.places
        levels = tuple(level for level, _ in self.domains) if self.labelled else ()
        sizes = dict(self.domains)
        return Cluster(
            tuple(
                Node(f"n{i:06d}", f"n{i:06d}", tuple((x, f"{x}{i // sizes[x]}") for x in levels))
                for i in range(self.nodes)
            ),
            levels,
        )


@dataclass(frozen=True)
class Links:
    """What moves bytes. `efficiency` is of the line rate; `training_share` of it is taken.

    `uplinks`: (level, times oversubscribed) of a domain's way out. 0 bytes/s of the store: none.
    """

    nic_bytes_per_s: float
    ram_bytes_per_s: float = 10e9
    efficiency: float = 1.0
    training_share: float = 0.0
    uplinks: tuple[tuple[str, float], ...] = ()
    s3_bytes_per_s: float = 0.0
    s3_node_bytes_per_s: float = 0.0


@dataclass(frozen=True)
class Saving:
    """The clocks of RAM, of the store behind it, and of a job that has the store only.

    An interval of 0 is chosen by the product's own `decide_schedule`.

    `stall_s`: training stands still for each snapshot; `s3_stall_s`: for each upload to the store;
    `s3_only_stall_s`: for each save of a job that has no RAM tier. `low_s` to `high_s` and
    `s3_low_s` to `s3_high_s`: what may be chosen.
    """

    interval_s: float = 0.0
    stall_s: float = 0.0
    s3_interval_s: float = 0.0
    s3_stall_s: float = 0.0
    s3_only_interval_s: float = 0.0
    s3_only_stall_s: float = 0.0
    low_s: float = 1.0
    high_s: float = 3600.0
    s3_low_s: float = 60.0
    s3_high_s: float = 21600.0


@dataclass(frozen=True)
class Recovery:
    """Stages that do not depend on the cause. `sigma`: lognormal spread of every stage time.

    `return_wait_s`: how long a restore waits for hosts that are away before it takes an older step.
    `evict_group`: nodes that are evicted together, aligned by number; the healthy ones among them
    are checked for `check_s` before they are spares. The scales multiply what all causes say.
    """

    allocate_s: float = 0.0
    init_s: float = 0.0
    detect_scale: float = 1.0
    diagnose_scale: float = 1.0
    sigma: float = 0.0
    return_wait_s: float = 30.0
    evict_group: int = 1
    check_s: float = 3600.0


@dataclass(frozen=True)
class Range:
    """An input that is not known well, and between which values it is plausible."""

    key: str
    low: float
    high: float


@dataclass(frozen=True)
class Note:
    """Where one number of a scenario comes from; `guess`: nobody measured it."""

    key: str
    value: Any
    text: str
    guess: bool


@dataclass(frozen=True)
class Scenario:
    """One synchronous job of `state_bytes` on a fleet, for `horizon_s`.

    `schemes` (the first is looked at closely) and `mtbf_sweep_s` say what `simulate run` compares,
    `vary` what the answer may depend on. `losses`, (seconds, nodes at once), are of a trace and
    take the place of all failures.
    """

    name: str
    about: str
    horizon_s: float
    state_bytes: float
    fleet: Fleet
    links: Links
    saving: Saving
    recovery: Recovery
    hazards: Hazards
    schemes: tuple[str, ...] = ("rs:8,2", "s3")
    mtbf_sweep_s: tuple[float, ...] = ()
    vary: tuple[Range, ...] = ()
    losses: tuple[tuple[float, int], ...] = ()
    notes: tuple[Note, ...] = field(default=(), compare=False)

    @property
    def node_bytes(self) -> float:
        """Snapshot bytes of one node."""
        return self.state_bytes / self.fleet.nodes

    def varied(self, key: str, value: Any) -> Scenario:
        """This scenario with one value changed, as ``varied("recovery.init_s", 5.0)``.

        ``causes.readable`` changes all causes. Raises ConfigError for a key that does not exist.
        """
        head, _, rest = key.partition(".")
        if head == "causes" and rest in Cause.__dataclass_fields__:
            patch: Any = {rest: value}
            causes = tuple(replace(c, **patch) for c in self.hazards.causes)
            return replace(self, hazards=replace(self.hazards, causes=causes))
        part: Any = getattr(self, head) if head in {f.name for f in fields(self)} else None
        known = getattr(part, "__dataclass_fields__", ())
        if part is None or (rest not in known if rest else known and type(value) is not type(part)):
            raise ConfigError(f"scenario {self.name}: no key {key!r}; as recovery.init_s")
        changed: Any = {head: replace(part, **{rest: value}) if rest else value}
        return replace(self, **changed)


# -- from TOML ---------------------------------------------------------------------------------


def find(name: str) -> Path:
    """The file `name`, or the bundled scenario of that name. Raises ConfigError."""
    for path in (Path(name), BUNDLED / Path(name).name, BUNDLED / f"{name}.toml"):
        if path.is_file():
            return path
    bundled = ", ".join(sorted(p.stem for p in BUNDLED.glob("*.toml")))
    raise ConfigError(f"scenario {name!r}: no such file, and none of the bundled: {bundled}")


def load(name: str) -> Scenario:
    """A scenario from a TOML file, or a bundled one by its name. Raises ConfigError."""
    path = find(name)
    try:
        return parse(path.read_text("utf-8"), path.name)
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path.name}: no text: {e}") from None


def parse(text: str, file: str = "scenario") -> Scenario:
    """A scenario from TOML text; ``file`` is for messages. Raises ConfigError."""
    notes: list[Note] = []
    try:
        plain = _stripped(tomllib.loads(text), file, "", notes)
    except (ValueError, RecursionError) as e:
        raise e if isinstance(e, ConfigError) else ConfigError(f"{file}: no TOML: {e}") from None
    hazards = _told("table", plain.pop("hazards", {}), f"{file}: hazards")
    where = f"{file}: hazards.causes"
    causes = [_told("table", c, where) for c in _told("list", hazards.pop("causes", ()), where)]
    fates = [{"fate": _fate(cause.pop("fate", None), cause, file)} for cause in causes]
    records = (_record(Cause, c, where, f) for c, f in zip(causes, fates, strict=True))
    kinds = {"fleet": Fleet, "links": Links, "saving": Saving, "recovery": Recovery}
    parts = {name: _record(kind, plain.pop(name, {}), f"{file}: {name}")
             for name, kind in kinds.items()}  # fmt: skip
    where, vary = f"{file}: vary", plain.pop("vary", ())
    parts["vary"] = tuple(_record(Range, v, where) for v in _told("list", vary, where))
    parts["hazards"] = _record(Hazards, hazards, f"{file}: hazards", {"causes": tuple(records)})
    made: Scenario = _record(Scenario, plain, file, {**parts, "notes": tuple(notes)})
    _check(made, file)
    for varied in made.vary:
        made.varied(varied.key, varied.low)
    return made


def _stripped(value: Any, file: str, key: str, notes: list[Note]) -> Any:
    """``value`` with every noted number replaced by the number itself; what it says is noted."""
    if isinstance(value, Mapping):
        if "value" in value:
            said = [word for word in ("source", "guess") if value.get(word)]
            if len(said) != 1 or set(value) != {"value", said[0]}:
                raise ConfigError(f"{file}: {key}: needs value and one of source, guess")
            notes.append(Note(key, value["value"], value[said[0]], said[0] == "guess"))
            return _frozen(value["value"])
        return {k: _stripped(v, file, f"{key}.{k}" if key else k, notes) for k, v in value.items()}
    if isinstance(value, list) and all(isinstance(v, Mapping) for v in value):
        return [
            _stripped(v, file, f"{key}[{v.get('name', i)}]", notes) for i, v in enumerate(value)
        ]
    if isinstance(value, bool | str) or (
        isinstance(value, list) and all(isinstance(v, str) for v in value)
    ):
        return _frozen(value)
    raise ConfigError(f"{file}: {key} = {shown(value)}: a number needs a source, or guess = why")


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, list) else value


def _told(what: str, value: Any, where: str) -> Any:
    """A table or list as a fresh one."""
    if not isinstance(value, dict if what == "table" else list | tuple):
        raise ConfigError(f"{where}: needs a {what}, has {shown(value)}")
    return dict(value) if what == "table" else list(value)


def _fate(fate: Any, cause: Mapping[str, Any], file: str) -> Fate:
    if not isinstance(fate, str) or fate not in list(Fate):
        what = f"{file}: cause {shown(cause.get('name'))}: fate {shown(fate)}"
        raise ConfigError(f"{what}, needs one of {', '.join(Fate)}")
    return Fate(fate)


def _record(kind: Any, told: Any, where: str, parts: Mapping[str, Any] | None = None) -> Any:
    """A record of what a table told, and of ``parts`` that are records already."""
    known = {f.name: f for f in fields(kind)}
    values = {**_told("table", told, where), **(parts or {})}
    unknown = sorted(set(values) - set(known) | set(told) & set(parts or {}))
    missing = sorted(
        n for n, f in known.items()
        if n not in values and f.default is MISSING and f.default_factory is MISSING
    )  # fmt: skip
    if unknown or missing:
        words = (", ".join(names) or "none" for names in (unknown, missing))
        raise ConfigError(f"{where}: unknown {next(words)}; missing {next(words)}")
    hints = get_type_hints(kind)
    for name in told:
        try:
            msgspec.convert(values[name], hints[name])  # only looked at: an int stays one
        except (msgspec.ValidationError, OverflowError, RecursionError) as e:
            raise ConfigError(f"{where}: {name} = {shown(values[name])}: {e}") from None
        if not _in_bounds(values[name]):
            raise ConfigError(f"{where}: {name} = {values[name]}, needs 0 or more, below 1e30")
    return kind(**values)


def _in_bounds(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_in_bounds, value))
    return isinstance(value, str) or (isinstance(value, int | float) and 0 <= value < 1e30)


def _check(made: Scenario, file: str) -> None:
    levels = {"node", *(level for level, _ in made.fleet.domains)}
    for cause in made.hazards.causes:
        if cause.level not in levels:
            raise ConfigError(
                f"{file}: cause {cause.name!r}: level {cause.level!r}, "
                f"needs one of {', '.join(sorted(levels))}"
            )
        if not 0 <= cause.readable <= 1 or not 0 < cause.hit <= 1:
            raise ConfigError(f"{file}: cause {cause.name!r}: readable and hit are fractions")
    for name, value in (
        ("fleet.nodes", made.fleet.nodes), ("horizon_s", made.horizon_s),
        ("hazards.mtbf_s", made.hazards.mtbf_s), ("hazards.shape", made.hazards.shape),
        ("links.nic_bytes_per_s", made.links.nic_bytes_per_s),
        ("recovery.evict_group", made.recovery.evict_group),
        *((f"fleet.domains: {level}", size) for level, size in made.fleet.domains),
    ):  # fmt: skip
        if value <= 0:
            raise ConfigError(f"{file}: {name} = {value}, needs more than 0")
    if made.fleet.nodes > MOST_NODES:
        raise ConfigError(f"{file}: {made.fleet.nodes} nodes, needs at most {MOST_NODES}")
    if made.hazards.mtbf_counts not in ("all", "node"):
        raise ConfigError(f"{file}: hazards.mtbf_counts: needs all or node")
