"""A wire in user space, for what this kernel's `tc` cannot do: delay, loss, a cut of one direction.

    A's tun device -> read -> [cut? lost?] -> due after the delay -> write -> B's tun device

Whole IP packets pass, so TCP of any kind (etcd's, gRPC's, UCX's) meets what it would meet on a bad
line, with addresses and ports as they are. Orders come as JSON, one a line, on stdin:

    {"open": ["n0-n1", "n1-n0"]}                         two devices, one end each; answered by "ok"
    {"rule": "n0-n1", "delay_s": 0.1, "loss": 0.02}      for what leaves from this device
    {"rule": "n0-n1", "cut": true}                       and so on; a rule replaces the former one

Contract: without a rule a packet is passed on at once. It ends with its stdin; the devices go then.
"""

import fcntl
import heapq
import json
import os
import random
import select
import struct
import sys
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000
LARGEST = 65536


def open_device(name):
    """A new tun device, in the namespace of this process; whoever likes moves it to another."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return fd


class Relay:
    def __init__(self):
        self.devices = {}
        self.other_end = {}
        self.rules = {}
        self.under_way = []
        self.count = 0
        self.chance = random.Random(7)

    def obey(self, order):
        if names := order.get("open"):
            a, b = (open_device(name) for name in names)
            self.other_end |= {a: b, b: a}
            self.devices |= dict(zip(names, (a, b), strict=True))
            print("ok", flush=True)
        else:
            self.rules[self.devices[order.pop("rule")]] = order

    def take(self, fd, now):
        """Read what has left a machine, some packets at a time."""
        rule = self.rules.get(fd, {})
        for _ in range(64):
            try:
                packet = os.read(fd, LARGEST)
            except BlockingIOError:
                return
            if rule.get("cut") or self.chance.random() < rule.get("loss", 0.0):
                continue
            self.count += 1
            due = now + rule.get("delay_s", 0.0)
            heapq.heappush(self.under_way, (due, self.count, self.other_end[fd], packet))

    def hand_over(self, now):
        while self.under_way and self.under_way[0][0] <= now:
            _, _, fd, packet = heapq.heappop(self.under_way)
            try:
                os.write(fd, packet)
            except OSError:
                pass  # a device that is down, or full: lost, as on any line

    def run(self):
        heard = b""
        while True:
            wait_s = None
            if self.under_way:
                wait_s = max(0.0, self.under_way[0][0] - time.monotonic())
            ready, _, _ = select.select([0, *self.other_end], [], [], wait_s)
            now = time.monotonic()
            for fd in ready:
                if fd != 0:
                    self.take(fd, now)
                    continue
                data = os.read(0, 65536)
                if not data:
                    return
                *lines, heard = (heard + data).split(b"\n")
                for line in lines:
                    self.obey(json.loads(line))
            self.hand_over(time.monotonic())


if __name__ == "__main__":
    sys.exit(Relay().run())
