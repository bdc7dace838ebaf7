"""Host lists as Slurm writes them: ``n[001-128,140]`` is 129 names, ``a,b[1-2]`` is three.

Intuition: thousands of names in a line that can be read; :func:`expand` and :func:`fold` are each
other's inverse, but for the order.

Contract: pure; names come in the order written; leading zeros keep their width. A list may hold
several bracketed parts (``r[1-2]n[1-4]``). Raises TopologyError for anything else, and for more
than MAX_NAMES names, so that a typing error cannot fill the memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import product
from math import prod

from topology.cluster import TopologyError

MAX_NAMES = 1_000_000
_PART = re.compile(r"[^\[\],\s]+|\[[0-9,\-]*\]")
_RANGE = re.compile(r"([0-9]{1,15})(?:-([0-9]{1,15}))?")


def expand(text: str) -> tuple[str, ...]:
    """All names that a host list stands for; blanks around commas are allowed."""
    return expand_all([text])


def expand_all(texts: Iterable[str]) -> tuple[str, ...]:
    """All names of several host lists, MAX_NAMES together."""
    names: list[str] = []
    for text in texts:
        for item in _items(text):
            pieces = _PART.findall(item)
            if not pieces or "".join(pieces) != item:
                raise TopologyError(
                    f"host list {text[:80]!r}: needs names as n[1-3,7], got {item[:80]!r}"
                )
            parts = [_part(piece, item) for piece in pieces]
            if len(names) + prod(map(len, parts)) > MAX_NAMES:
                raise TopologyError(f"host list {text[:80]!r}: more than {MAX_NAMES} names")
            names += map("".join, product(*parts))
    return tuple(names)


def _items(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    masked = re.sub(r"\[[^\]]*\]", lambda m: m[0].replace(",", "\0"), text)
    return [item.strip().replace("\0", ",") for item in masked.split(",")]


def _part(part: str, item: str) -> list[str]:
    if not part.startswith("["):
        return [part]
    numbers: list[str] = []
    for piece in part[1:-1].split(","):
        found = _RANGE.fullmatch(piece)
        if not found:
            what = f"host list {item[:80]!r}: needs numbers or a range"
            raise TopologyError(f"{what}, got {piece[:80]!r}")
        low, high = found[1], found[2] or found[1]
        if not 0 <= int(high) - int(low) < MAX_NAMES - len(numbers):
            raise TopologyError(
                f"host list {item[:80]!r}: range {piece!r} must rise; at most {MAX_NAMES} numbers"
            )
        numbers += [f"{n:0{len(low)}d}" for n in range(int(low), int(high) + 1)]
    return numbers


def fold(names: Iterable[str]) -> str:
    """A short host list of these names: ranges by the last number in each; sorted."""
    found: dict[tuple[str, str], list[str]] = {}
    plain = []
    for name in sorted(set(names)):
        parts = re.fullmatch(r"(.*?)([0-9]{1,15})([^0-9]*)", name)
        if parts and not set(name) & set("[], "):
            found.setdefault((parts[1], parts[3]), []).append(parts[2])
        else:
            plain.append(name)
    groups: dict[tuple[str, str, int], list[int]] = {}
    for (before, after), texts in found.items():
        padded = any(text != str(int(text)) for text in texts)
        for text in texts:
            groups.setdefault((before, after, len(text) if padded else 1), []).append(int(text))
    lists = []
    for (before, after, width), numbers in groups.items():
        runs: list[list[int]] = []
        for n in sorted(numbers):
            if runs and runs[-1][1] == n - 1:
                runs[-1][1] = n
            else:
                runs.append([n, n])
        pieces = [
            f"{low:0{width}d}" if low == high else f"{low:0{width}d}-{high:0{width}d}"
            for low, high in runs
        ]
        one = len(pieces) == 1 and "-" not in pieces[0]
        lists.append(before + (pieces[0] if one else f"[{','.join(pieces)}]") + after)
    return ",".join((*lists, *plain))
