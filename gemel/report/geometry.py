"""The geometry of the report's pictures: plain numbers in, positions in per cent out; the page only places them.

What became of frames and how old answers were: the geometry of the report's bars.

What merging cost, by kind of error and by class: the geometry of the report's bars.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from models.metrics import KINDS

AXIS_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5)
MAX_TICKS = 6
ROUNDING = 1e-9


class Axis:
    """A stretch of numbers laid over 0 to 100 per cent of a track, with round ticks."""

    def __init__(self, values: Sequence[float], step: float | None = None) -> None:
        low, high = min(values), max(values)
        self.step = step or next((s for s in AXIS_STEPS if (high - low) / s <= MAX_TICKS), AXIS_STEPS[-1])
        self.low = math.floor(low / self.step + ROUNDING) * self.step
        self.high = max(math.ceil(high / self.step - ROUNDING) * self.step, self.low + self.step)

    def at(self, value: float) -> float:
        """Where a value lies, in per cent of the track, never outside it."""
        share = (value - self.low) / (self.high - self.low)
        return round(100 * min(1.0, max(0.0, share)), 2)

    def ticks(self) -> list[tuple[float, float]]:
        """(value, position) of each round number."""
        count = round((self.high - self.low) / self.step)
        values = [self.low + self.step * index for index in range(count + 1)]
        return [(value, self.at(value)) for value in values]


def byte_rows(counts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Per query its bytes before, and after as parts (private, its part of the shared), in per cent.

    A weight shared by n queries counts 1/n for each, so that the parts of all queries add up to the bundle.
    """
    rows = counts["queries"]
    widest = max((row["before"] for row in rows), default=1) or 1

    def share(nbytes: float) -> float:
        return round(100 * nbytes / widest, 2)

    return [
        {
            **row,
            "before_at": share(row["before"]),
            "parts": [(name, share(row[name]), row[name]) for name in ("shared_part", "private") if row[name]],
            "after": row["shared_part"] + row["private"],
        }
        for row in rows
    ]


def total_parts(counts: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """The whole bundle as parts (name, per cent of the originals, bytes)."""
    before = counts["before"] or 1
    sums = {name: sum(row[name] for row in counts["queries"]) for name in ("shared_part", "private")}
    return [(name, round(100 * nbytes / before, 2), nbytes) for name, nbytes in sums.items() if nbytes]


def sharing_matrix(shared: Sequence[Mapping[str, Any]], queries: Sequence[str]) -> list[list[dict[str, Any]]]:
    """Bytes that each two queries have in common, and how strong that is (0..1 of the largest pair)."""
    common = {(a, b): 0 for a in queries for b in queries}
    for one in shared:
        inside = sorted({query for query, _ in one["members"]})
        for a in inside:
            for b in inside:
                common[a, b] += one["bytes"]
    largest = max((nbytes for (a, b), nbytes in common.items() if a != b), default=0) or 1
    return [
        [{"bytes": common[a, b], "own": a == b, "strength": round(common[a, b] / largest, 3)} for b in queries]
        for a in queries
    ]


def top_sets(shared: Sequence[Mapping[str, Any]], queries: Sequence[str]) -> list[dict[str, Any]]:
    """The shared weights that save most, each with the layer it is in every query."""
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
    rows.sort(key=lambda row: -row["saves"])
    return rows


def accuracy_axis(offline: Sequence[Mapping[str, Any]]) -> Axis:
    """One axis for the ratios of all queries: it holds every interval, every target, and 1."""
    values = [1.0]
    for row in offline:
        values += [row["target"], row["ratio"], *(bound for bound in row["ci95"] or () if bound is not None)]
    # Outliers of a bootstrap over few clips would flatten everything else.
    return Axis([min(1.0, max(0.0, min(values))), min(1.3, max(values))])


def streaming_panels(streaming: Sequence[Mapping[str, Any]], offline: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Per query, and for the mean of all, one row per memory setting with both arms on one axis."""
    by_query: dict[str, list[Mapping[str, Any]]] = {}
    for row in streaming:
        by_query.setdefault(row["query"], []).append(row)
    known = {row["query"]: row["merged"] for row in offline}
    values = [bound for row in streaming for bound in row["spread"]] + list(known.values()) + [0.0, 1.0]
    axis = Axis(values, step=0.2)
    panels = [_panel(query, rows, known.get(query), axis) for query, rows in by_query.items()]
    mean = _panel("all queries, mean", _mean_rows(streaming), sum(known.values()) / len(known) if known else None, axis)
    return {"axis": axis, "mean": mean, "queries": panels}


def _panel(title: str, rows: Sequence[Mapping[str, Any]], offline: float | None, axis: Axis) -> dict[str, Any]:
    settings: dict[str, dict[str, Any]] = {}
    for row in rows:
        setting = settings.setdefault(row["memory"], {"memory": row["memory"], "bytes": row["memory_bytes"]})
        low, high = row["spread"]
        setting[row["arm"]] = {
            **row, "at": axis.at(row["accuracy"]), "low": axis.at(low), "width": axis.at(high) - axis.at(low),
        }  # fmt: skip
    return {
        "title": title,
        "metric": rows[0]["metric"] if rows else "",
        "offline": offline,
        "offline_at": None if offline is None else axis.at(offline),
        "settings": sorted(settings.values(), key=lambda one: one["bytes"]),
    }


def _mean_rows(streaming: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The mean over queries of each arm under each memory setting, seed by seed."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in streaming:
        found.setdefault((row["arm"], row["memory"]), []).append(row)
    means = []
    for (arm, memory), rows in found.items():
        by_seed = [sum(values) / len(values) for values in zip(*(row["by_seed"] for row in rows), strict=True)]
        means.append({
            "arm": arm, "memory": memory, "memory_bytes": rows[0]["memory_bytes"], "metric": "",
            "accuracy": sum(by_seed) / len(by_seed), "spread": [min(by_seed), max(by_seed)], "age_p95_ms": None,
        })  # fmt: skip
    return means


def swapping_rows(swapping: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each arm in each memory setting the share of frames processed, and the bytes moved for each of them."""
    return [
        {
            "memory": one["memory"],
            "arm": one["arm"],
            "processed": one["processed"] / max(1, one["received"]),
            "moved": one["bytes_moved"] / max(1, one["processed"]),
        }
        for one in swapping
    ]


def timeline_rows(timeline: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Per query, when its weights were resident and when it ran, in per cent of the window."""
    start, length = timeline["from_s"], max(timeline["to_s"] - timeline["from_s"], 1e-9)

    def bars(spans: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
        return [(round(100 * (a - start) / length, 3), round(100 * (b - a) / length, 3)) for a, b in spans]

    return [
        {"query": row["query"], "resident": bars(row["resident"]), "runs": bars(row["runs"])}
        for row in timeline["queries"]
    ]


IN_TIME, LATE, DROPPED, FAILED, PENDING = "in time", "late", "dropped", "failed", "pending"
SHARES = (50, 95, 99)
MIN_AGE_MS = 1.0
DROP_KINDS = 4
"""How many reasons for dropping have a colour of their own; further ones begin again."""


def outcome_rows(ledger: Sequence[Mapping[str, Any]], by: Sequence[str] = ("memory", "arm")) -> list[dict[str, Any]]:
    """For each of what `by` names, these frames by fate: parts are (name, per cent, frames), in a fixed order."""
    reasons = sorted({reason for row in ledger for reason in row["dropped"]})
    found: dict[tuple[str, ...], dict[str, int]] = {}
    for row in ledger:
        fates = found.setdefault(tuple(row[key] for key in by), {})
        for name, frames in _fates(row, reasons):
            fates[name] = fates.get(name, 0) + frames
    return [
        {**dict(zip(by, key, strict=True)), "received": sum(fates.values()), "parts": _parts(fates)}
        for key, fates in found.items()
    ]


def outcome_classes(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The fates that occur in these rows, in order, and the class that each is drawn by."""
    names = list(dict.fromkeys(name for row in rows for name, _, _ in row["parts"]))
    reasons = [name for name in names if name.startswith(DROPPED)]
    return {
        name: f"drop{reasons.index(name) % DROP_KINDS}" if name in reasons else name.replace(" ", "-") for name in names
    }


def age_rows(
    streaming: Sequence[Mapping[str, Any]], offline: Sequence[Mapping[str, Any]], memory: str
) -> dict[str, Any]:
    """Per query the ages of answers in a memory setting: p50, p95 and p99 of each arm, and its SLA.

    `at` are places in per cent on an axis of powers of ten, which begins at 1 ms: the answers that swapping makes wait
    are a hundred times older than others. `ticks` are (milliseconds, place) of each power.
    """
    slas = {row["query"]: row["sla_ms"] for row in offline}
    rows = [row for row in streaming if row["memory"] == memory and row["age_p50_ms"] is not None]
    oldest = max([row["age_p99_ms"] for row in rows] + list(slas.values()), default=10.0)
    decades = max(1, math.ceil(math.log10(max(oldest, 10.0)) - 1e-9))

    def at(age_ms: float) -> float:
        return round(100 * min(1.0, math.log10(max(age_ms, MIN_AGE_MS)) / decades), 2)

    queries: dict[str, dict[str, Any]] = {
        query: {"query": query, "sla_ms": sla, "sla_at": at(sla), "arms": {}} for query, sla in slas.items()
    }
    for row in rows:
        ages = [row[f"age_p{share}_ms"] for share in SHARES]
        queries[row["query"]]["arms"][row["arm"]] = {"ages": ages, "at": [at(age) for age in ages]}
    ticks = [(float(10**power), round(100 * power / decades, 2)) for power in range(decades + 1)]
    return {"rows": list(queries.values()), "ticks": ticks}


def _fates(row: Mapping[str, Any], reasons: Sequence[str]) -> list[tuple[str, int]]:
    return [
        (IN_TIME, row["processed"] - row["late"]), (LATE, row["late"]),
        *((f"{DROPPED}: {reason}", row["dropped"].get(reason, 0)) for reason in reasons),
        (FAILED, row["failed"]), (PENDING, row["pending"]),
    ]  # fmt: skip


def _parts(fates: Mapping[str, int]) -> list[tuple[str, float, int]]:
    whole = sum(fates.values()) or 1
    return [(name, round(100 * frames / whole, 2), frames) for name, frames in fates.items() if frames]


SIDES = ("original", "merged")
MAX_CLASSES = 8
"""Classes of a query that are seen at once."""


def error_type_rows(offline: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per detection query: both models' errors as parts (kind, per cent of the longer bar, count), and a row for each
    kind with both counts, what mending it would bring, and whether merging made more of it.
    """
    rows = []
    for row in offline:
        if not row.get("errors"):
            continue
        errors = row["errors"]
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
        maps = {side: row[f"map_{side}"] for side in SIDES}
        rows.append({"query": row["query"], "bars": bars, "kinds": kinds, "map": maps})
    return rows


def recall_rows(offline: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per classification query its classes, those first whose recall fell most; `rest`: those after MAX_CLASSES."""
    rows = []
    for row in offline:
        if row.get("classes"):
            classes = sorted(row["classes"], key=lambda one: one["merged"] - one["original"])
            rows.append({"query": row["query"], "classes": classes[:MAX_CLASSES], "rest": classes[MAX_CLASSES:]})
    return rows
