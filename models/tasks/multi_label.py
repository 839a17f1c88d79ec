"""Multi-label classification: any number of the classes for each frame."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gemel.models.arrays import sigmoid
from gemel.models.measures.evidence import ShownAnswers
from gemel.models.predictions import LabelSet, LabelsPrediction, Task
from gemel.models.preprocess import Preprocess
from gemel.models.tasks.detection import MIN_F1

THRESHOLDS = np.linspace(0.05, 0.95, 19)


class MultiLabel(Task):
    """The model's outputs are logits (N, C), one sigmoid a class. The metric is F1, the mean of the classes that occur.

    One threshold of scores serves all classes.
    """

    name = "classification"
    metric = agreement = "macro_f1"
    has_threshold = has_decoder = True
    unlabelled_threshold = 0.5
    footage = "frames with and as many without a class"

    def predictions(
        self,
        reader: None,
        outputs: np.ndarray,
        sizes: Sequence[tuple[int, int]],
        classes: Sequence[str],
        min_score: float = 0.0,
        preprocess: Preprocess | None = None,
    ) -> list[LabelsPrediction]:
        """The classes with a score of `min_score` or more, best first."""
        predictions = []
        for row in sigmoid(outputs).tolist():
            ranked = sorted(zip(row, classes, strict=True), key=lambda pair: -pair[0])
            shown = [(name, score) for score, name in ranked if score >= min_score]
            predictions.append(
                LabelsPrediction(
                    tuple(name for name, _ in shown), tuple(score for _, score in shown)
                )
            )
        return predictions

    def tallies(
        self,
        predictions: Sequence[LabelsPrediction | None],
        labels: Sequence[LabelSet],
        classes: Sequence[str],
        threshold: float = 0.0,
    ) -> np.ndarray:
        """int64 (N, 3, C): hits, predictions from `threshold` on, and labels of each class."""
        counts = np.zeros((len(labels), 3, len(classes)), np.int64)
        places = {name: place for place, name in enumerate(classes)}
        for row, prediction, label in zip(counts, predictions, labels, strict=True):
            predicted = (
                self.labels_of(prediction, threshold).classes if prediction is not None else ()
            )
            row[1, [places[name] for name in predicted]] = 1
            row[2, [places[name] for name in label.classes]] = 1
        counts[:, 0] = counts[:, 1] & counts[:, 2]
        return counts

    def metric_of(self, total: np.ndarray) -> float:
        """F1, the mean of the classes that are labelled or predicted; 1 where there are none."""
        hits, predicted, labelled = total
        present = predicted + labelled > 0
        return (
            float((2 * hits[present] / (predicted + labelled)[present]).mean())
            if present.any()
            else 1.0
        )

    def choose_threshold(
        self, predictions: Sequence[LabelsPrediction], labels: Sequence[LabelSet]
    ) -> float:
        """The one of THRESHOLDS with the largest F1 on these frames; of equal ones the middle."""
        classes = sorted({name for frame in (*predictions, *labels) for name in frame.classes})
        tallies = (
            self.tallies(predictions, labels, classes, threshold) for threshold in THRESHOLDS
        )
        scores = np.array([self.metric_of(tally.sum(axis=0)) for tally in tallies])
        best = np.flatnonzero(scores == scores.max())
        return float(THRESHOLDS[best[len(best) // 2]])

    def labels_of(
        self, prediction: LabelsPrediction, threshold: float, label: LabelSet | None = None
    ) -> LabelSet:
        """The classes from `threshold` on."""
        pairs = zip(prediction.classes, prediction.scores, strict=True)
        return LabelSet(tuple(name for name, score in pairs if score >= threshold))

    def answers(self, label: LabelSet, classes: Sequence[str]) -> tuple[str, ...]:
        """The classes."""
        return label.classes

    def find_gap(
        self, labels: Sequence[LabelSet], classes: Sequence[str], shown: ShownAnswers, target: float
    ) -> str:
        """A class with so many frames and as many without it, each in several clips; not all alike."""
        min_samples = shown.config.min_samples
        clips = shown.clips or [""] * len(labels)
        least_clips = shown.config.min_clips if shown.clips else 1
        for name in classes:
            sides: dict[bool, list[str]] = {True: [], False: []}
            for label, clip in zip(labels, clips, strict=True):
                sides[name in label.classes].append(clip)
            if all(
                len(frames) >= min_samples and len(set(frames)) >= least_clips
                for frames in sides.values()
            ):
                return ""
        return f"{shown.name} shows no class in {min_samples} frames and, elsewhere, {min_samples} frames without it"

    def is_competent(self, reached: float, classes: Sequence[str]) -> bool:
        """As for detection."""
        return reached >= MIN_F1
