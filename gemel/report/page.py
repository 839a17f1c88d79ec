"""The first screen's three pictures: bytes, accuracy kept, accuracy on the stream; who lost stands out.

The report as one self-contained HTML page, readable on a phone, in the dark and on paper.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from gemel.report import drawing
from gemel.report import geometry as figures
from gemel.report.conclusion import VISIBLE_DIFFERENCE, draw_conclusion, reported_memory, stream_accuracies
from gemel.report.drawing import Series, draw_boxes, draw_curve
from gemel.report.examples import ARMS
from gemel.report.geometry import (
    IN_TIME,
    Axis,
    accuracy_axis,
    age_rows,
    error_type_rows,
    outcome_classes,
    outcome_rows,
    recall_rows,
    total_parts,
)
from gemel.report.templates import render_template, short, without_line_breaks, words
from gemel.text import size

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
    asked = reported_memory(document)
    if asked is None:
        return None
    axis, rows = Axis([0.0, 1.0], step=0.2), []
    for query, (before, after) in stream_accuracies(document, asked[0]).items():
        rows.append({
            "query": query, "before": before, "after": after, "before_at": axis.at(before), "after_at": axis.at(after),
            "lost": before - after > VISIBLE_DIFFERENCE,
        })  # fmt: skip
    means = {name: sum(row[name] for row in rows) / len(rows) for name in ("before", "after")}
    return {"memory": asked[0], "nbytes": asked[1], "axis": axis, **means, **_few(rows)}


def _few(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """As many as a picture holds: all in order, or those who lost first."""
    shown = rows if len(rows) <= MAX_ROWS else sorted(rows, key=lambda row: not row["lost"])[:MAX_ROWS]
    return {"rows": shown, "more": len(rows) - len(shown)}


SETS_SHOWN = 16
BYTE_KINDS = (
    ("shared_part", "shared with others (this query's part)"),
    ("private", "its own"),
)
MIN_RUN = 0.12
"""Per cent of the timeline, so that a short run is seen."""


def render_report(document: Mapping[str, Any], photos: Sequence[str] = ()) -> str:
    """The page of a report document (`gemel.evaluation`).

    All that it shows comes from the document but the `photos` of its `examples`, JPEGs in base64; without them the
    boxes stand on an empty ground.
    """
    document = without_line_breaks(document)
    offline, asked = document["offline"], reported_memory(document)
    queries = [row["query"] for row in offline]
    sets = figures.top_sets(document["shared"], queries)
    total_parts = figures.total_parts(document["bytes"])
    return render_template(
        "page.html",
        doc=document,
        photos=photos,
        queries=queries,
        asked=asked,
        verdict=draw_conclusion(document),
        first=first_screen(document),
        byte_rows=figures.byte_rows(document["bytes"]),
        total_parts=total_parts,
        byte_kinds=_byte_kinds({name for name, _, _ in total_parts}),
        parts_said=_parts_said,
        counts_said=_counts_said,
        matrix=figures.sharing_matrix(document["shared"], queries),
        sets=sets,
        sets_shown=sets[:SETS_SHOWN],
        ratios=figures.accuracy_axis(offline),
        errors=error_type_rows(offline),
        classes=recall_rows(offline),
        **(_on_the_stream(document, asked[0]) if asked else {}),
        timelines=[{**one, "rows": figures.timeline_rows(one)} for one in document["timeline"]],
        spans=_spans,
        groups=_groups(document["examples"]),
        boxed=any(one["task"] == "detection" for one in document["examples"]),
        overlay=draw_boxes,
    )


def _on_the_stream(document: Mapping[str, Any], memory: str) -> dict[str, Any]:
    """What the sections about the stream draw; single queries at the memory setting that was asked for."""
    panels = figures.streaming_panels(document["streaming"], document["offline"])
    mean = panels["mean"]
    moved = {(row["memory"], row["arm"]): row for row in figures.swapping_rows(document["swapping"])}
    fates = outcome_rows(document["ledger"])
    of_queries = outcome_rows([row for row in document["ledger"] if row["memory"] == memory], by=("query", "arm"))
    kinds = outcome_classes([*fates, *of_queries])
    three = [row for row in document["side_by_side"] if row["memory"] == memory]
    return {
        "streaming": panels,
        "spreads": _spreads,
        "curve": draw_curve(
            [_series(arm, mean["settings"]) for arm in ("originals", "merged")],
            {one["bytes"]: one["memory"] for one in mean["settings"]},
            ("merged, offline", mean["offline"]),
        ),
        "three": [
            {**row, "lost": row["originals_streaming"] - row["merged_streaming"] > VISIBLE_DIFFERENCE} for row in three
        ],
        "fates": [
            {**row, **moved[row["memory"], row["arm"]], "in_time": _in_time(row)} for row in fates
        ],
        "fates_by_query": [{**row, "in_time": _in_time(row)} for row in of_queries],
        "fate_kinds": [(kind, name, "") for name, kind in kinds.items()],
        "fates_said": lambda parts: [(kinds[name], share, f"{name}: {frames}") for name, share, frames in parts],
        "ages": age_rows(document["streaming"], document["offline"], memory),
    }  # fmt: skip


def _series(arm: str, settings: Sequence[Mapping[str, Any]]) -> Series:
    return Series(arm, arm, [(one["bytes"], one[arm]["accuracy"], *one[arm]["spread"]) for one in settings])


def _byte_kinds(present: Collection[str]) -> list[tuple[str, str, str]]:
    """The legend of the bytes: (class, name, shape) of what is drawn, and of nothing else."""
    return [("before", "original", ""), *((kind, name, "") for kind, name in BYTE_KINDS if kind in present)]


def _parts_said(parts: Iterable[tuple[str, float, float]]) -> list[tuple[str, float, str]]:
    return [(name, share, f"{words(name)}: {size(nbytes)}") for name, share, nbytes in parts]


def _counts_said(parts: Iterable[tuple[str, float, int]]) -> list[tuple[str, float, str]]:
    return [(name, share, f"{name}: {count}") for name, share, count in parts]


def _in_time(row: Mapping[str, Any]) -> float:
    frames = sum(frames for name, _, frames in row["parts"] if name == IN_TIME)
    return frames / max(1, row["received"])


def _spreads(setting: Mapping[str, Any]) -> list[Markup]:
    """Both arms of one memory setting on a track."""
    shapes = []
    for arm in ("originals", "merged"):
        one = setting[arm]
        shapes.append(drawing.reach(one["low"], one["low"] + one["width"], arm))
        shapes.append(drawing.dot(one["at"], arm, f"{arm}: {short(one['accuracy'])}"))
    return shapes


def _spans(row: Mapping[str, Any]) -> list[Markup]:
    """When a query was resident, and when it ran."""
    resident = [drawing.rect(x, width, "resident") for x, width in row["resident"]]
    return resident + [drawing.rect(x, max(width, MIN_RUN), "run", y="4", height="14") for x, width in row["runs"]]


def _groups(examples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The example frames by query, the query with the worst frame first; `at` is a frame's place among the photos."""
    found: dict[str, dict[str, Any]] = {}
    for at, one in enumerate(examples):
        group = found.setdefault(one["query"], {"query": one["query"], "task": one["task"], "rows": []})
        group["rows"].append({**one, "at": at, **(_said(one) if one["task"] == "detection" else {})})
    groups = sorted(found.values(), key=lambda group: -max(row["lost"] for row in group["rows"]))
    return [{**group, **_group_said(group["task"], group["rows"])} for group in groups]


def _said(example: Mapping[str, Any]) -> dict[str, Any]:
    """A detection example in words: what each model did on it, and what merging cost there."""
    said = {}
    for arm in ARMS:
        missed = sum(arm not in one["found"] for one in example["truth"])
        alarms = sum(not one["right"] for one in example[arm])
        alarmed = f"{alarms} false alarm{'s' if alarms != 1 else ''}"
        said[arm] = f"{len(example['truth']) - missed} found, {missed} missed, {alarmed}"
    lost = example["lost"]
    cost = f"merging {'costs' if lost > 0 else 'gains'} {short(abs(lost))} of F1 here"
    if abs(lost) < VISIBLE_DIFFERENCE:
        cost = "merged as good as the original"
    return {"said": said, "cost": cost}


def _group_said(task: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    nothing = "merging cost nothing on any test frame" if max(row["lost"] for row in rows) <= 0 else ""
    if task == "detection":
        named = {box["class"] for row in rows for part in ("truth", *ARMS) for box in row[part]}
        return {"several": len(named) > 1, "said": nothing}
    right = [sum(row[arm]["right"] for row in rows) for arm in ARMS]
    counted = f"of {len(rows)} frames {right[0]} right by the original, {right[1]} by the merged model"
    return {"said": nothing or counted}
