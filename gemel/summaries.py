"""Results of a merge, an evaluation and a box run as text for a terminal."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import Any

from gemel.models.errors import one_line
from gemel.process import SUMMARY, ExitCode
from gemel.report.conclusion import draw_conclusion
from gemel.report.document import MIN_STRONG, NOTHING_SHOWN, Report
from gemel.text import (
    bits_text,
    cost_text,
    duration,
    flops_change_text,
    key_text,
    networks_text,
    number,
    percent,
    saved_text,
    size,
    state_text,
    table,
)

Row = Mapping[str, Any]
MAX_REASON = 90
"""Characters of a reason in a table; a note has all of it."""
PROVEN, ORIGINAL = "proven", "original"
"""A state, and the evidence of a query without labels."""


def merge_text(merged: Row) -> str:
    """A merge (the keys of `gemel merge --json`): whose network answers whom, the queries, bytes, FLOPs and time."""
    networks = networks_text({query["id"]: query["network"] for query in merged["queries"]})
    parts = [networks] if networks else []
    change = flops_change_text(merged["flops_before"], merged["flops_after"], merged["flops_with_prefix"])
    total = (
        f"{merged['bundle']}: {size(merged['bytes_before'])} became {size(merged['bytes_after'])}, "
        f"{saved_text(merged['saved_fraction'], merged['ceiling_fraction'])}, {change}, "
        f"in {duration(merged['seconds'])}"
    )
    scores = [scores_text(merged["queries"])] if merged["queries"] else []
    costs = [cost_text(merged["cost"])] if merged["cost"] else []
    return "\n\n".join([*parts, *scores, *_addition_lines(merged.get("addition")), "\n".join([total, *costs])])


def _addition_lines(addition: Row | None) -> list[str]:
    """What became of a bundle that was added to, in one line."""
    if addition is None:
        return []
    kept, new, removed = (len(addition[key]) for key in ("kept", "new", "removed"))
    what = f"{kept} kept bit by bit, {new} new, {removed} removed; {size(addition['new_bytes'])} of tensors are new"
    return [f"queries of {addition['onto']}: {what}"]


def scores_text(queries: Sequence[Row]) -> str:
    """Each query of a merge against its original, as a table."""
    rows = [
        (row["id"], key_text(row["metric"]), *_scores(row),
         target_status(row["met"], row["worth"], row["reason"])
         + ", against its own answers" * (row["evidence"] == ORIGINAL),
         bits_text(row["bits"], row["in_integers"]),
         "of no worth without evidence" if row["reason"] and row["state"] == PROVEN
         else state_text(row["state"], row["lower_end"], row["from"], row["needs"]))
        for row in queries
    ]  # fmt: skip
    heads = ("query", "metric", "original", "merged", "ratio", "answers as before", "target", "bits", "proof")
    reasons = [f"{row['id']}: {row['bits']}, since {row['why_bits']}" for row in queries if row["why_bits"]]
    reasons += [
        f"{row['id']}: a weak original ({number(row['original'], 2)} {key_text(row['metric'])}); to keep its accuracy "
        "is no success: train it longer"
        for row in queries
        if row["worth"] and not row["reason"] and row["original"] < MIN_STRONG
    ]
    return "\n".join([table(heads, rows), *([""] if reasons else []), *map(one_line, reasons)])


def _scores(row: Row) -> tuple[str, str, str, str]:
    """Original, merged, ratio and agreement; nothing where there was nothing to compare."""
    if NOTHING_SHOWN in row["reason"]:
        return "-", "-", "-", "-"
    return number(row["original"]), number(row["merged"]), percent(row["ratio"]), percent(row["agreement"])


def target_status(met: bool, worth: bool = True, reason: str = "") -> str:
    """Whether a query meets its target on test; `reason`: why there is no evidence."""
    if reason:
        return f"no evidence: {shorten(reason, MAX_REASON)}"
    if not worth:
        return "no evidence: the original is too weak"
    return "met" if met else "missed"


def evaluation_text(report: Report) -> str:
    """Offline and streaming accuracy side by side, one line per query."""
    settings = [(one.memory, report.stream_accuracies(one.memory)) for one in report.memory_settings]
    rows = [
        (row.query, key_text(row.metric),
         *(number(None if row.shows_nothing else value) for value in (row.original, row.merged)),
         target_status(row.met, row.worth, row.reason), row.status,
         *(" -> ".join(number(accuracy, 2) for accuracy in own[row.query]) for _, own in settings))
        for row in report.offline
    ]  # fmt: skip
    headers = ("query", "metric", "original", "merged", "target", "proof", *(f"stream, {name}" for name, _ in settings))
    device = f"{report.device.title}, {report.device.clock}{' (modelled)' if report.device.modelled else ''}"
    gating = [
        f"motion gating, {row.query}: {row.run} of {row.frames} frames run, "
        f"{key_text(row.metric)} {number(row.ungated)} -> {number(row.gated)}"
        for row in report.gating
    ]
    stream = f"stream: originals -> merged with the same memory; {device}"
    return "\n".join([table(headers, rows), "", stream, *gating])


def conclusion_text(report: Report) -> str:
    """What to do, and a line for each query that merging made worse."""
    found = draw_conclusion(report)
    return "\n".join([found.sentence, *(f"  WORSE: {one.query}, {one.text}" for one in found.worse)])


def box_text(summary: Row) -> str:
    """The ledger of a box as a table, the results its sinks delivered, and the bytes it loaded."""
    rows = [
        (row["query"], row["received"], row["processed"], row["late"], sum(row["dropped"].values()), row["failed"],
         row["pending"])
        for row in summary["ledger"]
    ]  # fmt: skip
    sinks = [
        f"sink {sink['kind']}: {sink['delivered']} delivered{_counts(sink['undelivered'])}" for sink in summary["sinks"]
    ]
    spool = summary["spool"]
    joint = summary["joint"]
    passes = []
    if joint["runs"]:
        passes = [f"one pass for several queries: {joint['frames']} frames in {joint['runs']} runs"]
    samples = [] if spool is None else [f"spool: {spool['samples']} samples stored{_counts(spool['unsampled'])}"]
    failed = [f"camera {one['id']}: {one['error']}" for one in summary["cameras"] if one["error"] is not None]
    return "\n".join([
        table(("query", "received", "processed", "of these late", "dropped", "failed", "pending"), rows),
        "",
        *failed,
        *sinks,
        *samples,
        *passes,
        f"stopped after {duration(summary['seconds'])} ({summary['stopped_by']}): "
        f"{size(summary['bytes_moved'])} moved in {summary['swaps']} loads, "
        f"at most {size(summary['max_used_bytes'])} of {size(summary['budget_bytes'])} used",
    ])  # fmt: skip


def checked_text(config: str, summary: Row) -> str:
    """What `gemel run --check` found: memory, cameras, sinks."""
    fits = "everything stays resident" if summary["fits"] else "queries take turns in memory"
    needs = f"{size(summary['weights_bytes'])} of weights, {size(summary['workspace_bytes'])} of workspace"
    copied = [f"; {query} copies {size(count)} in every run" for query, count in summary["overflow_bytes"].items()]
    cameras = [
        f"{one['id']} {one['width']}x{one['height']}" if one["answers"] else f"{one['id']} does not answer"
        for one in summary["cameras"]
    ]
    sinks = [one["name"] if one["answers"] else f"{one['name']} does not answer" for one in summary["sinks"]]
    return "\n".join([
        f"{config}: sound; {needs}, budget {size(summary['budget_bytes'])}: {fits}{''.join(copied)}",
        f"cameras: {', '.join(cameras)}",
        f"sinks: {', '.join(sinks)}",
    ])  # fmt: skip


def _counts(by_reason: Mapping[str, int]) -> str:
    return "".join(f", {count} {reason}" for reason, count in by_reason.items())


def log_summary(summary: Row, problems: Sequence[str]) -> None:
    """The end of a box whose log has nothing but JSON."""
    log = logging.getLogger("gemel.run")
    for problem in problems:
        log.error(problem)
    log.info("the summary of the box", extra={SUMMARY: summary})


def box_exit_code(summary: Row) -> ExitCode:
    """A box that was stopped by a signal is done; one whose cameras all ended falls short if a camera failed."""
    if summary["fault"]:
        return ExitCode.SHORT
    if summary["stopped_by"].startswith("SIG"):
        return ExitCode.DONE
    if summary["unwritten"]:
        return ExitCode.BAD_INPUT
    return ExitCode.DONE if all(camera["error"] is None for camera in summary["cameras"]) else ExitCode.SHORT
