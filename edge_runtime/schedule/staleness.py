"""Staleness: what an answer is worth as it ages, and so what a fresh one brings.

A curve holds the accuracy of an answer that is 0, 1, 2... frames old, as it was measured; beyond its end it stays as it
is. Ages are in frames of the query's rate, and between two of them accuracies lie on the line.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

Curve = tuple[float, ...]
MAX_AGES = 64
"""Frames of age for which a curve says something, at most."""


def falling(measured: Sequence[float]) -> Curve:
    """A curve that never rises with age: where a measured one does, that is noise."""
    return tuple(accumulate(measured, min))


def accuracy_at(curve: Curve, frames: float) -> float:
    """The accuracy of an answer so many frames old."""
    young = min(int(frames), len(curve) - 1)
    old = min(young + 1, len(curve) - 1)
    return curve[young] + (frames - young) * (curve[old] - curve[young])


def stood_for(curve: Curve, frames: float) -> float:
    """What an answer brings in all that stands for so many frames: the sum of its accuracies at each."""
    sums = _sums(curve)
    whole = min(int(frames), len(curve))
    return sums[whole] + (frames - whole) * curve[min(whole, len(curve) - 1)]


def gain(curve: Curve, frames: float) -> float:
    """How much an answer is wanted where the newest is so many frames old: what has been lost since by its age.

    This is the index of a query whose answers grow old (age of information: Kadota et al. 2018, after Whittle 1988):
    the frames times the accuracy lost by now, less what was lost in sum on the way. Where an answer is worth something
    for its own frame alone, (1, 0, 0...), it is 1 for every frame: the number of frames in time.
    """
    return stood_for(curve, frames) - frames * accuracy_at(curve, frames)


def over_time(
    curve: Curve, fps: float, moments: Sequence[float], answers: Sequence[tuple[float, float]]
) -> float:  # fmt: skip
    """The mean over moments of what the newest answer that is there then is worth at its age; 0 before there is one.

    `answers` are (when it is there, when its frame was captured), in order of time, as `moments` are; both in seconds.
    """
    total, upto, newest = 0.0, 0, 0.0
    for now in moments:
        while upto < len(answers) and answers[upto][0] <= now:
            newest = max(newest, answers[upto][1]) if upto else answers[upto][1]
            upto += 1
        total += accuracy_at(curve, (now - newest) * fps) if upto else 0.0
    return total / max(1, len(moments))


@lru_cache(maxsize=1024)
def _sums(curve: Curve) -> tuple[float, ...]:
    return (0.0, *accumulate(curve))
