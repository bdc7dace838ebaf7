"""Faults on whole processes: a card of the plan becomes a blow on somebody, and is made good again.

Whom it hits is found when it is due, among those who can be hit then: nobody who is under a blow
already, no rank of a launch that is not up. A blow that takes nodes says so beforehand, for the
campaign to decide; what it took counts as hurt until a step was saved, and committed, after it was
made good. A killed agent or node is started again by the blow's end, as an operator would.

Contract: `aim` changes nothing. Signals go to children that are not reaped, and to a mover by a
pidfd. `mend` never waits; `mend_all` lets everybody go who is stopped, and starts who is away.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from p2pckpt.backends.etcd_server import EtcdServers
from p2pckpt.demo.campaign import Fault
from p2pckpt.demo.cluster import Launch, Machine, Node
from p2pckpt.demo.room import Room
from p2pckpt.errors import FormatError
from p2pckpt.records import FileKind, FileRecord, FileState
from p2pckpt.wire import unpack

REAPED_S = 10.0
ROOM = frozenset({"room"})
"""A tmpfs that is not full: whoever starts needs it."""
T = TypeVar("T")


@dataclass(frozen=True)
class Scene:
    """What the campaign knows when a fault is due. ``up``: all ranks train. ``committed``: the
    newest step of which a rank knows that, 0 for none."""

    launch: Launch
    up: bool
    committed: int
    ranks_per_node: int


def _nothing() -> None:
    pass


def _at_once() -> bool:
    return True


@dataclass(eq=False)
class Blow:
    """A fault that has found its victim. ``keys``: what no other blow may hit or need meanwhile;
    ``needs``: what none may hit.

    ``takes``: nodes whose bytes are gone or out of reach. ``do`` strikes; ``undo``, after the
    fault's time, begins to make it good; ``over``: is it good? One that ``ends_launch`` is not over
    before a later launch is up.
    """

    fault: Fault
    words: str
    do: Callable[[], None]
    keys: frozenset[str]
    needs: frozenset[str] = frozenset()
    takes: frozenset[str] = frozenset()
    undo: Callable[[], None] = _nothing
    over: Callable[[], bool] = _at_once
    ends_launch: bool = False
    launch: int = -1
    began_at: float = math.inf
    undone: bool = False


class Strikes:
    """All blows of a campaign. ``wrong``: what was found while making good. ``notes``: blows that
    may have missed."""

    def __init__(self, machine: Machine, room: Room | None) -> None:
        self.under_way: list[Blow] = []
        self.wrong: list[str] = []
        self.notes: list[str] = []
        self.away: set[str] = set()
        """Nodes whose agent we have killed and not yet started again."""
        self._machine, self._room = machine, room
        self._hurt: dict[str, float] = {}
        self._aims: dict[str, Callable[[Fault, Scene], Blow | str]] = {
            kind: getattr(self, f"_aim_{kind.partition('_')[0]}")
            for kind in (
                *("trainer_kill", "trainer_term", "trainer_pause"),
                *("agent_kill", "agent_pause", "agent_away", "mover_kill", "mover_pause"),
                *("node", "rack", "etcd_pause", "etcd_kill", "etcd_outage"),
                *("flip", "flip_kill", "full", "s3_kill", "s3_pause"),
            )
        }

    @property
    def busy(self) -> set[str]:
        """The keys of all blows under way."""
        return {key for blow in self.under_way for key in blow.keys}

    def hurt(self, since: float) -> set[str]:
        """Nodes that a blow has taken and not given back before `since`."""
        names = {node.name for node in self._machine.nodes}
        return {name for name, until in self._hurt.items() if until >= since and name in names}

    def aim(self, fault: Fault, scene: Scene) -> Blow | str:
        """The blow, or why there is nobody to hit now."""
        blow = self._aims[fault.kind](fault, scene)
        if isinstance(blow, Blow):
            needed = {key for other in self.under_way for key in other.needs}
            if taken := (blow.keys & (self.busy | needed)) | (blow.needs & self.busy):
                return f"another blow hits or needs {', '.join(sorted(taken))}"
        return blow

    def strike(self, blow: Blow, launch: Launch) -> None:
        """Now."""
        blow.launch, blow.began_at = launch.number, time.monotonic()
        self.under_way.append(blow)
        self._hurt |= dict.fromkeys(blow.takes, math.inf)
        blow.do()

    def mend(self, up: int) -> None:
        """Make good whose time is over. ``up``: the newest launch of which all ranks train."""
        now = time.monotonic()
        for blow in list(self.under_way):
            if not blow.undone and now >= blow.began_at + blow.fault.lasts_s:
                blow.undone = True
                blow.undo()
            back = not blow.ends_launch or up > blow.launch
            if blow.undone and back and blow.over():
                self.under_way.remove(blow)
                self._hurt |= dict.fromkeys(blow.takes, time.monotonic())

    def mend_all(self) -> None:
        """Begin to make good all that is under way."""
        for blow in self.under_way:
            if not blow.undone:
                blow.undone = True
                blow.undo()

    # -- ranks ------------------------------------------------------------------------------------

    def _aim_trainer(self, fault: Fault, scene: Scene) -> Blow | str:
        if not scene.up:
            return "not all ranks train"
        ranks = scene.launch.ranks
        number, rank = pick(list(enumerate(ranks)), fault.victim)
        if fault.kind == "trainer_pause":
            words = f"rank {number} is stopped for {fault.lasts_s:g} s"
            go_on = _signal(rank.pid, rank.poll, signal.SIGCONT)
            stop = _signal(rank.pid, rank.poll, signal.SIGSTOP)
            return Blow(fault, words, stop, frozenset({"ranks"}), undo=go_on)
        keys = frozenset({"ranks"})
        if fault.kind == "trainer_kill":
            words = f"rank {number} is killed"
            return Blow(fault, words, rank.kill, keys, ROOM, ends_launch=True)

        def tell_all() -> None:
            for each in ranks:
                each.terminate()

        return Blow(fault, "all ranks get SIGTERM", tell_all, keys, ROOM, ends_launch=True)

    # -- agents and movers ------------------------------------------------------------------------

    def _free(self) -> list[Node]:
        nodes = [n for n in self._machine.nodes if n.alive and n.ready_at is not None]
        return [n for n in nodes if n.name not in self.busy]

    def _aim_agent(self, fault: Fault, _scene: Scene) -> Blow | str:
        if not (free := self._free()):
            return "no node is free"
        node = pick(free, fault.victim)
        name = frozenset({node.name})
        if fault.kind != "agent_kill":
            agent = node.agent
            words = f"the agent of {node.name} is stopped for {fault.lasts_s:g} s"
            stop = _signal(agent.pid, agent.poll, signal.SIGSTOP)
            go_on = _signal(agent.pid, agent.poll, signal.SIGCONT)
            return Blow(fault, words, stop, name, takes=name, undo=go_on)
        store_id = node.store_id

        def kill() -> None:
            self.away.add(node.name)
            node.agent.kill()
            node.agent.wait(REAPED_S)

        def revive() -> None:
            self._machine.revive(node)
            self.away.discard(node.name)

        def back() -> bool:
            if node.ready_at is not None and node.store_id != store_id:
                self.wrong.append(f"the agent of {node.name} did not adopt its memory")
            return node.ready_at is not None

        words = f"the agent of {node.name} is killed, and restarts after {fault.lasts_s:g} s"
        return Blow(fault, words, kill, name, ROOM, name, revive, back)

    def _aim_mover(self, fault: Fault, _scene: Scene) -> Blow | str:
        nodes = [(n, pid) for n in self._free() if (pid := mover_of(n))]
        if not nodes:
            return "no mover runs on a free node"
        node, pid = pick(nodes, fault.victim)
        keys = frozenset({node.name})
        if fault.kind == "mover_kill":
            words = f"the mover of {node.name} is killed"
            kill = _signal_mover(node, pid, signal.SIGKILL)
            return Blow(fault, words, kill, keys, over=lambda: mover_of(node) not in (0, pid))
        words = f"the mover of {node.name} is stopped for {fault.lasts_s:g} s"
        stop = _signal_mover(node, pid, signal.SIGSTOP)
        return Blow(fault, words, stop, keys, undo=_signal_mover(node, pid, signal.SIGCONT))

    # -- nodes with their memory ------------------------------------------------------------------

    def _aim_node(self, fault: Fault, scene: Scene) -> Blow | str:
        if not (free := self._free()):
            return "no node is free"
        return self._lose([pick(free, fault.victim)], fault, scene)

    def _aim_rack(self, fault: Fault, scene: Scene) -> Blow | str:
        rack = pick(sorted({n.rack for n in self._machine.nodes}), fault.victim)
        return self._lose([n for n in self._machine.nodes if n.rack == rack], fault, scene)

    def _lose(self, nodes: list[Node], fault: Fault, scene: Scene) -> Blow | str:
        if not scene.up or any(n.ready_at is None for n in self._machine.nodes):
            return "not all ranks train, or not all nodes are ready"
        machine, each = self._machine, scene.ranks_per_node
        ranks = [r for r in range(len(scene.launch.ranks)) if machine.seats[r // each] in nodes]
        fresh: list[Node] = []

        def kill() -> None:
            for rank in ranks:  # one whose agent was restarted is not in its group any more
                scene.launch.ranks[rank].kill()
            machine.destroy(nodes)
            for node in nodes:
                machine.nodes.remove(node)

        def replace() -> None:
            fresh.extend(machine.start_node(node.rack) for node in nodes)

        names = frozenset(node.name for node in nodes)
        words = f"{', '.join(sorted(names))} with ranks {ranks} and all memory are lost"
        keys = names | ({"ranks"} if ranks else set())
        return Blow(
            fault, words, kill, keys, ROOM, names, replace,
            lambda: all(node.ready_at is not None for node in fresh), bool(ranks),
        )  # fmt: skip

    # -- services ---------------------------------------------------------------------------------

    def _aim_etcd(self, fault: Fault, _scene: Scene) -> Blow | str:
        etcd, keys = self._machine.etcd, frozenset({"etcd"})
        assert etcd is not None
        members = list(range(len(etcd.endpoints)))
        member = pick(members, fault.victim)
        if fault.kind == "etcd_kill":
            words = f"etcd member {member} is killed, and restarts after {fault.lasts_s:g} s"
            return Blow(
                fault, words, lambda: etcd.kill(member), keys,
                undo=lambda: etcd.spawn(member), over=lambda: _all_healthy(etcd, members),
            )  # fmt: skip
        frozen = [member] if fault.kind == "etcd_pause" else [m for m in members if m != member]

        def freeze() -> None:
            for each in frozen:
                etcd.freeze(each)

        def thaw() -> None:
            for each in frozen:
                etcd.thaw(each)

        names = " and ".join(map(str, frozen))
        words = f"etcd member {names} stopped for {fault.lasts_s:g} s"
        return Blow(fault, words, freeze, keys, undo=thaw, over=lambda: _all_healthy(etcd, members))

    def _aim_s3(self, fault: Fault, _scene: Scene) -> Blow | str:
        store, keys = self._machine.store, frozenset({"s3"})
        if store is None:
            return "there is no object store"
        if fault.kind == "s3_kill":
            words = f"the object store is killed, and restarts after {fault.lasts_s:g} s"
            return Blow(fault, words, store.kill, keys, undo=store.spawn)
        words = f"the object store is stopped for {fault.lasts_s:g} s"
        return Blow(fault, words, store.freeze, keys, undo=store.thaw)

    # -- memory -----------------------------------------------------------------------------------

    def _aim_full(self, fault: Fault, scene: Scene) -> Blow | str:
        if (room := self._room) is None:
            return "a tmpfs of our own needs root"
        if not scene.up or any(n.ready_at is None for n in self._machine.nodes):
            return "somebody starts, and needs room"
        words = f"the tmpfs is full for {fault.lasts_s:g} s"
        return Blow(fault, words, room.fill, ROOM, undo=room.free)

    def _aim_flip(self, fault: Fault, scene: Scene) -> Blow | str:
        kills = fault.kind == "flip_kill"
        if kills and not scene.up:
            return "not all ranks train"
        nodes = [n for n in self._free() if not kills or n in self._machine.seats]
        files = [
            (node, path, record)
            for node in nodes
            for path, record in whole_files(node.directory, scene.committed)
            if not kills or record.kind is FileKind.SLOT
        ]
        if not files:
            return f"no whole file of step {scene.committed} is there"
        node, path, record = pick(files, fault.victim)
        rank = scene.launch.ranks[record.part] if kills else None
        offset = int((fault.victim * 7919) % 1 * record.length)

        def strike() -> None:
            if not flip(path, record, offset):
                self.notes.append(f"{path.name} was put to another use while a bit was flipped")
            if rank is not None:
                rank.kill()

        words = f"a bit of {record.kind} {record.part} of step {scene.committed} on {node.name}"
        words += f" is flipped, and rank {record.part} is killed" if kills else " is flipped"
        name = frozenset({node.name})
        if not kills:
            return Blow(fault, words, strike, name, takes=name)
        return Blow(fault, words, strike, name | {"ranks"}, ROOM, name, ends_launch=True)


# -- parts -----------------------------------------------------------------------------------------


def pick(those: list[T], victim: float) -> T:
    """The one at this fraction of them."""
    return those[int(victim * len(those))]


def mover_of(node: Node) -> int:
    """The process id of a node's mover; 0 if it has none now."""
    pid = node.agent.pid
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if b"ucx_mover" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    return 0


def whole_files(directory: Path, step: int) -> Iterator[tuple[Path, FileRecord]]:
    """The files that hold a step, with their records, by name."""
    for path in sorted(directory.glob("*.rec")):
        with contextlib.suppress(OSError, FormatError):
            record = unpack(path.read_bytes(), FileRecord)
            if record.state is FileState.WHOLE and record.attempt.step == step and record.length:
                yield path, record


def flip(path: Path, record: FileRecord, offset: int) -> bool:
    """Flip one bit of the file with this record; False if it was used for something else then."""
    with contextlib.suppress(OSError, FormatError):
        with path.with_suffix(".ram").open("r+b", buffering=0) as f:
            byte = os.pread(f.fileno(), 1, offset)[0]
            os.pwrite(f.fileno(), bytes([byte ^ 1 << offset % 8]), offset)
        return unpack(path.read_bytes(), FileRecord) == record
    return False


def _signal(pid: int, poll: Callable[[], int | None], number: int) -> Callable[[], None]:
    """Signal a child of ours, if it has not ended: then its number is not another's."""

    def send() -> None:
        if poll() is None:
            os.kill(pid, number)

    return send


def _signal_mover(node: Node, pid: int, number: int) -> Callable[[], None]:
    """Signal a mover, if it is still this agent's."""

    def send() -> None:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            try:
                if mover_of(node) == pid:
                    signal.pidfd_send_signal(handle, number)
            finally:
                os.close(handle)

    return send


def _all_healthy(etcd: EtcdServers, members: list[int]) -> bool:
    return all(map(etcd.healthy, members))
