"""The first screen's three pictures: bytes, accuracy kept, accuracy on the stream; who lost stands out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gemel.report.figures import Axis, accuracy_axis, total_parts
from gemel.report.verdict import SEEN, asked_of, streamed_at

MAX_ROWS = 8
"""Queries in a picture of the first screen, those who lost first; the sections below show all."""


def first_screen(document: Mapping[str, Any]) -> dict[str, Any]:
    """`bytes`, `kept`, and `stream` (None without streams): positions in per cent, `lost` where a query lost."""
    return {
        "bytes": _bytes(document["bytes"]),
        "kept": _kept(document["offline"]),
        "stream": _stream(document),
    }


def _bytes(counts: Mapping[str, Any]) -> dict[str, Any]:
    least = counts["before"] - counts["ceiling"]
    return {"parts": total_parts(counts), "least": least, "least_at": round(100 * least / (counts["before"] or 1), 2)}


def _kept(offline: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    axis = accuracy_axis(offline)
    rows = [
        {
            "query": row["query"], "ratio": row["ratio"], "at": axis.at(row["ratio"]), "weak": not row["worth"],
            "target": row["target"], "target_at": axis.at(row["target"]), "lost": row["worth"] and not row["met"],
            "reach": None if row["ci95"] is None else tuple(map(axis.at, row["ci95"])),
        }
        for row in offline
    ]  # fmt: skip
    judged = [row for row in offline if row["worth"]]
    met, certain = (sum(row[name] for row in judged) for name in ("met", "certain"))
    return {"met": met, "certain": certain, "of": len(offline), "one_at": axis.at(1.0), "axis": axis, **_few(rows)}


def _stream(document: Mapping[str, Any]) -> dict[str, Any] | None:
    asked = asked_of(document)
    if asked is None:
        return None
    axis, rows = Axis([0.0, 1.0], step=0.2), []
    for query, (before, after) in streamed_at(document, asked[0]).items():
        rows.append({
            "query": query, "before": before, "after": after, "before_at": axis.at(before), "after_at": axis.at(after),
            "lost": before - after > SEEN,
        })  # fmt: skip
    means = {name: sum(row[name] for row in rows) / len(rows) for name in ("before", "after")}
    return {"memory": asked[0], "nbytes": asked[1], "axis": axis, **means, **_few(rows)}


def _few(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """As many as a picture holds: all in order, or those who lost first."""
    shown = rows if len(rows) <= MAX_ROWS else sorted(rows, key=lambda row: not row["lost"])[:MAX_ROWS]
    return {"rows": shown, "more": len(rows) - len(shown)}
