"""The benchmark itself: every figure comes out, and the JSON has its shape. No speed is judged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIGURES = {
    "block", "block_first", "process_safe", "node_safe_copies1", "node_safe_rs42",
    "restore_process", "restore_node", "ready_node", "memory_peak", "memory_held",
    "encode_copies1", "encode_rs42", "ucx",
}  # fmt: skip


@pytest.mark.slow
def test_every_figure_comes_out_and_nothing_is_left(tmp_path):
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tests.bench", "--scale", "0.01", "--runs", "1"]
    command += ["--json", str(out)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as bench:
        try:
            told, errors = bench.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            bench.kill()
            raise
    assert bench.returncode == 0, errors[-3000:]
    document = json.loads(out.read_text())
    assert document["config"]["ranks"] == 2
    assert document["config"]["tensors"] == 155
    figures = {figure["name"]: figure for figure in document["figures"]}
    assert set(figures) == FIGURES
    for name, figure in figures.items():
        assert set(figure) == {"name", "ratio", "runs", "noisy", "limit", "limit_is"}, name
        assert len(figure["runs"]) == 1, name
        assert figure["ratio"] > 0, name
        assert figure["limit"] > 0, name
        assert figure["noisy"] is False, name
        assert figure["limit_is"], name
        assert name in told
    assert not [n for n in os.listdir("/dev/shm") if n.startswith(f"p2pckpt-bench-{bench.pid}-")]


def test_too_little_memory_is_said_at_once():
    command = [sys.executable, "-m", "tests.bench", "--scale", "100000"]
    bench = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert bench.returncode == 2
    assert "less --scale" in bench.stdout
