"""The report's first sentence: which queries to ship, how certain that is, and which queries merging made worse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gemel.text import number, percent, size

VISIBLE_DIFFERENCE = 0.005
"""Accuracies that differ by less are equal to two decimals."""
MIN_CLIPS = 5
"""Clips or tracks of test footage below which a bootstrap interval says little."""
COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
BASELINES = ("none", "joint")
"""Methods that never share."""
ORIGINALS, MERGED = "originals", "merged"
Document = Mapping[str, Any]


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
    """What to do; `ship` are the queries that can be shipped."""

    sentence: str
    tone: Tone
    ship: tuple[str, ...]
    worse: tuple[WorseQuery, ...]


@dataclass(frozen=True)
class MemorySetting:
    """A memory budget that was simulated for both arms."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class StreamScores:
    """Accuracy on the stream of both arms, over all queries.

    Where the queries have one metric these are means of it. F1 and balanced accuracy have no common mean: there each
    accuracy is divided by the original's accuracy offline first, and `relative` is set.
    """

    originals: float
    merged: float
    relative: bool

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


def draw_conclusion(document: Document) -> Conclusion:
    """Judge a report document (`gemel.evaluation`) at its headline memory.

    A query can be shipped when its original is evidence, its target is met on test, and its streaming accuracy at that
    memory keeps the same fraction of the originals'. A query whose streaming accuracy is below the originals' at any
    memory setting is named as worse.
    """
    offline = document["offline"]
    worse = _worse_queries(document)
    if not document["shared"]:
        return Conclusion(f"Nothing could be shared: {_reason_nothing_shared(document)}.", Tone.BAD, (), worse)
    weak = [row["query"] for row in offline if not row["worth"]]
    failing = list(dict.fromkeys(one.query for one in worse if one.decides))
    ship = tuple(row["query"] for row in offline if row["query"] not in {*weak, *failing})
    reasons = [f"{_join(failing)} {'fall' if len(failing) > 1 else 'falls'} short"] if failing else []
    if weak:
        reasons.append(f"the original{'s' * (len(weak) > 1)} of {_join(weak)} {_verb(weak)} too weak to judge by")
    if not ship:
        return Conclusion(f"Don't ship it: {' and '.join(reasons)}.", Tone.BAD, (), worse)
    gain = f"{percent(document['bytes']['saved_fraction'], 0)} less memory for weights; {stream_gain(document)}"
    unsure = _uncertainty([row for row in offline if row["query"] in ship])
    if reasons:
        count = f"{_count(len(ship))} of {_count(len(offline))}"
        parts = [" and ".join(reasons), *([unsure] if unsure else []), gain]
        return Conclusion(f"Ship it for {count}: {'; '.join(parts)}.", Tone.MIXED, ship, worse)
    targets = f"all {_count(len(ship))} queries meet" if len(ship) > 1 else "the query meets"
    if unsure:
        own = "their" if len(ship) > 1 else "its"
        return Conclusion(f"{_capital(targets)} {own} accuracy target, {unsure}. {_capital(gain)}.",
                          Tone.MIXED, ship, worse)  # fmt: skip
    own = "their" if len(ship) > 1 else "its"
    return Conclusion(f"Ship it: {targets} {own} accuracy target, with {gain}.", Tone.GOOD, ship, worse)


def memory_settings_of(document: Document) -> list[MemorySetting]:
    """The simulated memory settings, from small to large."""
    settings = {row["memory"]: row["memory_bytes"] for row in document["streaming"]}
    return [MemorySetting(*one) for one in sorted(settings.items(), key=lambda one: one[1])]


def headline_memory(document: Document) -> MemorySetting | None:
    """The memory setting that the conclusion is for; None without streams."""
    settings = memory_settings_of(document)
    wanted = document.get("headline", {}).get("memory")
    return next((one for one in settings if one.name == wanted), settings[0] if settings else None)


def stream_accuracies(document: Document, memory: str) -> dict[str, tuple[float, float]]:
    """Query -> streaming accuracy (original, merged) at a memory setting."""
    found: dict[str, dict[str, float]] = {}
    for row in document["streaming"]:
        if row["memory"] == memory:
            found.setdefault(row["query"], {})[row["arm"]] = row["accuracy"] or 0.0
    return {query: (arms[ORIGINALS], arms[MERGED]) for query, arms in found.items()}


def score_divisors(offline: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Query -> what its accuracy is divided by before means over queries are taken; None: one metric, plain means."""
    if len({row["metric"] for row in offline}) == 1:
        return None
    return {row["query"]: row["original"] or 1.0 for row in offline}


def stream_scores(document: Document, memory: str) -> StreamScores:
    """Both arms over all queries at a memory setting."""
    divisors = score_divisors(document["offline"])
    pairs = [
        (before / (divisors or {}).get(query, 1.0), after / (divisors or {}).get(query, 1.0))
        for query, (before, after) in stream_accuracies(document, memory).items()
    ]
    before, after = (sum(arm) / len(arm) for arm in zip(*pairs, strict=True))
    return StreamScores(before, after, divisors is not None)


def device_name(document: Document) -> str:
    """The device that times are of; a modelled one is called so wherever its figures appear."""
    device = document["device"]
    return f"a modelled {device['title']}" if device["modelled"] else device["title"]


def stream_gain(document: Document) -> str:
    """What merging brings on the stream at the headline memory, in words."""
    setting = headline_memory(document)
    if setting is None:
        return "no streams were simulated"
    scores = stream_scores(document, setting.name)
    place = f"with {size(setting.nbytes)} on {device_name(document)}"
    if abs(scores.merged - scores.originals) < VISIBLE_DIFFERENCE:
        return f"merging changes nothing on the stream {place}: {scores.phrase(scores.originals)} either way"
    return f"{scores.phrase(scores.merged)} (originals {scores.format(scores.originals)}) {place}"


def _uncertainty(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many of the queries to be shipped are beyond doubt, and which need more test footage; empty where all are."""
    unsure = [row["query"] for row in rows if not row["certain"]]
    short = [row["query"] for row in rows if row["units"] < MIN_CLIPS]
    parts = []
    if unsure:
        parts.append(f"{len(rows) - len(unsure)} of {len(rows)} beyond doubt")
        parts.append(f"{_join(unsure)} {'need' if len(unsure) > 1 else 'needs'} more test footage")
    if len(short) == len(rows):
        parts.append(f"{'all have' if len(rows) > 1 else 'it has'} fewer than {MIN_CLIPS} test clips")
    elif short:
        parts.append(f"{_join(short)} {'have' if len(short) > 1 else 'has'} fewer than {MIN_CLIPS} test clips")
    return "; ".join(parts)


def _worse_queries(document: Document) -> tuple[WorseQuery, ...]:
    """Queries that miss their target first, then those worse on the stream, headline memory first."""
    found = [
        WorseQuery(
            row["query"],
            f"misses its target: {percent(row['ratio'])} of its original, {percent(row['target'], 0)} wanted",
            decides=True,
        )
        for row in document["offline"]
        if row["worth"] and not row["met"]
    ]
    headline = headline_memory(document)
    settings = sorted(memory_settings_of(document), key=lambda one: one != headline)
    streamed = {one.name: stream_accuracies(document, one.name) for one in settings}
    for row in document["offline"]:
        falls = []
        for setting in settings:
            before, after = streamed[setting.name].get(row["query"], (0.0, 0.0))
            if before - after > VISIBLE_DIFFERENCE:
                falls.append((setting, before, after))
        if falls:
            found.append(_worse_on_stream(row, falls, headline))
    return tuple(found)


def _worse_on_stream(
    row: Mapping[str, Any], falls: Sequence[tuple[MemorySetting, float, float]], headline: MemorySetting | None
) -> WorseQuery:
    starved = any(after < before / 2 for _, before, after in falls)
    parts = [
        f"{number(b, 2)} -> {number(a, 2)} with {size(setting.nbytes)} ({setting.name})" for setting, b, a in falls
    ]
    decides = any(setting == headline and after < row["target"] * before for setting, before, after in falls)
    return WorseQuery(row["query"], f"{'starved' if starved else 'worse'} on the stream: {', '.join(parts)}", decides)


def _reason_nothing_shared(document: Document) -> str:
    if document["method"] in BASELINES:
        return f"method {document['method']} is a baseline that shares nothing"
    if not document["bytes"]["ceiling_fraction"]:
        return "no two of the models have a layer of the same shape"
    return "no two models kept their accuracy targets with a layer in common"


def _count(count: int) -> str:
    return COUNTS[count] if count < len(COUNTS) else str(count)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _verb(names: Sequence[str]) -> str:
    return "are" if len(names) > 1 else "is"


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
