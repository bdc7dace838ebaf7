"""Machines that are network namespaces: links to pull, routes to lose, rates to limit.

    n0: eth0 --veth--+                       Each box is a network and a mount namespace of its own,
    n1: eth0 --veth--+-- br0 (the switch)    held by a process of ours; the switch is one too, so
    etcd: eth0 -veth-+                       nothing of the machine's own network is touched.

The kernel removes a namespace with everything in it when its last process ends, and the holders die
with us, so nothing is left behind, however a test ends. In every box there are, as on many real
machines, a bridge with an address that all have (172.17.0.1) and an interface that is down (B074).

Ranks have no network: they reach their agent by its Unix socket, and stay outside.

Contract: `Lan` is made by root only, see `why_not`. Its faults last as long as their `with` block;
`between` puts a pair's traffic on a `relay.py`, for good.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from kill_rig import PATIENCE_S, Cluster, until

from p2pckpt.backends.etcd_server import find_etcd
from p2pckpt.backends.lifeline import tied

HERE = Path(__file__).parent
TOOLS = ("ip", "tc", "mount", "nsenter", "unshare")
MTU = 9000


def why_not():
    """Why there can be no namespaces here; "" if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"not installed: {', '.join(missing)} (Debian: iproute2, util-linux, mount)"
    if not os.path.exists("/dev/net/tun"):
        return "no /dev/net/tun"
    done = subprocess.run(
        ["unshare", "--net", "--mount", "ip", "link", "add", "v0", "type", "veth", "peer", "v1"],
        capture_output=True, text=True,
    )  # fmt: skip
    return f"no network namespaces: {done.stderr.strip()}" if done.returncode else ""


class Box:
    """A network and a mount namespace; `shm_bytes`: with a /dev/shm of its own, of that size."""

    def __init__(self, shm_bytes=0):
        steps = ["mount -t sysfs sysfs /sys", "ip link set lo up"]  # what UCX looks for devices in
        if shm_bytes:
            steps.append(f"mount -t tmpfs -o size={shm_bytes},mode=1777 tmpfs /dev/shm")
        script = " && ".join([*steps, "echo ready", "exec sleep infinity"])
        command = [shutil.which("unshare"), "--net", "--mount", "sh", "-c", script]
        self.holder = subprocess.Popen(
            tied(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        if self.holder.stdout.readline() != "ready\n":
            self.close()
            raise AssertionError("no box: its first steps failed")

    @property
    def enter(self):
        """What goes before a command, to run it in here."""
        return [shutil.which("nsenter"), f"--target={self.holder.pid}", "--net", "--mount"]

    def run(self, text):
        """Run lines of shell in here; what they print."""
        done = subprocess.run(
            [*self.enter, "sh", "-ec", text], capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, (text, done.stderr)
        return done.stdout

    def close(self):
        self.holder.kill()
        self.holder.wait(PATIENCE_S)
        self.holder.stdout.close()


class Lan:
    """Boxes on one switch; made when first asked for."""

    def __init__(self, shm_bytes=0):
        self._shm_bytes = shm_bytes
        self._boxes = {}
        self._relay = None
        self.switch = Box()
        self.switch.run("ip link add br0 type bridge\n ip link set br0 up")

    def __getitem__(self, name):
        if name not in self._boxes:
            box = self._boxes[name] = Box(self._shm_bytes)
            self.switch.run(
                f"""ip link add eth0 netns {box.holder.pid} type veth peer name {name}
                ip link set {name} master br0 up"""
            )
            box.run(
                f"""ip address add {self.address(name)}/24 dev eth0
                ip link set eth0 up
                ip link add docker0 type bridge
                ip address add 172.17.0.1/16 dev docker0
                ip link set docker0 up
                ip link add spare type dummy 2>/dev/null || ip link add spare type bridge
                ip address add 192.168.9.9/24 dev spare"""
            )
        return self._boxes[name]

    def address(self, name):
        return f"10.77.0.{1 + list(self._boxes).index(name)}"

    # -- faults -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _broken(self, box, how, mend):
        box.run(how)
        try:
            yield
        finally:
            box.run(mend)

    def down(self, name):
        """The interface of a box is down: whoever sends there has an error at once."""
        return self._broken(self[name], "ip link set eth0 down", "ip link set eth0 up")

    def unplugged(self, name):
        """The other end of its cable is: whatever it sends goes nowhere."""
        return self._broken(self.switch, f"ip link set {name} down", f"ip link set {name} up")

    def blackhole(self, name, *others):
        """A box has no way to others, though they have one to it: none of its answers arrives."""
        places = [self.address(other) for other in others]
        return self._broken(
            self[name],
            "\n".join(f"ip route add blackhole {place}" for place in places),
            "\n".join(f"ip route del blackhole {place}" for place in places),
        )

    @contextlib.contextmanager
    def slow(self, name, mbit):
        """At most so much out of a box, and into it."""
        how, end = f"root tbf rate {mbit}mbit burst 128k latency 200ms", "root"
        out, into = "tc qdisc {} dev eth0 {}", f"tc qdisc {{}} dev {name} {{}}"
        with (
            self._broken(self[name], out.format("add", how), out.format("del", end)),
            self._broken(self.switch, into.format("add", how), into.format("del", end)),
        ):
            yield

    def between(self, a, b):
        """From now on all between two boxes passes a relay; as good as a wire, but for `rule`."""
        ends = (f"{a}-{b}", f"{b}-{a}")
        self._tell({"open": ends})
        assert self._relay.stdout.readline() == "ok\n"
        for end, here, there in zip(ends, (a, b), (b, a), strict=True):
            self.switch.run(f"ip link set {end} netns {self[here].holder.pid}")
            self[here].run(
                f"""ip link set {end} mtu {MTU} up
                ip route add {self.address(there)} dev {end} src {self.address(here)}"""
            )

    @contextlib.contextmanager
    def rule(self, a, b, **rule):
        """For packets from a to b, which a relay is `between`: `delay_s`, `loss`, `cut`."""
        self._tell({"rule": f"{a}-{b}", **rule})
        try:
            yield
        finally:
            self._tell({"rule": f"{a}-{b}"})

    @contextlib.contextmanager
    def bad(self, name, others, **rule):
        """A rule for all packets from and to a box."""
        with contextlib.ExitStack() as stack:
            for other in others:
                stack.enter_context(self.rule(name, other, **rule))
                stack.enter_context(self.rule(other, name, **rule))
            yield

    def _tell(self, order):
        if self._relay is None:
            self._relay = subprocess.Popen(
                tied([*self.switch.enter, sys.executable, str(HERE / "relay.py")]),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
        self._relay.stdin.write(json.dumps(order) + "\n")
        self._relay.stdin.flush()

    def close(self):
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate(timeout=PATIENCE_S)
            self._relay = None
        for box in [self.switch, *self._boxes.values()]:
            box.close()


class EtcdInside:
    """One member in a box of its own."""

    def __init__(self, lan, place):
        self._enter = lan["etcd"].enter
        self.endpoints = (f"http://{lan.address('etcd')}:2379",)
        command = [
            *(*self._enter, str(find_etcd()), f"--data-dir={place}", "--log-level=warn"),
            f"--advertise-client-urls={self.endpoints[0]}",
            *("--listen-client-urls=http://0.0.0.0:2379", "--unsafe-no-fsync"),
        ]
        with place.with_suffix(".log").open("wb") as log:
            self._process = subprocess.Popen(
                tied(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        until(lambda: self.ask("endpoint", "health").returncode == 0)

    def ask(self, *arguments):
        tool = str(find_etcd().with_name("etcdctl"))
        return subprocess.run(
            [*self._enter, tool, f"--endpoints={self.endpoints[0]}", *arguments],
            capture_output=True, text=True, timeout=20,
        )  # fmt: skip

    def close(self):
        self._process.kill()
        self._process.wait(PATIENCE_S)


class LanCluster(Cluster):
    """A cluster of which each agent, and etcd, is on a machine of its own, as far as networks go.

    ``settings``: more of an agent's.
    """

    def __init__(self, run, nodes, budget_mib, shm_bytes=0, racks=0, **settings):
        self._settings = settings
        self.lan = Lan(shm_bytes)
        try:
            super().__init__(run, nodes, budget_mib, racks=racks)
        except BaseException:
            self.lan.close()
            raise

    def start_services(self, *arguments, **options):
        super().start_services(*arguments, **options)
        with (self.run / "agent.toml").open("a") as f:
            f.writelines(f"{key} = {json.dumps(value)}\n" for key, value in self._settings.items())

    def _start_etcd(self, members, options):
        return EtcdInside(self.lan, self.run / "etcd")

    def _agent_command(self, name, rack):
        box = self.lan[name]
        box.run(f"mkdir -p {self.ram}")  # if its /dev/shm is its own
        command = super()._agent_command(name, rack)
        return [*box.enter, *command, "--listen", self.lan.address(name)]

    def etcdctl(self, *arguments):
        done = self.etcd.ask(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def close(self):
        with contextlib.ExitStack() as stack:
            stack.callback(self.lan.close)
            super().close()
