"""Clusters from Slurm: ``topology.conf`` and ``topology.yaml``, switch trees and blocks.

Intuition: both files say the same: a switch has nodes or other switches below it, a block has
nodes. Both are read into :class:`Entry` records first; the rest is one function.

Contract: a switch's level is its height over the nodes: ``leaf``, ``spine``, ``core``, then
``tier4`` and so on; a block's level is ``block``. Of the yaml form, the subset that Slurm documents
is read (topology.yaml(5)): block style, host lists as plain text; of several topologies of a kind,
that with ``cluster_default: true``, else the first. Errors name the line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from topology.cluster import TopologyError
from topology.hostlist import MAX_NAMES, expand

TIERS = ("leaf", "spine", "core")
MOST_TIERS = 64
"""Switches over each other: no network has more than a handful, and a chain takes its square."""
IGNORED = {"linkspeed", "blocksizes", "comment"}

Labels = dict[str, dict[str, str]]  # node: {level: label}


@dataclass(slots=True)
class Entry:
    """One switch or block: its name, the host lists below it, and the line it began on."""

    kind: str
    name: str
    line: int
    nodes: str = ""
    children: str = ""


def parse_conf(text: str) -> tuple[Labels, tuple[str, ...]]:
    """Labels by node, and the levels from narrow to wide, of a ``topology.conf``."""
    return _labels([entry for number, line in _lines(text) if (entry := _entry(number, line))])


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines without comments, continued ones joined, with the number of the first."""
    held, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        first = first or number
        line = line.partition("#")[0].rstrip()
        if line.endswith("\\"):
            held += line[:-1] + " "
            continue
        yield first, held + line
        held, first = "", 0
    yield first, held


def _entry(number: int, line: str) -> Entry | None:
    pairs: dict[str, str] = {}
    for word in line.split():
        key, equals, value = word.partition("=")
        if not equals or not value or key.lower() in pairs:
            raise TopologyError(f"line {number}: needs Key=Value once each, got {word[:80]!r}")
        pairs[key.lower()] = value
    for kind, name in (("switch", "switchname"), ("block", "blockname")):
        if name in pairs:
            known = {name, "nodes", *IGNORED} | ({"switches"} if kind == "switch" else set())
            if unknown := sorted(set(pairs) - known):
                raise TopologyError(f"line {number}: {kind} {pairs[name]!r} has unknown {unknown}")
            below = pairs.get("nodes", ""), pairs.get("switches", "")
            return Entry(kind, pairs[name], number, *below)
    if unknown := sorted(set(pairs) - IGNORED):
        raise TopologyError(f"line {number}: needs SwitchName= or BlockName=, got {unknown}")
    return None


_YAML_LINE = re.compile(r"\s*(?:- +)?(?P<key>[A-Za-z_]+):(?:\s+(?P<value>.*))?")


def parse_yaml(text: str) -> tuple[Labels, tuple[str, ...]]:
    """Labels by node, and the levels from narrow to wide, of a ``topology.yaml``."""
    found: list[tuple[bool, list[Entry]]] = []
    entry: Entry | None = None
    for number, raw in enumerate(text.splitlines(), 1):
        line = re.sub(r"(^|\s)#.*", "", raw).rstrip()
        if not line or line == "---" or re.fullmatch(r"\s*- +[0-9]+", line):
            continue
        pair = _YAML_LINE.fullmatch(line)
        if not pair:
            raise TopologyError(f"line {number}: needs 'key: value', got {line.strip()[:80]!r}")
        key, value = pair["key"], (pair["value"] or "").strip().strip("\"'")
        if value[:1] in ("{", "[", "&", "*", "|", ">") and value != "[]":
            raise TopologyError(f"line {number}: needs plain text after {key}:, got {value[:80]!r}")
        if key == "topology":
            found.append((False, []))
            entry = None
        elif not found:
            raise TopologyError(f"line {number}: needs '- topology: NAME' first, got {key!r}")
        elif key == "cluster_default":
            found[-1] = (value.lower() == "true", found[-1][1])
        elif key in ("switch", "block") and value:
            entry = Entry(key, value, number)
            found[-1][1].append(entry)
        elif key in ("children", "nodes"):
            if entry is None:
                raise TopologyError(
                    f"line {number}: {key} belongs to a switch or block, found none"
                )
            setattr(entry, key, value)
    chosen: dict[str, list[Entry]] = {}
    for _, entries in sorted(found, key=lambda topology: not topology[0]):
        if entries:
            chosen.setdefault(entries[0].kind, entries)
    return _labels([entry for entries in chosen.values() for entry in entries])


def _labels(entries: list[Entry]) -> tuple[Labels, tuple[str, ...]]:
    if not entries:
        raise TopologyError("needs at least one switch or block, found none")
    labels: Labels = {}
    known: dict[tuple[str, str], Entry] = {}
    parent: dict[str, Entry] = {}
    for entry in entries:
        first = known.setdefault((entry.kind, entry.name), entry)
        if first is not entry:
            raise TopologyError(
                f"line {entry.line}: {entry.kind} {entry.name!r} stands on line {first.line} too"
            )
        for child in _names(entry, entry.children):
            if parent.setdefault(child, entry) is not entry:
                raise TopologyError(
                    f"line {entry.line}: switch {child!r} is below {entry.name!r} and, by line "
                    f"{parent[child].line}, below {parent[child].name!r}"
                )
    for child, above in parent.items():
        if ("switch", child) not in known:
            raise TopologyError(f"line {above.line}: switch {child!r} is nowhere described")
    height = _heights(entries, parent)
    below: dict[tuple[str, str], Entry] = {}
    for entry in entries:
        for node in _names(entry, entry.nodes):
            if below.setdefault((entry.kind, node), entry) is not entry:
                raise TopologyError(
                    f"line {entry.line}: node {node!r} is in {entry.name!r} and, by line "
                    f"{below[entry.kind, node].line}, in {below[entry.kind, node].name!r}"
                )
            at: Entry | None = entry
            while at:
                level = _tier(height[at.name]) if at.kind == "switch" else "block"
                labels.setdefault(node, {})[level] = at.name
                at = parent.get(at.name) if at.kind == "switch" else None
        if len(labels) > MAX_NAMES:
            raise TopologyError(f"line {entry.line}: more than {MAX_NAMES} nodes")
    tiers = tuple(_tier(h) for h in sorted(set(height.values())))
    blocks = ("block",) if any(entry.kind == "block" for entry in entries) else ()
    return labels, (*blocks, *tiers)


def _names(entry: Entry, text: str) -> tuple[str, ...]:
    try:
        return expand(text) if text else ()
    except TopologyError as e:
        raise TopologyError(f"line {entry.line}: {entry.kind} {entry.name!r}: {e}") from e


def _heights(entries: list[Entry], parent: dict[str, Entry]) -> dict[str, int]:
    """Height of each switch over the nodes: 1 where it has no switches below."""
    height: dict[str, int] = {}
    for entry in entries:
        if entry.kind != "switch":
            continue
        at: Entry | None = entry
        steps = 0
        while at and height.get(at.name, 0) <= steps:
            steps += 1
            if steps > min(MOST_TIERS, len(entries)):
                raise TopologyError(
                    f"line {entry.line}: switch {entry.name!r} is below itself, or below more "
                    f"than {MOST_TIERS} others"
                )
            height[at.name] = steps
            at = parent.get(at.name)
    return height


def _tier(height: int) -> str:
    return TIERS[height - 1] if height <= len(TIERS) else f"tier{height}"
