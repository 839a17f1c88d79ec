"""What every task offers: loss, distillation, decoding and score of one kind of question."""

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


@dataclass(frozen=True)
class DetectionPrediction:
    """One frame's objects, best first: classes, scores, and boxes (x0, y0, x1, y1) in pixels of the frame shown."""

    classes: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    boxes: tuple[tuple[float, float, float, float], ...] = ()


@dataclass(frozen=True)
class Boxes:
    """The truth of one frame for detection: classes and boxes (x0, y0, x1, y1) in pixels of that frame."""

    classes: tuple[str, ...] = ()
    boxes: tuple[tuple[float, float, float, float], ...] = ()


Prediction = ClassPrediction | DetectionPrediction
GroundTruth = str | Boxes


class Task(Protocol):
    """One kind of question. `outputs` is whatever the model's forward returns for a batch of N frames."""

    name: str
    metric: str

    def targets(self, truths: Sequence[Any], sizes: Sequence[tuple[int, int]], classes: Sequence[str]) -> list[Any]:
        """Truths as the loss wants them; `sizes` = (width, height) of each frame before resizing."""
        ...

    def augment(self, images: Tensor, targets: list[Any], generator: torch.Generator) -> tuple[Tensor, list[Any]]:
        """A randomly changed copy of a uint8 batch (N, 3, S, S), made where the batch lies, and its targets.

        What is drawn comes from the processor's generator, and is the same wherever the batch lies.
        """
        ...

    def loss(self, model: nn.Module, outputs: Any, targets: list[Any]) -> Tensor:
        """Scalar loss against the labels."""
        ...

    def distill(self, model: nn.Module, outputs: Any, teacher: Any) -> Tensor:
        """Scalar loss against the original's outputs on the same batch."""
        ...

    def answers(
        self,
        model: nn.Module,
        outputs: Any,
        sizes: Sequence[tuple[int, int]],
        classes: Sequence[str],
        min_score: float = 0.0,
    ) -> list[Prediction]:
        """Outputs as answers, one per frame; `sizes` = (width, height) of each frame before resizing."""
        ...

    def tallies(
        self, answers: Sequence[Any], truths: Sequence[Any], classes: Sequence[str], threshold: float = 0.0
    ) -> np.ndarray:
        """Counts of each frame (N, ...), such that those of many frames add up; None stands for no answer."""
        ...

    def metric_of(self, total: np.ndarray) -> float:
        """The task's metric, 0..1, from summed counts."""
        ...

    def one_error(self, truths: Sequence[Any], classes: Sequence[str]) -> float:
        """How much of the metric one wrong answer can cost on these frames: it tells no finer."""
        ...

    def choose_threshold(self, answers: Sequence[Any], truths: Sequence[Any]) -> float:
        """The score from which an answer counts, chosen on val for the original and kept for the merged."""
        ...

    def truth_of(self, answer: Any, threshold: float) -> Any:
        """The answer of an original as the truth where there are no labels."""
        ...

    def chance(self, classes: Sequence[str]) -> float:
        """The metric of an answer that knows nothing."""
        ...
