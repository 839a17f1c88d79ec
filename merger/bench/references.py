"""What each original reaches on val: what its merged model is held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from merger.bench.scores import scores_of
from merger.bench.stock import Stock
from merger.journal.progress import Progress
from models.measuring.evaluation import predict, score, truths_of, worth_keeping
from models.tasks import Truth, task_of
from models.workload import Query

ROUNDING = 1e-6
FEW_UNITS = 10
"""Clips or tracks of val below which a query is reported: its frames are many, what they can tell is not."""


@dataclass(frozen=True)
class Reference:
    """What an original reaches on val, the truth it is judged by, and the score from which its detections count.

    `one_error` is the part of that score that one wrong answer can cost; `detections` is how many of a detector's
    count on some train frames (merger.bench.scores).
    """

    truths: Sequence[Truth]
    threshold: float
    score: float
    one_error: float
    detections: int = 0


def judged(stock: Stock, query: Query, progress: Progress, told: Callable[[int], None]) -> Reference:
    """The reference of one query; progress hears of it, and of what makes it weak evidence.

    `told` hears how many more frames were answered.
    """
    task, val = task_of(query.task), stock.val[query.id]
    answers = predict(stock.originals[query.id], query, val, told=told)
    labelled = val.split.truths
    threshold = task.choose_threshold(answers, labelled) if labelled is not None else query.min_score
    truths = truths_of(query, val.split, answers, threshold)
    reached = score(task, answers, truths, query.classes, threshold)
    needed = query.accuracy_target * reached  # the target is a ratio, so what it asks for depends on the original
    progress("reference", query=query.id, metric=task.metric, val=reached, needed=needed)
    if not worth_keeping(query, reached):
        text = f"{query.id}: its original reaches {reached:.2f} {task.metric} on val, which is no evidence"
        progress("warning", text=f"{text}; train it longer, or on more frames")
    units = len(set(val.split.units))
    if units < FEW_UNITS:
        what = "clip or track" if units == 1 else "clips or tracks"
        text = f"{query.id}: all of its val comes from {units} {what}; what holds there may not hold elsewhere"
        progress("warning", text=text)
    one_error = task.one_error(truths, query.classes) * (1 + ROUNDING) / reached if reached > 0 else 1.0
    found = 0
    if query.task == "detection":
        found = int((scores_of(stock.originals[query.id], query, stock.train[query.id]) >= threshold).sum())
    return Reference(truths, threshold, reached, one_error, found)
