"""Each query of a merge against its original, in words.

An evaluation in a few lines, for a terminal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gemel.report.conclusion import draw_conclusion
from gemel.text import number, percent, table


def scores_text(queries: Sequence[Mapping[str, Any]]) -> str:
    """Each query against its original, as a table."""
    rows = [
        (
            row["id"],
            row["metric"],
            number(row["original"]),
            number(row["merged"]),
            percent(row["ratio"]),
            target_status(row),
        )
        for row in queries
    ]
    return table(("query", "metric", "original", "merged", "ratio", "target"), rows)


def target_status(row: Mapping[str, Any]) -> str:
    """Whether a query keeps its target, and how far to trust that."""
    if not row.get("worth", True):
        return "no evidence: the original is too weak"
    if not row["met"]:
        return "missed"
    return "met" if row["certain"] else "met, not certain"


def evaluation_text(document: Mapping[str, Any]) -> str:
    """Offline and streaming accuracy side by side, one line per query."""
    memory = list(dict.fromkeys(row["memory"] for row in document["streaming"]))
    streamed = {(row["query"], row["memory"], row["arm"]): row["accuracy"] for row in document["streaming"]}

    def along(query: str, setting: str) -> str:
        return " -> ".join(number(streamed[query, setting, arm], 2) for arm in ("originals", "merged"))

    rows = [
        (row["query"], row["metric"], number(row["original"]), number(row["merged"]), draw_conclusion(row),
         *(along(row["query"], setting) for setting in memory))
        for row in document["offline"]
    ]  # fmt: skip
    settings = tuple(f"stream, {setting}" for setting in memory)
    device = document["device"]
    return "\n".join([
        table(("query", "metric", "original", "merged", "target", *settings), rows),
        "",
        f"stream: originals -> merged under the same memory, {device['title']}, {device['clock']}"
        + (" (modelled)" if device["modelled"] else ""),
    ])  # fmt: skip


def conclusion_text(document: Mapping[str, Any]) -> str:
    """What to do, and a line for each query that merging made worse."""
    found = draw_conclusion(document)
    return "\n".join([found.sentence, *(f"  WORSE: {one.query}, {one.text}" for one in found.worse)])
