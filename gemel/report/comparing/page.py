"""The page that shows evaluations beside each other, in the dress of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gemel.report import figures
from gemel.report.curve import Series, curve
from gemel.report.sheet import plain, written

ORIGINALS = "originals"
COLOURS = 6
"""Of reports; further ones begin again, their letters tell them apart."""


def render(comparison: Mapping[str, Any]) -> str:
    """The page of a comparison (`gemel.report.comparing.comparison`)."""
    comparison = plain(comparison)
    reports, cells = comparison["reports"], [cell for row in comparison["queries"] for cell in row["cells"]]
    kinds = {one["letter"]: f"r{index % COLOURS}" for index, one in enumerate(reports)}
    most = max(max(one["bytes"]["before"], one["bytes"]["after"]) for one in reports)
    rows = comparison["streaming"]
    memory = _common(reports, rows)
    lines = [_series(one, kinds[one["letter"]], rows) for one in reports]
    if not comparison["differences"]:  # the originals of one are those of all
        lines.insert(0, _series(reports[0], ORIGINALS, rows))
    return written(
        "compare.html",
        one=comparison,
        kinds=kinds,
        most=most,
        ratios=figures.accuracy_axis(cells),
        accuracies=figures.Axis([0.0, 1.0], step=0.2),
        memory=memory,
        means={row["letter"]: row for row in rows if row["memory"] == memory},
        curve=curve(
            lines,
            {row["memory_bytes"]: row["memory"] for row in rows},
        ),
    )


def _series(report: Mapping[str, Any], kind: str, rows: Sequence[Mapping[str, Any]]) -> Series:
    """The line of a report's merged models; of kind ORIGINALS that of its originals."""
    arm, name = (ORIGINALS, ORIGINALS) if kind == ORIGINALS else ("merged", f"{report['letter']}, {report['bundle']}")
    own = [row for row in rows if row["letter"] == report["letter"]]
    return Series(name, kind, [(row["memory_bytes"], row[arm], *row[f"{arm}_spread"]) for row in own])


def _common(reports: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The memory setting to look at: the first report's, where all played it, else the first that all did."""
    played = [{row["memory"] for row in rows if row["letter"] == one["letter"]} for one in reports]
    shared = set.intersection(*played)
    wanted = [reports[0]["asked"]["memory"], *(row["memory"] for row in rows)]
    return next((name for name in wanted if name in shared), None)
