"""What a proof goes by, from the answers of an original and a merged model: counts by block, and values on val."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemel.merger.proof import BlockCounts, LabelledValues, Observed, OriginalCounts, certain_original
from gemel.models.data import Split
from gemel.models.measures.metrics import match_frames
from gemel.models.predictions import GroundTruth, Prediction
from gemel.models.tasks import task_of
from gemel.models.tasks.detection import Detection
from gemel.models.workload import Query

SAME_IOU = 0.75
"""From which a merged model's object is the original's: far above 0.5, at which objects count as found."""


@dataclass(frozen=True)
class ValAnswers:
    """The frames of val with the original's answers; `truths` are labels, or without them the original's answers."""

    split: Split
    truths: Sequence[GroundTruth]
    answers: Sequence[Prediction]
    threshold: float

    @property
    def is_labelled(self) -> bool:
        """Whether the truths are labels."""
        return self.split.labels is not None


@dataclass(frozen=True, eq=False)
class AnswerDifferences:
    """By frame (N, C): the original's answers, and those that the merged model does not give; its own more (N, C)."""

    shown: np.ndarray
    differ: np.ndarray
    added: np.ndarray | None = None

    def by_block(self, blocks: Sequence[int], seconds: float) -> BlockCounts:
        """Summed over the frames of each block."""
        shown, differ = sum_by(self.shown, blocks), sum_by(self.differ, blocks)
        return BlockCounts(shown, differ, None if self.added is None else sum_by(self.added, blocks), seconds)

    @property
    def agreement(self) -> float:
        """The part of all answers that both models give."""
        shown, differ = float(self.shown.sum()), float(self.differ.sum())
        added = differ if self.added is None else float(self.added.sum())
        answers = 2 * shown - differ + added
        return 2 * (shown - differ) / answers if answers > 0 else 1.0

    @property
    def places(self) -> np.ndarray:
        """The frames on which the models differ."""
        differs = self.differ.any(axis=1)
        return np.flatnonzero(differs if self.added is None else differs | self.added.any(axis=1))


def sum_by(values: np.ndarray, units: Sequence[Any]) -> np.ndarray:
    """Values of frames (N, ...) summed by unit (U, ...)."""
    names, places = np.unique(np.asarray(units), return_inverse=True)
    sums = np.zeros((len(names), *values.shape[1:]))
    np.add.at(sums, places, values)
    return sums


def compare_answers(
    query: Query, original: Sequence[Any], merged: Sequence[Any], threshold: float
) -> AnswerDifferences:
    """What the merged model answers otherwise than its original on each frame.

    Classification: each frame has one answer. Detection: objects not found again at an IoU of 0.75, and objects added.
    Other tasks: what lacks to full agreement.
    """
    task = task_of(query)
    if query.task == "classification" and not query.multi_label:
        shown = np.zeros((len(original), len(query.classes)))
        shown[np.arange(len(original)), [query.classes.index(answer.label) for answer in original]] = 1
        differs = np.array([before.label != after.label for before, after in zip(original, merged, strict=True)])
        return AnswerDifferences(shown, shown * differs[:, None])
    labels = [task.labels_of(answer, threshold) for answer in original]
    if isinstance(task, Detection):
        hits, detections, objects = match_frames(merged, labels, task.overlaps, SAME_IOU).counts(threshold).T
        return AnswerDifferences(objects[:, None], (objects - hits)[:, None], (detections - hits)[:, None])
    tallies = task.tallies(merged, labels, query.classes, threshold)
    agreement = np.array([task.metric_of(tally) for tally in tallies])
    return AnswerDifferences(np.ones((len(labels), 1)), 1 - agreement[:, None])


def observe(query: Query, val: ValAnswers, merged: Sequence[Prediction] | None, blocks: BlockCounts | None) -> Observed:
    """All that is known of one query; `merged` are the merged model's answers on val, None without labels."""
    original = count_original(query, val) if can_bound(query, val) else None
    labels = shift = None
    if val.is_labelled and merged is not None:
        labels = measure_labels(query, val, merged)
        if isinstance(task_of(query), Detection):
            shift = measure_shift(query, val, merged)
    return Observed(query.accuracy_target, blocks, original, None, labels, shift)


def can_bound(query: Query, val: ValAnswers) -> bool:
    """Whether agreement bounds the metric: of labelled classes and objects, or where the metric is agreement."""
    whole = query.task == "classification" and not query.multi_label
    return not val.is_labelled or whole or isinstance(task_of(query), Detection)


def units_of(split: Split) -> Sequence[Any]:
    """What chance is counted by on val: clips where names tell them, else frames."""
    return split.units if split.has_named_units else list(range(len(split)))


def count_original(query: Query, val: ValAnswers) -> OriginalCounts:
    """How often the original is right, by class of its answer."""
    task = task_of(query)
    if not val.is_labelled:
        classes = len(query.classes) if query.task == "classification" and not query.multi_label else 1
        return certain_original(classes)
    tallies = task.tallies(val.answers, val.truths, query.classes, val.threshold)
    if isinstance(task, Detection):
        hits, detections, objects = tallies.T
        answered, wrong = detections[:, None], (detections - hits)[:, None]
        recall, density = np.ones(1), float(objects.sum() / max(1, detections.sum()))
    else:
        answered = np.zeros((len(val.answers), len(query.classes)))
        places = [query.classes.index(answer.label) for answer in val.answers]  # type: ignore[union-attr]
        answered[np.arange(len(places)), places] = 1
        right = tallies[:, 0].sum(axis=1, keepdims=True)
        wrong = answered * (1 - right)
        recall, density = tallies[:, 0].sum(axis=0) / np.maximum(1, tallies[:, 1].sum(axis=0)), 1.0
    units: Sequence[Any] = val.split.units if val.split.has_named_units else [0] * len(val.answers)
    return OriginalCounts(sum_by(answered, units), sum_by(wrong, units), recall, np.asarray(density))


def measure_labels(
    query: Query, val: ValAnswers, merged: Sequence[Prediction], units: Sequence[Any] | None = None
) -> LabelledValues:
    """The metric of both models as values of clips or frames (or other `units`): pseudo-values, whose mean it is."""
    task = task_of(query)
    units = units_of(val.split) if units is None else units
    nothing: list[Any] = [None] * len(merged)
    before, after, lost = (
        sum_by(task.tallies(answers, val.truths, query.classes, val.threshold), units)
        for answers in (val.answers, merged, nothing)
    )
    counts, whole = len(before), after.sum(axis=0)
    replaced = [counts * task.metric_of(whole - tally + other) for tally, other in zip(after, lost, strict=True)]
    without = [(counts - 1) * task.metric_of(whole - tally) for tally in after]
    return LabelledValues(
        pseudo_values(task, before), pseudo_values(task, after), np.array(replaced) - np.array(without)
    )


def pseudo_values(task: Any, tallies: np.ndarray) -> np.ndarray:
    """The metric as a value of each unit (U,), from its counts (U, ...)."""
    count, whole = len(tallies), tallies.sum(axis=0)
    metric = task.metric_of(whole)
    if count == 1:
        return np.array([metric])
    return np.array([count * metric - (count - 1) * task.metric_of(whole - tally) for tally in tallies])


def measure_shift(query: Query, val: ValAnswers, merged: Sequence[Prediction]) -> LabelledValues:
    """Of a detector: hits of the original, and of the merged model with those objects that it does not find again."""
    task = task_of(query)
    hits, after = (
        task.tallies(answers, val.truths, query.classes, val.threshold)[:, 0] for answers in (val.answers, merged)
    )
    missing = compare_answers(query, val.answers, merged, val.threshold).differ[:, 0]
    units = units_of(val.split)
    before, kept = sum_by(hits.astype(float), units), sum_by(after + missing, units)
    return LabelledValues(before, kept, np.zeros_like(before))
