"""The report as one self-contained HTML page, for a desktop, a phone, dark mode and paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from gemel.models.measures.metrics import KINDS
from gemel.report import drawing, geometry
from gemel.report.conclusion import draw_conclusion
from gemel.report.device import (
    VISIBLE_DIFFERENCE,
    StreamScores,
    device_memory,
    device_name,
    explain_memory,
    stream_scores,
)
from gemel.report.document import (
    MERGED,
    MODELS,
    ORIGINALS,
    DetectionExample,
    Example,
    MemorySetting,
    OfflineRow,
    Report,
    StreamRow,
)
from gemel.report.drawing import Series, draw_boxes, draw_curve
from gemel.report.templates import render_template, two_decimals, whole_percent
from gemel.text import key_text, size

MAX_SETS = 16
MAX_ROWS = 8
"""Queries in a picture of the first screen, those that lost first; the sections below show all."""
MAX_CLASSES = 8
"""Classes of a query that are visible without opening the rest."""
BYTE_KINDS = (("shared_part", "shared with others (this query's part)"), ("private", "its own"))


def render_report(report: Report, photos: Sequence[str] = ()) -> str:
    """The page of a report.

    All figures come from the report. `photos` are the pictures of its `examples`, JPEGs in base64; without them the
    boxes are drawn on an empty background.
    """
    headline = report.judged_memory
    sets = geometry.largest_shared(report.shared, report.queries)
    parts = geometry.total_parts(report.bytes)
    present = {name for name, _, _ in parts}
    matrix = geometry.sharing_matrix(report.shared, report.queries)
    return render_template(
        "page.html",
        doc=report,
        photos=photos,
        queries=report.queries,
        headline=headline,
        memory_reason=explain_memory(report, headline) if headline else "",
        weights=device_memory(report) or report.bytes,
        weak=[row.query for row in report.offline if row.query not in report.averaged],
        device=device_name(report),
        conclusion=draw_conclusion(report),
        first=first_screen(report),
        total_parts=parts,
        byte_parts=geometry.byte_parts,
        widest=max((row.before for row in report.bytes.queries), default=1) or 1,
        byte_kinds=[("before", "original", ""), *((kind, name, "") for kind, name in BYTE_KINDS if kind in present)],
        label_bytes=lambda own: [(name, share, f"{key_text(name)}: {size(nbytes)}") for name, share, nbytes in own],
        label_counts=lambda own: [(name, share, f"{name}: {count}") for name, share, count in own],
        matrix=matrix,
        largest=max(map(max, matrix)) or 1,
        sets=sets,
        visible_sets=sets[:MAX_SETS],
        ratios=geometry.ratio_axis(report.offline),
        unit=geometry.unit_axis(),
        kinds=KINDS,
        error_bars=error_bars,
        recalls=sorted_recalls,
        visible_classes=MAX_CLASSES,
        **(_stream_values(report, headline) if headline else {}),
        groups=group_examples(report.examples),
        boxed=any(one.task == "detection" for one in report.examples),
        draw_boxes=draw_boxes,
    )


@dataclass(frozen=True)
class StreamPoint:
    """A query on the stream at the headline memory."""

    query: str
    before: float
    after: float

    @property
    def lost(self) -> bool:
        """Whether merging makes it visibly worse."""
        return self.before - self.after > VISIBLE_DIFFERENCE


@dataclass(frozen=True)
class FirstScreen:
    """The rows of the first screen's pictures, at most MAX_ROWS each; `scores` of both arms by memory setting."""

    met: int
    sure: int
    kept: list[OfflineRow]
    stream: list[StreamPoint] = field(default_factory=list)
    scores: list[tuple[MemorySetting, StreamScores]] = field(default_factory=list)


def first_screen(report: Report) -> FirstScreen:
    """What the first screen shows; without streams the third picture is empty."""
    evidence = [row for row in report.offline if row.has_evidence]
    met, sure = sum(row.met for row in evidence), sum(row.is_sure for row in evidence)
    if report.judged_memory is None:
        return FirstScreen(met, sure, _losers_first(report.offline))
    accuracies = report.stream_accuracies(report.judged_memory.memory)
    stream = _losers_first([StreamPoint(query, *pair) for query, pair in accuracies.items()])
    scores = [(one, stream_scores(report, one.memory)) for one in report.memory_settings]
    return FirstScreen(met, sure, _losers_first(report.offline), stream, scores)


def _losers_first(rows: Sequence[Any]) -> list[Any]:
    """As many rows as a picture holds: all in order, or those that lost first."""
    return list(rows) if len(rows) <= MAX_ROWS else sorted(rows, key=lambda row: not row.lost)[:MAX_ROWS]


def _stream_values(report: Report, headline: MemorySetting) -> dict[str, Any]:
    points = geometry.mean_points(report)
    strong = [row for row in report.offline if row.query in report.averaged]
    merged = [row.merged / (report.divisors or {}).get(row.query, 1.0) for row in strong]
    outcomes = geometry.outcome_rows(report.ledger)
    by_query = geometry.outcome_rows([row for row in report.ledger if row.memory == headline.memory], "query")
    classes = geometry.outcome_classes([*outcomes, *by_query])
    streaming = {(row.query, row.memory, row.arm): row for row in report.streaming}
    ages = [row.age_p99_ms for row in report.streaming if row.memory == headline.memory and row.age_p99_ms is not None]
    return {
        "streaming": streaming,
        "arm_shapes": _arm_shapes,
        "relative": report.divisors is not None,
        "curve": draw_curve(
            [Series(arm, arm, points[arm]) for arm in (ORIGINALS, MERGED)],
            {row.memory_bytes: row.memory for row in report.streaming},
            ("merged, offline", sum(merged) / len(merged)),
            two_decimals if report.divisors is None else whole_percent,
        ),
        "visible_difference": VISIBLE_DIFFERENCE,
        "outcomes": outcomes,
        "outcomes_by_query": by_query,
        "moved": {(row.memory, row.arm): row.bytes_moved / max(1, row.processed) for row in report.transfers},
        "outcome_kinds": [(kind, name, "") for name, kind in classes.items()],
        "label_outcomes": lambda own: [(classes[name], share, f"{name}: {frames}") for name, share, frames in own],
        "ages": geometry.AgeAxis([*ages, *(row.sla_ms for row in report.offline)]),
    }


def _arm_shapes(rows: Mapping[tuple[str, str, str], StreamRow], query: str, memory: str) -> list[Markup]:
    """Both arms of one memory setting on a track."""
    axis, shapes = geometry.unit_axis(), []
    for arm in (ORIGINALS, MERGED):
        row = rows[query, memory, arm]
        low, high = map(axis.at, row.spread)
        shapes.append(drawing.interval(low, high, arm))
        shapes.append(drawing.dot(axis.at(row.accuracy), arm, f"{arm}: {two_decimals(row.accuracy)}"))
    return shapes


def error_bars(row: OfflineRow) -> dict[str, list[geometry.Part]]:
    """The errors of both models as parts of the longer bar."""
    errors = row.errors or {}
    counts = {model: [(kind, errors[model][kind].count) for kind in KINDS] for model in MODELS}
    longest = max(sum(count for _, count in own) for own in counts.values())
    return {model: geometry.make_parts(own, longest) for model, own in counts.items()}


def sorted_recalls(row: OfflineRow) -> list[Any]:
    """A query's classes, the largest loss of recall first."""
    return sorted(row.classes or (), key=lambda one: one.merged - one.original)


@dataclass
class ExampleGroup:
    """The example frames of one query, each with its index among the photos."""

    query: str
    task: str
    rows: list[tuple[int, Example]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What merging cost on these frames, in words."""
        if not self.rows:
            return "merging cost nothing on any test frame"
        if self.task != "classification":
            return ""
        return f"{len(self.rows)} that the merged model answers worse than the original"

    @property
    def several(self) -> bool:
        """Whether the boxes have more than one class."""
        parts = ("truth", *MODELS)
        return len({box.name for _, one in self.rows for part in parts for box in getattr(one, part)}) > 1

    @staticmethod
    def count_findings(example: DetectionExample, model: str) -> str:
        """What a model found on a frame."""
        missed = sum(model not in one.found for one in example.truth)
        alarms = sum(not one.right for one in getattr(example, model))
        return f"{len(example.truth) - missed} found, {missed} missed, {alarms} false alarm{'s' if alarms != 1 else ''}"

    @staticmethod
    def cost(example: Example) -> str:
        """What merging cost on a frame."""
        what = "F1 here" if example.task == "detection" else "the frame's score"
        return f"merging costs {two_decimals(example.lost)} of {what}"


def group_examples(examples: Sequence[Example]) -> list[ExampleGroup]:
    """The frames that merging cost something by query, the query with the worst frame first."""
    groups: dict[str, ExampleGroup] = {}
    for at, one in enumerate(examples):
        group = groups.setdefault(one.query, ExampleGroup(one.query, one.task))
        if one.lost >= VISIBLE_DIFFERENCE:
            group.rows.append((at, one))
    return sorted(groups.values(), key=lambda group: -max((one.lost for _, one in group.rows), default=0.0))
