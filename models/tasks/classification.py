"""Classification: one label per frame."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from gemel.models.arrays import softmax
from gemel.models.predictions import ClassPrediction, Task, TaskQuery
from gemel.models.preprocess import Preprocess
from gemel.models.tasks.multi_label import MultiLabel


def mean_ratio(parts: np.ndarray, wholes: np.ndarray) -> float:
    """The mean of the ratios (C,) of the classes that occur."""
    present = wholes > 0
    return float((parts[present] / wholes[present]).mean()) if present.any() else 0.0


class Classification(Task):
    """One label for each frame.

    The metric is balanced accuracy: the mean of the recalls of the classes present.
    """

    name = "classification"
    layout = "classes"
    metric = agreement = "balanced_accuracy"
    has_label = has_decoder = True

    @classmethod
    def of_query(cls, query: TaskQuery) -> Task:
        """With several labels a frame it is another question."""
        return MultiLabel() if query.multi_label else cls()

    def predictions(
        self,
        reader: None,
        outputs: np.ndarray,
        sizes: Sequence[tuple[int, int]],
        classes: Sequence[str],
        min_score: float = 0.0,
        preprocess: Preprocess | None = None,
    ) -> list[ClassPrediction]:
        """Most probable class of each frame, from logits (N, C)."""
        rows = softmax(outputs).tolist()
        best = [max(range(len(row)), key=row.__getitem__) for row in rows]
        return [
            ClassPrediction(classes[i], row[i], tuple(row))
            for i, row in zip(best, rows, strict=True)
        ]

    def tallies(
        self,
        predictions: Sequence[ClassPrediction | None],
        labels: Sequence[str],
        classes: Sequence[str],
        threshold: float = 0,
    ) -> np.ndarray:
        """int64 (N, 2, C): correct predictions and frames of each class; None is wrong."""
        correct = [
            prediction is not None and prediction.label == label
            for prediction, label in zip(predictions, labels, strict=True)
        ]
        counts = np.zeros((len(labels), 2, len(classes)), np.int64)
        frames = np.arange(len(labels))
        index = [classes.index(label) for label in labels]
        counts[frames, 0, index], counts[frames, 1, index] = correct, 1
        return counts

    def metric_of(self, total: np.ndarray) -> float:
        """Balanced accuracy: the mean recall of the classes that occur."""
        return mean_ratio(*total)

    def one_error(self, labels: Sequence[str], classes: Sequence[str]) -> float:
        """A frame of the rarest class that occurs."""
        frames = Counter(labels).values()
        return 1 / (len(frames) * min(frames)) if frames else 1.0

    def labels_of(
        self, prediction: ClassPrediction, threshold: float, label: str | None = None
    ) -> str:
        """The label."""
        return prediction.label

    def chance(self, classes: Sequence[str]) -> float:
        """Balanced accuracy of a constant prediction."""
        return 1 / len(classes)

    def answers(self, label: str, classes: Sequence[str]) -> tuple[str, ...]:
        """The label."""
        return (label,)
