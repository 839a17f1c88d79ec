"""An evaluation in a few lines, for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemel.looking.scores import verdict as kept
from gemel.report.verdict import verdict
from gemel.text import number, table


def evaluation_text(document: Mapping[str, Any]) -> str:
    """Offline and streaming accuracy side by side, one line per query."""
    memory = list(dict.fromkeys(row["memory"] for row in document["streaming"]))
    streamed = {(row["query"], row["memory"], row["arm"]): row["accuracy"] for row in document["streaming"]}

    def along(query: str, setting: str) -> str:
        return " -> ".join(number(streamed[query, setting, arm], 2) for arm in ("originals", "merged"))

    rows = [
        (row["query"], row["metric"], number(row["original"]), number(row["merged"]), kept(row),
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


def verdict_text(document: Mapping[str, Any]) -> str:
    """What to do, and a line for each query that merging made worse."""
    found = verdict(document)
    return "\n".join([found.sentence, *(f"  WORSE: {one.query}, {one.text}" for one in found.worse)])
