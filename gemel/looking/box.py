"""What became of the frames of a box that ran."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemel.text import duration, size, table


def box_text(summary: Mapping[str, Any]) -> str:
    """The ledger of a box as a table, what became of its results, and what was moved for it."""
    rows = [
        (row["query"], row["received"], row["processed"], row["late"], sum(row["dropped"].values()), row["failed"],
         row["pending"])
        for row in summary["ledger"]
    ]  # fmt: skip
    sinks = [
        f"sink {sink['kind']}: {sink['delivered']} delivered"
        + "".join(f", {count} {reason}" for reason, count in sink["undelivered"].items())
        for sink in summary["sinks"]
    ]
    wrong = [f"camera {one['id']}: {one['error']}" for one in summary["cameras"] if one["error"] is not None]
    return "\n".join([
        table(("query", "received", "processed", "of these late", "dropped", "failed", "pending"), rows),
        "",
        *wrong,
        *sinks,
        f"{duration(summary['seconds'])} until {summary['stopped_by']}: {size(summary['bytes_moved'])} moved in "
        f"{summary['swaps']} loads, at most {size(summary['max_used_bytes'])} of {size(summary['budget_bytes'])} used",
    ])  # fmt: skip
