"""The figures of a study, drawn from its numbers; needs matplotlib (extra `study`).

Intuition: one figure answers one question, and says the answer in its title. Schemes keep their
colour from figure to figure; what overlaps within the width of a line is one line with all its
names.

Contract: `draw` writes PNG files, each under 200 KB, into a folder that exists, and returns their
names. Nothing is computed here that the report does not have. This module is imported only when
figures are wanted: matplotlib is not needed to run a study.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from simulations.study.curves import DEAD_SHARE
from simulations.study.model import FATES, SOURCES, STAGES
from simulations.study.story import QUANTILES, Row, Study

COLOURS = ("#1b6ca8", "#d1495b", "#2a9d5c", "#edae49", "#7b4ea3", "#00798c", "#8d6b4b", "#333333")
STAGE_COLOURS = {
    "stall": "#8ecae6", "recompute": "#d1495b", "detect": "#f4a259", "diagnose": "#edae49",
    "spares": "#8d6b4b", "allocate": "#7b4ea3", "init": "#b79ad6", "return": "#bbbbbb",
    "restore": "#2a9d5c",
}  # fmt: skip
SOURCE_COLOURS = ("#1b6ca8", "#8ecae6", "#2a9d5c", "#d1495b")
SAME = 5e-4
"""ETTRs that differ by less at every point are drawn as one line."""


def draw(study: Study, folder: Path) -> list[str]:
    """All figures that ``study`` has data for; their file names."""
    wanted: tuple[tuple[str, Callable[[Study], Figure | None]], ...] = (
        ("ettr", ettr_by_mtbf),
        ("time", where_time_goes),
        ("recovered", recovered_from),
        ("domains", loss_by_domain),
        ("interval", interval_valley),
        ("lost_work", lost_work),
        ("scatter", scatter_width),
        ("sensitivity", tornado),
    )
    written = []
    for name, make in wanted:
        figure = make(study)
        if figure is not None:
            file = f"{study.scenario.name}_{name}.png"
            figure.savefig(folder / file, dpi=110, facecolor="white")
            written.append(file)
    return written


def _figure(title: str, note: str, size: tuple[float, float] = (8.0, 4.6)) -> tuple[Figure, Any]:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    figure.suptitle(title, x=0.01, ha="left", fontsize=11.5, fontweight="bold")
    axes.set_title(note, loc="left", fontsize=8.5, color="#555555")
    _plain(axes)
    return figure, axes


def _plain(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=8.5)
    axes.grid(axis="both", color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)


def _note(study: Study) -> str:
    hours = study.scenario.hazards.mtbf_s / 3600
    return (
        f"{study.scenario.name}: a failure every {hours:.3g} h, {study.runs} runs of "
        f"{study.scenario.horizon_s / 86400:.3g} days, seed {study.seed}"
    )


def _seconds(value: float, _: Any = None) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} s"


def _time_axis(axis: Any, values: Sequence[float]) -> None:
    """Ticks at round times."""
    low, high = min(values), max(values)
    round_s = (0.01, 0.1, 1, 10, 60, 600, 3600, 6 * 3600, 86400, 10 * 86400)
    axis.set_major_locator(FixedLocator([t for t in round_s if low / 1.3 <= t <= high * 1.3]))
    axis.set_major_formatter(FuncFormatter(_seconds))
    axis.set_minor_locator(NullLocator())


# -- schemes against each other ----------------------------------------------------------------


def _alike(study: Study) -> list[list[str]]:
    """Schemes whose ETTR is the same at every MTBF, to the width of a line."""
    by_name: dict[str, list[float]] = {}
    for row in study.rows:
        by_name.setdefault(row.scheme.name, []).append(row.ettr.value)
    groups: list[list[str]] = []
    for name, values in by_name.items():
        for group in groups:
            if np.abs(np.array(by_name[group[0]]) - values).max() < SAME:
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def ettr_by_mtbf(study: Study) -> Figure | None:
    """Figure 1."""
    mtbfs = sorted({row.mtbf_s for row in study.rows})
    if len(mtbfs) < 2:
        return None
    groups = _alike(study)
    title = "Effective training time against the time between failures"
    note = f"{study.scenario.name}: {study.runs} runs a point, bands: 95 % intervals"
    figure, axes = _figure(title, note)
    hours = np.array(mtbfs) / 3600
    ends: list[tuple[float, str, str]] = []
    for group, colour in zip(groups, COLOURS, strict=False):
        rows = {row.mtbf_s: row for row in study.rows if row.scheme.name == group[0]}
        found = [rows[m].ettr for m in mtbfs]
        axes.plot(hours, [100 * e.value for e in found], "-o", color=colour, markersize=4)
        axes.fill_between(
            hours, [100 * e.low for e in found], [100 * e.high for e in found],
            color=colour, alpha=0.15, linewidth=0,
        )  # fmt: skip
        ends.append((100 * found[0].value, _wrapped(group), colour))
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(hours)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.3g} h"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("mean time between failures of the cluster", fontsize=9)
    axes.set_ylabel("effective training time, %", fontsize=9)
    handles = axes.get_lines()
    order = sorted(range(len(ends)), key=lambda i: -ends[i][0])
    axes.legend(
        [handles[i] for i in order], [ends[i][1] for i in order], loc="lower right", frameon=False,
        fontsize=8.5,
    )  # fmt: skip
    return figure


def _wrapped(names: Sequence[str]) -> str:
    lines = [", ".join(names[i : i + 3]) for i in range(0, len(names), 3)]
    return ",\n".join(lines)


def where_time_goes(study: Study) -> Figure | None:
    """Figure 2."""
    rows = study.close
    first = dict(zip(STAGES, rows[0].stages, strict=True))
    worst = max(STAGE_COLOURS, key=lambda stage: first[stage].value)
    title = f"Where the time goes that is not training; most of {rows[0].scheme.name}'s: {worst}"
    figure, axes = _figure(title, _note(study), (8.0, 0.9 + 0.45 * len(rows) + 0.8))
    for at, row in enumerate(reversed(rows)):
        left = 0.0
        for stage, estimate in zip(STAGES, row.stages, strict=True):
            if stage == "productive":
                continue
            share = 100 * estimate.value
            if not any(r.stages[STAGES.index(stage)].value for r in rows):
                continue
            axes.barh(
                at, share, left=left, color=STAGE_COLOURS[stage], height=0.7,
                label=stage if at == 0 else None,
            )  # fmt: skip
            left += share
        axes.text(left, at, f"  {left:.2f} %", va="center", fontsize=8.5)
    axes.set_yticks(range(len(rows)), [row.scheme.name for row in reversed(rows)])
    axes.set_xlabel("share of all time, %", fontsize=9)
    axes.set_xlim(right=axes.get_xlim()[1] * 1.08)
    axes.grid(axis="y", visible=False)
    axes.legend(ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False, fontsize=8)
    return figure


def recovered_from(study: Study) -> Figure | None:
    """Figure 3."""
    rows = _telling(study)
    figure = Figure(figsize=(8.0, 3.9), layout="constrained")
    figure.suptitle(
        "Where the state came from, by the worst failure of an incident", x=0.01, ha="left",
        fontsize=11.5, fontweight="bold",
    )  # fmt: skip
    panels = figure.subplots(1, len(rows), sharey=True, squeeze=False)[0]
    for axes, row in zip(panels, rows, strict=True):
        _plain(axes)
        axes.set_title(row.scheme.name, loc="left", fontsize=9.5)
        bottom = np.zeros(len(FATES))
        total = np.maximum(1, np.array(row.recovered).sum(axis=1))
        for source, colour in enumerate(SOURCE_COLOURS):
            share = 100 * np.array([counts[source] for counts in row.recovered]) / total
            axes.bar(
                range(len(FATES)), share, bottom=bottom, color=colour, width=0.7,
                label=SOURCES[source],
            )  # fmt: skip
            bottom += share
        names = [f"{fate}\n{n:,}" for fate, n in zip(FATES, total, strict=True)]
        axes.set_xticks(range(len(FATES)), names, fontsize=7)
        axes.grid(axis="x", visible=False)
    panels[0].set_ylabel("share of incidents, %", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)
    return figure


def _telling(study: Study) -> list[Row]:
    """The first scheme and up to two that fall back to the store most, best first."""
    rows = [row for row in study.close if row.scheme.memory]
    others = sorted(rows[1:], key=lambda row: -row.fallback.value)[:2]
    return rows[:1] + sorted(others, key=lambda row: row.fallback.value)


def lost_work(study: Study) -> Figure | None:
    """Figure 6."""
    figure, axes = _figure("Training that an incident makes undone", _note(study))
    seen: list[tuple[float, ...]] = []
    for row in study.close:
        values = np.maximum(1.0, np.array(row.lost_quantiles_s))
        same = any(np.abs(np.log(values / np.array(s))).mean() < 0.02 for s in seen)
        if same:
            continue
        seen.append(tuple(values))
        alike = [
            r.scheme.name for r in study.close
            if np.abs(np.log(np.maximum(1.0, np.array(r.lost_quantiles_s)) / values)).mean() < 0.02
        ]  # fmt: skip
        axes.plot(values, 100 * QUANTILES, color=COLOURS[len(seen) - 1], label=_wrapped(alike))
    axes.set_xscale("log")
    _time_axis(axes.xaxis, [v for s in seen for v in s])
    axes.set_xlabel("lost work of an incident (logarithmic)", fontsize=9)
    axes.set_ylabel("incidents that lose no more, %", fontsize=9)
    axes.legend(loc="lower right", frameon=False, fontsize=8.5)
    return figure


# -- curves ------------------------------------------------------------------------------------


def loss_by_domain(study: Study) -> Figure | None:
    """Figure 4."""
    if not study.domains:
        return None
    figure, axes = _figure(
        "Placement decides: what the loss of a whole domain costs",
        f"{study.scenario.name}: solid: placed by domains, dashed: at random",
        (8.0, 4.8),
    )
    bodies = dict.fromkeys(c.name.partition("@")[0] for c in study.domains if not c.closed_form)
    colours = dict(zip(bodies, COLOURS, strict=False))
    for curve in study.domains:
        y = [100 * value for value in curve.deep]
        if curve.closed_form:
            axes.plot(curve.sizes, y, "x", color="black", markersize=6, label=curve.name)
            continue
        body = curve.name.partition("@")[0]
        axes.plot(
            curve.sizes, y, "--" if "@" in curve.name else "-o", color=colours[body],
            label=None if "@" in curve.name else body, linewidth=1.6, markersize=3.5,
        )  # fmt: skip
    levels = study.scenario.fleet.domains
    for level, size in levels:
        axes.axvline(size, color="#bbbbbb", linewidth=1, zorder=0)
        axes.text(size, 104, level, fontsize=8, color="#777777", ha="center")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(study.domains[0].sizes))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set_xlabel("nodes that are lost at once: neighbours by number", fontsize=9)
    axes.set_ylabel("too deep for RAM, % of such domains", fontsize=9)
    axes.set_ylim(-3, 110)
    axes.legend(loc="upper left", frameon=False, fontsize=8.5)
    return figure


def interval_valley(study: Study) -> Figure | None:
    """Figure 5."""
    valley = study.intervals
    low, high = valley.flat_s
    figure, axes = _figure(
        f"Any interval from {_seconds(low)} to {_seconds(high)} is within 1 % of the best",
        f"{valley.scheme}; {_note(study)}",
    )
    values = [100 * e.value for e in valley.ettr]
    axes.axvspan(low, high, color="#2a9d5c", alpha=0.10, linewidth=0)
    axes.fill_between(
        valley.intervals_s, [100 * e.low for e in valley.ettr], [100 * e.high for e in valley.ettr],
        color=COLOURS[0], alpha=0.15, linewidth=0,
    )  # fmt: skip
    axes.plot(valley.intervals_s, values, "-o", color=COLOURS[0], markersize=4)
    base = min(values)
    marks = (
        ("chosen", valley.decided_s, "-", "#2a9d5c", 5.0),
        ("Young", valley.young_s, ":", "#333333", 1.5),
        ("Daly", valley.daly_s, "--", "#d1495b", 1.5),
    )
    for name, at, style, colour, width in marks:
        text = f"{name} {_seconds(at)}"
        axes.axvline(
            at, linestyle=style, color=colour, linewidth=width, label=text,
            alpha=0.4 if name == "chosen" else 1,
        )  # fmt: skip
    axes.set_xscale("log")
    _time_axis(axes.xaxis, valley.intervals_s)
    axes.set_ylim(base - 0.05 * (max(values) - base) - 0.01)
    axes.set_xlabel("training time between snapshots (logarithmic)", fontsize=9)
    axes.set_ylabel("effective training time, %", fontsize=9)
    axes.legend(loc="lower left", bbox_to_anchor=(0.22, 0), frameon=False, fontsize=8.5)
    return figure


def scatter_width(study: Study) -> Figure | None:
    """Figure 7."""
    if not study.scatter:
        return None
    body = study.scatter[0].scheme.partition("@")[0]
    figure, axes = _figure(
        "A wider scatter rebuilds faster, and gives more sets of nodes that kill",
        f"{body} on {study.scenario.fleet.nodes:,} nodes, {DEAD_SHARE:.0%} of them dead at once, "
        "anywhere; bars: 95 % intervals",
    )
    for point in study.scatter:
        policy = point.scheme.partition("@")[2] or "domain-aware"
        copysets = policy.startswith("copysets")
        colour = COLOURS[0] if copysets else COLOURS[1]
        x, y = 1000 * point.rebuild_s, 100 * point.loss.value
        axes.errorbar(
            x, y, yerr=[[y - 100 * point.loss.low], [100 * point.loss.high - y]], fmt="o",
            color=colour, markersize=5, capsize=2,
        )  # fmt: skip
        text = f"{policy.partition(':')[2]} wide" if copysets else policy
        axes.annotate(
            text, (x, y), xytext=(6, 5) if copysets else (-6, -12), textcoords="offset points",
            fontsize=8, color=colour, ha="left" if copysets else "right",
        )  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([2, 4, 8, 16, 32, 64, 128]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g} ms"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("time in which its partners rebuild what a node held", fontsize=9)
    axes.set_ylabel("chance that something is lost, %", fontsize=9)
    axes.set_ylim(0)
    axes.plot([], [], "o", color=COLOURS[0], label="copysets")
    axes.plot([], [], "o", color=COLOURS[1], label="other policies")
    axes.legend(loc="upper right", frameon=False, fontsize=8.5)
    return figure


def tornado(study: Study) -> Figure | None:
    """Figure 8."""
    swings = study.sensitivity
    if not swings:
        return None
    base = 100 * (1 - study.close[0].ettr.value)
    figure, axes = _figure(
        "What the answer rests on: each input over its plausible range, one at a time",
        f"{study.close[0].scheme.name}; {_note(study)}",
        (8.0, 0.9 + 0.38 * len(swings) + 0.6),
    )
    for at, swing in enumerate(reversed(swings)):
        ends = [(100 * (1 - swing.at_low.value), f"{swing.low:g}", "#8ecae6"),
                (100 * (1 - swing.at_high.value), f"{swing.high:g}", "#1b6ca8")]  # fmt: skip
        if max(value for value, *_ in ends) < 1.03 * min(value for value, *_ in ends):
            axes.text(base * 1.03, at, f"{ends[0][1]} to {ends[1][1]}: no effect", va="center",
                      fontsize=7.5, color="#777777")  # fmt: skip
            continue
        left, right = sorted(ends)
        for value, _, colour in ends:
            axes.barh(at, value - base, left=base, color=colour, height=0.62)
        for (value, text, _), shift, side in ((left, -4, "right"), (right, 4, "left")):
            axes.annotate(text, (value, at), xytext=(shift, 0), va="center", ha=side, fontsize=7.5,
                          textcoords="offset points")  # fmt: skip
    axes.axvline(base, color="#333333", linewidth=1)
    axes.set_yticks(range(len(swings)), [swing.key for swing in reversed(swings)])
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g} %"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(-0.6, len(swings) - 0.4)
    axes.set_xlabel("time that is not training (logarithmic)", fontsize=9)
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.12)
    return figure
