"""Classification: one label per frame."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.device import to_device
from models.predictions import ClassPrediction, Task
from models.preprocess import Preprocess

TEMPERATURE = 2.0
LABEL_SMOOTHING = 0.02
MAX_SHIFT = 0.08


def augment_frames(images: Tensor, generator: torch.Generator) -> Tensor:
    """A uint8 batch, each frame shifted by up to 8 % of its side and made brighter or darker."""
    n, channels, *sides = images.shape
    reach = [max(1, round(side * MAX_SHIFT)) for side in sides]
    offsets = torch.randint(0, 2 * max(reach) + 1, (n, 2), generator=generator)
    gains = to_device(torch.empty(n, 1, 1, 1).uniform_(0.8, 1.2, generator=generator), images.device)
    # Source row and column of each row and column of the result, clamped to the edge.
    rows, columns = (
        (offset[:, None] * far // max(reach) + torch.arange(-far, side - far)).clamp_(0, side - 1)
        for offset, far, side in zip(offsets.unbind(1), reach, sides, strict=True)
    )
    places = to_device(rows, images.device)[:, :, None] * sides[1] + to_device(columns, images.device)[:, None, :]
    found = images.flatten(2).gather(2, places.view(n, 1, -1).expand(-1, channels, -1)).view_as(images)
    return (found * gains).clamp_(0, 255).to(torch.uint8)


def mean_ratio(parts: np.ndarray, wholes: np.ndarray) -> float:
    """The mean of the ratios (C,) of the classes that occur."""
    present = wholes > 0
    return float((parts[present] / wholes[present]).mean()) if present.any() else 0.0


class Classification(Task):
    """The metric is balanced accuracy: the mean of the recalls of the classes present."""

    name = "classification"
    metric = agreement = "balanced_accuracy"

    def targets(
        self,
        labels: Sequence[str],
        sizes: Sequence[tuple[int, int]],
        classes: Sequence[str],
        preprocess: Preprocess | None = None,
    ) -> list[int]:
        """Class indices."""
        return [classes.index(label) for label in labels]

    def augment(self, images: Tensor, targets: list | None, generator: torch.Generator) -> tuple[Tensor, list | None]:
        """Shift, and change the brightness; no mirroring, since left may be a class.

        Without labels frames stay as they are: an original that others trained may know one light alone.
        """
        return (images, None) if targets is None else (augment_frames(images, generator), targets)

    def loss(self, model: nn.Module, outputs: Tensor, targets: list[int]) -> Tensor:
        """Cross-entropy of logits (N, C)."""
        labels = to_device(torch.tensor(targets), outputs.device)
        return F.cross_entropy(outputs, labels, label_smoothing=LABEL_SMOOTHING)

    def distill(self, model: nn.Module, outputs: Tensor, teacher: Tensor) -> Tensor:
        """Hinton, Vinyals and Dean 2015: divergence of softened distributions, scaled by T squared."""
        student = F.log_softmax(outputs / TEMPERATURE, dim=1)
        target = F.log_softmax(teacher / TEMPERATURE, dim=1)
        return F.kl_div(student, target, log_target=True, reduction="batchmean") * TEMPERATURE**2

    def predictions(
        self,
        model: nn.Module,
        outputs: Tensor,
        sizes: Sequence[tuple[int, int]],
        classes: Sequence[str],
        min_score: float = 0.0,
        preprocess: Preprocess | None = None,
    ) -> list[ClassPrediction]:
        """Most probable class of each frame."""
        rows = outputs.float().softmax(dim=1).tolist()
        best = [max(range(len(row)), key=row.__getitem__) for row in rows]
        return [ClassPrediction(classes[i], row[i], tuple(row)) for i, row in zip(best, rows, strict=True)]

    def tallies(
        self,
        predictions: Sequence[ClassPrediction | None],
        labels: Sequence[str],
        classes: Sequence[str],
        threshold: float = 0,
    ) -> np.ndarray:
        """int64 (N, 2, C): correct predictions and frames of each class; None is wrong."""
        correct = [one is not None and one.label == label for one, label in zip(predictions, labels, strict=True)]
        counts = np.zeros((len(labels), 2, len(classes)), np.int64)
        frames, index = np.arange(len(labels)), [classes.index(label) for label in labels]
        counts[frames, 0, index], counts[frames, 1, index] = correct, 1
        return counts

    def metric_of(self, total: np.ndarray) -> float:
        """Balanced accuracy: the mean recall of the classes that occur."""
        return mean_ratio(*total)

    def one_error(self, labels: Sequence[str], classes: Sequence[str]) -> float:
        """A frame of the rarest class that occurs."""
        frames = Counter(labels).values()
        return 1 / (len(frames) * min(frames)) if frames else 1.0

    def labels_of(self, prediction: ClassPrediction, threshold: float, label: str | None = None) -> str:
        """The label."""
        return prediction.label

    def chance(self, classes: Sequence[str]) -> float:
        """Balanced accuracy of a constant prediction."""
        return 1 / len(classes)

    def answers(self, label: str, classes: Sequence[str]) -> tuple[str, ...]:
        """The label."""
        return (label,)
