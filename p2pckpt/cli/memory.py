"""What `p2pckpt doctor` finds out about memory: room, kind of file system, huge pages, locks.

An agent's RAM is files on a tmpfs. Four things of the machine decide whether that goes well: how
much may be taken before somebody is killed, that it is a tmpfs at all, whether its pages are 4 KiB
or 2 MiB (mapping and clearing small ones is what a restore waits for), and, for RDMA only, how much
memory may be locked.

Contract: the functions look, and change nothing. A verdict other than "ok" says what to do.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from p2pckpt.backends.budget import default_budget
from p2pckpt.backends.descriptors import NEEDED
from p2pckpt.cli.output import amount
from p2pckpt.config import Config

OK, WARN, FAIL = "ok", "warn", "fail"
SMALL_BYTES = 1 << 30
"""A budget below this holds checkpoints of toys only."""
SHMEM = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
HUGE = ("always", "within_size")
"""Values of the mount option huge= by which the files of a tmpfs get huge pages unasked."""


@dataclass(frozen=True)
class Check:
    """One verdict line: "ok", "warn" or "fail", what was found, and what to do about it.

    With "ok", ``do`` is what would make it better still.
    """

    name: str
    verdict: str
    found: str
    do: str = ""


@dataclass(frozen=True)
class Mount:
    """Type and options of a mounted file system."""

    kind: str
    options: tuple[str, ...] = ()


def budget_of(config: Config) -> tuple[int, str]:
    """What an agent would take, in bytes, and why: as its settings say, or half of what is free."""
    free, why = default_budget(config.directory)
    return (config.ram_budget_bytes, "") if config.ram_budget_bytes else (free, why)


def check_memory(config: Config, budget: int, why: str) -> Check:
    """The budget against what tmpfs, machine and cgroups leave free. ``why``: "" if it was set."""
    free = 2 * default_budget(config.directory)[0]
    found = f"an agent takes {amount(budget)}, as ram_budget_bytes says; free are {amount(free)}"
    if why:
        numbers = re.compile(r"(\d{6,})( bytes)?")
        found = f"an agent takes {numbers.sub(lambda m: amount(int(m[1])), why)}"
    if budget > free:
        do = f"set ram_budget_bytes to {free} at most, or make room: bigger writes are killed"
        return Check("memory", FAIL, f"budget {amount(budget)}, but free are {amount(free)}", do)
    if budget < SMALL_BYTES:
        do = "set ram_budget_bytes higher"
        if why:
            do = "raise the limit that is named as the least (tmpfs size=, cgroup memory limit)"
        return Check("memory", WARN, found, do)
    return Check("memory", OK, found)


def check_directory(directory: str, budget: int, mounts: Mapping[str, Mount]) -> Check:
    """Is the directory in RAM, and its file system large enough? ``mounts``: by path."""
    place = Path(directory).absolute()
    while not place.exists():
        place = place.parent
    disk = os.statvfs(place)
    size = disk.f_blocks * disk.f_frsize
    on = mount_of(place, mounts)
    found = f"{directory}: {mounts[on].kind} of {amount(size)} at {on}"
    if place != Path(directory).absolute() and place != Path(directory).absolute().parent:
        return Check("directory", FAIL, f"{directory}: {place} is as far as it exists", "make it")
    if mounts[on].kind not in ("tmpfs", "ramfs"):
        do = "use a directory on tmpfs, as /dev/shm; here every save would go to a disk"
        return Check("directory", WARN, found, do)
    if size < budget:
        do = "mount it larger (docker run --shm-size=..., mount -o remount,size=...)"
        return Check("directory", FAIL, found, do)
    return Check("directory", OK, found)


def check_huge(directory: str, mounts: Mapping[str, Mount], shmem_enabled: str) -> list[Check]:
    """Do the arena's files get huge pages? ``shmem_enabled``: text of `SHMEM`, "" if there is none.

    The mount's huge= decides; the kernel's setting overrules it if that is deny or force
    (kernel.org, admin-guide/mm/transhuge). None for what is no tmpfs. Pure.
    """
    on = mount_of(Path(directory).absolute(), mounts)
    if mounts[on].kind != "tmpfs":
        return []
    values = [o.removeprefix("huge=") for o in mounts[on].options if o.startswith("huge=")]
    option = values[-1] if values else "never"
    chosen = re.search(r"\[(\w+)\]", shmem_enabled)
    kernel = chosen[1] if chosen else "absent"
    found = f"{on} is mounted with huge={option}; the kernel's shmem_enabled is {kernel}"
    if kernel == "force" or (option in HUGE and kernel not in ("deny", "absent")):
        return [Check("huge pages", OK, found)]
    do = f"mount -o remount,huge=within_size {on}   # restores then map 2 MiB pages, not 4 KiB ones"
    if kernel == "deny":
        do = f"echo never > {SHMEM}; {do}"
    if kernel == "absent":
        do = "this kernel has no huge pages for tmpfs; restores map 4 KiB pages, which takes longer"
    return [Check("huge pages", OK, found, do)]


def mount_of(place: Path, mounts: Mapping[str, Mount]) -> str:
    """Where the file system of a path is mounted."""
    return max((m for m in mounts if place == Path(m) or Path(m) in place.parents), key=len)


def mounts_here() -> dict[str, Mount]:
    """Of this process, by path; of several on one path the last, which hides the others."""
    lines = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return {
        fields[1].encode().decode("unicode_escape"): Mount(fields[2], tuple(fields[3].split(",")))
        for fields in lines
    }


def shmem_setting() -> str:
    """The kernel's setting for huge pages of tmpfs; "" if it has none."""
    try:
        return Path(SHMEM).read_text()
    except OSError:
        return ""


def check_locked(limit: int, budget: int, devices: Sequence[str]) -> Check:
    """RDMA locks the memory that it moves; TCP does not. ``limit``: RLIMIT_MEMLOCK in bytes."""
    if limit == resource.RLIM_INFINITY or limit >= budget:
        return Check("locked memory", OK, "no limit" if limit < 0 else amount(limit))
    found = f"ulimit -l is {limit // 1024} KiB; RDMA needs {budget // 1024} KiB, TCP none"
    do = "for RDMA: LimitMEMLOCK=infinity in the unit, docker run --ulimit memlock=-1"
    return Check("locked memory", WARN if devices else OK, found, do if devices else "")


def check_files(limits: tuple[int, int]) -> Check:
    """May an agent have enough files open? ``limits``: soft, which it raises itself, and hard."""
    most = limits[1]
    if most != resource.RLIM_INFINITY and most < NEEDED:
        do = "raise the hard limit: LimitNOFILE= in the unit, docker run --ulimit nofile="
        return Check("open files", FAIL, f"at most {most}; an agent needs {NEEDED}", do)
    return Check("open files", OK, "no limit" if most < 0 else f"at most {most}")


def rdma_devices() -> list[str]:
    """InfiniBand and RoCE devices of this machine."""
    return sorted(p.name for p in Path("/sys/class/infiniband").glob("*"))
