"""What merging cost, by kind of error and by class: the geometry of the report's bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from models.metrics import KINDS

SIDES = ("original", "merged")
MAX_CLASSES = 8
"""Classes of a query that are seen at once."""


def error_rows(offline: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
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


def class_rows(offline: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per classification query its classes, those first whose recall fell most; `rest`: those after MAX_CLASSES."""
    rows = []
    for row in offline:
        if row.get("classes"):
            classes = sorted(row["classes"], key=lambda one: one["merged"] - one["original"])
            rows.append({"query": row["query"], "classes": classes[:MAX_CLASSES], "rest": classes[MAX_CLASSES:]})
    return rows
