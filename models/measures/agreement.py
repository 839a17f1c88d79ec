"""How often two models of a query agree on frames in order of time: a verdict with an interval. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gemel.models.measures.bounds import upper_ends
from gemel.models.predictions import Task

INTERVAL_ERROR = 0.025
"""Of each end of an interval of 95 %."""
MIN_COMPARED = 20
"""Frames with anything to compare of a drift check."""
KEPT, BELOW, UNSURE, TOO_FEW, ONE_ANSWER = "kept", "below", "unsure", "too few", "one answer"
"""Verdicts: on target; below it; below it, perhaps by chance; too few frames; nothing that could have failed."""


@dataclass(frozen=True, eq=False)
class ComparedFrames:
    """Tallies of frames in order of time (`Task.tallies`, with the other model's predictions as labels).

    `counts` int64 (N, ...); `expected` is the agreement on the test split; `unusable` frames were left out.
    """

    counts: np.ndarray
    expected: float = 1.0
    unusable: int = 0


@dataclass(frozen=True)
class Agreement:
    """The number of compared frames, the ratio of agreement to the expected one with its 95 % interval, a verdict.

    `ratio` and `ci95` are None where the frames are too few.
    """

    frames: int
    ratio: float | None
    ci95: tuple[float, float] | None
    verdict: str


def compare_agreement(found: ComparedFrames, task: Task, target: float) -> Agreement:
    """The verdict of these tallies.

    The interval is of the mean over blocks of consecutive frames, about the cube root of their number long (Hall,
    Horowitz and Jing 1995), since neighbours in time are alike (`models.measures.bounds`). BELOW: the whole interval is
    below the target; UNSURE: the ratio is, and not the whole interval. Frames on which neither model saw anything are
    no evidence; ONE_ANSWER: a classifier is on target on frames of a single class, as any model that always names it
    would be.
    """
    counts, frames = found.counts, len(found.counts)
    if np.count_nonzero(counts.any(axis=tuple(range(1, counts.ndim)))) < MIN_COMPARED:
        return Agreement(frames, None, None, TOO_FEW)
    ratio = task.metric_of(counts.sum(axis=0)) / found.expected
    low, high = (end / found.expected for end in interval_of_agreement(counts, task))
    verdict = BELOW if high < target else UNSURE if ratio < target else KEPT
    if verdict == KEPT and task.name == "classification" and np.count_nonzero(counts[:, 1].any(axis=0)) < 2:
        verdict = ONE_ANSWER
    return Agreement(frames, ratio, (low, high), verdict)


def interval_of_agreement(counts: np.ndarray, task: Task) -> tuple[float, float]:
    """The 95 % interval of the agreement of these counts of frames (N, ...), never of width zero."""
    frames = len(counts)
    blocks = np.array_split(np.arange(frames), max(2, frames // round(frames ** (1 / 3))))
    sums = np.stack([counts[block].sum(axis=0) for block in blocks])
    whole, count = sums.sum(axis=0), len(sums)
    metric = task.metric_of(whole)
    values = np.array([count * metric - (count - 1) * task.metric_of(whole - own) for own in sums])
    ones, losses = np.ones(count), 1 - values
    single = count / frames  # a block that loses one frame
    high = upper_ends(values, ones, np.maximum(1.0, values.max()), INTERVAL_ERROR)
    low = 1 - upper_ends(losses, ones, np.maximum(single, losses.max()), INTERVAL_ERROR)
    return max(0.0, float(low)), float(high)
