"""Predictions, labels, and the interface of a task: loss, distillation, decoding and metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ClassPrediction:
    """One frame's class: the label, its probability, and the probabilities of all classes in order."""

    label: str
    score: float
    probabilities: tuple[float, ...]


Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class DetectionPrediction:
    """One frame's objects, best first: classes, scores, and boxes (x0, y0, x1, y1) in pixels of the frame."""

    classes: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    boxes: tuple[Box, ...] = ()


@dataclass(frozen=True)
class BoxLabels:
    """The labels of one frame for detection: classes and boxes (x0, y0, x1, y1) in pixels of that frame.

    `crowds` are regions full of objects of a class: not to be found, and detections in them are not false.
    """

    classes: tuple[str, ...] = ()
    boxes: tuple[Box, ...] = ()
    crowds: BoxLabels | None = None


Prediction = ClassPrediction | DetectionPrediction
GroundTruth = str | BoxLabels


class Task(Protocol):
    """One kind of question. `outputs` is whatever the model's forward returns for a batch of N frames."""

    name: str
    metric: str

    def targets(self, labels: Sequence[Any], sizes: Sequence[tuple[int, int]], classes: Sequence[str]) -> list[Any]:
        """Labels in the form of the loss; `sizes` = (width, height) of each frame before resizing."""
        ...

    def augment(self, images: Tensor, targets: list[Any], generator: torch.Generator) -> tuple[Tensor, list[Any]]:
        """A randomly changed copy of a uint8 batch (N, 3, S, S), on its own device, and its targets.

        Random numbers come from a CPU generator, so they are the same on every device.
        """
        ...

    def loss(self, model: nn.Module, outputs: Any, targets: list[Any]) -> Tensor:
        """Scalar loss against the labels."""
        ...

    def distill(self, model: nn.Module, outputs: Any, teacher: Any) -> Tensor:
        """Scalar loss against the original's outputs on the same batch."""
        ...

    def predictions(
        self,
        model: nn.Module,
        outputs: Any,
        sizes: Sequence[tuple[int, int]],
        classes: Sequence[str],
        min_score: float = 0.0,
    ) -> list[Prediction]:
        """Outputs as predictions, one per frame; `sizes` = (width, height) of each frame before resizing."""
        ...

    def tallies(
        self, predictions: Sequence[Any], labels: Sequence[Any], classes: Sequence[str], threshold: float = 0.0
    ) -> np.ndarray:
        """Counts of each frame (N, ...), additive over frames; a prediction None means that there was none."""
        ...

    def metric_of(self, total: np.ndarray) -> float:
        """The task's metric, 0..1, from summed counts."""
        ...

    def one_error(self, labels: Sequence[Any], classes: Sequence[str]) -> float:
        """The resolution of the metric on these frames: what one wrong prediction can cost."""
        ...

    def choose_threshold(self, predictions: Sequence[Any], labels: Sequence[Any]) -> float:
        """The score from which a detection counts, chosen on val for the original and kept for the merged model."""
        ...

    def labels_of(self, prediction: Any, threshold: float, label: Any = None) -> Any:
        """The prediction of an original as labels; `label` is the frame's own, where it has one."""
        ...

    def chance(self, classes: Sequence[str]) -> float:
        """The metric of a constant prediction."""
        ...
