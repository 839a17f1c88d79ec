"""Predictions of a model over a split, and evidence of how a merged model compares with its original."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from models.data import PreparedFrames, Split
from models.device import retry_with_smaller_batch
from models.evidence import EVIDENCE as EVIDENCE
from models.evidence import EvidenceConfig as EvidenceConfig
from models.evidence import ShownAnswers, find_few_frames
from models.predictions import GroundTruth, Prediction, Task
from models.process import keep_freed_memory
from models.tasks import task_of
from models.workload import Query
from models.zoo import preprocess_of

BOOTSTRAP_ROUNDS = 1000
MIN_UNITS = 2
"""Clips or tracks that an interval needs."""
LABELS, ORIGINAL, NO_EVIDENCE = "labels", "original", "none"


@dataclass(frozen=True)
class Evidence:
    """How a merged model compares with its original on one split.

    `ratio` = merged / original; `chance_corrected` the same above chance; `ci95` the bootstrap interval of the ratio
    over units, None over a single one; `certain` when its lower end reaches the target; `worth` is False where the
    original is too weak for any conclusion. `agreement` is the metric with the original's predictions as labels.
    `evidence` is the reference, `labels` or the `original`; `none` where the footage proves nothing, for this `reason`:
    then the query is not `met`. `proven` is False where the model changed and val was too small to tell.
    """

    metric: str
    split: str
    samples: int
    units: int
    original: float
    merged: float
    ratio: float
    chance_corrected: float
    ci95: tuple[float, float] | None
    met: bool
    certain: bool
    worth: bool
    agreement: float = 1.0
    evidence: str = LABELS
    reason: str = ""
    proven: bool = True

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**self.__dict__, "ci95": None if self.ci95 is None else list(self.ci95)}


@torch.inference_mode()
def predict(
    model: nn.Module,
    query: Query,
    split: Split | PreparedFrames,
    batch: int = 32,
    progress: Callable[[int], None] = lambda frames: None,
    places: Sequence[int] | None = None,
) -> list[Prediction]:
    """The model's prediction for each frame of the split, or for those at `places`, in order; boxes in pixels.

    Detections have scores from 0 on, for thresholds and mean average precision. `progress` is called with the number
    of frames of each batch. The batch is halved when memory is full.
    """
    keep_freed_memory()
    prepared = split if isinstance(split, PreparedFrames) else PreparedFrames(query, split)
    task, preprocess = task_of(query), preprocess_of(query)
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    predictions: list[Prediction] = []
    chosen = range(len(prepared)) if places is None else places

    def predict_batch(count: int) -> list[Prediction]:
        indices = chosen[len(predictions) : len(predictions) + count]
        outputs = model(preprocess.normalise(prepared.batch(indices).to(device)))
        return task.predictions(model, outputs, prepared.sizes(indices), query.classes, preprocess=preprocess)

    while len(predictions) < len(chosen):
        batch, found = retry_with_smaller_batch(min(batch, len(chosen) - len(predictions)), predict_batch)
        predictions += found
        progress(len(found))
    model.train(was_training)
    return predictions


def score(
    task: Task,
    predictions: Sequence[Prediction | None],
    labels: Sequence[GroundTruth],
    classes: Sequence[str],
    threshold: float,
) -> float:
    """The task's metric over these frames; None means no prediction."""
    return task.metric_of(task.tallies(predictions, labels, classes, threshold).sum(axis=0))


def threshold_without_labels(query: Query) -> float:
    """The score from which an original's answers count where no label says it."""
    return query.min_score or task_of(query).unlabelled_threshold


def load_labels(query: Query, split: Split, original: Sequence[Prediction], threshold: float) -> Sequence[GroundTruth]:
    """The split's labels, or without them the original's own predictions."""
    task = task_of(query)
    return split.labels if split.labels is not None else [task.labels_of(one, threshold) for one in original]


def compare(
    query: Query,
    split: Split,
    original: Sequence[Prediction],
    merged: Sequence[Prediction],
    threshold: float,
    seed: int = 0,
    gap: str | None = None,
    config: EvidenceConfig = EVIDENCE,
) -> Evidence:
    """Merged against original on one split, with the interval of the ratio by bootstrap over units.

    `gap` says why the footage is no evidence; None: `find_gap` of this split. A weak original is none either.
    """
    task = task_of(query)
    labels = load_labels(query, split, original, threshold)
    own_labels = [
        task.labels_of(one, threshold, label)
        for one, label in zip(original, split.labels or [None] * len(original), strict=True)
    ]
    counts = [task.tallies(side, labels, query.classes, threshold) for side in (original, merged)]
    by_unit = [_sum_by_unit(side, split.units) for side in counts]
    before, after = (task.metric_of(side.sum(axis=0)) for side in by_unit)
    units, interval = len(by_unit[0]), None
    if units >= MIN_UNITS:
        interval = _bootstrap(
            units, lambda drawn: as_ratio(*(task.metric_of(side[drawn].sum(0)) for side in reversed(by_unit))), seed
        )
    chance = task.chance(query.classes)
    ratio = as_ratio(after, before)
    gap = find_gap(query, split, labels, config) if gap is None else gap
    gap = gap or find_weakness(query, split.name, before, config)
    return Evidence(
        metric=task.metric_name(split.labels is not None), split=split.name, samples=len(split), units=units,
        original=before, merged=after,
        ratio=ratio, chance_corrected=as_ratio(after - chance, before - chance), ci95=interval,
        met=not gap and ratio >= query.accuracy_target,
        certain=not gap and interval is not None and interval[0] >= query.accuracy_target,
        worth=is_competent(query, before), agreement=score(task, merged, own_labels, query.classes, threshold),
        evidence=NO_EVIDENCE if gap else ORIGINAL if split.labels is None else LABELS, reason=gap,
    )  # fmt: skip


def find_gap(query: Query, split: Split, labels: Sequence[GroundTruth], config: EvidenceConfig = EVIDENCE) -> str:
    """Why these labels (or the original's answers) on a split are no evidence; empty where they are."""
    task, clips = task_of(query), split.units if split.has_clips and labels else None
    shown = ShownAnswers(split.name, [task.answers(label, query.classes) for label in labels], clips, config)
    gap = task.find_gap(labels, query.classes, shown, query.accuracy_target)
    return gap or find_few_frames(split.name, split.frames, config)


def find_weakness(query: Query, split: str, reached: float, config: EvidenceConfig = EVIDENCE) -> str:
    """Why an original of this quality on a split is no evidence for anything; empty where it is."""
    if not config.competent or is_competent(query, reached):
        return ""
    return f"its original reaches only {reached:.2f} {task_of(query).metric} on {split}"


def evidence_hint(query: Query, config: EvidenceConfig = EVIDENCE) -> str:
    """What footage a query without evidence needs."""
    return (
        f"add footage: val and test each need {config.min_samples} {task_of(query).footage} "
        "(a video, or a folder without splits, gives a fifth of its frames to each)"
    )


def count_samples(query: Query, labels: Sequence[GroundTruth]) -> Counter[str]:
    """Class -> frames, or objects."""
    return Counter(name for label in labels for name in task_of(query).answers(label, query.classes))


def tallies_by_unit(
    query: Query, split: Split, predictions: Sequence[Prediction], labels: Sequence[GroundTruth], threshold: float
) -> np.ndarray:
    """The task's counts (U, ...) of each clip or track of a split; of each frame where all come from a single one."""
    counts = task_of(query).tallies(predictions, labels, query.classes, threshold)
    return _sum_by_unit(counts, split.units) if len(set(split.units)) >= MIN_UNITS else counts


def _sum_by_unit(counts: np.ndarray, units: Sequence[str]) -> np.ndarray:
    """Counts of frames (N, ...) added up for each of their units (U, ...)."""
    names, index = np.unique(np.array(units), return_inverse=True)
    return np.stack([counts[index == unit].sum(axis=0) for unit in range(len(names))])


def _bootstrap(units: int, ratio_of: Callable[[np.ndarray], float], seed: int) -> tuple[float, float]:
    """The middle 95 % of a ratio over units drawn anew; `ratio_of` gets the positions of the drawn ones."""
    random = np.random.default_rng(seed)
    ratios = [ratio_of(random.integers(units, size=units)) for _ in range(BOOTSTRAP_ROUNDS)]
    return float(np.quantile(ratios, 0.025)), float(np.quantile(ratios, 0.975))


def is_competent(query: Query, reached: float) -> bool:
    """Whether an original of this quality allows any conclusion."""
    return task_of(query).is_competent(reached, query.classes)


def as_ratio(part: float, whole: float) -> float:
    """Part / whole; of nothing 1, unless the part is less."""
    if whole <= 0:
        return 1.0 if part >= whole else 0.0
    return part / whole


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


def compare_agreement(found: ComparedFrames, task: Task, target: float, seed: int = 0) -> Agreement:
    """The verdict of these tallies.

    The interval is a bootstrap over blocks of consecutive frames, about the cube root of their number long (Hall,
    Horowitz and Jing 1995), since neighbours in time are alike. BELOW: the whole interval is below the target;
    UNSURE: the ratio is, and not the whole interval. Frames on which neither model saw anything are no evidence;
    ONE_ANSWER: a classifier is on target on frames of a single class, as any model that always names it would be.
    """
    counts, frames = found.counts, len(found.counts)
    if np.count_nonzero(counts.any(axis=tuple(range(1, counts.ndim)))) < EVIDENCE.min_samples:
        return Agreement(frames, None, None, TOO_FEW)
    blocks = np.array_split(np.arange(frames), frames // round(frames ** (1 / 3)))
    sums = np.stack([counts[block].sum(axis=0) for block in blocks])
    low, high = _bootstrap(len(sums), lambda drawn: task.metric_of(sums[drawn].sum(axis=0)) / found.expected, seed)
    ratio = task.metric_of(counts.sum(axis=0)) / found.expected
    verdict = BELOW if high < target else UNSURE if ratio < target else KEPT
    if verdict == KEPT and task.name == "classification" and np.count_nonzero(counts[:, 1].any(axis=0)) < 2:
        verdict = ONE_ANSWER
    return Agreement(frames, ratio, (low, high), verdict)
