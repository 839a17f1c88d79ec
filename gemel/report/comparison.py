"""Several evaluations of one workload side by side: `gemel report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from gemel.report import geometry
from gemel.report.conclusion import MERGED, ORIGINALS, draw_conclusion, score_divisors
from gemel.report.document import read_report, report_path
from gemel.report.drawing import Series, draw_curve
from gemel.report.templates import render_template, two_decimals, whole_percent, without_line_breaks
from gemel.text import number, percent, size
from models.errors import InputError
from models.io import check_apart, check_output, open_atomic

MAX_REPORTS = len(ascii_uppercase)
CELL_KEYS = ("metric", "original", "merged", "ratio", "ci95", "target", "met", "certain", "worth")
SAME = 1e-9
"""Accuracies of the same original on the same frames differ by no more."""
REPORT_COLOURS = 6
"""Further reports reuse colours; their letters distinguish them."""
Document = Mapping[str, Any]


def write_comparison(reports: Sequence[str | Path], out: str | Path) -> dict[str, Any]:
    """Compare these reports, write the page, and return what it shows; InputError, with nothing written, as they do."""
    paths = [report_path(one) for one in reports]
    check_apart([("--out", out)], [("one of the reports", path) for path in paths])
    check_output(out, overwrite=True)
    found = compare_documents([(path, read_report(path)) for path in paths])
    with open_atomic(Path(out), overwrite=True) as file:
        file.write(render_comparison(found).encode("utf-8", "backslashreplace"))
    return found


def compare_documents(found: Sequence[tuple[Path, Document]]) -> dict[str, Any]:
    """The comparison of these reports (path, document), which get letters in their order.

    Raises InputError where two are not of one workload: of another name, or with other queries.
    """
    if len(found) > MAX_REPORTS:
        raise InputError("gemel report", f"{len(found)} reports are too many", f"give {MAX_REPORTS} at most")
    _check_same_workload(found)
    documents = [document for _, document in found]
    reports = [_report_summary(letter, *one) for letter, one in zip(ascii_uppercase, found, strict=False)]
    cells = [_query_cells(one["letter"], document) for one, document in zip(reports, documents, strict=True)]
    streaming = [
        row for one, document in zip(reports, documents, strict=True) for row in _stream_rows(one["letter"], document)
    ]
    return {
        "workload": documents[0]["workload"],
        "answer": _answer(reports),
        "reports": reports,
        "queries": [{"query": query, "cells": [own[query] for own in cells]} for query in cells[0]],
        "relative": score_divisors(documents[0]["offline"]) is not None,
        "streaming": streaming,
        "differences": _differences(reports, documents),
    }


def render_comparison(comparison: Document) -> str:
    """The page of a comparison (`compare_documents`)."""
    comparison = without_line_breaks(comparison)
    reports, cells = comparison["reports"], [cell for row in comparison["queries"] for cell in row["cells"]]
    kinds = {one["letter"]: f"r{index % REPORT_COLOURS}" for index, one in enumerate(reports)}
    rows = comparison["streaming"]
    memory = _common_memory(reports, rows)
    lines = [
        Series(f"{one['letter']}, {one['bundle']}", kinds[one["letter"]], _points(rows, one["letter"], MERGED))
        for one in reports
    ]
    if not comparison["differences"]:  # all reports have the same originals
        lines.insert(0, Series(ORIGINALS, ORIGINALS, _points(rows, reports[0]["letter"], ORIGINALS)))
    style = whole_percent if comparison["relative"] else two_decimals
    return render_template(
        "compare.html",
        one=comparison,
        kinds=kinds,
        most=max(max(one["bytes"]["before"], one["bytes"]["after"]) for one in reports),
        ratios=geometry.ratio_axis(cells),
        scores=geometry.unit_axis(),
        style=style,
        memory=memory,
        means={row["letter"]: row for row in rows if row["memory"] == memory},
        curve=draw_curve(lines, {row["memory_bytes"]: row["memory"] for row in rows}, style=style),
    )


def _check_same_workload(found: Sequence[tuple[Path, Document]]) -> None:
    (first, known), *others = found
    expected = {(row["query"], row["task"], row["metric"]) for row in known["offline"]}
    for path, document in others:
        if document["workload"] != known["workload"]:
            problem = f"is of workload '{document['workload']}', {first} of '{known['workload']}'"
            raise InputError(path, problem, "compare reports of one workload", "workload")
        odd = expected ^ {(row["query"], row["task"], row["metric"]) for row in document["offline"]}
        if odd:
            problem = f"does not evaluate the same queries as {first} ({min(odd)[0]})"
            raise InputError(path, problem, "compare reports of one workload", "offline")


def _report_summary(letter: str, path: Path, document: Document) -> dict[str, Any]:
    evidence = [row for row in document["offline"] if row["worth"]]
    found = draw_conclusion(document)
    return {
        "letter": letter,
        "file": str(path),
        "bundle": document["bundle"]["file"],
        "digest": document["bundle"]["digest"],
        "method": document["method"],
        "created_at": document["created_at"],
        "device": {key: document["device"][key] for key in ("title", "clock", "modelled")},
        "seeds": len(document["seeds"]),
        "headline": {key: document["headline"][key] for key in ("memory", "memory_bytes")},
        "bytes": {key: document["bytes"][key] for key in ("before", "after", "ceiling", "saved_fraction")},
        "met": sum(row["met"] for row in evidence),
        "certain": sum(row["certain"] for row in evidence),
        "of": len(document["offline"]),
        "worst_ratio": min((row["ratio"] for row in evidence), default=None),
        "sentence": found.sentence,
        "tone": found.tone.value,
        "worse": [{"query": one.query, "text": one.text} for one in found.worse],
        "commands": list(document["commands"]),
    }


def _query_cells(letter: str, document: Document) -> dict[str, dict[str, Any]]:
    """Each query of one report: its row offline, and streaming accuracy by memory and arm."""
    cells = {
        row["query"]: {"letter": letter, "streaming": {}, **{key: row[key] for key in CELL_KEYS}}
        for row in document["offline"]
    }
    for row in document["streaming"]:
        cells[row["query"]]["streaming"].setdefault(row["memory"], {})[row["arm"]] = row["accuracy"]
    return cells


def _stream_rows(letter: str, document: Document) -> list[dict[str, Any]]:
    """Both arms over all queries in each memory setting, with the lowest and the highest seed."""
    points = geometry.mean_points(document["streaming"], score_divisors(document["offline"]))
    names = {row["memory_bytes"]: row["memory"] for row in document["streaming"]}
    rows: dict[int, dict[str, Any]] = {}
    for arm, own in points.items():
        for nbytes, score, low, high in own:
            row = rows.setdefault(nbytes, {"letter": letter, "memory": names[nbytes], "memory_bytes": nbytes})
            row |= {arm: score, f"{arm}_spread": [low, high]}
    return list(rows.values())


def _answer(reports: Sequence[Document]) -> str:
    """Which report to take: the fewest bytes among those whose queries all meet their targets."""
    whole = [one for one in reports if one["met"] == one["of"]]
    if not whole:
        best = max(reports, key=lambda one: (one["met"], -one["bytes"]["after"]))
        return f"None meets every accuracy target; {_name(best)} meets most, {best['met']} of {best['of']}."
    least = min(whole, key=lambda one: one["bytes"]["after"])
    counts = least["bytes"]
    saved = f"{size(counts['after'])} instead of {size(counts['before'])}, {percent(counts['saved_fraction'], 0)} less"
    subject = "It meets every accuracy target" if len(reports) == 1 else "Fewest bytes with every accuracy target met"
    doubt = "" if least["certain"] == least["of"] else f"; {least['certain']} of {least['of']} beyond doubt"
    return f"{subject}: {_name(least)}, {saved}{doubt}."


def _name(report: Document) -> str:
    return f"{report['letter']} ({report['bundle']}, method {report['method']})"


def _differences(reports: Sequence[Document], documents: Sequence[Document]) -> list[str]:
    """What differs between these reports besides the merging, a sentence each."""
    lines = []
    known = {row["query"]: row["original"] for row in documents[0]["offline"]}
    for report, document in zip(reports[1:], documents[1:], strict=True):
        other = next((row for row in document["offline"] if abs(row["original"] - known[row["query"]]) > SAME), None)
        if other is not None:
            lines.append(
                f"{report['letter']} was evaluated against other originals than A, or on other frames: that of "
                f"{other['query']} has {number(other['original'])} instead of {number(known[other['query']])}."
            )
    for what, values in (
        ("devices", [one["device"]["title"] for one in reports]),
        ("numbers of seeds", [one["seeds"] for one in reports]),
        ("accuracy targets", [[row["target"] for row in one["offline"]] for one in documents]),
    ):
        if any(value != values[0] for value in values):
            named = [f"{one['letter']}: {value}" for one, value in zip(reports, values, strict=True)]
            detail = "" if what == "accuracy targets" else f" ({'; '.join(named)})"
            lines.append(f"The {what} differ{detail}: figures that depend on them cannot be compared.")
    return lines


def _points(rows: Sequence[Document], letter: str, arm: str) -> list[tuple[int, float, float, float]]:
    return [(row["memory_bytes"], row[arm], *row[f"{arm}_spread"]) for row in rows if row["letter"] == letter]


def _common_memory(reports: Sequence[Document], rows: Sequence[Document]) -> str | None:
    """The first report's headline memory where all reports have it, else the first setting that all have."""
    settings = [{row["memory"] for row in rows if row["letter"] == one["letter"]} for one in reports]
    shared = set.intersection(*settings)
    wanted = [reports[0]["headline"]["memory"], *(row["memory"] for row in rows)]
    return next((name for name in wanted if name in shared), None)
