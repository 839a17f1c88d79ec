"""How far one model's answers agree with another's, and how sure that is: no labels are needed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.tasks import Task

FEWEST = 20
"""Frames with something to compare below which nothing is said."""
ROUNDS = 1000
KEPT, BELOW, UNSURE, TOO_FEW = "kept", "below", "unsure", "too few"
"""What may be said: on target, below it for certain, below it and perhaps by chance, too few frames."""


@dataclass(frozen=True, eq=False)
class Compared:
    """The tally of every frame (`Task.tallies`), the other's answer its truth, int64 (N, ...), in the order of time;
    the agreement that is `expected` of a model that is right as often; and how many frames could not be used.
    """

    counts: np.ndarray
    expected: float = 1.0
    unusable: int = 0


@dataclass(frozen=True)
class Judged:
    """So many `frames` were compared, the `ratio` of the agreement to the expected one with its 95 % interval (None
    where the frames are too few), and the verdict: KEPT, BELOW, UNSURE or TOO_FEW.
    """

    frames: int
    ratio: float | None
    ci95: tuple[float, float] | None
    verdict: str


def judged(found: Compared, task: Task, target: float, seed: int = 0) -> Judged:
    """The verdict of these tallies.

    The interval is a bootstrap over blocks of consecutive frames, about the cube root of their number long (Hall,
    Horowitz and Jing 1995), since neighbours in time are alike. BELOW: all of the interval lies below the target;
    UNSURE: the ratio does, and not all of the interval. Frames on which neither saw anything count as compared and are
    no evidence.
    """
    counts, frames = found.counts, len(found.counts)
    if np.count_nonzero(counts.any(axis=tuple(range(1, counts.ndim)))) < FEWEST:
        return Judged(frames, None, None, TOO_FEW)
    blocks = np.array_split(np.arange(frames), frames // round(frames ** (1 / 3)))
    sums = np.stack([counts[block].sum(axis=0) for block in blocks])
    random = np.random.default_rng(seed)
    drawn = [task.metric_of(sums[random.integers(len(sums), size=len(sums))].sum(axis=0)) for _ in range(ROUNDS)]
    low, high = (float(np.quantile(drawn, part)) / found.expected for part in (0.025, 0.975))
    ratio = task.metric_of(counts.sum(axis=0)) / found.expected
    verdict = BELOW if high < target else UNSURE if ratio < target else KEPT
    return Judged(frames, ratio, (low, high), verdict)
