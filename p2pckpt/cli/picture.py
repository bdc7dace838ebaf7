"""The picture of a plan, as `p2pckpt topology` writes it: SVG by itself, PNG by matplotlib.

Intuition: one owner in blue, who holds its shards in yellow, who is placed weaker than asked for in
red: what a placement does is seen at a glance, and the words around it say what survives.

Contract: the layout is topology/draw.py's, the same for both; PNG has the light colours.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from p2pckpt.cli.output import plural
from p2pckpt.errors import MissingDependency, UsageError
from topology import draw
from topology.cluster import HOST
from topology.plan import Plan


def picture_of(
    plan: Plan, layout: str, owner: str | None = None, more: Sequence[tuple[str, str]] = ()
) -> draw.Picture:
    """The plan: one owner (the first, unless named) and who holds its shards; ``more`` facts."""
    low, high = min(plan.loads.values()), max(plan.loads.values())
    owner = owner or next(iter(plan.placements))
    holders = plan.placements[owner].nodes
    marks = {}
    for name, load in plan.loads.items():
        kind = "weak" if name in plan.degraded else "cell"
        if kind == "cell" and low != high:
            kind = "less" if load == low else "more" if load == high else "cell"
        marks[name] = draw.Mark(kind, "", f"holds {plural(load, 'shard')}")
    for index, name in enumerate(holders):
        marks[name] = draw.Mark("holder", str(index), f"holds shard {index} of {owner}")
    marks[owner] = draw.Mark("owner", "own", marks[owner].tip)
    kinds = {mark.kind for mark in marks.values()}
    words = {
        "owner": f"{owner}, which keeps its own copy",
        "holder": f"holders of its {len(holders)} shards",
        "weak": "owners placed weaker than asked for",
        "less": f"holds {plural(low, 'shard')}",
        "more": f"holds {plural(high, 'shard')}",
        "cell": f"holds {low} shards" if low == high else "in between",
    }
    facts = [
        (f"any {len(case.domains) - 1}", f"{level} losses survived")
        for level, case in plan.worst.items()
        if level != HOST
    ]
    story = draw.Story(
        f"{plural(len(plan.cluster), 'node')}, {layout}, {plan.policy}",
        plan.placements[owner].reason,
        (*facts, *more),
        [(kind, text) for kind, text in words.items() if kind in kinds],
        [finding.text for finding in plan.findings() if finding.weak][:4],
    )
    return draw.draw(plan.cluster, story, marks)


def write(picture: draw.Picture, svg: Path | None, png: Path | None) -> None:
    """Write it as asked for. Raises UsageError, and MissingDependency for PNG."""
    try:
        if svg:
            svg.write_text(draw.svg(picture))
        if png:
            _png(picture, png)
    except OSError as e:
        raise UsageError(f"picture: cannot be written: {e}") from e


def _png(picture: draw.Picture, path: Path) -> None:
    """The picture by matplotlib, in its light colours. Raises MissingDependency."""
    try:
        figures = importlib.import_module("matplotlib.figure")
        patches = importlib.import_module("matplotlib.patches")
    except ImportError as e:
        raise MissingDependency("--png needs matplotlib; --svg needs nothing") from e
    dots = 72.0
    figure = figures.Figure(figsize=(picture.width / dots, picture.height / dots), dpi=2 * dots)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, picture.width), ylim=(picture.height, 0))
    axes.axis("off")
    for b in picture.boxes:
        style = f"round,pad=0,rounding_size={b.radius}" if b.radius else "square,pad=0"
        colour = draw.STYLES[b.kind][0]
        box = patches.FancyBboxPatch((b.x, b.y), b.width, b.height, style, fc=colour, lw=0)
        axes.add_patch(box)
    for t in picture.texts:
        axes.text(
            t.x, t.y, t.text.replace("$", "\\$"), size=t.size, color=draw.STYLES[t.kind][0],
            weight="bold" if t.bold else "normal",
            ha="center" if t.anchor == "middle" else "left", va="baseline",
        )  # fmt: skip
    figure.savefig(path, format="png")
