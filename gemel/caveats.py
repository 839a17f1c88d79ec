"""What a reader of the report must know before believing its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FEW_UNITS = 5


def caveats(
    offline: Sequence[Mapping[str, Any]], device: Mapping[str, Any], unlabelled: Sequence[str], seeds: Sequence[int]
) -> list[str]:
    """One sentence or two each: no evidence, few clips, modelled device, what streaming accuracy leaves out."""
    lines = []
    weak = [row for row in offline if not row["worth"]]
    for row in weak:
        bar = "an F1 below 0.5" if row["metric"] == "f1" else "less than 10 points above chance"
        lines.append(
            f"{row['query']}: no evidence. Its original reaches {row['original']:.2f} on test, {bar}, so keeping "
            "that accuracy proves nothing."
        )
    few = [f"{row['query']} ({row['units']})" for row in offline if row["units"] < FEW_UNITS]
    if few:
        lines.append(
            f"The test footage of {', '.join(few)} has fewer than {FEW_UNITS} clips or tracks; an interval over so few "
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
        "answer, and that first frame is always wrong, for both arms. Short tracks suffer most from it. "
        f"Mean of {len(seeds)} seed{'s' if len(seeds) != 1 else ''} for order and phase; bands run from the least to "
        "the largest."
    )
    return lines
