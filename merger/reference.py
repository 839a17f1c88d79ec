"""What a merge knows of an original before any training: its answers on val, what could prove a merged model, and gaps.

Val proves, and nothing searches there. A search goes by some frames of train that nothing trains on, and by the part of
the footage that trains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gemel.merger.config import MEASUREMENT
from gemel.merger.events import Event
from gemel.merger.needs import can_tell, describe_power, find_allowed, find_needs, find_power
from gemel.merger.observe import ValAnswers, measure_labels
from gemel.merger.proof import PROOF, Observed
from gemel.merger.scores import scores_of
from gemel.merger.workload_data import WorkloadData
from gemel.models.detector import Detector
from gemel.models.errors import join_names
from gemel.models.footage import FOOTAGE
from gemel.models.measures.bounds import tail_of_mean
from gemel.models.measures.evaluation import (
    WEAK,
    EvidenceConfig,
    count_samples,
    evidence_hint,
    find_gap,
    find_weakness,
    is_competent,
    load_labels,
    predict,
    score,
)
from gemel.models.notes import add_note
from gemel.models.predictions import GroundTruth, Prediction
from gemel.models.preprocess_check import describe_preprocess_problem
from gemel.models.tasks import task_of
from gemel.models.tasks.classification import Classification
from gemel.models.workload import Query

ROUNDING = 1e-6
MAX_CLASSES = 6
"""Classes that one note names."""
RARE = 20
"""Frames or objects of a class below which its loss would hardly show on val."""
MIN_POWER = 0.5
"""Likelihood that a good merge is proven, below which a merge says so before any training."""
UNPROVABLE = "give --accept-unproven to go by the plain ratio on val"
TRAIN_HINT = "train it longer, on more frames, or give other weights"


@dataclass(frozen=True)
class Reference:
    """An original's results.

    `truths`, `answers` and `score` (its metric there) are of the frames that a search uses, `allowed` is the part of
    these answers that may differ in a model that is to be proven, None where nothing is. `threshold` is the score from
    which detections count, `one_error` the part of the metric that one wrong answer costs; `detections` is the number
    of a detector's detections on some train frames (merger.scores). `eval_norms`: the norms are folded, or
    recalibration harms the original, so its norms stay in eval mode for the whole merge. `gap` says why val is no
    evidence, empty where it is, `doubt` why nothing here could prove a merged model, `needs` what would; `lacking` is
    all that is lacking. `unjudged` are classes with few samples in val, with their number; `remedy` is what helps an
    original whose answers do not fit.
    """

    truths: Sequence[GroundTruth]
    threshold: float
    score: float
    one_error: float
    detections: int = 0
    eval_norms: bool = False
    answers: Sequence[Prediction] = ()
    allowed: float | None = None
    gap: str = ""
    doubt: str = ""
    needs: str = ""
    lacking: Sequence[str] = ()
    unjudged: Mapping[str, int] = field(default_factory=dict)
    remedy: str = ""

    def score_of(self, query: Query, answers: Sequence[Prediction]) -> float:
        """The metric of these answers on the frames that a search uses."""
        return score(task_of(query), answers, self.truths, query.classes, self.threshold)


def find_class_order(query: Query, answers: Sequence[Any], labels: Sequence[GroundTruth]) -> tuple[str, ...] | None:
    """The order of the classes in which the answers fit the labels, if it is another one than the query's.

    Each output gets the label of most frames that it is the answer to; None when two outputs get the same label, or
    when the answers would still prove nothing.
    """
    met = {name: Counter[GroundTruth]() for name in query.classes}
    for answer, label in zip(answers, labels, strict=True):
        met[answer.label][label] += 1
    best = [one.most_common(1)[0] for one in met.values() if one]
    order, right = tuple(str(label) for label, _ in best), sum(count for _, count in best) / len(labels)
    another = set(order) == set(query.classes) and order != query.classes
    return order if another and is_competent(query, right) else None


@dataclass(frozen=True)
class OriginalJudge:
    """What evaluates originals: `config` says what evidence is, `proves` whether a merge will have to be proven.

    `report` gets events, `add` the number of frames of each batch.
    """

    data: WorkloadData
    config: EvidenceConfig
    proves: bool
    report: Callable[..., None]
    add: Callable[[int], None]

    def evaluate(self, query: Query) -> Reference:
        """The reference of one query; progress reports it and what makes it weak evidence."""
        task, data = task_of(query), self.data
        val, search, original = data.val_answers[query.id], data.search[query.id], data.originals[query.id]
        reached = score(task, val.answers, val.truths, query.classes, val.threshold)
        needed = query.accuracy_target * reached  # the target is a ratio, so what it asks for depends on the original
        metric = task.metric_name(val.is_labelled)
        self.report(Event.REFERENCE, query=query.id, metric=metric, val=reached, needed=needed)
        remedy = note_mistakes(query, original, val, reached)
        detections = 0
        if isinstance(original, Detector):
            detections = int((scores_of(original, query, data.train[query.id]) >= val.threshold).sum())
        samples = count_samples(query, val.truths)
        unjudged = {name: samples[name] for name in query.classes if samples[name] < RARE}
        answers = predict(original, query, search, progress=self.add)
        truths = load_labels(query, search.split, answers, val.threshold)
        gap = find_gap(query, val.split, val.truths, self.config) or find_incompetence(query, val, reached, self.config)
        reached = score(task, answers, truths, query.classes, val.threshold)
        one_error = task.one_error(truths, query.classes) * (1 + ROUNDING) / reached if reached > 0 else 1.0
        reference = Reference(
            truths, val.threshold, reached, one_error, detections, False, answers, gap=gap, unjudged=unjudged,
            remedy=remedy,
        )  # fmt: skip
        if self.proves:
            return self.judge_footage(query, reference)
        return replace(reference, lacking=(gap,) if gap else ())

    def judge_footage(self, query: Query, reference: Reference) -> Reference:
        """The reference with whether anything could prove a model that answers as its original, and what is lacking."""
        observed, footage = self.data.observe_original(query.id), self.data.footage[query.id]
        error = PROOF.error / max(1, len(self.data.queries) - 1)
        lacking = [reference.gap] if reference.gap else []
        if footage is not None and footage.problem:
            lacking.append(footage.problem)
        needs = find_needs(observed, error, FOOTAGE.block_s).text()
        if not can_tell(observed, error):
            # The last query of Holm's procedure has all of the error.
            how = "can be proven only after all others" if can_tell(observed, PROOF.error) else "cannot be proven"
            doubt = f"{how} with {describe_given(observed)}: needs {needs}"
            return replace(reference, doubt=doubt, needs=needs, lacking=(*lacking, doubt))
        if (power := find_power(observed, error)) < MIN_POWER:
            text = f"{describe_given(observed)} prove a good merge {describe_power(power)}"
            add_note(query.id, text, "add footage, or answer what `gemel review` shows")
        return replace(reference, lacking=tuple(lacking), allowed=find_allowed(observed, PROOF.error))


def note_mistakes(query: Query, original: Any, val: ValAnswers, reached: float) -> str:
    """Note classes in another order, another preprocessing, a val of few clips; the remedy for wrong answers."""
    units = len(set(val.split.units))
    if units < MEASUREMENT.min_val_units:
        what = "clip or track" if units == 1 else "clips or tracks"
        add_note(query.id, f"its val split has only {units} {what}", "its accuracy may not generalize: add clips")
    if remedy := note_class_order(query, val.answers, val.split.labels):
        return remedy
    text, remedy = describe_preprocess_problem(query, original, val.split, reached)
    if text:
        add_note(query.id, text, remedy)
    return remedy


def note_class_order(query: Query, answers: Sequence[Any], labels: Sequence[Any] | None) -> str:
    """Note that an original's answers fit the labels if its classes stand in another order; the remedy, else empty."""
    order = find_class_order(query, answers, labels) if isinstance(task_of(query), Classification) and labels else None
    if order is None:
        return ""
    text = f"the original's predictions fit the labels if its outputs are named {join_names(order)}, in this order"
    remedy = "list `classes` in this order, or check the weights"
    add_note(query.id, text, remedy)
    return remedy


def find_incompetence(query: Query, val: ValAnswers, reached: float, config: EvidenceConfig) -> str:
    """Why an original is no evidence for anything: it is weak, or it cannot be told from a constant answer."""
    weakness = find_weakness(query, val.split.name, reached, config)
    if weakness or not val.is_labelled or not config.competent:
        return weakness
    chance = task_of(query).chance(query.classes)
    values = measure_labels(query, val, val.answers, range(len(val.split)))
    doubt = float(tail_of_mean(chance - values.original, float((chance - values.lost).max())))
    if doubt <= PROOF.error:
        return ""
    return f"on {len(val.split)} frames of val its original's {reached:.2f} cannot be told from chance ({chance:.2f})"


def describe_given(observed: Observed) -> str:
    """The labels and the footage that there are."""
    parts = []
    if observed.labels is not None:
        parts.append(f"{len(observed.labels.original)} labelled frames or clips of val")
    if observed.blocks is not None:
        minutes = round(observed.blocks.seconds / 60)
        parts.append(f"{minutes} minute{'s' * (minutes != 1)} of footage")
    return " and ".join(parts) or "neither labels nor footage"


def note_evidence(
    queries: Mapping[str, Query],
    references: Mapping[str, Reference],
    config: EvidenceConfig,
    proves: bool,
    accept_unproven: bool,
) -> None:
    """Note of each query all that is lacking, and the classes that val shows too seldom.

    Where the merge `proves` nothing, no option is named that would make it accept more.
    """
    outcome = "a plain ratio on val accepts it" if accept_unproven else "it keeps its own weights"
    for query, reference in references.items():
        if reference.lacking:
            parts = [f"no evidence: {part}" if part == reference.gap else part for part in reference.lacking]
            remedies = [UNPROVABLE] if proves and not accept_unproven else []
            if reference.gap:
                is_weak = reference.gap.startswith(WEAK)
                weak_hint = reference.remedy or TRAIN_HINT
                remedies.insert(0, weak_hint if is_weak else evidence_hint(queries[query], config))
            add_note(query, f"{'; '.join(parts)}; {outcome}", "; or ".join(remedies))
        if reference.unjudged and not reference.gap:
            counts = reference.unjudged.items()
            names = [f"{name} ({count})" for name, count in sorted(counts, key=lambda pair: -pair[1])]
            share = f"{len(names)} of {len(queries[query].classes)} classes"
            text = f"val shows {share} fewer than {RARE} times: {join_names(names, MAX_CLASSES)}"
            add_note(query, text, "losing them would hardly show; add footage of them")
