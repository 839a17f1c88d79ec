"""Several evaluations of one workload side by side: `gemel report`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from gemel.models.errors import InputError, one_line
from gemel.models.files.io import check_apart, check_output, open_atomic
from gemel.report import geometry
from gemel.report.conclusion import Conclusion, draw_conclusion
from gemel.report.device import VISIBLE_DIFFERENCE, StreamScores, stream_scores
from gemel.report.document import MERGED, ORIGINALS, MemorySetting, Report, read_report, report_path
from gemel.report.drawing import Series, draw_curve
from gemel.report.templates import render_template, two_decimals, whole_percent
from gemel.text import number, percent, size

MAX_REPORTS = len(ascii_uppercase)
SAME = 1e-9
"""Accuracies of the same original on the same frames differ by no more."""
REPORT_COLOURS = 6
"""Further reports reuse colours; their letters distinguish them."""


@dataclass(frozen=True)
class ComparedReport:
    """One of the reports, with its letter, file and conclusion."""

    letter: str
    file: str
    report: Report
    conclusion: Conclusion

    @cached_property
    def met(self) -> int:
        """Queries with evidence that meet their target."""
        return sum(row.met for row in self.report.offline if row.has_evidence)

    @property
    def proven(self) -> int:
        """Queries that are proven, or cannot miss."""
        return sum(row.is_sure for row in self.report.offline)

    @property
    def is_met(self) -> bool:
        """Whether all queries meet their targets."""
        return self.met == len(self.report.offline)

    @property
    def worst_ratio(self) -> float | None:
        """The lowest ratio with evidence; None without any."""
        return min((row.ratio for row in self.report.offline if row.has_evidence), default=None)

    @property
    def name(self) -> str:
        """Letter, bundle and method."""
        return f"{self.letter} ({self.report.bundle.file}, method {self.report.method})"

    def scores(self, memory: str) -> StreamScores:
        """Both arms over all queries at a memory setting."""
        return stream_scores(self.report, memory)

    def setting(self, memory: str) -> MemorySetting:
        """The memory setting of this name."""
        return next(one for one in self.report.memory_settings if one.memory == memory)

    def to_json(self) -> dict[str, Any]:
        """Its row of `reports`."""
        report, found = self.report, self.conclusion
        plain = report.model_dump(
            mode="json", include={"method", "created_at", "device", "headline", "bytes", "commands"}
        )
        return {
            **plain, "letter": self.letter, "file": self.file, "bundle": report.bundle.file,
            "digest": report.bundle.digest, "seeds": len(report.seeds), "met": self.met, "proven": self.proven,
            "of": len(report.offline), "worst_ratio": self.worst_ratio, "sentence": found.sentence,
            "tone": found.tone.value, "worse": [{"query": one.query, "text": one.text} for one in found.worse],
        }  # fmt: skip


@dataclass(frozen=True)
class ReportComparison:
    """Reports of one workload; `answer` says which to take, `differences` what differs besides the merging."""

    workload: str
    reports: list[ComparedReport]
    answer: str
    differences: list[str]

    @property
    def relative(self) -> bool:
        """Whether means over queries are of shares of the originals' accuracy offline."""
        return self.reports[0].report.divisors is not None

    @property
    def memory(self) -> str | None:
        """The first report's headline memory where all reports have it, else the first setting that all have."""
        settings = [[one.memory for one in own.report.memory_settings] for own in self.reports]
        shared = set.intersection(*map(set, settings))
        wanted = [self.reports[0].report.headline.memory, *settings[0]]
        return next((name for name in wanted if name in shared), None)

    def to_json(self) -> dict[str, Any]:
        """The keys of `gemel report --json`."""
        keys = {
            "query",
            "metric",
            "original",
            "merged",
            "ratio",
            "lower_end",
            "target",
            "met",
            "proven",
            "state",
            "worth",
            "evidence",
            "reason",
        }
        return {
            "workload": self.workload,
            "answer": self.answer,
            "differences": self.differences,
            "relative": self.relative,
            "reports": [one.to_json() for one in self.reports],
            "queries": [
                {"letter": one.letter, **row.model_dump(mode="json", include=keys)}
                for one in self.reports for row in one.report.offline
            ],
            "streaming": [
                {"letter": one.letter, "memory": setting.memory, "memory_bytes": setting.memory_bytes,
                 "base_bytes": one.report.base_bytes,
                 ORIGINALS: (scores := one.scores(setting.memory)).originals, MERGED: scores.merged}
                for one in self.reports for setting in one.report.memory_settings
            ],
        }  # fmt: skip


def write_comparison(reports: Sequence[str | Path], out: str | Path) -> ReportComparison:
    """Compare these reports and write the page; InputError, with nothing written, where they cannot be."""
    paths = [report_path(one) for one in reports]
    check_apart([("--out", out)], [("one of the reports", path) for path in paths])
    check_output(out, overwrite=True)
    found = compare_documents([(path, read_report(path)) for path in paths])
    with open_atomic(Path(out), overwrite=True) as file:
        file.write(render_comparison(found).encode("utf-8", "backslashreplace"))
    return found


def compare_documents(found: Sequence[tuple[Path, Report]]) -> ReportComparison:
    """The comparison of these reports (path, report), which get letters in their order.

    Raises InputError where two are not of one workload: of another name, or with other queries.
    """
    if len(found) > MAX_REPORTS:
        raise InputError("gemel report", f"{len(found)} reports are too many", f"give {MAX_REPORTS} at most")
    _check_same_workload(found)
    reports = [
        ComparedReport(letter, one_line(path), report, draw_conclusion(report))
        for letter, (path, report) in zip(ascii_uppercase, found, strict=False)
    ]
    return ReportComparison(found[0][1].workload, reports, _answer(reports), _differences(reports))


def render_comparison(found: ReportComparison) -> str:
    """The page of a comparison."""
    reports, style = found.reports, whole_percent if found.relative else two_decimals
    kinds = {one.letter: f"r{index % REPORT_COLOURS}" for index, one in enumerate(reports)}
    points = [geometry.mean_points(one.report) for one in reports]
    lines = [
        Series(f"{one.letter}, {one.report.bundle.file}", kinds[one.letter], own.get(MERGED, []))
        for one, own in zip(reports, points, strict=True)
    ]
    if not found.differences:  # all reports have the same originals
        lines.insert(0, Series(ORIGINALS, ORIGINALS, points[0].get(ORIGINALS, [])))
    settings = {row.memory_bytes: row.memory for one in reports for row in one.report.memory_settings}
    return render_template(
        "compare.html",
        one=found,
        kinds=kinds,
        largest=max(max(one.report.bytes.before, one.report.bytes.after) for one in reports),
        ratios=geometry.ratio_axis([row for one in reports for row in one.report.offline]),
        scores=geometry.unit_axis(),
        style=style,
        memory=found.memory,
        visible_difference=VISIBLE_DIFFERENCE,
        rows={(one.letter, row.query): row for one in reports for row in one.report.offline},
        curve=draw_curve(lines, settings, style=style),
    )


def _check_same_workload(found: Sequence[tuple[Path, Report]]) -> None:
    (first, known), *others = found
    expected = {(row.query, row.task, row.metric) for row in known.offline}
    for path, report in others:
        if report.workload != known.workload:
            problem = f"is of workload '{report.workload}', {first} of '{known.workload}'"
            raise InputError(path, problem, "compare reports of one workload", "workload")
        odd = expected ^ {(row.query, row.task, row.metric) for row in report.offline}
        if odd:
            problem = f"does not evaluate the same queries as {first} ({min(odd)[0]})"
            raise InputError(path, problem, "compare reports of one workload", "offline")


def _answer(reports: Sequence[ComparedReport]) -> str:
    """Which report to take: the fewest bytes among those whose queries all meet their targets."""
    whole = [one for one in reports if one.is_met]
    of = len(reports[0].report.offline)
    if not whole:
        best = max(reports, key=lambda one: (one.met, -one.report.bytes.after))
        return f"None meets every accuracy target; {best.name} meets most, {best.met} of {of}."
    least = min(whole, key=lambda one: one.report.bytes.after)
    counts = least.report.bytes
    saved = f"{size(counts.after)} instead of {size(counts.before)}, {percent(counts.saved_fraction, 0)} less"
    subject = "It meets every accuracy target" if len(reports) == 1 else "Fewest bytes with every accuracy target met"
    doubt = "" if least.proven == of else f"; {least.proven} of {of} proven or unchanged"
    return f"{subject}: {least.name}, {saved}{doubt}."


def _differences(reports: Sequence[ComparedReport]) -> list[str]:
    """What differs between these reports besides the merging, a sentence each."""
    lines = []
    known = {row.query: row.original for row in reports[0].report.offline}
    for one in reports[1:]:
        other = next((row for row in one.report.offline if abs(row.original - known[row.query]) > SAME), None)
        if other is not None:
            lines.append(
                f"{one.letter} was evaluated against other originals than A, or on other frames: that of "
                f"{other.query} has {number(other.original)} instead of {number(known[other.query])}."
            )
    compared: dict[str, list[Any]] = {
        "devices": [one.report.device.title for one in reports],
        "numbers of seeds": [len(one.report.seeds) for one in reports],
        "accuracy targets": [{row.query: row.target for row in one.report.offline} for one in reports],
    }
    for what, values in compared.items():
        if any(value != values[0] for value in values):
            named = [f"{one.letter}: {value}" for one, value in zip(reports, values, strict=True)]
            detail = "" if what == "accuracy targets" else f" ({'; '.join(named)})"
            lines.append(f"The {what} differ{detail}: figures that depend on them cannot be compared.")
    return lines
