"""Predictions of a model over a split, and evidence of how a merged model compares with its original."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from gemel.models.data import PreparedFrames, Split
from gemel.models.detector import read_outputs
from gemel.models.device import retry_with_smaller_batch
from gemel.models.measures.evidence import EVIDENCE as EVIDENCE
from gemel.models.measures.evidence import EvidenceConfig as EvidenceConfig
from gemel.models.measures.evidence import ShownAnswers, find_few_frames
from gemel.models.predictions import GroundTruth, Prediction, Task
from gemel.models.process import keep_freed_memory
from gemel.models.tasks import task_of
from gemel.models.tensors import normalise_frames
from gemel.models.workload import Query
from gemel.models.zoo import preprocess_of

WEAK = "its original reaches only"
"""How the reason begins where an original is no evidence."""
FLIP_ERROR = 0.025
"""Of the upper end of the part of flips."""
MAX_FLIPPED = 20
"""Frames that are named."""
LABELS, ORIGINAL, NO_EVIDENCE = "labels", "original", "none"


class EvidenceState(str, Enum):
    """What is shown of a query."""

    PROVEN = "proven"
    UNCHANGED = "unchanged"
    """Its model is its original, bit by bit: it cannot miss."""
    NOT_PROVEN = "not proven"


@dataclass(frozen=True)
class Flips:
    """Right answers of the original on labelled frames, those that are wrong now, and the upper end of their part.

    `frames` names the first of these, by clip and second, or by number.
    """

    right: int
    wrong: int
    upper_end: float
    frames: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """How a merged model compares with its original on one split, and what is proven of it.

    `ratio` = merged / original; `chance_corrected` the same above chance; `worth` is False where the original is too
    weak for any conclusion. `agreement` is the metric with the original's predictions as labels. `evidence` is the
    reference, `labels` or the `original`; `none` where the footage proves nothing, for this `reason`: then the query is
    not `met`, unless it is unchanged. A proven query has a `lower_end` of its ratio and its `source` (agreement,
    answers or labels); of another one, and of one that was not tried for that, `needs` says what is lacking.
    `answers_kept` is the part of its original's answers that it gives on the footage, `answers_kept_end` the lower end.
    """

    metric: str
    split: str
    samples: int
    units: int
    original: float
    merged: float
    ratio: float
    chance_corrected: float
    met: bool
    worth: bool
    agreement: float = 1.0
    evidence: str = LABELS
    reason: str = ""
    state: EvidenceState = EvidenceState.NOT_PROVEN
    lower_end: float | None = None
    source: str | None = None
    needs: str = ""
    answers_kept: float | None = None
    answers_kept_end: float | None = None
    flips: Flips | None = None

    @property
    def proven(self) -> bool:
        """Whether the promise of merger.proof holds."""
        return self.state is EvidenceState.PROVEN

    def to_json(self) -> dict[str, Any]:
        """Plain values; `source` is called `from`."""
        plain = {
            name: value for name, value in asdict(self).items() if name not in ("source", "state")
        }
        return {**plain, "proven": self.proven, "state": self.state.value, "from": self.source}


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
    task = task_of(query)
    preprocess = preprocess_of(query)
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    predictions: list[Prediction] = []
    chosen = range(len(prepared)) if places is None else places

    def predict_batch(count: int) -> list[Prediction]:
        indices = chosen[len(predictions) : len(predictions) + count]
        outputs = model(normalise_frames(preprocess, prepared.batch(indices).to(device)))
        return read_outputs(
            task, model, outputs, prepared.sizes(indices), query.classes, preprocess=preprocess
        )

    while len(predictions) < len(chosen):
        batch, answers = retry_with_smaller_batch(
            min(batch, len(chosen) - len(predictions)), predict_batch
        )
        predictions += answers
        progress(len(answers))
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


def load_labels(
    query: Query, split: Split, original: Sequence[Prediction], threshold: float
) -> Sequence[GroundTruth]:
    """The split's labels, or without them the original's own predictions."""
    task = task_of(query)
    return (
        split.labels
        if split.labels is not None
        else [task.labels_of(prediction, threshold) for prediction in original]
    )


def compare(
    query: Query,
    split: Split,
    original: Sequence[Prediction],
    merged: Sequence[Prediction],
    threshold: float,
    gap: str | None = None,
    config: EvidenceConfig = EVIDENCE,
) -> Evidence:
    """Merged against original on one split.

    `gap` says why the footage is no evidence; None: `find_gap` of this split. A weak original is none either.
    """
    task = task_of(query)
    labels = load_labels(query, split, original, threshold)
    own_labels = [
        task.labels_of(prediction, threshold, label)
        for prediction, label in zip(original, split.labels or [None] * len(original), strict=True)
    ]
    before, after = (
        task.metric_of(task.tallies(side, labels, query.classes, threshold).sum(axis=0))
        for side in (original, merged)
    )
    chance = task.chance(query.classes)
    ratio = as_ratio(after, before)
    gap = find_gap(query, split, labels, config) if gap is None else gap
    gap = gap or find_weakness(query, split.name, before, config)
    is_same = original is merged
    return Evidence(
        metric=task.metric_name(split.labels is not None),
        split=split.name,
        samples=len(split),
        units=len(set(split.units)),
        original=before,
        merged=after,
        ratio=ratio,
        chance_corrected=as_ratio(after - chance, before - chance),
        met=is_same or (not gap and ratio >= query.accuracy_target),
        worth=is_competent(query, before),
        agreement=score(task, merged, own_labels, query.classes, threshold),
        evidence=NO_EVIDENCE if gap else ORIGINAL if split.labels is None else LABELS,
        reason=gap,
        state=EvidenceState.UNCHANGED if is_same else EvidenceState.NOT_PROVEN,
        flips=count_flips(query, split, original, merged, threshold),
    )


def count_flips(
    query: Query, split: Split, original: Sequence[Any], merged: Sequence[Any], threshold: float
) -> Flips | None:
    """Right answers that are wrong now, of labelled frames that have one answer; None of other ones."""
    if split.labels is None or query.task != "classification" or query.multi_label:
        return None
    from scipy.special import betaincinv  # no box needs it

    rows = list(enumerate(zip(original, merged, split.labels, strict=True)))
    right = [place for place, (before, _, label) in rows if before.label == label]
    wrong = [place for place in right if merged[place].label != split.labels[place]]
    end = (
        float(betaincinv(len(wrong) + 1, max(1, len(right) - len(wrong)), 1 - FLIP_ERROR))
        if right
        else 1.0
    )
    return Flips(
        len(right), len(wrong), end, tuple(split.name_of(place) for place in wrong[:MAX_FLIPPED])
    )


def find_gap(
    query: Query, split: Split, labels: Sequence[GroundTruth], config: EvidenceConfig = EVIDENCE
) -> str:
    """Why these labels (or the original's answers) on a split are no evidence; empty where they are."""
    if split.overlap and config.apart:
        return split.overlap
    task = task_of(query)
    clips = split.units if split.has_clips and labels else None
    shown = ShownAnswers(
        split.name, [task.answers(label, query.classes) for label in labels], clips, config
    )
    gap = task.find_gap(labels, query.classes, shown, query.accuracy_target)
    return gap or find_few_frames(split.name, split.frames, config)


def find_weakness(
    query: Query, split: str, reached: float, config: EvidenceConfig = EVIDENCE
) -> str:
    """Why an original of this quality on a split is no evidence for anything; empty where it is."""
    if not config.competent or is_competent(query, reached):
        return ""
    return f"{WEAK} {reached:.2f} {task_of(query).metric} on {split}"


def evidence_hint(query: Query, config: EvidenceConfig = EVIDENCE) -> str:
    """What footage a query without evidence needs."""
    return (
        f"add footage: val and test each need {config.min_samples} {task_of(query).footage} "
        "(a video, or a folder without splits, gives a fifth of its frames to each)"
    )


def count_samples(query: Query, labels: Sequence[GroundTruth]) -> Counter[str]:
    """Class -> frames, or objects."""
    return Counter(
        name for label in labels for name in task_of(query).answers(label, query.classes)
    )


def is_competent(query: Query, reached: float) -> bool:
    """Whether an original of this quality allows any conclusion."""
    return task_of(query).is_competent(reached, query.classes)


def as_ratio(part: float, whole: float) -> float:
    """Part / whole; of nothing 1, unless the part is less."""
    if whole <= 0:
        return 1.0 if part >= whole else 0.0
    return part / whole
