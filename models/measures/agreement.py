"""How often two models of a query agree on frames in order of time, and whether that is too seldom. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gemel.models.measures.sequential import group_values, start_test
from gemel.models.predictions import Task

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
    """The number of compared frames, the ratio of agreement to the expected one (None: too few frames), a verdict."""

    frames: int
    ratio: float | None
    verdict: str


def compare_agreement(
    compared: ComparedFrames, task: Task, target: float, is_below: bool
) -> Agreement:
    """The verdict of these tallies; a test of a stated error says whether agreement `is_below` the target.

    UNSURE: the ratio alone is below it. Frames on which neither model saw anything are no evidence; ONE_ANSWER: a
    classifier is on target on frames of a single class, as any model that always names it would be.
    """
    counts = compared.counts
    frames = len(compared.counts)
    if np.count_nonzero(counts.any(axis=tuple(range(1, counts.ndim)))) < MIN_COMPARED:
        return Agreement(frames, None, TOO_FEW)
    ratio = task.metric_of(counts.sum(axis=0)) / compared.expected
    verdict = BELOW if is_below else UNSURE if ratio < target else KEPT
    if (
        verdict == KEPT
        and task.name == "classification"
        and np.count_nonzero(counts[:, 1].any(axis=0)) < 2
    ):
        verdict = ONE_ANSWER
    return Agreement(frames, ratio, verdict)


def values_of(compared: ComparedFrames, task: Task) -> list[float]:
    """The agreement on each frame with anything to compare."""
    return [task.metric_of(frame) for frame in compared.counts if frame.any()]


def is_surely_below(compared: ComparedFrames, task: Task, target: float, error: float) -> bool:
    """Whether two models agree less than the target, in one test that is wrong with this likelihood at most.

    It bets on blocks of frames, about the cube root of their number long, since neighbours in time are alike (Hall,
    Horowitz and Jing 1995).
    """
    values = values_of(compared, task)
    test = start_test(target * compared.expected, error)
    blocks = group_values(values, max(1, round(len(values) ** (1 / 3))))
    return any(test.add(value, frames=0) for value in blocks)
