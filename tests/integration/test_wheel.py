"""The wheel is whole: what is installed from it runs outside of the checkout."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    for name in filter(None, files):  # a copy, so that no build folder is left in the checkout
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(place), "."]
    subprocess.run(command, cwd=source, check=True, timeout=300)
    return next(place.glob("*.whl"))


def test_everything_is_in_it(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in ("p2pckpt", "topology", "simulations"):
        for file in (ROOT / package).rglob("*.py"):
            assert str(file.relative_to(ROOT)) in names
    for file in ("py.typed", "FORMATS.md", "PROTOCOL.md", "README.md", "dataflow.svg"):
        assert f"p2pckpt/{file}" in names
    assert not any(name.startswith("tests/") for name in names)


def installed(wheel, place):
    """An environment in which Python finds the wheel's files before the checkout's."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(place)]
    subprocess.run([*command, str(wheel)], check=True, timeout=300)
    return {**os.environ, "PYTHONPATH": str(place)}


def run(arguments, env, cwd, timeout_s):
    command = [sys.executable, "-m", "p2pckpt.cli.main", *arguments]
    return subprocess.run(
        command, env=env, cwd=cwd, capture_output=True, text=True, timeout=timeout_s
    )


def test_it_runs_outside_of_the_checkout(wheel, tmp_path):
    env = installed(wheel, tmp_path / "site")
    where = [sys.executable, "-c", "import p2pckpt; print(p2pckpt.__file__)"]
    found = subprocess.run(where, env=env, cwd=tmp_path, capture_output=True, text=True).stdout
    assert found.startswith(str(tmp_path))
    done = run(["simulate", "world", "--saves", "3", "--json"], env, tmp_path, 60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["end"] == "ok"


@pytest.mark.slow
def test_the_demo_runs_outside_of_the_checkout(wheel, tmp_path):
    env = installed(wheel, tmp_path / "site")
    done = run(["demo", "--json"], env, tmp_path, 900)
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads(done.stdout)
    assert document["losses_bit_identical"]
    assert document["state_digests_equal"]
