"""What became of the frames of a box that ran; what a check of one found."""

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
        f"sink {sink['kind']}: {sink['delivered']} delivered{_counts(sink['undelivered'])}" for sink in summary["sinks"]
    ]
    spool = summary["spool"]
    kept = [] if spool is None else [f"spool: {spool['samples']} samples kept{_counts(spool['unsampled'])}"]
    wrong = [f"camera {one['id']}: {one['error']}" for one in summary["cameras"] if one["error"] is not None]
    return "\n".join([
        table(("query", "received", "processed", "of these late", "dropped", "failed", "pending"), rows),
        "",
        *wrong,
        *sinks,
        *kept,
        f"{duration(summary['seconds'])} until {summary['stopped_by']}: {size(summary['bytes_moved'])} moved in "
        f"{summary['swaps']} loads, at most {size(summary['max_used_bytes'])} of {size(summary['budget_bytes'])} used",
    ])  # fmt: skip


def checked_text(config: str, summary: Mapping[str, Any]) -> str:
    """What `gemel run --check` found sound, and who answers."""
    fits = "everything stays resident" if summary["fits"] else "queries take turns in memory"
    needs = f"{size(summary['weights_bytes'])} of weights, {size(summary['workspace_bytes'])} of workspace"
    copied = [f"; {query} copies {size(count)} in every run" for query, count in summary["overflow_bytes"].items()]
    cameras = [
        f"{one['id']} {one['width']}x{one['height']}" if one["answers"] else f"{one['id']} does not answer"
        for one in summary["cameras"]
    ]
    sinks = [one["name"] if one["answers"] else f"{one['name']} does not answer" for one in summary["sinks"]]
    return "\n".join([
        f"{config}: sound; {needs}, budget {size(summary['budget_bytes'])}: {fits}{''.join(copied)}",
        f"cameras: {', '.join(cameras)}",
        f"sinks: {', '.join(sinks)}",
    ])  # fmt: skip


def _counts(by_reason: Mapping[str, int]) -> str:
    return "".join(f", {count} {reason}" for reason, count in by_reason.items())
