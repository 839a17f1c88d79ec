"""The rules that cut real footage into train, val and test, as pure functions.

Neighbouring frames are near-duplicates, so nothing is dealt out at random: lists are cut in time, clips are
dealt by day and crops by track.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

SPLITS = ("train", "val", "test")
Item = TypeVar("Item")
Box = tuple[float, float, float, float]


def number_in(name: str) -> int:
    """The last number in a file name: image12.png comes before image100.png."""
    numbers = re.findall(r"\d+", name)
    if not numbers:
        raise ValueError(f"{name} holds no number to order it by")
    return int(numbers[-1])


def contiguous(items: Sequence[Item], shares: Sequence[float]) -> list[list[Item]]:
    """Cut a list into consecutive parts of lengths as `shares`; every item lands in exactly one of them."""
    total, done, start, parts = sum(shares), 0.0, 0, []
    for share in shares:
        done += share
        end = round(len(items) * done / total)
        parts.append(list(items[start:end]))
        start = end
    return parts


def in_time(items: Sequence[Item], gap: int = 0, shares: Sequence[float] = (60, 20, 20)) -> dict[str, list[Item]]:
    """Train, val and test one after the other, leaving `gap` items out between two neighbours."""
    parts = contiguous(items, shares)
    return {split: part[(gap if number else 0) :] for number, (split, part) in enumerate(zip(SPLITS, parts))}


def in_segments(items: Sequence[Item], segments: int = 8) -> list[dict[str, list[Item]]]:
    """The list as contiguous segments, each of them split in time by itself."""
    return [in_time(segment) for segment in contiguous(items, [1] * segments)]


def by_day(clips: Sequence[str], days: Mapping[str, str]) -> dict[str, list[str]]:
    """Clips named `<camera>_<YYYYMMDDhhmm>` dealt to the split of their day.

    Raises ValueError for a clip whose day is in no split, so that new footage is never dealt silently.
    """
    dealt: dict[str, list[str]] = {split: [] for split in SPLITS}
    for clip in clips:
        day = clip.split("_")[-1][:8]
        if day not in days:
            raise ValueError(f"clip {clip}: its day {day} is in no split")
        dealt[days[day]].append(clip)
    return dealt


def by_track(tracks: Mapping[int, str], sizes: Mapping[int, float]) -> dict[int, str]:
    """The split of each track, every class in every split, large and small tracks spread over all of them.

    `tracks` gives each track's class, `sizes` how its neighbours in size are found. About a quarter of a
    class is tested, a fifth validates. Raises ValueError for a class of fewer than four tracks.
    """
    dealt: dict[int, str] = {}
    for name in sorted(set(tracks.values())):
        members = sorted((t for t in tracks if tracks[t] == name), key=lambda t: (-sizes[t], t))
        if len(members) < 4:
            raise ValueError(f"class {name} has {len(members)} tracks; four are needed for three splits")
        tested = max(1, round(len(members) / 4 + 0.01))
        validating = max(1, round(len(members) / 5))
        dealt.update(dict.fromkeys(members, "train"))
        for track in _spread(members, tested):
            dealt[track] = "test"
        for track in _spread([t for t in members if dealt[t] == "train"], validating):
            dealt[track] = "val"
    return dealt


def _spread(items: Sequence[Item], count: int) -> list[Item]:
    """`count` items from the middles of as many equal parts of the list."""
    return [items[int((place + 0.5) * len(items) / count)] for place in range(count)]


def thin(items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` items, evenly spaced over the list."""
    return list(items) if len(items) <= most else _spread(items, most)


def with_margin(box: Box, margin: float, width: int, height: int) -> tuple[int, int, int, int]:
    """A box widened by `margin` of its own sides, in whole pixels, kept inside the frame."""
    x0, y0, x1, y1 = box
    dx, dy = margin * (x1 - x0), margin * (y1 - y0)
    return (
        max(0, round(x0 - dx)),
        max(0, round(y0 - dy)),
        min(width, round(x1 + dx)),
        min(height, round(y1 + dy)),
    )


def overlap_fraction(box: Box, others: Sequence[Box]) -> float:
    """The largest part of a box that one nearer box hides: one reaching further down the picture."""
    x0, y0, x1, y1 = box
    area = (x1 - x0) * (y1 - y0)
    nearer = [other for other in others if other[3] > y1]
    overlaps = [
        max(0.0, min(x1, other[2]) - max(x0, other[0])) * max(0.0, min(y1, other[3]) - max(y0, other[1]))
        for other in nearer
    ]
    return max(overlaps, default=0.0) / area if area > 0 else 1.0
