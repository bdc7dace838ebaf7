"""The pure parts of the commands: what a step is worth, what a header says, verdicts on a node."""

import json
import re
import resource
from itertools import combinations
from math import ceil
from pathlib import Path

import pytest
import torch

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.cli import doctor as d
from p2pckpt.cli import main as m
from p2pckpt.cli import memory
from p2pckpt.cli.memory import Mount
from p2pckpt.cli.output import EXIT_DONE, finish, job_key, json_target, plural
from p2pckpt.cli.step import Checked, Step, files_of, lost_ranks, tensors_of
from p2pckpt.config import Config
from p2pckpt.errors import FormatError, NoRoom, UsageError
from p2pckpt.save import snapshot
from p2pckpt.save.encode import header_of

CHUNK, LAYOUT = 512, r.Layout(2, 1)
A = r.Attempt("1" * 32, "1000.job", 1, 2, 3)
SLOT, SHARD = r.FileKind.SLOT, r.FileKind.SHARD


def test_the_key_of_a_job():
    assert job_key(None) == ""
    assert job_key("7.run") == "7.run"
    assert job_key("run").endswith(".run")
    for wrong in ("x.run", "7.", ".run", "a b", ""):
        with pytest.raises(UsageError):
            job_key(wrong)


# -- a step ----------------------------------------------------------------------------------------


def step_of(lengths=(1500, 600), owners=("n0",)):
    """One share with two ranks of 3 and 2 chunks; shard i on node h<i>, slots on n0."""
    entries = []
    for rank, length in enumerate(lengths):
        size = ceil(ceil(length / 2) / CHUNK) * CHUNK
        stored = [max(0, min(size, length - i * size)) for i in range(2)]
        tables = [bytes(4 * -(-n // CHUNK)) for n in (*stored, size)]
        entries.append(r.RankSnapshot(rank, length, size, tuple(tables)))
    manifest = r.Manifest(A, "n0", "s", LAYOUT, CHUNK, "crc32c/1", tuple(entries))
    share = r.SealedShare("n0", "s", (0, 1), "digest", sum(lengths), ("s0", "s1", "s2"))
    commit = r.Commit(A, "L", LAYOUT, 2, 1)
    held = {n: [(SLOT, 0), (SLOT, 1)] for n in owners}
    held |= {f"h{i}": [(SHARD, i)] for i in range(3)}
    replies = {
        n: w.HeldReply(n, tuple(w.HeldFile(A, k, "n0", p, "digest") for k, p in files), 1)
        for n, files in held.items()
    }
    groups = (r.GroupRecord(A, 0, (share,)),)
    return Step(w.StepReply("1000.job", commit, groups, replies, (), "{}"), {"n0": manifest})


def found(step, wrong=(), bad=()):
    """All files right, but those of `wrong` (kind, part), and the pieces of `bad` in theirs."""
    out = []
    for f in files_of(step):
        place = (f.share, f.kind, f.part, f.node, f.length)
        pieces = tuple(w.BadPiece(rank, i, 1, (0,)) for k, p, rank, i in bad if f.kind == k
                       and f.part == p)  # fmt: skip
        if (f.kind, f.part) in wrong or not f.node:
            out.append(f)
        else:
            out.append(Checked(*place, "wrong" if pieces else "right", pieces))
    return out


def test_files_of_a_step_and_their_lengths():
    files = {(f.kind, f.part, f.node): f.length for f in files_of(step_of())}
    assert files == {
        (SLOT, 0, "n0"): 1500,
        (SLOT, 1, "n0"): 600,
        (SHARD, 0, "h0"): 1024 + 512,
        (SHARD, 1, "h1"): 476 + 88,
        (SHARD, 2, "h2"): 1024 + 512,
    }
    gone = {(f.kind, f.part): f.node for f in files_of(step_of(owners=()))}
    assert gone[SLOT, 0] == gone[SLOT, 1] == ""


def test_a_step_is_lost_exactly_when_a_rank_has_less_than_k_pieces():
    step = step_of()
    parts = [(SLOT, 0), (SLOT, 1), (SHARD, 0), (SHARD, 1), (SHARD, 2)]
    for n in range(len(parts) + 1):
        for wrong in combinations(parts, n):
            shards = sum(kind is SHARD for kind, _ in wrong)
            lost = [rank for rank in (0, 1) if (SLOT, rank) in wrong and shards > 1]
            says = lost_ranks(step, found(step, wrong))
            assert len(says) == len(lost), (wrong, says)
            assert all(f"rank {rank} of n0" in why for rank, why in zip(lost, says, strict=True))


def test_wrong_pieces_count_one_by_one():
    step = step_of()
    wrong = [(SHARD, 1), (SHARD, 2)]
    assert lost_ranks(step, found(step, wrong, [(SLOT, 0, 0, 0)])) == [], "shard 0 has that piece"
    says = lost_ranks(step, found(step, wrong, [(SLOT, 0, 0, 1)]))
    assert says == ["rank 0 of n0: 1 of 3 pieces are right, it needs 2"]
    says = lost_ranks(step, found(step, [(SLOT, 1), (SHARD, 2)], [(SHARD, 0, 1, 0)]))
    assert len(says) == 1
    assert "rank 1" in says[0]


def test_an_empty_piece_is_always_there_and_a_lost_manifest_loses_all():
    short = step_of(lengths=(100, 100))  # all in shard 0; shard 1 is empty
    assert lost_ranks(short, found(short, [(SLOT, 0), (SLOT, 1), (SHARD, 1), (SHARD, 2)])) == []
    blind = Step(short.told, {"n0": None})
    assert "no right copy of the manifest" in lost_ranks(blind, found(blind))[0]


def test_tensors_of_a_real_snapshot():
    state = {"w": torch.zeros(3, 5), "c": torch.zeros(7, dtype=torch.complex64), "n": {"x": 1}}
    plan = snapshot.plan(state)
    image = bytearray(plan.capacity_bytes)
    length = snapshot.write(plan, memoryview(image))
    listed = {t["dtype"]: t for t in tensors_of(header_of(memoryview(image)[:length]))}
    assert listed["F32"]["shape"] == [3, 5]
    assert listed["F32"]["bytes"] == 60
    assert listed["complex64"]["shape"] == [7]
    assert len(listed) == 2
    for wrong in (b"", b"{}", b"[1]", b'{"__metadata__":{"p2pckpt":"[]"}}'):
        with pytest.raises(FormatError):
            tensors_of(wrong)


# -- doctor ----------------------------------------------------------------------------------------

WHEEL = "/x/site-packages/libucx/lib/libucp.so"


def facts(transports, library=WHEEL):
    return {"ucx": "1.21.0", "transports": transports, "library": library}


def test_locked_memory_names_the_limit():
    check = memory.check_locked(8 << 20, 1 << 30, ["mlx5_0"])
    assert (check.verdict, "8192 KiB" in check.found) == ("warn", True)
    assert "memlock" in check.do
    assert memory.check_locked(8 << 20, 1 << 30, []).verdict == "ok", "TCP needs none"
    assert memory.check_locked(1 << 30, 1 << 30, ["mlx5_0"]).verdict == "ok"
    assert memory.check_locked(resource.RLIM_INFINITY, 1 << 40, ["mlx5_0"]).verdict == "ok"


@pytest.mark.parametrize(
    ("option", "kernel", "advice"),
    [
        ("rw", "always [never] deny force", "mount -o remount,huge=within_size /ram"),
        ("huge=advise", "always [never] deny force", "mount -o remount,huge=within_size /ram"),
        ("huge=within_size", "always [never] deny force", ""),
        ("huge=always", "[always] never deny force", ""),
        ("rw", "always never deny [force]", ""),
        ("huge=always", "always never [deny] force", "echo never >"),
        ("huge=always", "", "no huge pages"),
    ],
)
def test_huge_pages_of_the_mount_and_of_the_kernel(option, kernel, advice):
    mounts = {"/": Mount("ext4"), "/ram": Mount("tmpfs", ("rw", option))}
    (check,) = memory.check_huge("/ram/deep/p2pckpt", mounts, kernel)
    assert (check.verdict, bool(check.do)) == ("ok", bool(advice))
    assert advice in check.do
    assert memory.check_huge("/home", mounts, kernel) == []


def test_the_settings_of_an_agent_that_runs_are_checked():
    read = Config(endpoints="mine:1", key="/mine", directory="/mine")
    told = Config(endpoints="its:1", key="/its", directory="/its")
    answer = {"node": "n7", "config": told.shown(), "ram": {"budget_bytes": 5}}
    config, origin = d.settings(read, {"directory": "/mine", "workers": None}, answer)
    assert (config.endpoints, config.directory, config.key) == ("its:1", "/mine", "/mine")
    assert (config.ram_budget_bytes, "n7" in origin, "--directory" in origin) == (5, True, True)
    config, origin = d.settings(read, {}, None)
    assert (config, "no agent" in origin) == (read, True)


def test_ucx_and_rdma():
    ucx, rdma = d.check_ucx(facts("self/memory tcp/eth0 tcp/lo"), [])
    assert (ucx.verdict, rdma.verdict) == ("ok", "ok")
    assert "wheel" in ucx.found
    assert "TCP" in rdma.found
    ucx, rdma = d.check_ucx(facts("tcp/eth0"), ["mlx5_0"])
    assert (rdma.verdict, "mlx5_0" in rdma.found, "verbs" in rdma.do) == ("warn", True, True)
    system = facts("tcp/eth0 rc_mlx5/mlx5_0:1 dc_mlx5/mlx5_0:1", "/usr/lib/libucp.so.0")
    ucx, rdma = d.check_ucx(system, ["mlx5_0"])
    assert (rdma.verdict, rdma.found) == ("ok", "in use: mlx5_0:1")
    assert "system library" in ucx.found
    assert d.check_ucx(facts("self/memory"), [])[0].verdict == "warn"


def test_a_network_that_is_not_known_holds_nothing_back():
    told = {"bandwidth": {"nic_bytes_s": 5, "nic": "measured: x"}}
    assert d.network_of(Config(nic_bytes_s=7), told) == (5, "measured: x")
    assert d.network_of(Config(nic_bytes_s=7), None) == (7, "as configured")
    check = d.check_nic(2_500_000_000, "measured: x", 0.5)
    assert (check.verdict, check.do) == ("ok", "")
    assert check.found.startswith("2.50 GB/s each way, measured: x; 1.25 GB/s of it")
    check = d.check_nic(0, "not measured: NoRoom: y", 1.0)
    assert (check.verdict, check.found) == ("warn", "not measured: NoRoom: y")
    assert "--nic-bytes-s" in check.do


def test_etcd_releases_and_latency():
    assert d.check_etcd("e", "3.5.16", 0.001, False).verdict == "ok"
    assert d.check_etcd("e", "3.5.1", 0.001, False).verdict == "fail"
    assert d.check_etcd("e", "3.5.1", 0.001, True).verdict == "warn"
    slow = d.check_etcd("e", "3.5.16", 0.5, False)
    assert (slow.verdict, "500.0 ms" in slow.found) == ("warn", True)


def test_room_in_etcd():
    assert d.check_room("e", d.Room(1 << 20, (), True)).verdict == "ok"
    check = d.check_room("e", d.Room(1 << 20, (), False))
    assert (check.verdict, "auto-compaction" in check.do) == ("warn", True)
    check = d.check_room("e", d.Room(1 << 20, ("NOSPACE",), True))
    assert (check.verdict, "NOSPACE" in check.found) == ("fail", True)


def test_hosts_for_a_layout():
    hosts = {f"n{i}": f"h{i // 2}" for i in range(8)}
    assert d.check_members(hosts, r.Layout(2, 1)).verdict == "ok"
    check = d.check_members(hosts, r.Layout(4, 2))
    assert (check.verdict, "3 more hosts" in check.do) == ("warn", True)


def test_directories(tmp_path):
    mounts = {"/": Mount("overlay"), str(tmp_path): Mount("tmpfs")}
    assert memory.check_directory(str(tmp_path / "ram"), 1 << 10, mounts).verdict == "ok"
    assert memory.check_directory(str(tmp_path / "ram"), 1 << 60, mounts).verdict == "fail"
    assert memory.check_directory(str(tmp_path / "no" / "ram"), 1, mounts).verdict == "fail"
    other = memory.check_directory(str(tmp_path), 1, {"/": Mount("ext4")})
    assert (other.verdict, "ext4" in other.found) == ("warn", True)


def test_a_budget_above_what_is_free_fails(tmp_path):
    config = Config(directory=str(tmp_path))
    assert memory.check_memory(config, 1 << 62, "why").verdict == "fail"
    assert memory.check_memory(config, 1 << 20, "why").verdict == "warn"


def test_counts_agree_with_their_words():
    assert plural(1, "step") == "1 step"
    assert plural(0, "step") == "0 steps"
    assert plural(2, "copy", "copies") == "2 copies"


# -- what holds for every command ------------------------------------------------------------------

LEAVES = dict(m.leaves(m.cli))
ARGUMENTS = {"inspect": ["3"], "verify": ["3"], "export": ["3", "out"], "clean": ["--job", "a"]}
ARGUMENTS["ledger rebuild"] = ARGUMENTS["preempt"] = ARGUMENTS["save-now"] = ["--job", "a"]


def told(capsys, arguments, code):
    """The document of a command that fails, after what all have in common was checked."""
    assert m.run(arguments) == code, arguments
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert list(document)[:5] == ["schema_version", "command", "ok", "error", "exit_code"]
    assert (document["ok"], document["exit_code"]) == (code == 0, code)
    assert set(document["error"]) == {"kind", "message", "next"}
    assert all(document["error"].values())
    assert document["error"]["next"] == err.strip().splitlines()[-1]
    return document


@pytest.mark.parametrize("name", sorted(LEAVES))
def test_every_command_takes_json_and_has_an_example_that_it_understands(
    name, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    command = LEAVES[name]
    assert any("--json" in p.opts for p in command.params)
    found = re.search(r"Example: (p2pckpt .*)$", command.epilog or "")
    assert found, f"main.EXAMPLES has no line for {name}"
    _, *arguments = found[1].split()
    assert m.named(arguments) == name
    for file in (word for word in arguments if word.endswith((".toml", ".csv"))):
        Path(file).touch()
    command.make_context(name, arguments[len(name.split()) :])


@pytest.mark.parametrize("name", sorted(LEAVES))
def test_wrong_usage_of_every_command_is_a_document_too(name, capsys, tmp_path):
    words = name.split()
    document = told(capsys, [*words, "--no-such-option", "--json"], 2)
    assert (document["command"], document["error"]["kind"]) == (name, "UsageError")
    assert f"p2pckpt {name} --help" in document["error"]["next"]
    file = tmp_path / "x.json"
    assert m.run([*words, "--no-such-option", f"--json={file}"]) == 2
    assert json.loads(file.read_text()) == document
    assert capsys.readouterr().out == ""
    unwritable = told(capsys, [*words, *ARGUMENTS.get(name, []), "--json", "/no/such/x.json"], 2)
    assert "/no/such/x.json" in unwritable["error"]["message"]


@pytest.mark.parametrize(
    "name", [n for n in sorted(LEAVES) if any("--agent" in p.opts for p in LEAVES[n].params)]
)
def test_without_an_agent_every_command_says_so(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name == "doctor":  # it says so too, but looks at all else first
        assert d.check_agent("no agent answers").verdict == "warn"
        return
    arguments = [*name.split(), *ARGUMENTS.get(name, []), "--agent", str(tmp_path / "no.sock")]
    document = told(capsys, [*arguments, "--json"], 1)
    assert document["error"]["kind"] == "AgentUnreachable"
    assert "p2pckpt agent" in document["error"]["next"]
    assert m.run(arguments) == 1
    out, err = capsys.readouterr()
    assert (out, err.strip().splitlines()[-1]) == ("", document["error"]["next"])
    assert list(tmp_path.iterdir()) == []


def test_json_that_swallows_an_argument_says_so_and_writes_no_file(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    document = told(capsys, ["inspect", "--json", "3"], 2)
    assert "took '3' for its FILE" in document["error"]["next"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("raised", "code", "kind", "following"),
    [
        (NoRoom("no"), 1, "NoRoom", "--ram-budget-bytes"),
        (UsageError("no"), 2, "UsageError", "`p2pckpt status --help`"),
        (PermissionError("no"), 1, "PermissionError", "put right"),
        (KeyboardInterrupt(), 130, "Interrupted", "again"),
        (SystemExit(143), 143, "Interrupted", "again"),
        (ZeroDivisionError("no"), 1, "ZeroDivisionError", "bug"),
    ],
)
def test_whatever_is_raised_is_a_document(raised, code, kind, following, capsys, monkeypatch):
    def fail(**_):
        raise raised

    monkeypatch.setattr(LEAVES["status"], "callback", fail)
    document = told(capsys, ["status", "--json"], code)
    assert document["error"]["kind"] == kind
    assert following in document["error"]["next"]


@pytest.mark.parametrize("code", [0, 1, 3, 4])
def test_ok_is_the_exit_code_0_and_nothing_else(code, capsys, monkeypatch):
    def end(**_):
        advice = "it is broken\nmend it" if code else ""
        finish("status", "-", {"ok": "mine", "more": 1}, "text", code, advice)

    monkeypatch.setattr(LEAVES["status"], "callback", end)
    if code == EXIT_DONE:
        assert m.run(["status", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert (document["ok"], document["error"], document["more"]) == (True, None, 1)
        return
    error = told(capsys, ["status", "--json"], code)["error"]
    assert (error["message"], error["next"]) == ("it is broken", "mend it")
    assert error["kind"] == {1: "Failed", 3: "NothingFound", 4: "Degraded"}[code]


@pytest.mark.parametrize(
    ("arguments", "target"),
    [
        ("status", None), ("status --json", "-"), ("status --json x.json", "x.json"),
        ("status --json=x.json", "x.json"), ("status --json --agent a", "-"),
        ("export -- --json x", None), ("status --json -", "-"),
    ],
)  # fmt: skip
def test_where_the_document_goes(arguments, target):
    assert json_target(arguments.split()) == target


def test_json_of_the_checks_is_plain():
    json.dumps([c.__dict__ for c in d.check_ucx(facts("tcp/lo"), [])])
