"""What a reader of the report must know before believing its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MIN_UNITS = 5
ENOUGH = 0.99


def caveats(
    offline: Sequence[Mapping[str, Any]],
    swapping: Sequence[Mapping[str, Any]],
    device: Mapping[str, Any],
    unlabelled: Sequence[str],
    seeds: int,
) -> list[str]:
    """One sentence or two each: no evidence, few clips, no pressure, modelled device, what streams leave out."""
    lines = []
    weak = [row for row in offline if not row["worth"]]
    for row in weak:
        bar = "an F1 below 0.5" if row["metric"] == "f1" else "less than 10 points above chance"
        lines.append(
            f"{row['query']}: no evidence. Its original reaches {row['original']:.2f} on test, {bar}, so keeping "
            "that accuracy proves nothing."
        )
    few = [f"{row['query']} ({row['units']})" for row in offline if row["units"] < MIN_UNITS]
    if few:
        lines.append(
            f"The test footage of {', '.join(few)} has fewer than {MIN_UNITS} clips or tracks; an interval over so few "
            "says little."
        )
    unsure = [row["query"] for row in offline if row["met"] and not row["certain"] and row["worth"]]
    if unsure:
        lines.append(
            f"{', '.join(unsure)}: the target is met, but the lower end of the 95 % interval lies below it; another "
            "day's footage could miss it."
        )
    if unlabelled:
        lines.append(
            f"{', '.join(unlabelled)}: no human labels; the reference is the original's own output, so the figures "
            "are agreement with the original, not accuracy."
        )
    if all(row["processed"] >= ENOUGH * row["received"] for row in swapping):
        lines.append(
            f"No pressure: {device['title']} keeps up with these streams even without merging, whatever the memory, so "
            "streaming accuracy says nothing about merging here. A slower device, more queries or higher rates would."
        )
    modelled = (
        f"{device['title']} is modelled from published bandwidths and rates ({'; '.join(device['sources'])}), "
        "it was not measured"
        if device["modelled"]
        else f"{device['title']} was measured"
    )
    lines.append(
        f"Times come from a {device['clock']}: the box's own schedule, loads and runs as long as the profile says. "
        f"{modelled}. Differences between arms carry further than the figures themselves."
    )
    lines.append(
        "On the stream a query's labelled test clips or tracks are played back to back, so each begins without an "
        "answer, and that first frame is always wrong, for both arms. Only labelled frames are played, so an answer is "
        f"never fresher than their spacing ({_spacing(offline)}). "
        f"Mean of {seeds} seed{'s' if seeds != 1 else ''} for order and phase; bands run from the least to "
        "the largest."
    )
    return lines


def _spacing(offline: Sequence[Mapping[str, Any]]) -> str:
    spacings = sorted({round(row["label_interval_s"], 2) for row in offline})
    return f"{spacings[0]:g} s" if len(spacings) == 1 else f"{spacings[0]:g} to {spacings[-1]:g} s"
