"""What merging brings on the report's device: does all fit already, what changes, and below which memory it helps."""

from __future__ import annotations

from dataclasses import dataclass

from gemel.report.document import MemorySetting, Report
from gemel.text import number, percent, size

VISIBLE_DIFFERENCE = 0.005
"""Accuracies that differ by less are equal to two decimals."""
DEVICE_SHARE = 0.5
"""Of a device's memory, for weights and workspace, where --memory gives no size; system, libraries and frames need the
rest."""
NAMED_MEMORY = ("min", "50%", "75%", "all")


@dataclass(frozen=True)
class StreamScores:
    """Accuracy on the stream of both arms, over the queries whose originals are strong enough to judge by.

    Where the queries have one metric these are means of it. F1 and balanced accuracy have no common mean: there each
    accuracy is divided by the original's accuracy offline first, and `relative` is set.
    """

    originals: float
    merged: float
    relative: bool

    @property
    def gain(self) -> float:
        """What merging adds; 0 where two decimals hide it."""
        change = self.merged - self.originals
        return change if abs(change) >= VISIBLE_DIFFERENCE else 0.0

    def format(self, value: float) -> str:
        """A score as text."""
        return percent(value, 0) if self.relative else number(value, 2)

    @property
    def noun(self) -> str:
        """What the scores are, in words."""
        return "of offline accuracy on the stream" if self.relative else "accuracy on the stream"

    def phrase(self, value: float) -> str:
        """A score with its noun."""
        return f"{self.format(value)} {self.noun}" if self.relative else f"{self.noun} {self.format(value)}"


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of weights of both arms, and what the originals need at once: `workspace` is of the largest query.

    `budget` is what the device has for weights and workspace, None where that is not known.
    """

    before: int
    after: int
    workspace: int
    least: int
    everything: int
    budget: int | None


def device_memory(report: Report) -> DeviceMemory | None:
    """The memory that sentence, subtitle and first card of a report speak of; None without streams."""
    settings = {one.memory: one.memory_bytes for one in report.memory_settings}
    if "min" not in settings or "all" not in settings:
        return None
    workspace = max((row.workspace_bytes for row in report.costs), default=0)
    budget = round(DEVICE_SHARE * report.device.memory_bytes) or None
    if report.headline.memory not in NAMED_MEMORY:
        budget = report.headline.memory_bytes
    counts = report.bytes
    return DeviceMemory(counts.before, counts.after, workspace, settings["min"], settings["all"], budget)


def stream_scores(report: Report, memory: str) -> StreamScores:
    """Both arms at a memory setting, over the queries with strong originals (all, where there are none)."""
    divisors = report.divisors
    pairs = [
        (before / (divisors or {}).get(query, 1.0), after / (divisors or {}).get(query, 1.0))
        for query, (before, after) in report.stream_accuracies(memory).items()
        if query in report.averaged
    ]
    before, after = (sum(arm) / len(arm) for arm in zip(*pairs, strict=True))
    return StreamScores(before, after, divisors is not None)


def device_name(report: Report) -> str:
    """The device that times are of; a modelled one is called so wherever its figures appear."""
    return f"a modelled {report.device.title}" if report.device.modelled else report.device.title


def describe_gain(report: Report) -> str:
    """The report's first sentences: what merging changes on this device, and where it brings nothing."""
    memory = device_memory(report)
    freed = report.bytes.before - report.bytes.after
    if memory is None:
        return f"Merging frees {size(freed)} of weights; no streams were simulated."
    if memory.budget is None:
        first = f"All originals need {size(memory.everything)} at once; merging frees {size(freed)}."
    elif memory.budget >= memory.everything:
        at_all = stream_scores(report, "all")
        change = "changes nothing else"
        if at_all.gain:
            change = f"{_compare(at_all)}, by training alone, since memory is short for neither"
        first = f"Your device ({device_name(report)}) holds all originals; merging frees {size(freed)} and {change}."
    else:
        first = (
            f"Your device ({device_name(report)}) has {size(memory.budget)} for weights and workspace, and all "
            f"originals need {size(memory.everything)}; merging frees {size(freed)}."
        )
    return f"{first} {_describe_shortage(report, memory.everything)}"


def _describe_shortage(report: Report, everything: int) -> str:
    """What merging brings with less memory than all originals need, at the headline memory or where it brings most."""
    if not report.strong:
        return "No original is strong enough for a figure on the stream."
    short = [one for one in report.memory_settings if one.memory_bytes < everything]
    if not short:
        return ""
    limit = f"Below {size(everything)}"
    by_setting = [(one, stream_scores(report, one.memory)) for one in short]
    setting, scores = max(by_setting, key=lambda pair: (pair[0] == report.judged_memory, pair[1].gain))
    if not any(one.gain for _, one in by_setting):
        return f"{limit} it brings nothing on the stream either: {scores.phrase(scores.originals)} both ways."
    if not scores.gain:
        setting, scores = max(by_setting, key=lambda pair: abs(pair[1].gain))
    verb = "helps" if scores.gain > 0 else "harms"
    return f"{limit} it {verb}: with {size(setting.memory_bytes)} it {_compare(scores)}."


def _compare(scores: StreamScores) -> str:
    verb = "lifts" if scores.gain > 0 else "lowers"
    before, after = scores.format(scores.originals), scores.format(scores.merged)
    if scores.relative:
        return f"{verb} what the stream keeps of offline accuracy from {before} to {after}"
    return f"{verb} {scores.noun} from {before} to {after}"


def explain_memory(report: Report, headline: MemorySetting) -> str:
    """What the headline memory is a fraction of, and why it was chosen."""
    memory = device_memory(report)
    if memory is None or headline.memory not in NAMED_MEMORY:
        return "as requested by --memory"
    whole = f"all originals at once ({size(memory.before)} of weights, {size(memory.workspace)} of largest workspace)"
    if headline.memory == "min":
        return "the least that runs the largest original alone"
    if headline.memory == "all":
        return f"enough for {whole}"
    return (
        f"{headline.memory} of the way from {size(memory.least)}, the largest original alone, to "
        f"{size(memory.everything)}, {whole}"
    )
