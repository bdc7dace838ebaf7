"""Valid inputs of every target, to begin with."""

from pathlib import Path

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.backends.ucx_flow import Frame, Kind
from p2pckpt.coding import table, tree
from p2pckpt.save.offload import encode_checkpoint
from tests.fuzz import specimens
from tests.fuzz.specimens import ATTEMPT, body_of

LINE = b"\n---\n"
"""Between the parts of an input that has several."""
ROOT = Path(__file__).parents[2]

CONFIG = b"""# an agent
node = "n1"
domains = "rack=r1,pod=p1"
spread = "rack!,pod"
ram_budget_bytes = 1073741824
lease_s = 10.0
keepalive_s = 2.5
trial = true
s3_url = "s3://bucket/prefix"
offload_every = 10
"""
CLUSTER = b"""nodes = ["n[001-004]", "m1"]
levels = ["rack", "pod"]
[domains.rack]
r1 = "n[001-002]"
r2 = ["n[003-004]", "m1"]
[domains.pod]
p1 = "n[001-004],m1"
[hosts]
h1 = "n[001-002]"
"""
SLURM = b"""# tree
SwitchName=s0 Switches=s[1-2] LinkSpeed=1
SwitchName=s1 Nodes=n[1-4]
SwitchName=s2 \\
  Nodes=n[5-8]
"""
BLOCKS = b"BlockName=b1 Nodes=n[1-4]\nBlockName=b2 Nodes=n[5-8]\nBlockSizes=4,8\n"
SLURM_YAML = b"""---
- topology: topo1
  cluster_default: true
  tree:
    switches:
      - switch: root
        children: leaf[1-2]
      - switch: leaf1
        nodes: n[1-4]
      - switch: leaf2
        nodes: n[5-8]
"""
NODES = b"""{"items": [
 {"metadata": {"name": "n1", "labels": {"topology.kubernetes.io/zone": "a",
   "topology.kubernetes.io/rack": "r1", "cloud.google.com/gce-topology-host": "h1"}}},
 {"metadata": {"name": "n2", "labels": {"topology.kubernetes.io/zone": "b"}}}]}
"""
HOSTS = b"# two racks\np1r1n[1-4]\np1r2n[1-4], p2r1n1\n"
STEPS = b"0,4\n10,4\n10,3\n20.5,3\n20.5,4\n30,4\n30,2\n40,2\n40,4\n90,4\n90,1\n95,1\n95,3\n"
SAMPLES = b"index,Time,GPUs\n0,0,64\n1,60,56\n2,120,64\n3,180,32\n4,500,64\n"
LANL = (
    b"System,machine type,nodenumz,Prob Started (mm/dd/yy hh:mm),Prob Fixed (mm/dd/yy hh:mm)\n"
    b"2,cluster,0,6/21/2005 10:54,6/21/2005 11:00\n2,cluster,1,6/22/2005 10:54,\n"
    b"20,cluster,7,6/23/2005 1:04,6/25/2005 11:00\n"
)
BUNDLED = ROOT / "simulations" / "study" / "scenarios"
SCENARIOS = tuple(path.read_bytes() for path in sorted(BUNDLED.glob("*.toml")))

GROUP = r.GroupRecord(ATTEMPT, 0, (specimens.of(r.SealedShare),))
COMMIT = specimens.of(r.Commit)
MANIFEST = body_of(specimens.of(r.Manifest))
CHECKPOINT = encode_checkpoint(
    r.Checkpoint(r.CHECKPOINT_FORMAT, COMMIT, (GROUP,), (specimens.of(r.ShareObjects),))
)
SCHEDULE, PROGRESS = body_of(specimens.of(r.Schedule)), body_of(specimens.of(r.Progress))
BOARD = LINE.join([SCHEDULE, SCHEDULE, PROGRESS, PROGRESS])


def _state():
    keys = r.JobKeys(ATTEMPT.job)
    found = [
        (keys.ledger_id, b"", ATTEMPT.ledger_id.encode()),
        (keys.floor, b"", b"0000000001.0000000000"),
    ]
    for key, kind in (
        (keys.generation, r.Generation),
        (keys.commit(COMMIT.lineage, 3), r.Commit),
        (keys.commit(COMMIT.lineage, 4), r.Commit),
        (keys.outcome(ATTEMPT), r.Outcome),
        (keys.closed(1, 1), r.Closed),
        (keys.decision(1, 1), r.Decision),
        (keys.retired(ATTEMPT), r.Retired),
        (keys.schedule(1), r.Schedule),
        (keys.offloaded(ATTEMPT), r.Offloaded),
        (keys.offload_retired(ATTEMPT), r.OffloadRetired),
        (keys.offload_dropped(ATTEMPT), r.OffloadDropped),
    ):
        found.append((key, kind.__name__.encode(), body_of(specimens.of(kind))))
    prefix = len(keys.state)
    return LINE.join(b"%s %s\n%s" % (key[prefix:].encode(), *rest) for key, *rest in found)


STATE = _state()


def mover_frames():
    """One of each kind."""
    return tuple(Frame(kind, "5a" * 16, 1, 2, 3, "text").pack() for kind in Kind)


def envelopes():
    """Every kind of record and message."""
    return specimens.envelopes()


def groups():
    """The records of one group, and of two."""
    one = body_of(GROUP)
    return one, LINE.join([one, one.replace(b'"group":0', b'"group":1')])


def framed(*records):
    """As they go over the trainers' socket."""
    packed = [w.pack(record) for record in records]
    return b"".join(len(p).to_bytes(4, "little") + p for p in packed)


def requests():
    """What trainers say, one after the other."""
    join, slot = specimens.of(w.TrainerJoin), specimens.of(w.OpenSlot)
    return framed(join, slot, specimens.of(w.SlotDone), w.Leave()), framed(w.StatusQuery())


def replies():
    """What an agent answers."""
    kinds = (w.Steps, w.Slot, w.RestoreFile, w.Joined, w.Failed, w.SaveState, w.Accepted)
    return tuple(framed(specimens.of(kind)) for kind in kinds)


def trees():
    """Values of every kind."""
    values = tree.Dict(
        "dict",
        ["a", "b", "c", "d"],
        [
            tree.Seq("list", [1, 2.5, None, True, "x"]),
            tree.Ints("tuple", "<u4", b"\1\0\0\0\2\0\0\0"),
            tree.Seq("tuple", [tree.BigInt(b"\0" * 9), tree.Complex(1.0, 2.0), tree.Raw(b"x")]),
            tree.Object(tree.Dict("OrderedDict", [], [], None)),
        ],
    )
    leaves = tree.Seq(
        "list", [tree.Tensor(0, True, False, None), tree.Array(1, False), tree.Blob(1, True)]
    )
    return tree.encode(values), tree.encode(leaves), tree.encode(tree.Text(b"\xed\xa0\x80"))


def snapshots():
    """A file with two tensors and a tree."""
    packed = trees()[1]
    built = table.build([("w", "float32", (4,)), ("h", "bfloat16", (3,))], {})
    head = built.header(len(packed))
    out = head + bytes(built.tree_offset - len(head)) + packed
    table.parse(memoryview(out))
    return (out,)
