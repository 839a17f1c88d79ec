"""Geometry of the report's pictures: plain numbers in, positions in per cent out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from models.metrics import KINDS

AXIS_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5)
MAX_TICKS = 6
ROUNDING = 1e-9
IN_TIME, LATE, DROPPED, FAILED, PENDING = "in time", "late", "dropped", "failed", "pending"
AGE_PERCENTILES = (50, 95, 99)
MIN_AGE_MS = 1.0
DROP_COLOURS = 4
"""Colours of drop reasons; further reasons reuse them."""
SIDES = ("original", "merged")
MAX_CLASSES = 8
"""Classes of a query that are visible without opening the rest."""
BYTE_PARTS = ("shared_part", "private")
Row = Mapping[str, Any]


class Axis:
    """A range of numbers laid over 0 to 100 per cent of a track, with regular round ticks."""

    def __init__(self, values: Sequence[float], step: float | None = None) -> None:
        low, high = min(values), max(values)
        self.step = step or next((s for s in AXIS_STEPS if (high - low) / s <= MAX_TICKS), AXIS_STEPS[-1])
        self.low = math.floor(low / self.step + ROUNDING) * self.step
        self.high = max(math.ceil(high / self.step - ROUNDING) * self.step, self.low + self.step)
        if self._steps() > 3 and self._steps() % 2:  # an even number can be thinned to every second tick
            self.high += self.step

    def at(self, value: float) -> float:
        """Position of a value in per cent of the track, clamped to it."""
        share = (value - self.low) / (self.high - self.low)
        return round(100 * min(1.0, max(0.0, share)), 2)

    def ticks(self) -> list[tuple[float, float]]:
        """(value, position) of each round number."""
        values = [self.low + self.step * index for index in range(self._steps() + 1)]
        return [(value, self.at(value)) for value in values]

    def _steps(self) -> int:
        return round((self.high - self.low) / self.step)


def unit_axis() -> Axis:
    """The axis of scores from 0 to 1."""
    return Axis([0.0, 1.0], step=0.25)


def ratio_axis(offline: Sequence[Row]) -> Axis:
    """One axis for the ratios of all queries: it holds every interval, every target, and 1."""
    values = [1.0]
    for row in offline:
        values += [row["target"], row["ratio"], *(bound for bound in row["ci95"] or () if bound is not None)]
    # Outliers of a bootstrap over few clips would flatten everything else.
    return Axis([min(1.0, max(0.0, min(values))), min(1.3, max(values))])


def byte_rows(counts: Row) -> list[dict[str, Any]]:
    """Per query its bytes before, and after as parts (name, per cent of the largest original, bytes).

    A weight shared by n queries counts 1/n for each, so that the parts of all queries add up to the bundle.
    """
    widest = max((row["before"] for row in counts["queries"]), default=1) or 1
    return [
        {
            **row,
            "before_at": round(100 * row["before"] / widest, 2),
            "parts": [(name, round(100 * row[name] / widest, 2), row[name]) for name in BYTE_PARTS if row[name]],
            "after": sum(row[name] for name in BYTE_PARTS),
        }
        for row in counts["queries"]
    ]


def total_parts(counts: Row) -> list[tuple[str, float, float]]:
    """The whole bundle as parts (name, per cent of the originals, bytes)."""
    before = counts["before"] or 1
    sums = {name: sum(row[name] for row in counts["queries"]) for name in BYTE_PARTS}
    return [(name, round(100 * nbytes / before, 2), nbytes) for name, nbytes in sums.items() if nbytes]


def sharing_matrix(shared: Sequence[Row], queries: Sequence[str]) -> list[list[dict[str, Any]]]:
    """Bytes that each two queries share (diagonal: all that a query shares), and `strength` 0..1 of the most."""
    common = {(a, b): 0 for a in queries for b in queries}
    for one in shared:
        inside = sorted({query for query, _ in one["members"]})
        for a in inside:
            for b in inside:
                common[a, b] += one["bytes"]
    largest = max(common.values(), default=0) or 1
    return [
        [{"bytes": common[a, b], "own": a == b, "strength": round(common[a, b] / largest, 3)} for b in queries]
        for a in queries
    ]


def largest_shared(shared: Sequence[Row], queries: Sequence[str]) -> list[dict[str, Any]]:
    """The shared weights, those that save most first, each with the layer that it is in every query."""
    rows = []
    for one in shared:
        paths: dict[str, list[str]] = {}
        for query, path in one["members"]:
            paths.setdefault(query, []).append(path.removesuffix(".weight"))
        rows.append({
            "bytes": one["bytes"],
            "saves": one["bytes"] * (len(one["members"]) - 1),
            "shape": "×".join(str(size) for size in one["shape"]),
            "cells": [", ".join(paths.get(query, [])) for query in queries],
        })  # fmt: skip
    return sorted(rows, key=lambda row: -row["saves"])


def streaming_panels(streaming: Sequence[Row], offline: Sequence[Row]) -> list[dict[str, Any]]:
    """Per query one row for each memory setting, with both arms on one axis."""
    known, axis = {row["query"]: row for row in offline}, unit_axis()
    found: dict[str, dict[str, Any]] = {}
    for row in sorted(streaming, key=lambda one: one["memory_bytes"]):
        merged = known[row["query"]]["merged"]
        panel = found.setdefault(
            row["query"],
            {"title": row["query"], "metric": row["metric"], "offline": merged, "offline_at": axis.at(merged),
             "settings": {}},
        )  # fmt: skip
        setting = panel["settings"].setdefault(row["memory"], {"memory": row["memory"], "bytes": row["memory_bytes"]})
        low, high = map(axis.at, row["spread"])
        setting[row["arm"]] = {**row, "at": axis.at(row["accuracy"]), "low": low, "width": high - low}
    return [{**panel, "settings": list(panel["settings"].values())} for panel in found.values()]


def mean_points(
    streaming: Sequence[Row], divisors: Mapping[str, float] | None
) -> dict[str, list[tuple[int, float, float, float]]]:
    """Arm -> (memory bytes, score, lowest and highest seed) of all queries together, seed by seed.

    `divisors` (`gemel.report.conclusion.score_divisors`) make accuracies of different metrics comparable.
    """
    found: dict[tuple[int, str], list[list[float]]] = {}
    for row in streaming:
        divisor = 1.0 if divisors is None else divisors[row["query"]]
        found.setdefault((row["memory_bytes"], row["arm"]), []).append([value / divisor for value in row["by_seed"]])
    points: dict[str, list[tuple[int, float, float, float]]] = {}
    for (nbytes, arm), rows in sorted(found.items()):
        by_seed = [sum(values) / len(values) for values in zip(*rows, strict=True)]
        points.setdefault(arm, []).append((nbytes, sum(by_seed) / len(by_seed), min(by_seed), max(by_seed)))
    return points


def outcome_rows(ledger: Sequence[Row], by: Sequence[str] = ("memory", "arm")) -> list[dict[str, Any]]:
    """Frames by outcome for each value of `by`: parts are (name, per cent, frames), in a fixed order."""
    reasons = sorted({reason for row in ledger for reason in row["dropped"]})
    found: dict[tuple[str, ...], dict[str, int]] = {}
    for row in ledger:
        counts = found.setdefault(tuple(row[key] for key in by), {})
        for name, frames in _outcomes(row, reasons):
            counts[name] = counts.get(name, 0) + frames
    return [
        {
            **dict(zip(by, key, strict=True)),
            "received": sum(counts.values()),
            "in_time": counts.get(IN_TIME, 0) / max(1, sum(counts.values())),
            "parts": [
                (name, round(100 * frames / max(1, sum(counts.values())), 2), frames)
                for name, frames in counts.items()
                if frames
            ],
        }
        for key, counts in found.items()
    ]


def outcome_classes(rows: Iterable[Row]) -> dict[str, str]:
    """Outcomes that occur in these rows, in order, and the CSS class of each."""
    names = list(dict.fromkeys(name for row in rows for name, _, _ in row["parts"]))
    reasons = [name for name in names if name.startswith(DROPPED)]
    return {
        name: f"drop{reasons.index(name) % DROP_COLOURS}" if name in reasons else name.replace(" ", "-")
        for name in names
    }


def age_rows(streaming: Sequence[Row], offline: Sequence[Row], memory: str) -> dict[str, Any]:
    """Per query the age of results at a memory setting: p50, p95 and p99 of each arm, and the SLA.

    Positions are on a logarithmic axis from 1 ms; `ticks` are (milliseconds, position) of each power of ten.
    """
    slas = {row["query"]: row["sla_ms"] for row in offline}
    rows = [row for row in streaming if row["memory"] == memory and row["age_p50_ms"] is not None]
    oldest = max([row["age_p99_ms"] for row in rows] + list(slas.values()), default=10.0)
    decades = max(1, math.ceil(math.log10(max(oldest, 10.0)) - ROUNDING))
    decades += decades > 3 and decades % 2  # an even number can be thinned to every second tick

    def at(age_ms: float) -> float:
        return round(100 * min(1.0, math.log10(max(age_ms, MIN_AGE_MS)) / decades), 2)

    queries: dict[str, dict[str, Any]] = {
        query: {"query": query, "sla_ms": sla, "sla_at": at(sla), "arms": {}} for query, sla in slas.items()
    }
    for row in rows:
        ages = [row[f"age_p{share}_ms"] for share in AGE_PERCENTILES]
        queries[row["query"]]["arms"][row["arm"]] = {"ages": ages, "at": [at(age) for age in ages]}
    ticks = [(float(10**power), round(100 * power / decades, 2)) for power in range(decades + 1)]
    return {"rows": list(queries.values()), "ticks": ticks}


def error_type_rows(offline: Sequence[Row]) -> list[dict[str, Any]]:
    """Per detection query the errors of both models as parts (kind, per cent of the longer bar, count), and by kind."""
    rows = []
    for row in offline:
        errors = row.get("errors")
        if not errors:
            continue
        most = max(sum(errors[side][kind]["count"] for kind in KINDS) for side in SIDES) or 1
        bars = {
            side: [
                (kind, round(100 * count / most, 2), count) for kind in KINDS if (count := errors[side][kind]["count"])
            ]
            for side in SIDES
        }
        kinds = [
            {"kind": kind, "more": errors["merged"][kind]["count"] > errors["original"][kind]["count"],
             **{side: errors[side][kind] for side in SIDES}}
            for kind in KINDS
        ]  # fmt: skip
        rows.append({
            "query": row["query"], "bars": bars, "kinds": kinds, "map": {side: row[f"map_{side}"] for side in SIDES}
        })  # fmt: skip
    return rows


def recall_rows(offline: Sequence[Row]) -> list[dict[str, Any]]:
    """Per classification query its classes, largest loss of recall first; `rest`: those after MAX_CLASSES."""
    rows = []
    for row in offline:
        if row.get("classes"):
            classes = sorted(row["classes"], key=lambda one: one["merged"] - one["original"])
            rows.append({"query": row["query"], "classes": classes[:MAX_CLASSES], "rest": classes[MAX_CLASSES:]})
    return rows


def timeline_rows(timeline: Row) -> list[dict[str, Any]]:
    """Per query, when its weights were resident and when it ran, in per cent of the window."""
    start, length = timeline["from_s"], max(timeline["to_s"] - timeline["from_s"], 1e-9)

    def bars(spans: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
        return [(round(100 * (a - start) / length, 3), round(100 * (b - a) / length, 3)) for a, b in spans]

    return [
        {"query": row["query"], "resident": bars(row["resident"]), "runs": bars(row["runs"])}
        for row in timeline["queries"]
    ]


def _outcomes(row: Row, reasons: Sequence[str]) -> list[tuple[str, int]]:
    return [
        (IN_TIME, row["processed"] - row["late"]),
        (LATE, row["late"]),
        *((f"{DROPPED}: {reason}", row["dropped"].get(reason, 0)) for reason in reasons),
        (FAILED, row["failed"]),
        (PENDING, row["pending"]),
    ]
