"""A picture of a cluster: boxes in boxes, a square per node, and what was found out about it.

Intuition: whoever sees rack beside rack, and where the shards of one owner went, believes a
placement, or does not. A :class:`Picture` is a list of rectangles and texts, each of a kind; a kind
has its colours in one table. So one layout serves SVG (here) and any other renderer.

Contract: pure, standard library only, the same bytes for the same input. The widest levels that
nest are drawn as boxes (three at most); one level that does not (power, say) as a coloured foot of
each node. Sizes follow the number of nodes, from 16 to some thousands. The SVG carries its own
colours for light and dark, and a tooltip on each node and box.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from topology.cluster import Cluster, Node

STYLES: dict[str, tuple[str, str]] = {  # kind: its colour on light, on dark
    "ground": ("#ffffff", "#0b1220"),
    "tile": ("#f1f5f9", "#16203a"),
    "box0": ("#f8fafc", "#111a2e"),
    "box1": ("#eef2f7", "#17223b"),
    "box2": ("#e2e8f0", "#1e2b49"),
    "cell": ("#b6c2d2", "#475569"),
    "less": ("#dbe3ec", "#334155"),
    "more": ("#7c8da5", "#7d8da6"),
    "owner": ("#2563eb", "#60a5fa"),
    "holder": ("#f59e0b", "#fbbf24"),
    "weak": ("#f8a5a5", "#b4535a"),
    "foot0": ("#0d9488", "#2dd4bf"),
    "foot1": ("#9333ea", "#c084fc"),
    "foot2": ("#db2777", "#f472b6"),
    "foot3": ("#4d7c0f", "#a3e635"),
    "foot4": ("#0369a1", "#38bdf8"),
    "foot5": ("#78350f", "#d6a374"),
    "title": ("#0f172a", "#f1f5f9"),
    "text": ("#334155", "#cbd5e1"),
    "muted": ("#64748b", "#94a3b8"),
    "warning": ("#b45309", "#fbbf24"),
    "on_cell": ("#1e293b", "#e2e8f0"),
    "on_mark": ("#ffffff", "#0b1220"),
}
FEET = 6
WIDTH, MARGIN = 1160.0, 32.0
GLYPH = 0.58
"""Width of a letter by its size, about, in any sans-serif font."""


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle; ``tip`` is shown by those who can."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    radius: float = 0.0
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """One line; ``anchor`` is "start" or "middle"."""

    x: float
    y: float
    text: str
    kind: str
    size: float
    bold: bool = False
    anchor: str = "start"


@dataclass(slots=True)
class Picture:
    """What is drawn, in order: all boxes, then all texts."""

    width: float = 0.0
    height: float = 0.0
    boxes: list[Box] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)

    def add(self, other: Picture, x: float, y: float) -> None:
        """``other``, moved by (x, y)."""
        for b in other.boxes:
            self.boxes.append(Box(b.x + x, b.y + y, b.width, b.height, b.kind, b.radius, b.tip))
        for t in other.texts:
            moved = Text(t.x + x, t.y + y, t.text, t.kind, t.size, t.bold, t.anchor)
            self.texts.append(moved)
        self.width = max(self.width, x + other.width)
        self.height = max(self.height, y + other.height)


@dataclass(frozen=True, slots=True)
class Mark:
    """How a node is to be shown: a kind of STYLES, a word on it, more for its tooltip."""

    kind: str = "cell"
    word: str = ""
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Story:
    """The words around the boxes: facts are (value, caption), legend is (kind, meaning)."""

    title: str
    subtitle: str = ""
    facts: Sequence[tuple[str, str]] = ()
    legend: Sequence[tuple[str, str]] = ()
    warnings: Sequence[str] = ()


PLAIN = Mark()


def draw(cluster: Cluster, story: Story, marks: Mapping[str, Mark]) -> Picture:
    """The picture of a cluster; nodes without a mark are plain."""
    boxed, foot = levels_drawn(cluster)
    feet = {d: f"foot{i}" for i, d in enumerate(_domains(cluster, foot))} if foot else {}
    cell = next(size for most, size in _SIZES if len(cluster) <= most)
    body = _Body(cluster, boxed[::-1], cell, (foot, feet), marks).level(cluster.nodes, 0)
    legend = [*story.legend, *((kind, f"{foot} {d}") for d, kind in feet.items())]
    width = max(body.width, 720.0)
    picture = Picture()
    for part, space in (
        (_head(story, width), 0.0),
        (body, 20.0),
        (_legend(legend, width), 20.0),
        (_warnings(story.warnings, width), 14.0),
    ):
        if part.height:
            picture.add(part, MARGIN, (picture.height or MARGIN) + (space if picture.height else 0))
    picture.width, picture.height = width + 2 * MARGIN, picture.height + MARGIN
    ground = Box(0.0, 0.0, picture.width, picture.height, "ground")
    picture.boxes.insert(0, ground)
    return picture


def levels_drawn(cluster: Cluster) -> tuple[tuple[str, ...], str]:
    """The levels shown as boxes, narrow to wide, and the one shown as a foot ("": none)."""
    boxed: list[str] = []
    left: list[str] = []
    for level in cluster.levels:
        count = len(_domains(cluster, level))
        if count < 2:
            continue
        if cluster.nests((*boxed, level)) and (
            not boxed or count < len(_domains(cluster, boxed[-1]))
        ):
            boxed.append(level)
        elif count <= FEET:
            left.append(level)
    return tuple(boxed[-3:]), left[0] if left else ""


def _domains(cluster: Cluster, level: str) -> list[str]:
    return sorted(label for label in cluster.members(level) if label is not None)


# -- the boxes -------------------------------------------------------------------------------------

_SIZES = ((24, 46.0), (80, 34.0), (200, 24.0), (500, 17.0), (1600, 12.0), (6000, 7.0), (10**9, 4.5))


@dataclass(frozen=True, slots=True)
class _Body:
    cluster: Cluster
    levels: tuple[str, ...]  # wide to narrow
    cell: float
    foot: tuple[str, dict[str, str]]
    marks: Mapping[str, Mark]

    def level(self, nodes: Sequence[Node], depth: int) -> Picture:
        """The nodes, boxed by the levels from ``depth`` on."""
        if depth == len(self.levels):
            return self._cells(nodes)
        groups: dict[str, list[Node]] = {}
        for node in nodes:
            groups.setdefault(node.domain(self.levels[depth]) or "", []).append(node)
        boxes = [self._box(label, groups[label], depth) for label in sorted(groups)]
        area = sum(box.width * box.height for box in boxes)
        wish = WIDTH if depth == 0 else math.sqrt(area * (2.6 if depth == 1 else 1.8))
        return _flow(boxes, wish, 16.0 if depth == 0 and len(self.levels) > 1 else 7.0)

    def _box(self, label: str, nodes: Sequence[Node], depth: int) -> Picture:
        inner = self.level(nodes, depth + 1)
        narrow = depth == len(self.levels) - 1
        size = 9.5 if narrow else 12.0
        pad = max(3.0, min(9.0, self.cell * 0.25)) if narrow else 10.0
        level = self.levels[depth]
        words = label or f"no {level}"
        room = int((inner.width + 2 * pad - 4) / (size * GLYPH))
        short = words if len(words) <= room else "…" + words[1 - room :] if room > 3 else ""
        head = size + pad * 0.9 + (2.0 if narrow else 0.0) if short else pad
        width, height = inner.width + 2 * pad, inner.height + head + pad
        picture = Picture(width, height)
        kind = f"box{min(2, depth + (3 - len(self.levels)) // 2)}"
        tip = f"{level} {label}: {len(nodes)} nodes" if label else f"{len(nodes)} without a {level}"
        picture.boxes.append(Box(0, 0, width, height, kind, 6.0 if narrow else 9.0, tip))
        if short:
            tone = "muted" if label else "warning"
            picture.texts.append(Text(pad, size + pad * 0.35, short, tone, size, bold=not narrow))
        picture.add(inner, pad, head)
        return picture

    def _cells(self, nodes: Sequence[Node]) -> Picture:
        count, step = len(nodes), self.cell * 1.16
        columns = count if count <= 4 else math.ceil(math.sqrt(count * 1.7))
        picture = Picture(columns * step - self.cell * 0.16)
        for i, node in enumerate(nodes):
            self._cell(picture, node, i % columns * step, i // columns * step)
        picture.height = -(-count // columns) * step - self.cell * 0.16
        return picture

    def _cell(self, picture: Picture, node: Node, x: float, y: float) -> None:
        cell, mark = self.cell, self.marks.get(node.name, PLAIN)
        where = ", ".join(f"{level} {label}" for level, label in node.domains)
        tip = "; ".join(filter(None, (node.name, where, mark.tip)))
        picture.boxes.append(Box(x, y, cell, cell, mark.kind, cell * 0.16, tip))
        level, feet = self.foot
        foot = feet.get(node.domain(level) or "") if level else None
        if foot:
            high = cell * 0.17
            picture.boxes.append(Box(x, y + cell - high, cell, high, foot, cell * 0.08))
        middle = x + cell / 2
        tone = "on_mark" if mark.kind == "owner" else "on_cell"
        if cell >= 40:
            room = int(cell / (8.5 * GLYPH)) - 1
            name = node.name if len(node.name) <= room else "…" + node.name[1 - room :]
            picture.texts.append(Text(middle, y + cell * 0.34, name, tone, 8.5, anchor="middle"))
        if mark.word and cell >= 17:
            size, at = (13.0, 0.68) if cell >= 40 else (cell * 0.48, 0.62)
            word = Text(middle, y + cell * at, mark.word, tone, size, True, "middle")
            picture.texts.append(word)


def _flow(parts: Iterable[Picture], wish: float, gap: float) -> Picture:
    """Parts in rows, left to right, at most ``wish`` wide unless one part is wider."""
    picture = Picture()
    x = y = row = 0.0
    for part in parts:
        if x and x + part.width > wish:
            x, y, row = 0.0, y + row + gap, 0.0
        picture.add(part, x, y)
        x, row = x + part.width + gap, max(row, part.height)
    return picture


# -- the words around them -------------------------------------------------------------------------


def _head(story: Story, width: float) -> Picture:
    picture = Picture(width, 26.0)
    picture.texts.append(Text(0, 20.0, story.title, "title", 21.0, bold=True))
    lines = textwrap.wrap(story.subtitle, max(20, int(width / (12.5 * GLYPH))))
    for i, line in enumerate(lines):
        picture.texts.append(Text(0, 42.0 + 17.0 * i, line, "muted", 12.5))
        picture.height = 48.0 + 17.0 * i
    tiles = []
    for value, caption in story.facts:
        wide = max(len(value) * 16.0, len(caption) * 10.5) * GLYPH + 28.0
        tile = Picture(wide, 48.0, [Box(0, 0, wide, 48.0, "tile", 8.0)])
        tile.texts.append(Text(14.0, 22.0, value, "title", 16.0, bold=True))
        tile.texts.append(Text(14.0, 38.0, caption, "muted", 10.5))
        tiles.append(tile)
    if tiles:
        picture.add(_flow(tiles, width, 10.0), 0.0, picture.height + 12.0)
    return picture


def _legend(entries: Iterable[tuple[str, str]], width: float) -> Picture:
    parts = []
    for kind, meaning in entries:
        part = Picture(26.0 + len(meaning) * 11.5 * GLYPH, 16.0, [Box(0, 1.0, 14, 14, kind, 3.0)])
        part.texts.append(Text(21.0, 12.0, meaning, "text", 11.5))
        parts.append(part)
    return _flow(parts, width, 14.0)


def _warnings(warnings: Sequence[str], width: float) -> Picture:
    picture = Picture()
    room = int(width / (11.5 * GLYPH)) - 2
    for i, warning in enumerate(warnings):
        words = warning if len(warning) <= room else warning[: room - 1] + "…"
        picture.texts.append(Text(0.0, i * 18.0 + 12.0, f"▲ {words}", "warning", 11.5))
        picture.width, picture.height = width, i * 18.0 + 16.0
    return picture


# -- as SVG ----------------------------------------------------------------------------------------


def svg(picture: Picture) -> str:
    """The picture as one SVG document, for light and dark."""
    used = sorted({b.kind for b in picture.boxes} | {t.kind for t in picture.texts})
    light = "".join(f".{kind}{{fill:{STYLES[kind][0]}}}" for kind in used)
    dark = "".join(f".{kind}{{fill:{STYLES[kind][1]}}}" for kind in used)
    size = f"{_n(picture.width)} {_n(picture.height)}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" '
        f'width="{_n(picture.width)}" height="{_n(picture.height)}" '
        'font-family="system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif">',
        f"<style>{light}@media(prefers-color-scheme:dark){{{dark}}}</style>",
    ]
    for b in picture.boxes:
        radius = f' rx="{_n(b.radius)}"' if b.radius else ""
        shape = (
            f'<rect class="{b.kind}" x="{_n(b.x)}" y="{_n(b.y)}" '
            f'width="{_n(b.width)}" height="{_n(b.height)}"{radius}'
        )
        lines.append(f"{shape}><title>{_safe(b.tip)}</title></rect>" if b.tip else f"{shape}/>")
    for t in picture.texts:
        more = (' font-weight="600"' if t.bold else "") + (
            f' text-anchor="{t.anchor}"' if t.anchor != "start" else ""
        )
        lines.append(
            f'<text class="{t.kind}" x="{_n(t.x)}" y="{_n(t.y)}" '
            f'font-size="{_n(t.size)}"{more}>{_safe(t.text)}</text>'
        )
    return "\n".join((*lines, "</svg>", ""))


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _safe(text: str) -> str:
    """Escaped, and without letters that XML forbids."""
    return escape("".join(c if c.isprintable() else " " for c in text))
