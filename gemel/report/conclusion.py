"""The report's conclusion: what merging brings on the device, whether to ship it, and which queries it made worse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from gemel.report.device import VISIBLE_DIFFERENCE, describe_gain
from gemel.report.document import MIN_STRONG, MemorySetting, OfflineRow, Report
from gemel.text import key_text, networks_text, number, percent, size

COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
MAX_REASONS = 4
BASELINES = ("none", "joint")
"""Methods that never share."""


class Tone(str, Enum):
    """How the page colours the conclusion."""

    GOOD = "good"
    MIXED = "mixed"
    BAD = "bad"


@dataclass(frozen=True)
class WorseQuery:
    """A query that merging made worse, and how; `decides`: this alone keeps the query from being shipped."""

    query: str
    text: str
    decides: bool


@dataclass(frozen=True)
class Conclusion:
    """What to do, in `lines` that follow each other; `ship` are the queries that can be shipped."""

    sentence: str
    tone: Tone
    ship: tuple[str, ...]
    worse: tuple[WorseQuery, ...]
    lines: tuple[str, ...] = ()


def draw_conclusion(report: Report) -> Conclusion:
    """Judge a report at its headline memory: what merging brings on its device, and whether to ship it.

    A query can be shipped when its original is evidence, its target is met on test, and its streaming accuracy at that
    memory keeps the same fraction of the originals'. A query whose streaming accuracy is below the originals' at any
    memory setting is named as worse. Queries whose footage is no evidence, and weak originals, are named.
    """
    judged, blank = _judge_evidence(report), missing_evidence(report)
    networks = networks_text({row.query: row.network for row in report.offline})
    parts = [describe_gain(report) if report.shared else "", networks and f"{_capital(networks)}.", blank]
    lines = tuple(filter(None, [*parts, judged.sentence, _name_weak(report)]))
    tone = Tone.MIXED if blank and judged.tone is Tone.GOOD else judged.tone
    return replace(judged, sentence=" ".join(lines), lines=lines, tone=tone)


def _name_weak(report: Report) -> str:
    """The originals that answer too often wrong for the keeping of their accuracy to be a success."""
    rows = [row for row in report.offline if row.worth and not row.reason and row.original < MIN_STRONG]
    if not rows:
        return ""
    named = [
        f"{row.query} ({number(row.original, 2)} {key_text(row.metric)}"
        + (f", merged {number(row.merged, 2)})" if row.merged - row.original > VISIBLE_DIFFERENCE else ")")
        for row in rows
    ]
    several = len(rows) > 1
    return (
        f"Weak original{'s' * several}: {_join(named)}; to keep {'their' if several else 'its'} accuracy is no "
        f"success: train {'them' if several else 'it'} longer first."
    )


def missing_evidence(report: Report) -> str:
    """How many queries have no evidence, with the reason of each; empty where all have some."""
    rows = [row for row in report.offline if row.reason]
    if not rows:
        return ""
    reasons = [f"{row.query}, {row.reason}" for row in rows[:MAX_REASONS]]
    reasons += [f"and {len(rows) - MAX_REASONS} more"] if len(rows) > MAX_REASONS else []
    many = "query has" if len(report.offline) == 1 else "queries have"
    return f"{len(rows)} of {len(report.offline)} {many} no evidence: {'; '.join(reasons)}."


def _judge_evidence(report: Report) -> Conclusion:
    worse = _worse_queries(report)
    if not report.shared:
        return Conclusion(f"Nothing could be shared: {_reason_nothing_shared(report)}.", Tone.BAD, (), worse)
    blank = [row.query for row in report.offline if row.reason]
    weak = [row.query for row in report.offline if not row.worth and not row.reason]
    failing = list(dict.fromkeys(one.query for one in worse if one.decides))
    shipped = [row for row in report.offline if row.query not in {*blank, *weak, *failing}]
    ship, several = tuple(row.query for row in shipped), len(shipped) > 1
    reasons = [f"{_join(failing)} {'fall' if len(failing) > 1 else 'falls'} short"] if failing else []
    if weak:
        many = len(weak) > 1
        reasons.append(f"the original{'s' * many} of {_join(weak)} {'are' if many else 'is'} too weak to judge by")
    if changed := [row.query for row in report.offline if row.reason and not row.met]:
        reasons.append(f"{_join(changed)} {'have' if len(changed) > 1 else 'has'} no evidence")
    if not ship:
        return Conclusion(f"Don't ship it: {' and '.join(reasons) or 'nothing is proved'}.", Tone.BAD, (), worse)
    unsure = _uncertainty(shipped)
    if reasons:
        count = f"{_count(len(ship))} of {_count(len(report.offline))}"
        sentence = f"Ship it for {count}: {'; '.join(filter(None, [' and '.join(reasons), unsure]))}."
        return Conclusion(sentence, Tone.MIXED, ship, worse)
    every = "the other" if blank else "all"
    met = (
        f"{every} {_count(len(ship))} queries meet their" if several else f"the {'other ' * bool(blank)}query meets its"
    )
    if unsure:
        return Conclusion(f"Get more footage: {met} accuracy target, {unsure}.", Tone.MIXED, ship, worse)
    return Conclusion(f"Ship it: {met} accuracy target.", Tone.GOOD, ship, worse)


def report_limits(report: Report, unlabelled: Sequence[str]) -> list[str]:
    """What limits the report's figures, a sentence or two each; `unlabelled` queries have no human labels."""
    lines, device = [], report.device
    for row in (row for row in report.offline if row.reason):
        why = "a worse model could look as good on this footage" if row.worth else "keeping that proves nothing"
        lines.append(f"{row.query}: no evidence, {row.reason}; {why}.")
    for row in (row for row in report.offline if not row.worth and not row.reason):
        bar = "an F1 below 0.5" if row.task in ("detection", "keypoints") else "less than 10 points above chance"
        lines.append(
            f"{row.query}: no evidence. Its original reaches {row.original:.2f} on test, {bar}; keeping that accuracy "
            "proves nothing."
        )
    if unsure := [row.query for row in report.offline if row.met and not row.is_sure and row.has_evidence]:
        lines.append(
            f"{', '.join(unsure)}: the target is met on test, but nothing proves it; other footage could miss it."
        )
    if unlabelled:
        lines.append(
            f"{', '.join(unlabelled)}: no human labels. The reference is the original's own output: the figures are "
            "agreement with the original, not accuracy."
        )
    if all(row.processed >= MIN_PROCESSED_SHARE * row.received for row in report.transfers):
        lines.append(
            f"No pressure: {device.title} keeps up with these streams without merging at every memory setting, so "
            "streaming accuracy says nothing about merging here. Use a slower device, more queries or higher rates."
        )
    origin = f"modelled from published bandwidths and rates ({'; '.join(device.sources)})"
    spacings = sorted({round(row.label_interval_s, 2) for row in report.offline})
    spacing = f"{spacings[0]:g} s" if len(spacings) == 1 else f"{spacings[0]:g} to {spacings[-1]:g} s"
    seeds = f"{len(report.seeds)} seed{'s' if len(report.seeds) != 1 else ''}"
    return [
        *lines,
        f"Times come from a {device.clock}: the box's own scheduler with the loads and runs of the device profile. "
        f"{device.title} is {origin if device.modelled else 'measured'}. Differences between arms are more reliable "
        "than absolute figures.",
        "Labelled test clips or tracks are played back to back. Each begins without a result, so its first frame is "
        "wrong for both arms. Only labelled frames are played: a result is never fresher than their spacing "
        f"({spacing}). Mean of {seeds} for order and phase; bands are the lowest and the highest seed.",
    ]


MIN_PROCESSED_SHARE = 0.99
"""Share of frames processed above which a device is under no pressure."""


def _uncertainty(rows: Sequence[OfflineRow]) -> str:
    """How many of the queries to be shipped are proven or unchanged, and what the others need; empty where all are."""
    unsure = [row for row in rows if not row.is_sure]
    if not unsure:
        return ""
    needs = [f"{row.query} needs {row.needs}" for row in unsure if row.needs]
    counted = f"{len(rows) - len(unsure)} of {len(rows)} proven or unchanged"
    return "; ".join([counted, *(needs or [f"{_join([row.query for row in unsure])} not proven"])])


def _worse_queries(report: Report) -> tuple[WorseQuery, ...]:
    """Queries that miss their target first, then those worse on the stream, headline memory first."""
    found = [
        WorseQuery(
            row.query,
            f"misses its target: {percent(row.ratio)} of its original, {percent(row.target, 0)} wanted",
            decides=True,
        )
        for row in report.offline
        if row.lost
    ]
    settings = sorted(report.memory_settings, key=lambda one: one != report.judged_memory)
    streamed = [(one, report.stream_accuracies(one.memory)) for one in settings]
    for row in report.offline:
        falls = [
            (setting, *accuracies[row.query])
            for setting, accuracies in streamed
            if row.query in accuracies and accuracies[row.query][0] - accuracies[row.query][1] > VISIBLE_DIFFERENCE
        ]
        if falls:
            found.append(_worse_on_stream(row, falls, report.judged_memory))
    return tuple(found)


def _worse_on_stream(
    row: OfflineRow, falls: Sequence[tuple[MemorySetting, float, float]], headline: MemorySetting | None
) -> WorseQuery:
    kind = "starved" if any(after < before / 2 for _, before, after in falls) else "worse"
    parts = [f"{number(b, 2)} -> {number(a, 2)} with {size(one.memory_bytes)} ({one.memory})" for one, b, a in falls]
    decides = any(one == headline and after < row.target * before for one, before, after in falls)
    return WorseQuery(row.query, f"{kind} on the stream: {', '.join(parts)}", decides)


def _reason_nothing_shared(report: Report) -> str:
    if report.method in BASELINES:
        return f"method {report.method} is a baseline that shares nothing"
    if sum(not row.reason for row in report.offline) < 2 <= len(report.offline):
        return "models without evidence keep their own weights"
    if needs := [f"{row.query} needs {row.needs}" for row in report.offline if row.needs]:
        return f"nothing here could prove it: {'; '.join(needs)}"
    if not report.bytes.ceiling_fraction:
        return "no two of the models have a layer of the same shape"
    return "no two models kept their accuracy targets with a layer in common"


def _count(count: int) -> str:
    return COUNTS[count] if count < len(COUNTS) else str(count)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
