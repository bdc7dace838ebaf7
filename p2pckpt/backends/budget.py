"""How much RAM an arena may take when nobody says so.

Intuition: the pages of a tmpfs file are bounded three times over: by the file system's size, by the
machine's memory, and by every memory cgroup above the process that touches them, which kills
instead of refusing. Half of the least of these is a budget that leaves room for the training.

Contract: reads files only, changes nothing, and tells in a sentence what it found and which bound
was the least. Works for cgroup version 1 and 2, in a container with or without a cgroup namespace.
The files that the arena has already count as free, so that a restart finds the same budget.
"""

from __future__ import annotations

import os
from pathlib import Path


def default_budget(
    directory: str | os.PathLike[str], root: str | os.PathLike[str] = "/"
) -> tuple[int, str]:
    """Half of what is free for an arena in `directory`, in bytes, and a sentence that says why.

    Free is the least of: the file system's free space, the machine's available memory, and for the
    memory cgroup (version 1 or 2) of this process and each one above it the limit less what is
    used and cannot be reclaimed. What the arena's own files take counts as free, so that a
    restart finds the same budget. `root` is where /proc and the cgroup mounts are looked for.
    """
    place = Path(directory)
    own = sum(p.stat().st_size for p in place.glob("*.ram")) if place.is_dir() else 0
    while not place.exists() and place != place.parent:
        place = place.parent
    bounds = [(_free_bytes(place), f"file system of {place}")]
    for line in (Path(root) / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            bounds.append((int(line.split()[1]) * 1024, "available memory of the machine"))
    bounds += _cgroup_bounds(Path(root))
    free, least = min(bounds)
    budget = max(0, free + own) // 2
    every = "; ".join(f"{words}: {max(0, n)}" for n, words in bounds)
    return budget, (
        f"{budget} bytes: half of the {max(0, free)} free in the {least} and the {own} of the "
        f"arena's own files (free bytes of the {every})"
    )


def _free_bytes(place: Path) -> int:
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def _cgroup_bounds(root: Path) -> list[tuple[int, str]]:
    """Free bytes below each limit that binds this process."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    bounds = []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        version = 1 if "memory" in controllers.split(",") else 2
        if version == 2 and controllers:
            continue  # another controller of version 1
        for mounted in (line.split() for line in mounts):
            tail = mounted[mounted.index("-") + 1 :]
            if tail[0] != ("cgroup" if version == 1 else "cgroup2"):
                continue
            if version == 2 or "memory" in tail[2].split(","):
                top = root / mounted[4].lstrip("/")
                inside = os.path.relpath(path, mounted[3])
                bounds += _bounds_upwards(top, top if inside.startswith("..") else top / inside)
    return bounds


def _bounds_upwards(top: Path, place: Path) -> list[tuple[int, str]]:
    bounds = []
    for group in (place, *place.parents):
        for limit, usage, reclaimable in (
            ("memory.max", "memory.current", "inactive_file "),
            ("memory.high", "memory.current", "inactive_file "),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
        ):
            try:
                bound = int((group / limit).read_text())  # "max" is no number and no bound
                used = int((group / usage).read_text())
                stats = (group / "memory.stat").read_text().splitlines()
            except (OSError, ValueError):
                continue
            spare = sum(int(s.split()[1]) for s in stats if s.startswith(reclaimable))
            if bound < 1 << 60:  # version 1 writes "no limit" as nearly 2^63
                bounds.append((bound - used + spare, f"cgroup limit {group / limit}"))
        if group == top:
            break
    return bounds


def file_system(directory: str | os.PathLike[str], root: str | os.PathLike[str] = "/") -> str:
    """The kind of file system that a directory is or would be on, as "tmpfs" or "ext4"."""
    place = Path(directory).absolute()
    kinds = {}
    for line in (Path(root) / "proc/mounts").read_text().splitlines():
        _, on, kind, *_ = line.split()
        kinds[Path(on.encode().decode("unicode_escape"))] = kind
    return next((kinds[on] for on in (place, *place.parents) if on in kinds), "unknown")
