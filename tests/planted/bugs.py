"""Planted bugs: what a bad programmer might do, as exact replacements of text in product code.

Each `NAME.toml` here has the ``story`` (what was done, and what it would cost), the ``rule`` that
is to object (rules.py), and edits: in ``file`` the text ``old``, which must stand there exactly
once, becomes ``new``. Exact text instead of line numbers survives other people's changes to the
file, and where it does not, planting fails and says so.

Contract: nothing is planted into the tree itself, only into a copy of it below a folder of one's
own. A patch of tests or simulations is refused: the world must not know of the bug.
"""

import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGES = ("p2pckpt", "topology", "simulations")
PRODUCT = ("p2pckpt/", "topology/")


class NotPlanted(Exception):
    """A bug does not fit the tree, or is not what a bug must be."""


@dataclass(frozen=True)
class Edit:
    """In ``file``, relative to the root, ``old`` becomes ``new``."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Bug:
    """``ends``: the ends of a run that count as found."""

    name: str
    story: str
    rule: str
    edits: tuple[Edit, ...]
    ends: tuple[str, ...] = ("wrong",)


def load(path: Path) -> Bug:
    """Read one. Raises NotPlanted for fields that are missing, unknown or no product code."""
    try:
        found = tomllib.loads(path.read_text())
        edits = tuple(Edit(**edit) for edit in found.pop("edit"))
        ends = tuple(found.pop("ends", ("wrong",)))
        bug = Bug(path.stem, edits=edits, ends=ends, **found)
    except (KeyError, TypeError, tomllib.TOMLDecodeError) as e:
        raise NotPlanted(f"{path.name}: {e!r}") from e
    for edit in bug.edits:
        if not edit.file.startswith(PRODUCT):
            raise NotPlanted(f"{bug.name}: {edit.file} is not one of {PRODUCT}")
    return bug


def every() -> list[Bug]:
    """All of them, by name."""
    return [load(path) for path in sorted(HERE.glob("*.toml"))]


def copy_tree(to: Path, source: Path = ROOT) -> None:
    """The packages that a run needs, without anything that was compiled."""
    for package in PACKAGES:
        hidden = shutil.ignore_patterns("__pycache__", ".*")
        shutil.copytree(source / package, to / package, ignore=hidden)


def plant(bug: Bug, tree: Path) -> None:
    """Change a copy of the tree. Raises NotPlanted where a text does not stand exactly once."""
    if tree.resolve() == ROOT.resolve():
        raise NotPlanted(f"{bug.name}: into a copy of the tree only")
    for edit in bug.edits:
        path = tree / edit.file
        text = path.read_text() if path.exists() else ""
        if (times := text.count(edit.old)) != 1:
            raise NotPlanted(
                f"{bug.name}: needs this text once in {edit.file}, found it {times} times; "
                f"the code has changed, so the bug must be planted anew:\n{edit.old}"
            )
        changed = text.replace(edit.old, edit.new)
        try:
            compile(changed, edit.file, "exec")
        except SyntaxError as e:
            raise NotPlanted(f"{bug.name}: {edit.file} is no Python any more: {e}") from e
        path.write_text(changed)
