"""Tensor: any outputs, of which nothing is known but how they are compared: with the original's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from models.evidence import ShownAnswers
from models.io import Agreement
from models.predictions import Task, TensorPrediction, join_shapes
from models.preprocess import Preprocess

AGREEMENTS: tuple[Agreement, ...] = ("argmax", "cosine", "relative-error")
MIN_VARIANCE = 1e-6


def choice_axis(shape: Sequence[int]) -> int:
    """The axis of a frame's output over which the largest value counts: the first of maps (C, h, w), else the last."""
    return 0 if len(shape) == 3 else len(shape) - 1


class Tensors(Task):
    """There are no labels, so nothing here is an accuracy: the metric is agreement with the original, 0 to 1.

    `argmax`: the fraction of places at which the largest value is the same one. `cosine`: the cosine of all values.
    `relative-error`: 1 - the norm of the difference over the norm of the original's values. Each is the mean of the
    outputs.
    """

    name = "tensor"
    footage = "frames whose answers differ"

    def __init__(self, agreement: Agreement) -> None:
        self.by = agreement
        self.metric = self.agreement = f"{agreement.replace('-', '_')}_agreement"

    def augment(self, images: Tensor, targets: list | None, generator: torch.Generator) -> tuple[Tensor, list | None]:
        """There are no labels: as they are, as for classification."""
        return images, targets

    def distill(self, model: nn.Module, outputs: Any, teacher: Any) -> Tensor:
        """Mean squared difference of each output over the variance of the original's; of scores, the divergence."""
        own: Any = getattr(model, "distill", None)
        if own is not None:
            return own(outputs, teacher)
        pairs = zip(_floats(outputs), _floats(teacher), strict=True)
        return torch.stack([self._distance(mine, theirs) for mine, theirs in pairs]).mean()

    def _distance(self, mine: Tensor, theirs: Tensor) -> Tensor:
        if self.by == "argmax":
            axis = 1 + choice_axis(mine.shape[1:])
            student, target = mine.log_softmax(dim=axis), theirs.log_softmax(dim=axis)
            return F.kl_div(student, target, log_target=True, reduction="none").sum(dim=axis).mean()
        return (mine - theirs).square().mean() / theirs.var(correction=0).clamp(min=MIN_VARIANCE)

    def predictions(
        self,
        model: nn.Module,
        outputs: Any,
        sizes: Sequence[tuple[int, int]],
        classes: Sequence[str],
        min_score: float = 0.0,
        preprocess: Preprocess | None = None,
    ) -> list[TensorPrediction]:
        """The outputs of each frame; for `argmax` the places of the largest values alone."""
        leaves = [leaf.float() for leaf in _floats(outputs)]
        shapes = tuple(tuple(leaf.shape[1:]) for leaf in leaves)
        if self.by == "argmax":
            leaves = [leaf.argmax(dim=1 + choice_axis(leaf.shape[1:])) for leaf in leaves]
        arrays = [leaf.cpu().numpy() for leaf in leaves]
        return [TensorPrediction(tuple(one), shapes) for one in zip(*arrays, strict=True)]

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
                row[0] = np.mean([self._agreement(*pair) for pair in zip(prediction.values, label.values, strict=True)])
        return counts

    def _agreement(self, mine: np.ndarray, theirs: np.ndarray) -> float:
        if self.by == "argmax":
            return float(np.mean(mine == theirs))
        a, b = mine.ravel().astype(np.float64), theirs.ravel().astype(np.float64)
        if np.array_equal(a, b):
            return 1.0
        norm = float(np.linalg.norm(b))
        if self.by == "relative-error":
            return max(0.0, 1 - float(np.linalg.norm(a - b)) / max(norm, 1e-12))
        return max(0.0, float(a @ b) / max(norm * float(np.linalg.norm(a)), 1e-12))

    def metric_of(self, total: np.ndarray) -> float:
        """The mean agreement."""
        return float(total[0] / total[1]) if total[1] else 0.0

    def labels_of(self, prediction: TensorPrediction, threshold: float, label: Any = None) -> TensorPrediction:
        """The outputs."""
        return prediction

    def answers(self, label: TensorPrediction, classes: Sequence[str]) -> tuple[str, ...]:
        """None that has a name."""
        return ()

    def find_gap(self, labels: Sequence, classes: Sequence[str], shown: ShownAnswers, target: float) -> str:
        """So many frames, whose outputs are not all alike."""
        if not labels:
            return self.constant_gap(None, labels, shown, target)
        stacks = [np.stack(values) for values in zip(*(one.values for one in labels), strict=True)]
        middle = np.median if self.by == "argmax" else np.mean
        constant = TensorPrediction(tuple(middle(stack, axis=0) for stack in stacks), labels[0].shapes)
        return self.constant_gap(constant, labels, shown, target)

    def find_misfit(self, shapes: Sequence[tuple[int, ...]], width: int) -> str:
        """Any tensors, each with a row for the frame."""
        if not shapes or any(shape[:1] != (1,) for shape in shapes):
            return f"answers one frame with {join_shapes(shapes)}, not with a row for the frame in each"
        return ""


def _floats(outputs: Any) -> list[Tensor]:
    """The outputs that are of floating point."""
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
