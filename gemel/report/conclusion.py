"""What to do with a bundle, in one sentence, and whom merging made worse: the report's first words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gemel.text import number, percent, size

VISIBLE_DIFFERENCE = 0.005
"""A streaming accuracy that falls by less is the same to two decimals, and is not called worse."""
COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
SHARES_NOTHING = ("none", "joint")
"""Methods that are there to be compared with, and never share."""


@dataclass(frozen=True)
class WorseQuery:
    """A query that merging made worse, and how; `decides` says that this keeps it from being shipped."""

    query: str
    text: str
    decides: bool


@dataclass(frozen=True)
class Conclusion:
    """What to do: `tone` is good, mixed or bad; `ship` are the queries that can be shipped."""

    sentence: str
    tone: str
    ship: tuple[str, ...]
    worse: tuple[WorseQuery, ...]


def draw_conclusion(document: Mapping[str, Any]) -> Conclusion:
    """Judge a report document (`gemel.evaluation`) at the memory that was asked for.

    A query can be shipped when its original is evidence, its target is met on test, and at that memory its streaming
    accuracy keeps the same part of what the originals have. Made worse, and named, is also every query whose streaming
    accuracy is below the originals' at that or another memory setting.
    """
    offline, counts = document["offline"], document["bytes"]
    worse = _worse(document)
    if not document["shared"]:
        return Conclusion(f"Nothing could be shared, because {_why_nothing(document)}.", "bad", (), tuple(worse))
    weak = [row["query"] for row in offline if not row["worth"]]
    falling = list(dict.fromkeys(one.query for one in worse if one.decides))
    ship = tuple(row["query"] for row in offline if row["query"] not in {*weak, *falling})
    gain = f"{percent(counts['saved_fraction'], 0)} less memory for weights{_stream_gain(document)}"
    if len(ship) == len(offline):
        kept = f"all {_count(len(ship))} queries keep their accuracy target" if len(ship) > 1 else "its target is kept"
        return Conclusion(f"Ship it: {kept}, with {gain}.", "good", ship, tuple(worse))
    reasons = [f"{_listed(falling)} {'fall' if len(falling) > 1 else 'falls'} short"] if falling else []
    if weak:
        originals = "the originals of" if len(weak) > 1 else "the original of"
        reasons.append(f"{originals} {_listed(weak)} {'are' if len(weak) > 1 else 'is'} too weak to judge by")
    if not ship:
        return Conclusion(f"Don't ship it: {' and '.join(reasons)}.", "bad", (), tuple(worse))
    part = f"{_count(len(ship))} of {_count(len(offline))}"
    return Conclusion(f"Ship it for {part}: {' and '.join(reasons)}; {gain}.", "mixed", ship, tuple(worse))


def reported_memory(document: Mapping[str, Any]) -> tuple[str, int] | None:
    """Name and bytes of the memory setting asked for, the least where none was; None without streams."""
    settings = {row["memory"]: row["memory_bytes"] for row in document["streaming"]}
    if "asked" in document and document["asked"]["memory"] in settings:
        return document["asked"]["memory"], document["asked"]["memory_bytes"]
    return min(settings.items(), key=lambda one: one[1]) if settings else None


def stream_accuracies(document: Mapping[str, Any], memory: str) -> dict[str, tuple[float, float]]:
    """Query -> streaming accuracy of its original and merged at a memory setting; 0 where there is none."""
    found: dict[str, dict[str, float]] = {}
    for row in document["streaming"]:
        if row["memory"] == memory:
            found.setdefault(row["query"], {})[row["arm"]] = row["accuracy"] or 0.0
    return {query: (arms["originals"], arms["merged"]) for query, arms in found.items()}


def _worse(document: Mapping[str, Any]) -> list[WorseQuery]:
    """Those who missed their target first, then those worse on the stream, at the memory asked for before others."""
    found = [
        WorseQuery(
            row["query"],
            f"misses its target: {percent(row['ratio'])} of its original, {percent(row['target'], 0)} wanted",
            decides=True,
        )
        for row in document["offline"]
        if row["worth"] and not row["met"]
    ]
    asked = reported_memory(document)
    settings = {row["memory"]: row["memory_bytes"] for row in document["streaming"]}
    order = sorted(settings, key=lambda name: (asked is None or name != asked[0], settings[name]))
    streamed = {memory: stream_accuracies(document, memory) for memory in order}
    for row in document["offline"]:
        falls = []
        for memory in order:
            before, after = streamed[memory].get(row["query"], (0.0, 0.0))
            if before - after > VISIBLE_DIFFERENCE:
                falls.append((memory, before, after))
        if falls:
            found.append(_worse_on_stream(row, falls, settings, asked))
    return found


def _worse_on_stream(
    row: Mapping[str, Any],
    falls: Sequence[tuple[str, float, float]],
    settings: Mapping[str, int],
    asked: tuple[str, int] | None,
) -> WorseQuery:
    """One line for a query, whatever the number of memory settings: (setting, accuracy before, after) each."""
    starved = any(after < before / 2 for _, before, after in falls)
    parts = [f"{number(b, 2)} became {number(a, 2)} with {size(settings[memory])} ({memory})" for memory, b, a in falls]
    decides = any(asked is not None and name == asked[0] and a < row["target"] * b for name, b, a in falls)
    return WorseQuery(row["query"], f"{'starved' if starved else 'worse'} on the stream: {', '.join(parts)}", decides)


def _stream_gain(document: Mapping[str, Any]) -> str:
    asked = reported_memory(document)
    if asked is None:
        return ""
    before, after = (sum(arm) / len(arm) for arm in zip(*stream_accuracies(document, asked[0]).values(), strict=True))
    return f"; the stream is answered at {number(after, 2)} instead of {number(before, 2)} in {size(asked[1])}"


def _why_nothing(document: Mapping[str, Any]) -> str:
    if document["method"] in SHARES_NOTHING:
        return f"method {document['method']} is there to compare with and shares nothing"
    if not document["bytes"]["ceiling_fraction"]:
        return "no two of the models have a layer of the same shape"
    return "no two models kept their accuracy targets with a layer in common"


def _count(count: int) -> str:
    return COUNTS[count] if count < len(COUNTS) else str(count)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
