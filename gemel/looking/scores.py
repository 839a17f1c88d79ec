"""Each query of a merge against its original, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gemel.text import number, percent, table


def scores_text(queries: Sequence[Mapping[str, Any]]) -> str:
    """Each query against its original, as a table."""
    rows = [
        (row["id"], row["metric"], number(row["original"]), number(row["merged"]), percent(row["ratio"]), verdict(row))
        for row in queries
    ]
    return table(("query", "metric", "original", "merged", "ratio", "target"), rows)


def verdict(row: Mapping[str, Any]) -> str:
    """Whether a query keeps its target, and how far to trust that."""
    if not row.get("worth", True):
        return "no evidence: the original is too weak"
    if not row["met"]:
        return "missed"
    return "met" if row["certain"] else "met, not certain"
