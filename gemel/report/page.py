"""The report as one self-contained HTML page, readable on a phone, in the dark and on paper."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from gemel.report import drawing, figures
from gemel.report.boxes import overlay
from gemel.report.curve import Series, curve
from gemel.report.fates import IN_TIME, age_rows, fate_rows, fates_of
from gemel.report.first import first_screen
from gemel.report.frames import ARMS
from gemel.report.mistakes import class_rows, error_rows
from gemel.report.sheet import plain, short, words, written
from gemel.report.verdict import SEEN, asked_of, verdict
from gemel.text import size

SETS_SHOWN = 16
BYTE_KINDS = (
    ("shared_part", "shared with others (this query's part)"),
    ("private", "its own"),
    ("residual", "low-rank residual"),
)
MIN_RUN = 0.12
"""Per cent of the timeline, so that a short run is seen."""


def render(document: Mapping[str, Any], photos: Sequence[str] = ()) -> str:
    """The page of a report document (`gemel.evaluation.evaluating`).

    All that it shows comes from the document but the `photos` of its `examples`, JPEGs in base64; without them the
    boxes stand on an empty ground.
    """
    document = plain(document)
    offline, asked = document["offline"], asked_of(document)
    queries = [row["query"] for row in offline]
    sets = figures.top_sets(document["shared"], queries)
    total_parts = figures.total_parts(document["bytes"])
    return written(
        "page.html",
        doc=document,
        photos=photos,
        queries=queries,
        asked=asked,
        verdict=verdict(document),
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
        errors=error_rows(offline),
        classes=class_rows(offline),
        **(_on_the_stream(document, asked[0]) if asked else {}),
        timelines=[{**one, "rows": figures.timeline_rows(one)} for one in document["timeline"]],
        spans=_spans,
        groups=_groups(document["examples"]),
        boxed=any(one["task"] == "detection" for one in document["examples"]),
        overlay=overlay,
    )


def _on_the_stream(document: Mapping[str, Any], memory: str) -> dict[str, Any]:
    """What the sections about the stream draw; single queries at the memory setting that was asked for."""
    panels = figures.streaming_panels(document["streaming"], document["offline"])
    mean = panels["mean"]
    moved = {(row["memory"], row["arm"]): row for row in figures.swapping_rows(document["swapping"])}
    fates = fate_rows(document["ledger"])
    of_queries = fate_rows([row for row in document["ledger"] if row["memory"] == memory], by=("query", "arm"))
    kinds = fates_of([*fates, *of_queries])
    three = [row for row in document["side_by_side"] if row["memory"] == memory]
    return {
        "streaming": panels,
        "spreads": _spreads,
        "curve": curve(
            [_series(arm, mean["settings"]) for arm in ("originals", "merged")],
            {one["bytes"]: one["memory"] for one in mean["settings"]},
            ("merged, offline", mean["offline"]),
        ),
        "three": [
            {**row, "lost": row["originals_streaming"] - row["merged_streaming"] > SEEN} for row in three
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
    if abs(lost) < SEEN:
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
