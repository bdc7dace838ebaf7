"""A study as a document, as rows and as text: every number with its interval, guesses named.

Contract: pure; nothing is written here. The document holds scenario, seed, runs and the version of
the package, so that it can be made again; `csv_text` has a line per scheme and MTBF; `text` is for
people, and ends with the inputs that nobody measured.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from simulations.study import model
from simulations.study.scenario import Scenario
from simulations.study.statistics import Estimate
from simulations.study.story import Row, Study

SHARES = ("productive", "stall", "recompute", "spares", "restore")


def origin(scenario: Scenario, runs: int, seed: int) -> dict[str, Any]:
    """What a result was made from."""
    return {
        "scenario": scenario.name,
        "about": scenario.about,
        "version": version("p2pckpt"),
        "runs": runs,
        "seed": seed,
        "inputs": [asdict(note) for note in scenario.notes],
        "guesses": sum(note.guess for note in scenario.notes),
    }


def document(study: Study) -> dict[str, Any]:
    """The whole study as plain values."""
    valley = study.intervals
    found = {
        **origin(study.scenario, study.runs, study.seed),
        "rows": [row_document(row) for row in study.rows],
        "intervals": {
            **asdict(valley),
            "flat_s": list(valley.flat_s),
        },
        "domain_loss": [asdict(curve) for curve in study.domains],
        "scatter": [asdict(point) for point in study.scatter],
        "sensitivity": [asdict(swing) for swing in study.sensitivity],
    }
    rounded: dict[str, Any] = _rounded(found)
    return rounded


def _rounded(value: Any) -> Any:
    """Numbers to 7 digits: more is noise."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list | tuple) else value


def row_document(row: Row) -> dict[str, Any]:
    """One row as plain values; lost work without its quantiles but the usual ones."""
    quantiles = row.lost_quantiles_s
    at = {"p50": 100, "p90": 180, "p99": 198, "max": 200}
    return {
        "scheme": row.scheme.name,
        "in_product": row.scheme.product,
        "mtbf_s": row.mtbf_s,
        "runs": row.runs,
        "ettr": asdict(row.ettr),
        "gain_over_first": asdict(row.gain),
        "time": {
            name: asdict(e) for name, e in zip(model.STAGES, row.stages, strict=True)
        },
        "interval_s": row.plan.interval_s,
        "store_interval_s": row.plan.every * row.plan.interval_s or None,
        "reasons": list(row.plan.schedule.reasons),
        "lost_work_s": {
            **asdict(row.lost_s),
            **{name: quantiles[i] for name, i in at.items()},
        },
        "fallback_share": asdict(row.fallback),
        "fallback_share_stratified": row.plan.deep_share if row.scheme.memory else None,
        "recovered": {
            fate.value: dict(zip(model.SOURCES, counts, strict=True))
            for fate, counts in zip(model.FATES, row.recovered, strict=True)
        },
        "ram_beside_own_copy": row.scheme.ram,
        "sent_per_save": row.scheme.sent,
        "read_to_rebuild": row.scheme.read,
        "counts": row.counts,
    }  # fmt: skip


def csv_text(rows: Sequence[Row]) -> str:
    """One line per scheme and MTBF, each estimate as value, low, high."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    estimates = ("ettr", "gain", "lost_work_s", "fallback", *(f"time_{s}" for s in model.STAGES))
    writer.writerow(
        ["scheme", "mtbf_h", "runs", "interval_s", "ram", "sent", "stratified_fallback",
         "incidents", "events"]
        + [f"{name}{end}" for name in estimates for end in ("", "_low", "_high")]
    )  # fmt: skip
    for row in rows:
        found = (row.ettr, row.gain, row.lost_s, row.fallback, *row.stages)
        writer.writerow(
            [row.scheme.name, f"{row.mtbf_s / 3600:g}", row.runs, f"{row.plan.interval_s:.6g}",
             f"{row.scheme.ram:.6g}", f"{row.scheme.sent:.6g}", f"{row.plan.deep_share:.6g}",
             row.counts["incidents"], row.counts["events"]]
            + [f"{x:.7g}" for e in found for x in (e.value, e.low, e.high)]
        )  # fmt: skip
    return out.getvalue()


# -- for people --------------------------------------------------------------------------------


def text(study: Study) -> str:
    """Tables, what they say, and what they rest on."""
    parts = [headline(study)]
    for mtbf in dict.fromkeys(row.mtbf_s for row in study.rows):
        parts.append(f"A failure every {mtbf / 3600:.3g} h\n" + table(study.at(mtbf)))
    parts.append(_valley(study))
    if study.sensitivity:
        parts.append(_swings(study))
    parts.append(effort(study.rows, study.runs))
    return "\n\n".join((*parts, guesses(study.scenario)))


def effort(rows: Sequence[Row], runs: int) -> str:
    """What was simulated."""
    events, snapshots, failures = (
        sum(row.counts[what] for row in rows) for what in ("events", "snapshots", "failures")
    )
    return (
        f"{failures:,} failures, {events:,} events, {snapshots:,} snapshots in {len(rows)} rows of "
        f"{runs} runs"
    )


def headline(study: Study) -> str:
    """The main sentence: the first scheme against the store alone, at the scenario's MTBF."""
    rows = {row.scheme.name: row for row in study.close}
    first = study.close[0]
    hours = first.mtbf_s / 3600
    said = (
        f"{study.scenario.about}.\nWith {first.scheme.name} and a failure every {hours:.3g} h the "
        f"job trains {percent(first.ettr)} of the time; an incident costs "
        f"{first.lost_s.value:.3g} s of work on average"
    )
    if "s3" in rows:
        other = rows["s3"]
        said += f". With the store alone it is {percent(other.ettr)} and {other.lost_s.value:.3g} s"
    share = f"{first.fallback.value:.2%}" if first.fallback.value else (
        f"fewer than {first.fallback.high:.2%} (none was seen)"
    )  # fmt: skip
    return f"{said}.\nOf all incidents {share} were too deep for RAM."


def table(rows: Sequence[Row]) -> str:
    """A line per scheme."""
    head = ("scheme", "ETTR", "+-", "against first", *SHARES, "lost/incident", "from store",
            "RAM", "interval")  # fmt: skip
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        share = dict(zip(model.STAGES, row.stages, strict=True))
        lines.append((
            row.scheme.name + ("" if row.scheme.product else " *"),
            f"{row.ettr.value:.3%}",
            f"{row.ettr.half_width:.3%}",
            f"{row.gain.value:+.3%} ({row.gain.half_width:.3%})",
            *(f"{share[name].value:.3%}" for name in SHARES),
            f"{row.lost_s.value:.4g} s",
            _fallback(row),
            f"{row.scheme.ram:.3g} x",
            f"{row.plan.interval_s:.4g} s",
        ))  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    shown = ("  ".join(c.ljust(n) for c, n in zip(line, widths, strict=True)) for line in lines)
    note = "\n* studied, not in the product" if any(not r.scheme.product for r in rows) else ""
    return "\n".join(line.rstrip() for line in shown) + note


def _fallback(row: Row) -> str:
    if not row.scheme.memory:
        return "all"
    found = row.fallback
    return f"{found.value:.3%}" if found.value else f"< {found.high:.2g}"


def _valley(study: Study) -> str:
    valley = study.intervals
    low, high = valley.flat_s
    return (
        f"Interval of {valley.scheme}: Young {valley.young_s:.3g} s, Daly {valley.daly_s:.3g} s, "
        f"chosen {valley.decided_s:.3g} s.\nFrom {low:.3g} s to {high:.3g} s the ETTR is within "
        "1 % of the best simulated one."
    )


def _swings(study: Study) -> str:
    lines = ["What the answer rests on (ETTR at both ends of each input's range):"]
    for swing in study.sensitivity:
        lines.append(
            f"  {swing.key:28} {swing.low:9.4g} -> {percent(swing.at_low):8} "
            f"{swing.high:9.4g} -> {percent(swing.at_high)}"
        )
    return "\n".join(lines)


def guesses(scenario: Scenario) -> str:
    """The inputs that nobody measured."""
    found = [note for note in scenario.notes if note.guess]
    lines = [f"{len(found)} of {len(scenario.notes)} inputs are guesses:"]
    lines += [f"  {note.key} = {note.value}: {note.text}" for note in found]
    return "\n".join(lines)


def percent(found: Estimate) -> str:
    """A share for people."""
    return f"{found.value:.2%}"
