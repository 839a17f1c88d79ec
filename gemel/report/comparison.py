"""What several evaluations of one workload say beside each other, in plain values.

The page that shows evaluations beside each other, in the dress of the report.

Reports in, one page out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from gemel.report import geometry as figures
from gemel.report.conclusion import draw_conclusion
from gemel.report.document import read_report, report_path
from gemel.report.drawing import Series, draw_curve
from gemel.report.templates import render_template, without_line_breaks
from gemel.text import number, percent, size
from models.errors import InputError
from models.io import check_apart, check_output, open_atomic

MAX_REPORTS = len(ascii_uppercase)
CELL_KEYS = ("metric", "original", "merged", "ratio", "ci95", "target", "met", "certain", "worth")
"""What is told of a query in each report."""
SAME = 1e-9
"""Accuracies of the same original on the same frames differ by no more."""


def compare_documents(found: Sequence[tuple[Path, Mapping[str, Any]]]) -> dict[str, Any]:
    """The comparison of these reports (path, document), which get letters in their order.

    Raises InputError where two are not of one workload: of another name, or with other queries.
    """
    if len(found) > MAX_REPORTS:
        raise InputError("gemel report", f"{len(found)} reports are too many", f"give {MAX_REPORTS} at most")
    _check_alike(found)
    documents = [document for _, document in found]
    reports = [_told(letter, path, document) for letter, (path, document) in zip(ascii_uppercase, found, strict=False)]
    cells = [_cells(one["letter"], document) for one, document in zip(reports, documents, strict=True)]
    return {
        "workload": documents[0]["workload"],
        "answer": _answer(reports),
        "reports": reports,
        "queries": [{"query": query, "cells": [own[query] for own in cells]} for query in cells[0]],
        "streaming": [
            row for one, document in zip(reports, documents, strict=True) for row in _means(one["letter"], document)
        ],
        "differences": _differences(reports, documents),
    }


def _check_alike(found: Sequence[tuple[Path, Mapping[str, Any]]]) -> None:
    (first, known), *others = found
    asked = {(row["query"], row["task"], row["metric"]) for row in known["offline"]}
    for path, document in others:
        if document["workload"] != known["workload"]:
            fault = f"is of workload '{document['workload']}', {first} of '{known['workload']}'"
            raise InputError(path, fault, "compare reports of one workload", "workload")
        odd = asked ^ {(row["query"], row["task"], row["metric"]) for row in document["offline"]}
        if odd:
            fault = f"does not judge the same queries as {first} ({min(odd)[0]})"
            raise InputError(path, fault, "compare reports of one workload", "offline")


def _told(letter: str, path: Path, document: Mapping[str, Any]) -> dict[str, Any]:
    """One report as a whole."""
    judged = [row for row in document["offline"] if row["worth"]]
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
        "asked": {key: document["asked"][key] for key in ("memory", "memory_bytes")},
        "bytes": {key: document["bytes"][key] for key in ("before", "after", "ceiling", "saved_fraction")},
        "met": sum(row["met"] for row in judged),
        "certain": sum(row["certain"] for row in judged),
        "of": len(document["offline"]),
        "worst_ratio": min((row["ratio"] for row in judged), default=None),
        "sentence": found.sentence,
        "tone": found.tone,
        "worse": [{"query": one.query, "text": one.text} for one in found.worse],
        "commands": list(document["commands"]),
    }


def _cells(letter: str, document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Each query of one report: its row offline, and streaming accuracy by memory and arm."""
    cells = {row["query"]: {"letter": letter, **{key: row[key] for key in CELL_KEYS}} for row in document["offline"]}
    for cell in cells.values():
        cell["streaming"] = {}
    for row in document["streaming"]:
        cells[row["query"]]["streaming"].setdefault(row["memory"], {})[row["arm"]] = row["accuracy"]
    return cells


def _means(letter: str, document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The mean over queries in each memory setting, of both arms, with the least and the largest seed."""
    found: dict[tuple[int, str], dict[str, list[Sequence[float]]]] = {}
    for row in document["streaming"]:
        arms = found.setdefault((row["memory_bytes"], row["memory"]), {})
        arms.setdefault(row["arm"], []).append(row["by_seed"])
    rows = []
    for (nbytes, memory), arms in sorted(found.items()):
        told: dict[str, Any] = {"letter": letter, "memory": memory, "memory_bytes": nbytes}
        for arm, seeds in arms.items():
            means = [sum(values) / len(values) for values in zip(*seeds, strict=True)]
            told |= {arm: sum(means) / len(means), f"{arm}_spread": [min(means), max(means)]}
        rows.append(told)
    return rows


def _answer(reports: Sequence[Mapping[str, Any]]) -> str:
    """Which one to take, in a sentence: the fewest bytes among those who keep every target."""
    whole = [one for one in reports if one["met"] == one["of"]]
    if not whole:
        best = max(reports, key=lambda one: (one["met"], -one["bytes"]["after"]))
        return f"None keeps every accuracy target; {_name(best)} keeps most, {best['met']} of {best['of']}."
    least = min(whole, key=lambda one: one["bytes"]["after"])
    counts = least["bytes"]
    saved = f"{size(counts['after'])} instead of {size(counts['before'])}, {percent(counts['saved_fraction'], 0)} less"
    who = "It keeps every accuracy target" if len(reports) == 1 else "Fewest bytes with every accuracy target kept"
    return f"{who}: {_name(least)}, {saved}."


def _name(report: Mapping[str, Any]) -> str:
    return f"{report['letter']} ({report['bundle']}, method {report['method']})"


def _differences(reports: Sequence[Mapping[str, Any]], documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """What keeps these reports from being compared by merging alone, a sentence each."""
    lines = []
    known = {row["query"]: row["original"] for row in documents[0]["offline"]}
    for report, document in zip(reports[1:], documents[1:], strict=True):
        apart = [row for row in document["offline"] if abs(row["original"] - known[row["query"]]) > SAME]
        if apart:
            row = apart[0]
            lines.append(
                f"{report['letter']} was judged against other originals than A, or on other frames: that of "
                f"{row['query']} has {number(row['original'])} instead of {number(known[row['query']])}."
            )
    for what, values in (
        ("devices", [one["device"]["title"] for one in reports]),
        ("numbers of seeds", [one["seeds"] for one in reports]),
        ("accuracy targets", [[row["target"] for row in one["offline"]] for one in documents]),
    ):
        if any(value != values[0] for value in values):
            told = [f"{one['letter']}: {value}" for one, value in zip(reports, values, strict=True)]
            shown = "" if what == "accuracy targets" else f" ({'; '.join(told)})"
            lines.append(f"The {what} differ{shown}: what depends on them cannot be compared.")
    return lines


ORIGINALS = "originals"
REPORT_COLOURS = 6
"""Of reports; further ones begin again, their letters tell them apart."""


def render_comparison(comparison: Mapping[str, Any]) -> str:
    """The page of a comparison (`gemel.report.comparison`)."""
    comparison = without_line_breaks(comparison)
    reports, cells = comparison["reports"], [cell for row in comparison["queries"] for cell in row["cells"]]
    kinds = {one["letter"]: f"r{index % REPORT_COLOURS}" for index, one in enumerate(reports)}
    most = max(max(one["bytes"]["before"], one["bytes"]["after"]) for one in reports)
    rows = comparison["streaming"]
    memory = _common(reports, rows)
    lines = [_series(one, kinds[one["letter"]], rows) for one in reports]
    if not comparison["differences"]:  # the originals of one are those of all
        lines.insert(0, _series(reports[0], ORIGINALS, rows))
    return render_template(
        "compare.html",
        one=comparison,
        kinds=kinds,
        most=most,
        ratios=figures.accuracy_axis(cells),
        accuracies=figures.Axis([0.0, 1.0], step=0.2),
        memory=memory,
        means={row["letter"]: row for row in rows if row["memory"] == memory},
        curve=draw_curve(
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


def write_comparison(reports: Sequence[str | Path], out: str | Path) -> dict[str, Any]:
    """Compare these reports, write the page, and return what it shows; InputError, with nothing written, as they do."""
    paths = [report_path(one) for one in reports]
    check_apart([("--out", out)], [("one of the reports", path) for path in paths])
    check_output(out, overwrite=True)
    found = compare_documents([(path, read_report(path)) for path in paths])
    with open_atomic(Path(out), overwrite=True) as file:
        file.write(render_comparison(found).encode("utf-8", "backslashreplace"))
    return found
