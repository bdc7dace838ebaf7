"""The commands as people run them: real etcd, real agents, real ranks, the process' exit code.

One cluster for the module. Steps are looked at, proven, damaged, taken out; a job is cleaned up.
"""

import hashlib
import json
import select
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors
import torch
from cli_rig import PATIENCE_S, ROOT, UID, Cluster, advice, command, document, until
from safetensors.torch import load_file

from p2pckpt import wire as w


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("cli"), 4)
    try:
        cluster.train("demo", 3, ("n0", "n1", "n2"), "rs:2,1")
        yield cluster
    finally:
        cluster.close()


# -- inspect ---------------------------------------------------------------------------------------


def test_inspect_says_all_of_a_step(cluster):
    d = document("inspect", "latest", "--job", "demo", agent=cluster.socket("n0"))
    assert (d["job"], d["step"], d["layout"]) == (f"{UID}.demo", 3, "rs:2,1")
    assert d["world_size"] == 3
    assert d["redundancy"]["survivable_node_losses"] == 2
    assert [share["node"] for share in d["shares"]] == ["n0", "n1", "n2"]
    for rank, share in enumerate(d["shares"]):
        (entry,) = share["ranks"]
        assert entry["rank"] == rank
        assert entry["own_copy"] == [share["node"]]
        assert entry["meta"] == {"rank": rank, "lr": 0.1}
        tensors = {t["name"]: t for t in entry["tensors"]}
        by_bytes = {t["bytes"]: (t["dtype"], t["shape"]) for t in tensors.values()}
        assert by_bytes[1_200_000] == ("F32", [300_000])
        assert by_bytes[30] == ("BF16", [3, 5])
        assert by_bytes[56] == ("complex64", [7])
        holders = [shard["held_by"] for shard in share["shards"]]
        assert all(len(nodes) == 1 and share["node"] not in nodes for nodes in holders)
        assert len({nodes[0] for nodes in holders}) == 3
        assert sum(r["bytes"] for r in share["ranks"]) == share["bytes"]


def test_inspect_for_people_and_from_a_node_without_ranks(cluster):
    text, _ = command("inspect", 3, agent=cluster.socket("n3"))
    for word in ("share of n0", "rank 2", "complex64 [7]", "rs:2,1", "the loss of 2 more nodes"):
        assert word in text, text


def test_a_step_or_job_that_is_not_there(cluster):
    _, err = command("inspect", 77, "--job", "demo", code=3, agent=cluster.socket("n0"))
    assert "committed: [3]" in err
    assert "job ls" in advice(err)
    _, err = command("verify", 3, "--job", "none", code=3, agent=cluster.socket("n0"))
    assert f"there are: {UID}.demo" in err
    _, err = command("inspect", "x", code=2, agent=cluster.socket("n0"))
    assert "latest" in err
    _, err = command("inspect", 3, code=1, agent="/nowhere/agent.sock")
    assert "p2pckpt agent" in advice(err)


# -- verify ----------------------------------------------------------------------------------------


def test_verify_right_and_wrong(cluster):
    """B107, of RAM."""
    socket = cluster.socket("n1")
    d = document("verify", "latest", "--job", "demo", agent=socket)
    assert d["restorable"]
    assert {f["state"] for f in d["files"]} == {"right"}
    assert len(d["files"]) == 3 * (1 + 3)
    held = {f["node"] for f in d["files"]}
    assert held == {"n0", "n1", "n2", "n3"}

    slot = next(f for f in d["files"] if f["kind"] == "slot" and f["node"] == "n1")
    heal = flip_slot(cluster, "n1", 200_000)
    d = document("verify", 3, "--job", "demo", code=4, agent=socket)
    (wrong,) = [f for f in d["files"] if f["state"] != "right"]
    assert (wrong["node"], wrong["kind"], wrong["part"]) == ("n1", "slot", slot["part"])
    assert wrong["wrong"] == [{"rank": 1, "shard": 0, "count": 1, "chunks": [200_000 // 65536]}]
    assert d["restorable"]
    text, err = command("verify", 3, "--job", "demo", code=4, agent=socket)
    assert "rank 1 shard 0: 1 chunk, 3" in text
    assert "repair" in advice(err)
    heal()
    command("verify", 3, "--job", "demo", agent=socket)


def flip_slot(cluster, node, at):
    """The slot of the committed step is the one whose record is WHOLE and named by a manifest."""
    for path in sorted((cluster.ram / node).glob("slot-*.rec")):
        record = w.unpack_any(path.read_bytes())
        if record.state == "whole" and record.manifest_digest and record.attempt.step == 3:
            target = path.with_suffix(".ram")
            break
    else:
        raise AssertionError("no slot")

    def change():
        with target.open("r+b") as f:
            f.seek(at)
            (byte,) = f.read(1)
            f.seek(at)
            f.write(bytes([byte ^ 1]))

    change()
    return change


def ram_used(cluster, node):
    return document("status", agent=cluster.socket(node))["ram"]["used_bytes"]


# -- export ----------------------------------------------------------------------------------------


def test_export_opens_with_plain_safetensors(cluster, tmp_path):
    target = tmp_path / "out"
    d = document("export", "latest", target, "--job", "demo", agent=cluster.socket("n0"))
    names = sorted(p.name for p in target.iterdir())
    assert names == ["checkpoint.json", *(f"rank-{i:05d}.safetensors" for i in range(3))]
    whole = json.loads((target / "checkpoint.json").read_text())
    assert (whole["format"], whole["step"], whole["world_size"]) == ("p2pckpt-export/1", 3, 3)
    assert [r["source"] for r in whole["ranks"]] == ["local", "peers", "peers"]
    assert d["bytes"] == sum(p.stat().st_size for p in target.glob("rank-*"))
    for rank in range(3):
        with safetensors.safe_open(target / f"rank-{rank:05d}.safetensors", "pt") as f:
            shapes = {tuple(f.get_slice(name).get_shape()) for name in f.keys()}  # noqa: SIM118
        assert (300_000,) in shapes
        tensors = load_file(target / f"rank-{rank:05d}.safetensors").values()
        (weights,) = (t for t in tensors if t.numel() == 300_000)
        assert torch.equal(weights, torch.full((300_000,), rank + 3.0))
        assert whole["ranks"][rank]["meta"] == {"rank": rank, "lr": 0.1}
    assert not list(tmp_path.glob(".*"))

    _, err = command("export", 3, target, code=2, agent=cluster.socket("n0"))
    assert "empty directory" in err


def test_export_decodes_what_is_damaged_and_gives_back_what_it_took(cluster, tmp_path):
    heal = flip_slot(cluster, "n0", 100_000)
    other = flip_slot(cluster, "n2", 100_000)
    target = tmp_path / "out"
    target.mkdir()
    command("export", 3, tmp_path / "first", "--job", "demo", agent=cluster.socket("n0"))
    used = ram_used(cluster, "n0")
    command("export", 3, target, "--job", "demo", agent=cluster.socket("n0"))
    assert ram_used(cluster, "n0") == used
    whole = json.loads((target / "checkpoint.json").read_text())
    assert [r["source"] for r in whole["ranks"]] == ["peers"] * 3
    (weights,) = (
        t for t in load_file(target / "rank-00000.safetensors").values() if t.numel() == 300_000
    )
    assert torch.equal(weights, torch.full((300_000,), 3.0))
    heal()
    other()
    command("verify", 3, "--job", "demo", agent=cluster.socket("n0"))
    until(lambda: not [k for k in cluster.keys("demo") if k.startswith("readers/")])


VISITOR = """
import sys
from p2pckpt import wire as w
from p2pckpt.backends.agent_link import AgentLink
link = AgentLink([sys.argv[1]])
told = link.call(w.StepQuery(sys.argv[2]), 10)
file = link.call(w.ExportCall(told.commit.attempt, 1), 20)
assert (file.source, len(link.map(file.file))) == ("peers", file.length)
print(file.file, flush=True)
sys.stdin.read()
"""


def test_a_visitor_keeps_the_step_and_killed_leaves_nothing(cluster):
    asking = (sys.executable, "-c", VISITOR, cluster.socket("n3"), f"{UID}.demo")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(asking, cwd=ROOT, **pipes) as visitor:
        assert select.select([visitor.stdout], [], [], PATIENCE_S)[0]
        file = visitor.stdout.readline().decode().strip()
        assert file.startswith("stage-")
        assert [k for k in cluster.keys("demo") if k.startswith("readers/")]
        _, err = command("clean", "--job", "demo", "--yes", code=1, agent=cluster.socket("n0"))
        assert "is reading step 3" in err
        visitor.kill()
        visitor.wait(PATIENCE_S)
    until(lambda: not [k for k in cluster.keys("demo") if k.startswith("readers/")])


# -- jobs ------------------------------------------------------------------------------------------


def test_ls_and_status_of_one_job_or_of_none(cluster):
    d = document("ls", "--job", "demo", agent=cluster.socket("n3"))
    assert d["jobs"] == {f"{UID}.demo": [{"step": 3, "tiers": ["ram"], "layout": "rs:2,1"}]}
    text, _ = command("ls", agent=cluster.socket("n3"))
    assert [line.split()[:3] for line in text.splitlines()][1] == [f"{UID}.demo", "3", "RAM"]
    d = document("status", "--job", "demo", agent=cluster.socket("n0"))
    assert list(d["jobs"]) == [f"{UID}.demo"]
    assert d["config"]["node"] == "n0"
    told = d["telemetry"]
    lossy = told["gauges"]["survivable_losses"][f"{UID}.demo"]
    assert lossy == d["jobs"][f"{UID}.demo"]["redundancy"]["survivable_node_losses"]
    assert told["counters"]["stage_runs_total"]["save"] >= 1
    assert told["counters"]["stage_bytes_total"]["save"] > 1_000_000 / 3
    for name in ("status", "ls"):
        d = document(name, "--job", "none", code=3, agent=cluster.socket("n0"))
        assert f"{UID}.none is not known" in d["error"]["message"]
        document(name, "--job", "a b", code=2, agent=cluster.socket("n0"))


def test_job_ls(cluster):
    d = document("job", "ls", agent=cluster.socket("n0"))
    mine = d["jobs"][f"{UID}.demo"]
    assert (mine["world_size"], mine["layout"], mine["latest"]) == (3, "rs:2,1", 3)
    assert mine["held_bytes"] > 1_200_000
    text, _ = command("job", "ls", agent=cluster.socket("n0"))
    assert text.startswith("JOB")


def test_clean_refuses_while_trainers_live(cluster):
    cluster.tell("busy", 1, ("n0", "n1"), hold=True)
    socket = cluster.socket("n2")
    _, err = command("clean", "--job", "busy", "--yes", code=1, agent=socket)
    assert "live on n" in err
    for rank in (0, 1):
        cluster.ranks[rank].stdin.write(b"go on\n")
        cluster.ranks[rank].stdin.flush()
    for rank in (0, 1):
        cluster.hear(rank)
    _, err = command("clean", "--job", "busy", code=2, agent=socket)
    assert "--yes" in err
    before = cluster.keys("busy")
    d = document("clean", "--job", "busy", "--dry-run", agent=socket)
    assert d["steps"] == [1]
    assert cluster.keys("busy") == before
    command("clean", "--job", "busy", "--yes", agent=socket)


def files_of(cluster, node, job):
    out = []
    for path in (cluster.ram / node).glob("*.rec"):
        if w.unpack_any(path.read_bytes()).attempt.job == f"{UID}.{job}":
            out.append(path)
    return out


def beside(cluster, node, job):
    """What an agent remembers of a job's ledger."""
    digest = hashlib.sha256(f"{UID}.{job}".encode()).hexdigest()[:16]
    return list((cluster.ram / node).glob(f"*-{digest}*.doc"))


def test_clean_leaves_nothing_and_the_name_can_be_used_again(cluster):
    nodes = ("n0", "n1", "n2")
    cluster.train("gone", 2, nodes)
    assert all(files_of(cluster, name, "gone") for name in nodes)
    assert all(beside(cluster, name, "gone") for name in nodes)
    d = document("clean", "--job", "gone", "--yes", agent=cluster.socket("n3"))
    assert (d["steps"], d["left"], d["away"]) == ([2], [], [])
    (tomb,) = cluster.keys("gone")
    assert tomb.startswith("state/cleaned/")
    for name in cluster.names:
        until(lambda name=name: not files_of(cluster, name, "gone"))
        until(lambda name=name: not beside(cluster, name, "gone"))
    jobs = document("job", "ls", agent=cluster.socket("n0"))["jobs"]
    assert f"{UID}.gone" not in jobs
    status = document("status", agent=cluster.socket("n0"))
    assert f"{UID}.gone" not in status["jobs"]
    _, err = command("clean", "--job", "gone", "--yes", code=3, agent=cluster.socket("n0"))
    assert "nothing is known" in err

    cluster.train("gone", 1, nodes)
    d = document("verify", "latest", "--job", "gone", agent=cluster.socket("n2"))
    assert (d["step"], {f["state"] for f in d["files"]}) == (1, {"right"})
    demo = document("verify", "latest", "--job", "demo", agent=cluster.socket("n2"))
    assert {f["state"] for f in demo["files"]} == {"right"}


def test_an_agent_that_was_away_frees_its_bytes_when_it_returns(cluster):
    cluster.train("late", 1, ("n0", "n1", "n2"))
    assert files_of(cluster, "n1", "late")
    cluster.stop("n1")
    d = document("clean", "--job", "late", "--yes", code=4, agent=cluster.socket("n0"))
    assert d["away"] == ["n1"]
    assert files_of(cluster, "n1", "late")
    cluster.start("n1")
    cluster.ready("n1")
    until(lambda: not files_of(cluster, "n1", "late"))
    cluster.train("late", 1, ("n1", "n2"))


# -- what is missing (last: it takes nodes away) ---------------------------------------------------


def test_verify_tells_degraded_from_lost(cluster):
    cluster.train("thin", 1, ("n0", "n1"), "rs:2,0")
    d = document("verify", "latest", "--job", "thin", agent=cluster.socket("n0"))
    held = {f["node"] for f in d["files"] if f["share"] == "n1" and f["kind"] == "shard"}
    assert "n1" not in held
    cluster.stop("n3", wipe=True)
    cluster.stop("n2", wipe=True)
    heal = [flip_all(cluster, "n1", "thin")]
    d = document("verify", "latest", "--job", "thin", code=1, agent=cluster.socket("n0"))
    assert not d["restorable"]
    assert any("rank 1 of n1" in why for why in d["lost"])
    _, err = command("export", "latest", "/tmp/never", "--job", "thin", code=1,
                     agent=cluster.socket("n0"))  # fmt: skip
    assert "rank" in err
    assert not Path("/tmp/never").exists()
    heal[0]()
    d = document("verify", "latest", "--job", "thin", code=4, agent=cluster.socket("n0"))
    assert d["restorable"]


def flip_all(cluster, node, job):
    """One byte in every chunk of every slot of a job."""
    paths = [p.with_suffix(".ram") for p in files_of(cluster, node, job) if "slot" in p.name]
    assert paths

    def change():
        for path in paths:
            with path.open("r+b") as f:
                for at in range(100, path.stat().st_size, 65536):
                    f.seek(at)
                    (byte,) = f.read(1)
                    f.seek(at)
                    f.write(bytes([byte ^ 1]))

    change()
    return change


# -- doctor ----------------------------------------------------------------------------------------


def test_doctor_on_a_node_that_works(cluster):
    d = document("doctor", "--layout", "copies:1", code=4, agent=cluster.socket("n0"))
    found = {c["name"]: c for c in d["checks"]}
    assert found["settings"]["found"] == "those of the agent of n0, which runs"
    assert cluster.etcd.endpoints[0] in found["etcd"]["found"]
    assert str(cluster.ram / "n0") in found["directory"]["found"]
    assert "256.0 MiB" in found["memory"]["found"]
    assert found["coding"]["verdict"] == found["checksum"]["verdict"] == "ok"
    assert "libisal" in found["coding"]["found"]
    assert found["ucx"]["verdict"] == "ok"
    assert "tcp" in found["ucx"]["found"]
    assert d["nic"].startswith("measured: ")
    assert found["nic"]["found"].startswith(
        f"{d['nic_bytes_s'] / 1e9:.2f} GB/s each way, {d['nic']}"
    )
    assert f'"nic_bytes_s": {d["nic_bytes_s"]}' in cluster.log("n0").read_text()
    assert found["agent"]["found"].startswith("n0 answers")
    assert found["members"]["verdict"] == "ok"
    assert "linearizable read takes" in found["etcd"]["found"]
    assert all(c["do"] for c in d["checks"] if c["verdict"] != "ok")


def test_a_flag_of_the_doctors_own_overrules_the_agents_settings(cluster):
    where = (
        "--endpoints",
        "127.0.0.1:1",
        "--ledger-timeout-s",
        "0.5",
        "--nic-bytes-s",
        "1000000000",
    )
    d = document("doctor", *where, code=1, agent=cluster.socket("n0"))
    found = {c["name"]: c for c in d["checks"]}
    assert "but --endpoints, --ledger-timeout-s, --nic-bytes-s" in found["settings"]["found"]
    assert "127.0.0.1:1" in found["etcd"]["found"]
    assert (d["nic_bytes_s"], d["nic"]) == (10**9, "as configured")
    assert found["agent"]["verdict"] == "ok"


def test_doctor_on_a_node_where_nothing_is(tmp_path):
    where = ("--endpoints", "127.0.0.1:1", "--ledger-timeout-s", "0.5")
    out, err = command("doctor", *where, "--directory", "/nowhere/deep/ram", code=1,
                       agent=str(tmp_path / "no.sock"))  # fmt: skip
    for line in ("fail  etcd", "fail  directory", "warn  agent", "ok    nic"):
        assert line in out, out
    assert "GB/s from the mover to itself" in out
    assert advice(err).startswith("first: directory: make it")
