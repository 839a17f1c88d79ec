"""The report as one self-contained HTML page, for a desktop, a phone, dark mode and paper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from gemel.report import drawing, geometry
from gemel.report.conclusion import (
    MERGED,
    MIN_CLIPS,
    ORIGINALS,
    VISIBLE_DIFFERENCE,
    MemorySetting,
    device_name,
    draw_conclusion,
    headline_memory,
    memory_settings_of,
    score_divisors,
    stream_accuracies,
    stream_scores,
)
from gemel.report.drawing import Series, draw_boxes, draw_curve
from gemel.report.examples import MODELS
from gemel.report.templates import (
    render_template,
    two_decimals,
    whole_percent,
    without_line_breaks,
    words,
)
from gemel.text import size

MAX_SETS = 16
MAX_ROWS = 8
"""Queries in a picture of the first screen, those that lost first; the sections below show all."""
BYTE_KINDS = (("shared_part", "shared with others (this query's part)"), ("private", "its own"))
MIN_RUN = 0.12
"""Per cent of the timeline below which a run would be invisible."""
Document = Mapping[str, Any]


def render_report(document: Document, photos: Sequence[str] = ()) -> str:
    """The page of a report document (`gemel.evaluation`).

    All figures come from the document. `photos` are the pictures of its `examples`, JPEGs in base64; without them the
    boxes are drawn on an empty background.
    """
    document = without_line_breaks(document)
    offline, headline = document["offline"], headline_memory(document)
    queries = [row["query"] for row in offline]
    sets = geometry.largest_shared(document["shared"], queries)
    parts = geometry.total_parts(document["bytes"])
    present = {name for name, _, _ in parts}
    return render_template(
        "page.html",
        doc=document,
        photos=photos,
        queries=queries,
        headline=headline,
        memory_reason=_memory_reason(document, headline),
        device=device_name(document),
        conclusion=draw_conclusion(document),
        first=first_screen(document),
        min_clips=MIN_CLIPS,
        byte_rows=geometry.byte_rows(document["bytes"]),
        total_parts=parts,
        byte_kinds=[("before", "original", ""), *((kind, name, "") for kind, name in BYTE_KINDS if kind in present)],
        labelled_bytes=_labelled_bytes,
        labelled_counts=_labelled_counts,
        matrix=geometry.sharing_matrix(document["shared"], queries),
        sets=sets,
        visible_sets=sets[:MAX_SETS],
        ratios=geometry.ratio_axis(offline),
        errors=geometry.error_type_rows(offline),
        classes=geometry.recall_rows(offline),
        **(_stream_sections(document, headline) if headline else {}),
        timelines=[{**one, "rows": geometry.timeline_rows(one)} for one in document["timeline"]],
        spans=_spans,
        groups=_example_groups(document["examples"]),
        boxed=any(one["task"] == "detection" for one in document["examples"]),
        draw_boxes=draw_boxes,
    )


def first_screen(document: Document) -> dict[str, Any]:
    """The three pictures of the first screen: `bytes`, `kept`, and `stream` (None without streams)."""
    counts = document["bytes"]
    least = counts["before"] - counts["ceiling"]
    return {
        "bytes": {
            "parts": geometry.total_parts(counts),
            "least": least,
            "least_at": round(100 * least / (counts["before"] or 1), 2),
        },
        "kept": _kept_accuracy(document["offline"]),
        "stream": _stream_accuracy(document),
    }


def _kept_accuracy(offline: Sequence[Document]) -> dict[str, Any]:
    axis = geometry.ratio_axis(offline)
    rows = [
        {
            "query": row["query"], "ratio": row["ratio"], "at": axis.at(row["ratio"]), "weak": not row["worth"],
            "target": row["target"], "target_at": axis.at(row["target"]), "lost": row["worth"] and not row["met"],
            "unsure": row["worth"] and row["met"] and not row["certain"],
            "interval": None if row["ci95"] is None else tuple(map(axis.at, row["ci95"])),
        }
        for row in offline
    ]  # fmt: skip
    evidence = [row for row in offline if row["worth"]]
    met, certain = (sum(row[name] for row in evidence) for name in ("met", "certain"))
    return {
        "met": met,
        "certain": certain,
        "of": len(offline),
        "one_at": axis.at(1.0),
        "axis": axis,
        **_lost_first(rows),
    }


def _stream_accuracy(document: Document) -> dict[str, Any] | None:
    headline = headline_memory(document)
    if headline is None:
        return None
    axis = geometry.unit_axis()
    rows = [
        {
            "query": query, "before": before, "after": after, "before_at": axis.at(before), "after_at": axis.at(after),
            "lost": before - after > VISIBLE_DIFFERENCE,
        }
        for query, (before, after) in stream_accuracies(document, headline.name).items()
    ]  # fmt: skip
    scores = [(one, stream_scores(document, one.name)) for one in memory_settings_of(document)]
    own = next(score for one, score in scores if one == headline)
    return {"memory": headline, "scores": own, "settings": scores, "axis": axis, **_lost_first(rows)}


def _lost_first(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """As many rows as a picture holds: all in order, or those that lost first."""
    visible = rows if len(rows) <= MAX_ROWS else sorted(rows, key=lambda row: not row["lost"])[:MAX_ROWS]
    return {"rows": visible, "more": len(rows) - len(visible)}


def _memory_reason(document: Document, headline: MemorySetting | None) -> str:
    """What the headline memory is a fraction of, and why it was chosen."""
    if headline is None:
        return ""
    settings = {one.name: size(one.nbytes) for one in memory_settings_of(document)}
    low, high = settings.get("min"), settings.get("all")
    if headline.name == "min":
        return "the least that runs the largest original alone"
    if headline.name == "all":
        return "enough for all originals at once"
    if low and high and headline.name.endswith("%"):
        return f"{headline.name} of the way from {low}, the largest original alone, to {high}, all originals at once"
    return "as requested by --memory"


def _stream_sections(document: Document, headline: MemorySetting) -> dict[str, Any]:
    offline, streaming = document["offline"], document["streaming"]
    divisors = score_divisors(offline)
    points = geometry.mean_points(streaming, divisors)
    merged = [row["merged"] / (divisors or {}).get(row["query"], 1.0) for row in offline]
    moved = {
        (row["memory"], row["arm"]): row["bytes_moved"] / max(1, row["processed"]) for row in document["transfers"]
    }
    outcomes = geometry.outcome_rows(document["ledger"])
    own = [row for row in document["ledger"] if row["memory"] == headline.name]
    by_query = geometry.outcome_rows(own, by=("query", "arm"))
    kinds = geometry.outcome_classes([*outcomes, *by_query])
    return {
        "panels": geometry.streaming_panels(streaming, offline),
        "arm_shapes": _arm_shapes,
        "settings": memory_settings_of(document),
        "relative": divisors is not None,
        "curve": draw_curve(
            [Series(arm, arm, points[arm]) for arm in (ORIGINALS, MERGED)],
            {row["memory_bytes"]: row["memory"] for row in streaming},
            ("merged, offline", sum(merged) / len(merged)),
            two_decimals if divisors is None else whole_percent,
        ),
        "side_by_side": [
            {**row, "lost": row["originals_streaming"] - row["merged_streaming"] > VISIBLE_DIFFERENCE}
            for row in document["side_by_side"]
            if row["memory"] == headline.name
        ],
        "outcomes": [{**row, "moved": moved[row["memory"], row["arm"]]} for row in outcomes],
        "outcomes_by_query": by_query,
        "outcome_kinds": [(kind, name, "") for name, kind in kinds.items()],
        "labelled_outcomes": lambda parts: [(kinds[name], share, f"{name}: {frames}") for name, share, frames in parts],
        "ages": geometry.age_rows(streaming, offline, headline.name),
    }


def _labelled_bytes(parts: Iterable[tuple[str, float, float]]) -> list[tuple[str, float, str]]:
    return [(name, share, f"{words(name)}: {size(nbytes)}") for name, share, nbytes in parts]


def _labelled_counts(parts: Iterable[tuple[str, float, int]]) -> list[tuple[str, float, str]]:
    return [(name, share, f"{name}: {count}") for name, share, count in parts]


def _arm_shapes(setting: Document) -> list[Markup]:
    """Both arms of one memory setting on a track."""
    shapes = []
    for arm in (ORIGINALS, MERGED):
        one = setting[arm]
        shapes.append(drawing.interval(one["low"], one["low"] + one["width"], arm))
        shapes.append(drawing.dot(one["at"], arm, f"{arm}: {two_decimals(one['accuracy'])}"))
    return shapes


def _spans(row: Document) -> list[Markup]:
    """When a query was resident, and when it ran."""
    resident = [drawing.rect(x, width, "resident") for x, width in row["resident"]]
    return resident + [drawing.rect(x, max(width, MIN_RUN), "run", y="4", height="14") for x, width in row["runs"]]


def _example_groups(examples: Sequence[Document]) -> list[dict[str, Any]]:
    """The example frames by query, the query with the worst frame first; `at` is a frame's index among the photos."""
    found: dict[str, dict[str, Any]] = {}
    for at, one in enumerate(examples):
        group = found.setdefault(one["query"], {"query": one["query"], "task": one["task"], "rows": []})
        group["rows"].append({**one, "at": at, **(_detection_texts(one) if one["task"] == "detection" else {})})
    groups = sorted(found.values(), key=lambda group: -max(row["lost"] for row in group["rows"]))
    return [{**group, **_group_texts(group["task"], group["rows"])} for group in groups]


def _detection_texts(example: Document) -> dict[str, Any]:
    """What each model found on a frame, and what merging cost there."""
    texts = {}
    for arm in MODELS:
        missed = sum(arm not in one["found"] for one in example["truth"])
        alarms = sum(not one["right"] for one in example[arm])
        found = len(example["truth"]) - missed
        texts[arm] = f"{found} found, {missed} missed, {alarms} false alarm{'s' if alarms != 1 else ''}"
    lost = example["lost"]
    cost = f"merging {'costs' if lost > 0 else 'gains'} {two_decimals(abs(lost))} of F1 here"
    return {"texts": texts, "cost": "merged equals the original" if abs(lost) < VISIBLE_DIFFERENCE else cost}


def _group_texts(task: str, rows: Sequence[Document]) -> dict[str, Any]:
    nothing = "merging cost nothing on any test frame" if max(row["lost"] for row in rows) <= 0 else ""
    if task == "detection":
        classes = {box["class"] for row in rows for part in ("truth", *MODELS) for box in row[part]}
        return {"several": len(classes) > 1, "text": nothing}
    right = [sum(row[arm]["right"] for row in rows) for arm in MODELS]
    counted = f"of {len(rows)} frames the original has {right[0]} right, the merged model {right[1]}"
    return {"text": nothing or counted}
