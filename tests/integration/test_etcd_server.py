"""The embedded etcd: its life, its releases, and the certificates that guard a real one.

Certificates are made by the openssl program; users and roles by etcdctl. Nothing is mocked.
"""

import asyncio
import os
import subprocess
import sys
import time

import pytest
from etcd_rig import etcdctl, member, run

from p2pckpt.backends.etcd import Etcd, version_flaw
from p2pckpt.backends.etcd_server import EtcdOptions, EtcdServers
from p2pckpt.errors import ConfigError, LedgerUnavailable, UsageError
from p2pckpt.ports import Put, Txn, absent


def test_a_server_keeps_its_data_and_its_ports(tmp_path):
    async def put(servers):
        async with Etcd(servers.endpoints) as etcd:
            assert await etcd.ledger.transact(Txn((absent("k"),), (Put("k", b"1"),)))

    async def get(servers):
        async with Etcd(servers.endpoints) as etcd:
            return (await etcd.ledger.get("k")).value

    with EtcdServers.start(tmp_path) as servers:
        asyncio.run(put(servers))
        endpoints, pid = servers.endpoints, servers.pid(0)
    assert not os.path.exists(f"/proc/{pid}")
    with EtcdServers.start(tmp_path) as servers:
        assert servers.endpoints == endpoints
        assert asyncio.run(get(servers)) == b"1"
        with pytest.raises(LedgerUnavailable, match=r"member 0.*port \d+ is taken"):
            EtcdServers.start(_same_ports(tmp_path))
    with pytest.raises(LedgerUnavailable, match=r"(?s)member 0 ended.*flag provided"):
        EtcdServers.start(tmp_path / "bad", 1, EtcdOptions(flags=("--no-such-flag",)))
    with pytest.raises(UsageError, match="of 1 members, asked for 3"):
        EtcdServers.start(tmp_path, 3)
    with pytest.raises(UsageError, match="1 or 3"):
        EtcdServers.start(tmp_path / "two", 2)


def _same_ports(data_dir):
    other = data_dir / "other"
    other.mkdir()
    (other / "ports.json").write_text((data_dir / "ports.json").read_text())
    return other


def test_servers_die_with_their_parent(tmp_path):
    program = (
        "import os, sys, pathlib\n"
        "from p2pckpt.backends.etcd_server import EtcdServers\n"
        "servers = EtcdServers.start(pathlib.Path(sys.argv[1]))\n"
        "print(servers.pid(0), flush=True)\n"
        "os._exit(0)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, timeout=30
    )
    pid = int(found.stdout)
    end = time.monotonic() + 5.0
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
        with open(f"/proc/{pid}/stat") as stat:
            if stat.read().rsplit(")", 1)[1].split()[0] == "Z":
                return  # dead, and nobody there to reap it
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{pid}")


def test_releases_that_lose_data_are_refused(tmp_path):
    for good in ("3.4.22", "3.4.30", "3.5.6", "3.5.16", "3.6.0", "3.6.0-rc.1", "4.0.0"):
        assert version_flaw(good) == ""
    for bad in ("3.5.0", "3.5.1", "3.5.5", "3.4.21", "3.3.27", "2.3.8", "", "x"):
        assert version_flaw(bad)

    with EtcdServers.start(tmp_path) as servers:

        async def main():
            async with Etcd(servers.endpoints) as etcd:
                assert await etcd.check_version(trial=True) == {servers.endpoints[0]: "3.5.1"}
                with pytest.raises(UsageError, match=r"3\.5\.1 is refused.*3\.5\.6"):
                    await etcd.check_version()

        run(main)


# -- certificates ---------------------------------------------------------------------------------


def openssl(*arguments):
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=20)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """(ca, cert, key) by CN, all of one CA, and "stranger" of another."""
    place = tmp_path_factory.mktemp("certificates")
    subject = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    for ca in ("ca", "other-ca"):
        openssl(
            *("req", "-x509", *subject, "-days", 2, "-subj", f"/CN={ca}"),
            *("-keyout", place / f"{ca}.key", "-out", place / f"{ca}.pem"),
        )
    (place / "ext").write_text("subjectAltName=IP:127.0.0.1\n")
    made = {}
    for name in ("root", "agent", "stranger"):
        ca = "other-ca" if name == "stranger" else "ca"
        cert, key, request = (place / f"{name}.{end}" for end in ("pem", "key", "csr"))
        openssl("req", "-new", *subject, "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        openssl(
            *("x509", "-req", "-in", request, "-days", 2, "-extfile", place / "ext"),
            *("-CA", place / f"{ca}.pem", "-CAkey", place / f"{ca}.key"),
            *("-CAcreateserial", "-out", cert),
        )
        made[name] = (place / "ca.pem", cert, key)
    return made


def test_certificates_let_in_and_keep_out(tmp_path, certificates):
    """B084: who a client is says its certificate, so there is no token that could expire."""
    root, agent, stranger = (certificates[name] for name in ("root", "agent", "stranger"))
    options = EtcdOptions(durable=False, tls=root)
    with EtcdServers.start(tmp_path, 1, options) as servers:
        endpoint = servers.endpoints[0]

        async def refused(tls, match):
            async with Etcd([endpoint], tls, 0.3, 0.4) as etcd:
                with pytest.raises(LedgerUnavailable, match=match):
                    await etcd.ledger.get("p2pckpt/a")

        async def main():
            assert endpoint.startswith("https://")
            await refused(stranger, endpoint)
            wrong_ca = (certificates["stranger"][1], *agent[1:])
            await refused(wrong_ca, "(?i)certificate|handshake|ssl")
            for user in ("root", "agent"):
                etcdctl(endpoint, "user", "add", user, "--no-password", tls=root)
            etcdctl(endpoint, "user", "grant-role", "root", "root", tls=root)
            etcdctl(endpoint, "role", "add", "p2pckpt", tls=root)
            grant = ("role", "grant-permission", "p2pckpt", "readwrite", "--prefix", "p2pckpt/")
            etcdctl(endpoint, *grant, tls=root)
            etcdctl(endpoint, "user", "grant-role", "agent", "p2pckpt", tls=root)
            etcdctl(endpoint, "auth", "enable", tls=root)
            async with Etcd([endpoint], agent) as etcd:
                revision = await etcd.ledger.transact(Txn((), (Put("p2pckpt/a", b"1"),)))
                watch = etcd.ledger.watch("p2pckpt/", revision)
                assert len(await anext(watch)) == 1
                await watch.aclose()
                session = await etcd.membership.open(member(), 5.0)
                assert await etcd.membership.keep(session)
                await etcd.membership.close(session)
                with pytest.raises(ConfigError, match=r"permission denied.*CN"):
                    await etcd.ledger.transact(Txn((), (Put("elsewhere", b"1"),)))
                with pytest.raises(ConfigError, match="permission denied"):
                    await anext(etcd.ledger.watch("elsewhere", 1))

        run(main)
    with pytest.raises(ConfigError, match="https://"):
        Etcd(["http://127.0.0.1:1"], agent)
    with pytest.raises(ConfigError, match="nowhere"):
        Etcd(["127.0.0.1:1"], (tmp_path / "nowhere", *agent[1:]))
