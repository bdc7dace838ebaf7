"""A trainer's process holds none of what makes forks dangerous: that is all in the agent.

Fault reports (B071, B091, B099): fork after UCX, a gRPC client or an S3 client was set up made
children hang, abort or mix replies. Here a rank has a Unix socket and shared memory; the clients
live in the agent, and no process of the product ever forks without starting another program.
"""

import ast
import subprocess
import sys
from pathlib import Path

import p2pckpt

ROOT = Path(p2pckpt.__file__).parents[1]
CLIENTS = ("grpc", "etcd", "ucxx", "ucp", "boto3", "botocore")


def test_the_hook_loads_no_client_and_starts_no_thread():
    """B071, B091, B099."""
    code = f"""
import sys, threading
import torch
before = threading.active_count()
import p2pckpt, p2pckpt.checkpointer, p2pckpt.backends.agent_link, p2pckpt.launch
p2pckpt.Checkpointer
loaded = {{name.split(".")[0] for name in sys.modules}} & set({CLIENTS!r})
sys.exit(f"{{loaded}}, {{threading.active_count()}} threads" if loaded or
         threading.active_count() != before else 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_nothing_in_the_product_forks():
    """B099: a client is never shared with a child, since a child is another program."""
    for path in sorted((ROOT / "p2pckpt").rglob("*.py")):
        tree = ast.parse(path.read_text(), str(path))
        for node in ast.walk(tree):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Attribute | ast.Name):
                name = node.attr if isinstance(node, ast.Attribute) else node.id
                assert name not in ("fork", "forkpty", "ProcessPoolExecutor"), where
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [getattr(node, "module", "") or "", *(a.name for a in node.names)]
                assert not any(n.split(".")[0] == "multiprocessing" for n in names), where
