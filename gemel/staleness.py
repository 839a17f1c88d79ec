"""Staleness curves: how good an answer still is some frames later, from frames with labels or a teacher's answers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from edge_runtime.scheduler.types import Curve, monotone_curve
from gemel.stream_eval import Footage, units_of
from models.bundle import Bundle
from models.data import load_split
from models.evaluation import load_labels, predict
from models.predictions import Task
from models.tasks import task_of
from models.workload import Query

STALENESS_AGES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""In frames of the query's rate; what lies between is interpolated."""
CLOCK_SLACK_S = 1e-6


def query_staleness(query: Query, bundle: Bundle, device: str) -> Curve:
    """The curve of a bundle's query on its val split: against labels, or the answers themselves where there are none.

    Empty where the split has no two frames of one clip or track.
    """
    split, task = load_split(query, "val"), task_of(query.task)
    answers = predict(bundle.build(query.id, device), query, split)
    threshold = bundle.query(query.id).threshold
    threshold = query.min_score if threshold is None else threshold
    truths = load_labels(query, split, answers, threshold)
    curve = staleness_curve(
        task, Footage(split.units, split.times_s, query.fps), answers, truths, query.classes, threshold
    )
    return curve if len(curve) > 1 else ()


def staleness_curve(
    task: Task, footage: Footage, answers: Sequence[Any], truths: Sequence[Any], classes: Sequence[str],
    threshold: float,
) -> Curve:  # fmt: skip
    """The accuracy of answers 0, 1, 2... frames old against the truth of each labelled moment, never rising.

    An answer of another clip or track says nothing. The curve ends at the age that no clip is long enough for.
    """
    known: list[tuple[int, float]] = []
    for age in STALENESS_AGES:
        pairs = frame_pairs(footage, age)
        if not pairs:
            break
        old, new = [answers[before] for before, _ in pairs], [truths[now] for _, now in pairs]
        known.append((age, task.metric_of(task.tallies(old, new, classes, threshold).sum(axis=0))))
    return monotone_curve(_between(known))


def frame_pairs(footage: Footage, age: int) -> list[tuple[int, int]]:
    """For each frame the newest one of its unit that is so many of the query's frames older, as indices (then, now)."""
    pairs = []
    for unit in units_of(footage):
        times = [footage.times_s[frame] for frame in unit]
        for place, frame in enumerate(unit):
            then = place - age
            if footage.fps is not None:
                then = bisect_right(times, times[place] - age / footage.fps + CLOCK_SLACK_S) - 1
            if then >= 0:
                pairs.append((unit[then], frame))
    return pairs


def _between(known: Sequence[tuple[int, float]]) -> list[float]:
    found = [accuracy for _, accuracy in known[:1]]
    for (young, high), (old, low) in pairwise(known):
        found += [high + (age - young) / (old - young) * (low - high) for age in range(young + 1, old + 1)]
    return found
