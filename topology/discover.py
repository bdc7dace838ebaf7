"""The door through which clusters come in: a file that somebody else keeps becomes a Cluster.

Intuition: where machines stand is known already, to Slurm, to Kubernetes, or in their names. Read
it from there, and it is right when the cluster changes.

Contract: :func:`read_cluster` reads a file, everything else is pure. Formats: ``toml`` (our own,
the only one that can say everything), ``slurm`` (topology.conf), ``slurm-yaml`` (topology.yaml),
``kubernetes`` (kubectl get nodes -o json), ``hosts`` (names, a pattern says what they mean); by
default told from the name and the text. Whatever is wrong is a TopologyError that names the file,
the line or item, what was needed and what was found; nothing is guessed.

Consequence: a node for which the file says nothing at a level has no label there, and
``p2pckpt topology check`` says so.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from topology import kubernetes, slurm
from topology.cluster import HOST, NODE, Cluster, Node, TopologyError
from topology.hostlist import MAX_NAMES, expand, expand_all

FORMATS = ("toml", "slurm", "slurm-yaml", "kubernetes", "hosts")
MAX_BYTES = 256 * 2**20

Labels = dict[str, dict[str, str]]
Found = tuple[Labels, tuple[str, ...]]
NOTHING: Mapping[str, str] = {}


def read_cluster(
    path: Path, format: str = "", pattern: str = "", labels: Mapping[str, str] = NOTHING
) -> Cluster:
    """The cluster that the file describes; ``format`` "" is told from the file.

    ``pattern`` is needed by ``hosts``; ``labels`` (level to label key) adds to the labels that
    ``kubernetes`` knows. Raises TopologyError.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise TopologyError(f"{path}: larger than {MAX_BYTES} bytes")
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as e:
        raise TopologyError(f"{path}: cannot be read as text: {e}") from e
    return parse_cluster(text, str(path), format or tell_format(path.name, text), pattern, labels)


def tell_format(name: str, text: str) -> str:
    """The format of a file, by its name, else by its text; ``hosts`` where nothing else fits."""
    if name.endswith(".toml"):
        return "toml"
    if name.endswith((".yaml", ".yml")):
        return "slurm-yaml"
    if name.endswith(".json") or text.lstrip().startswith("{"):
        return "kubernetes"
    if re.search(r"^\s*(switch|block)name=", text, re.IGNORECASE | re.MULTILINE):
        return "slurm"
    return "hosts"


def parse_cluster(
    text: str, source: str, format: str, pattern: str = "", labels: Mapping[str, str] = NOTHING
) -> Cluster:
    """The cluster that ``text`` describes; ``source`` names it in errors. Raises TopologyError."""
    if format not in FORMATS:
        raise TopologyError(f"format {format!r} is none of {', '.join(FORMATS)}")
    if labels and format != "kubernetes":
        raise TopologyError(f"{source}: labels are for format kubernetes, this is {format}")
    try:
        if format == "toml":
            found, levels = _toml(text)
        elif format == "slurm":
            found, levels = slurm.parse_conf(text)
        elif format == "slurm-yaml":
            found, levels = slurm.parse_yaml(text)
        elif format == "kubernetes":
            found, levels = kubernetes.parse_nodes(text, labels)
        else:
            found, levels = _hosts(text, pattern)
        nodes = (
            Node(name, where.pop(HOST, name), tuple(where.items())) for name, where in found.items()
        )
        return Cluster(tuple(nodes), levels)
    except TopologyError as e:
        raise TopologyError(f"{source}: {e}") from e


# -- our own ---------------------------------------------------------------------------------------


def _toml(text: str) -> Found:
    """``nodes`` = host list, ``[domains.LEVEL]`` and ``[hosts]``: label = host list."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as e:  # also a number of too many digits
        raise TopologyError(f"no TOML: {e}") from e
    if unknown := sorted(set(document) - {"nodes", "levels", "domains", "hosts"}):
        raise TopologyError(f"needs nodes, levels, domains, hosts; has {', '.join(unknown)} too")
    found: Labels = {}
    for name in _names("nodes", document.get("nodes")):
        if name in found:
            raise TopologyError(f"nodes: {name!r} is given twice")
        found[name] = {}
    domains = _table("domains", document.get("domains", {}))
    levels = document.get("levels", list(domains))
    if not isinstance(levels, list) or not all(isinstance(level, str) for level in levels):
        raise TopologyError(f"levels: needs a list of names, narrow to wide, got {_shown(levels)}")
    if forgotten := sorted(set(domains) - set(levels)):
        raise TopologyError(f"levels: {levels} lacks {', '.join(forgotten)} of domains")
    if wrong := {HOST, NODE} & set(domains):
        raise TopologyError(f"domains.{min(wrong)}: hosts are described under [hosts]")
    for level, table in (*domains.items(), (HOST, document.get("hosts", {}))):
        where = "hosts" if level == HOST else f"domains.{level}"
        for label, names in _table(where, table).items():
            for name in _names(f"{where}.{label}", names):
                if name not in found:
                    raise TopologyError(f"{where}.{label}: {name!r} is not among nodes")
                if found[name].setdefault(level, label) != label:
                    raise TopologyError(
                        f"{where}.{label}: {name!r} is in {found[name][level]!r} already"
                    )
    return found, tuple(levels)


def _shown(value: Any) -> str:
    """For a message: short, however large or deep it is."""
    try:
        return repr(value)[:200]
    except RecursionError:
        return f"a {type(value).__name__}, nested too deep"


def _table(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TopologyError(f"{where}: needs a table, got {_shown(value)}")
    return value


def _names(where: str, value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        raise TopologyError(
            f"{where}: needs a host list as 'n[001-128]', or several, got {_shown(value)}"
        )
    try:
        return expand_all(texts)
    except TopologyError as e:
        raise TopologyError(f"{where}: {e}") from e


# -- names that say where they are -----------------------------------------------------------------


def _hosts(text: str, pattern: str) -> Found:
    """Names, and a pattern whose groups are levels, the widest first.

    A label is the name up to the end of its group, so racks of two pods differ: by
    ``p(?P<pod>\\d+)r(?P<rack>\\d+)``, ``p1r7n3`` is in pod ``p1`` and rack ``p1r7``.
    """
    try:
        regex = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as e:
        raise TopologyError(f"pattern {pattern!r}: {e}") from e
    groups = sorted(set(regex.groupindex) - {NODE}, key=regex.groupindex.__getitem__)
    if not groups:
        raise TopologyError(
            f"names alone say no places: needs a pattern with groups, as "
            f"r(?P<rack>\\d+)n(?P<host>\\d+), got {pattern!r}"
        )
    found: Labels = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        try:
            names = expand(line) if line else ()
        except TopologyError as e:
            raise TopologyError(f"line {number}: {e}") from e
        for name in names:
            match = regex.match(name)
            if not match:
                raise TopologyError(f"line {number}: {name!r} does not match {pattern!r}")
            if name in found:
                raise TopologyError(f"line {number}: {name!r} is given twice")
            found[name] = {g: name[: match.end(g)] for g in groups if match[g]}
        if len(found) > MAX_NAMES:
            raise TopologyError(f"line {number}: more than {MAX_NAMES} names")
    if not found:
        raise TopologyError("needs at least one name, found none")
    return found, tuple(group for group in reversed(groups) if group != HOST)
