"""Tensor: any outputs, of which nothing is known but how they are compared: with the original's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gemel.models.files.io import Agreement
from gemel.models.measures.evidence import ShownAnswers
from gemel.models.predictions import Task, TaskQuery, TensorPrediction, join_shapes
from gemel.models.preprocess import Preprocess

AGREEMENTS: tuple[Agreement, ...] = ("argmax", "cosine", "relative-error")


def choice_axis(shape: Sequence[int]) -> int:
    """The axis of a frame's output over which the largest value counts: the first of maps (C, h, w), else the last."""
    return 0 if len(shape) == 3 else len(shape) - 1


class Tensors(Task):
    """Any outputs, compared with the original's own.

    There are no labels, so nothing here is an accuracy: the metric is agreement with the original, 0 to 1.

    `argmax`: the fraction of places at which the largest value is the same one. `cosine`: the cosine of all values.
    `relative-error`: 1 - the norm of the difference over the norm of the original's values. Each is the mean of the
    outputs.
    """

    name = "tensor"
    answer = "outputs"
    footage = "frames whose answers differ"

    def __init__(self, agreement: str = "cosine") -> None:
        self.by = agreement
        self.metric = self.agreement = f"{agreement.replace('-', '_')}_agreement"

    @classmethod
    def of_query(cls, query: TaskQuery) -> Task:
        """By the agreement that the query names."""
        return cls(query.agreement or "cosine")

    def predictions(
        self,
        reader: None,
        outputs: np.ndarray | Sequence[np.ndarray],
        sizes: Sequence[tuple[int, int]],
        classes: Sequence[str],
        min_score: float = 0.0,
        preprocess: Preprocess | None = None,
    ) -> list[TensorPrediction]:
        """The outputs of each frame; for `argmax` the places of the largest values alone."""
        tensors = [outputs] if isinstance(outputs, np.ndarray) else outputs
        arrays = [array for array in tensors if array.dtype.kind == "f"]
        shapes = tuple(array.shape[1:] for array in arrays)
        if self.by == "argmax":
            arrays = [array.argmax(axis=1 + choice_axis(array.shape[1:])) for array in arrays]
        return [TensorPrediction(tuple(values), shapes) for values in zip(*arrays, strict=True)]

    def tallies(
        self,
        predictions: Sequence[TensorPrediction | None],
        labels: Sequence[TensorPrediction],
        classes: Sequence[str],
        threshold: float = 0.0,
    ) -> np.ndarray:
        """f64 (N, 2): agreement and 1."""
        counts = np.ones((len(labels), 2))
        for row, prediction, label in zip(counts, predictions, labels, strict=True):
            row[0] = 0.0
            if prediction is not None and prediction.shapes == label.shapes:
                row[0] = np.mean(
                    [
                        self._agreement(*pair)
                        for pair in zip(prediction.values, label.values, strict=True)
                    ]
                )
        return counts

    def _agreement(self, answer: np.ndarray, theirs: np.ndarray) -> float:
        if self.by == "argmax":
            return float(np.mean(answer == theirs))
        a = answer.ravel().astype(np.float64)
        b = theirs.ravel().astype(np.float64)
        if np.array_equal(a, b):
            return 1.0
        norm = float(np.linalg.norm(b))
        if self.by == "relative-error":
            return max(0.0, 1 - float(np.linalg.norm(a - b)) / max(norm, 1e-12))
        return max(0.0, float(a @ b) / max(norm * float(np.linalg.norm(a)), 1e-12))

    def metric_of(self, total: np.ndarray) -> float:
        """The mean agreement."""
        return float(total[0] / total[1]) if total[1] else 0.0

    def labels_of(
        self, prediction: TensorPrediction, threshold: float, label: Any = None
    ) -> TensorPrediction:
        """The outputs."""
        return prediction

    def answers(self, label: TensorPrediction, classes: Sequence[str]) -> tuple[str, ...]:
        """None that has a name."""
        return ()

    def find_gap(
        self, labels: Sequence, classes: Sequence[str], shown: ShownAnswers, target: float
    ) -> str:
        """So many frames, whose outputs are not all alike."""
        if not labels:
            return self.constant_gap(None, labels, shown, target)
        stacks = [
            np.stack(values) for values in zip(*(label.values for label in labels), strict=True)
        ]
        middle = np.median if self.by == "argmax" else np.mean
        constant = TensorPrediction(
            tuple(middle(stack, axis=0) for stack in stacks), labels[0].shapes
        )
        return self.constant_gap(constant, labels, shown, target)

    def find_misfit(self, shapes: Sequence[tuple[int, ...]], width: int) -> str:
        """Any tensors, each with a row for the frame."""
        if not shapes or any(shape[:1] != (1,) for shape in shapes):
            return f"answers one frame with {join_shapes(shapes)}, not with a row for the frame in each"
        return ""
