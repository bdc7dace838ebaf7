"""What the tests of the etcd backend share: a bounded run, another client, the current leader."""

import asyncio
import json
import socket
import subprocess

from p2pckpt.backends.etcd_server import EtcdOptions, find_etcd
from p2pckpt.records import Member

FAST = EtcdOptions(durable=False)
THREE = EtcdOptions(durable=False, heartbeat_ms=50, election_ms=500)


def run(main, within_s=30.0):
    """Run a coroutine function; it must leave no task behind."""

    async def bounded():
        async with asyncio.timeout(within_s):
            await main()
        for _ in range(100):
            left = asyncio.all_tasks() - {asyncio.current_task()}
            if not left:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"left behind: {left}")

    asyncio.run(bounded())


def etcdctl(endpoint, *arguments, tls=None):
    """Another client, of etcd's own."""
    command = [find_etcd().with_name("etcdctl"), f"--endpoints={endpoint}", *arguments]
    if tls:
        command += [
            f"--{name}={path}" for name, path in zip(("cacert", "cert", "key"), tls, strict=True)
        ]
    found = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert found.returncode == 0, found.stderr
    return found.stdout


def leader_of(servers):
    answers = json.loads(
        etcdctl(",".join(servers.endpoints), "endpoint", "status", "--write-out=json")
    )
    for member, endpoint in enumerate(servers.endpoints):
        for answer in answers:
            status = answer["Status"]
            if answer["Endpoint"] == endpoint and status["leader"] == status["header"]["member_id"]:
                return member
    raise AssertionError(answers)


def member(node="n1", store_id="s1", session="x"):
    return Member(
        node=node,
        host="h",
        store_id=store_id,
        session=session,
        peers_address="p",
        transport_address="t",
    )


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
