"""A drift check in a few lines, for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemel.text import number, table
from models.evaluation import BELOW, KEPT, TOO_FEW, UNSURE

WORDS = {
    KEPT: "on target", BELOW: "BELOW its target", UNSURE: "below its target, perhaps by chance",
    TOO_FEW: "too few frames with something to compare: nothing can be said",
}  # fmt: skip


def check_text(found: Mapping[str, Any]) -> str:
    """A line for each query, what was left out, and what is to be done."""
    rows = [
        (row["id"], row["metric"], row["frames"], number(row["ratio"]), _interval(row["ci95"]), number(row["target"]),
         _verdict(row))
        for row in found["queries"]
    ]  # fmt: skip
    lines = [
        table(("query", "metric", "frames", "ratio", "95 % interval", "target", "verdict"), rows),
        "",
        f"samples of bundle {found['bundle']}"
        + "".join(f"; left out: {count} {reason}" for reason, count in found["left_out"].items()),
    ]
    if found["out"] is not None:
        lines.append(f"{found['out']}: written; `gemel bundle diff OLD {found['out']} -o update` is what ships")
    elif any(row["verdict"] == BELOW and row["note"] is None for row in found["queries"]):
        lines.append("with -o FILE a bundle is written in which what is below has its own weights again")
    if not found["told"]:
        lines.append(f"{found['spool']} cannot be written: the box is not told")
    return "\n".join(lines)


def _verdict(row: Mapping[str, Any]) -> str:
    more = "; has its own weights again" if row["reverted"] else f"; {row['note']}" if row["note"] else ""
    return WORDS[row["verdict"]] + more


def _interval(ci95: list[float] | None) -> str:
    return "-" if ci95 is None else f"{ci95[0]:.3f} to {ci95[1]:.3f}"
