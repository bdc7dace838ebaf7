"""The commands on steps that lie in the object store: real agents, a real SeaweedFS.

Step 2 is retired from RAM and is in the store only; step 4 is in both. Then all RAM is lost, an
object is damaged, the store goes away.
"""

import json

import pytest
import torch
from cli_rig import UID, Cluster, advice, command, document, until
from safetensors.torch import load_file

from p2pckpt.backends.seaweed import Seaweed


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    root = tmp_path_factory.mktemp("cli-s3")
    with Seaweed.start(root / "weed") as store:
        options = ("--s3-url", f"s3://{store.bucket}/runs", "--s3-endpoint", store.endpoint)
        options += ("--offload-every", "2", "--s3-timeout-s", "4")
        cluster = Cluster(root, 3, options, store.environment)
        try:
            cluster.train("gpt", 4, ("n0", "n1"), "copies:1")
            until(lambda: tiers(cluster) == {2: ["s3"], 4: ["ram", "s3"]})
            yield cluster, store
        finally:
            cluster.close()


def tiers(cluster, node="n0"):
    steps = document("ls", agent=cluster.socket(node))["jobs"][f"{UID}.gpt"]
    return {s["step"]: s["tiers"] for s in steps}


def weights(folder, rank):
    tensors = load_file(folder / f"rank-{rank:05d}.safetensors").values()
    (found,) = (t for t in tensors if t.numel() == 300_000)
    return found


def test_a_step_that_only_the_store_has_is_looked_at_proven_and_taken_out(rig, tmp_path):
    cluster, _ = rig
    socket = cluster.socket("n2")  # it never held any of it
    text, _ = command("ls", agent=socket)
    assert [line.split()[1:3] for line in text.splitlines()[1:]] == [["2", "S3"], ["4", "RAM,"]]
    d = document("inspect", 2, agent=socket)
    assert (d["step"], d["tiers"], d["world_size"]) == (2, ["s3"], 2)
    metas = [r["meta"] for share in d["shares"] for r in share["ranks"]]
    assert metas == [{"rank": 0, "lr": 0.1}, {"rank": 1, "lr": 0.1}]
    assert "MISSING" not in command("inspect", 2, agent=socket)[0]
    d = document("verify", 2, agent=socket)
    assert [(f["node"], f["state"]) for f in d["files"]] == [("s3", "right")] * 2
    d = document("export", 2, tmp_path / "out", agent=socket)
    assert [r["source"] for r in d["ranks"]] == ["s3"] * 2
    for rank in range(2):
        assert torch.equal(weights(tmp_path / "out", rank), torch.full((300_000,), rank + 2.0))
    until(lambda: not [k for k in cluster.keys("gpt") if k.startswith("readers/")])
    d = document("verify", 4, agent=socket)
    assert {(f["node"], f["state"]) for f in d["files"]} >= {("s3", "right"), ("n0", "right")}


def test_after_all_ram_is_lost_the_step_is_had_from_the_store(rig, tmp_path):
    cluster, _ = rig
    for name in cluster.names:
        cluster.stop(name, wipe=True)
    for name in cluster.names:
        cluster.start(name)
    for name in cluster.names:
        cluster.ready(name)
    socket = cluster.socket("n1")
    d = document("verify", "latest", code=4, agent=socket)
    assert d["restorable"]
    assert {f["state"] for f in d["files"] if f["node"] == "s3"} == {"right"}
    assert {f["state"] for f in d["files"] if f["node"] != "s3"} == {"missing"}
    document("export", "latest", tmp_path / "out", agent=socket)
    assert torch.equal(weights(tmp_path / "out", 1), torch.full((300_000,), 5.0))


def test_damaged_objects_are_found_and_nothing_of_them_is_exported(rig, tmp_path):
    """B107, of the store."""
    cluster, store = rig
    socket = cluster.socket("n1")
    heal = damage(store, "/rank-1.safetensors", 200_000)
    d = document("verify", 4, code=1, agent=socket)
    (wrong,) = [f for f in d["files"] if f["state"] == "wrong"]
    assert (wrong["part"], wrong["node"], wrong["wrong"][0]["chunks"]) == (
        1,
        "s3",
        [200_000 // 65536],
    )
    assert not d["restorable"]
    assert "rank 1 of n1" in d["lost"][0]
    d = document("export", 4, tmp_path / "out", code=1, agent=socket)
    assert d["error"]["kind"] == "RestoreFailed"
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))
    heal()
    document("verify", 4, code=4, agent=socket)


def damage(store, ending, at):
    """One bit of the newest object with this ending, by a client that is not ours."""
    import boto3

    keys = {"aws_access_key_id": store.access_key, "aws_secret_access_key": store.secret_key}
    s3 = boto3.client("s3", endpoint_url=store.endpoint, region_name="us-east-1", **keys)
    listed = s3.list_objects_v2(Bucket=store.bucket)["Contents"]
    name = sorted(o["Key"] for o in listed if o["Key"].endswith(ending))[-1]
    right = s3.get_object(Bucket=store.bucket, Key=name)["Body"].read()
    wrong = bytearray(right)
    wrong[at] ^= 1
    s3.put_object(Bucket=store.bucket, Key=name, Body=bytes(wrong))
    return lambda: s3.put_object(Bucket=store.bucket, Key=name, Body=right)


def test_a_store_that_is_away_is_said_to_be_away_and_not_wrong(rig, tmp_path):
    cluster, store = rig
    cluster.stop("n0")  # a fresh agent has no manifest of it in its cache
    cluster.start("n0")
    cluster.ready("n0")
    store.freeze()
    try:
        d = document("inspect", 2, code=1, agent=cluster.socket("n0"))
        assert d["error"]["kind"] == "ObjectStoreUnavailable"
        assert "object store" in d["error"]["next"]
        out, err = command("export", 2, tmp_path / "out", code=1, agent=cluster.socket("n0"))
        assert (out, "object store" in advice(err)) == ("", True)
    finally:
        store.thaw()
    json.dumps(document("inspect", 2, agent=cluster.socket("n0")))
