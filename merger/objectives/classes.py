"""Classification by one label or by several, and embeddings: a row of numbers for each frame."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemel.merger.objectives.augmentation import augment_frames
from gemel.merger.objectives.base import Objective
from gemel.models.device import to_device
from gemel.models.predictions import IdentityLabel, LabelSet, TaskQuery
from gemel.models.preprocess import Preprocess

TEMPERATURE = 2.0
LABEL_SMOOTHING = 0.02
CONTRAST_TEMPERATURE = 0.1


class FrameObjective(Objective):
    """What a model learns that answers a whole frame with one row."""

    def augment(self, images: Tensor, targets: list | None, generator: torch.Generator) -> tuple[Tensor, list | None]:
        """Shift, and change the brightness; no mirroring, since left may be a class.

        Without labels frames stay as they are: an original that others trained may know one light alone.
        """
        return (images, None) if targets is None else (augment_frames(images, generator), targets)


class ClassificationObjective(FrameObjective):
    """What a classifier learns."""

    @classmethod
    def of_query(cls, query: TaskQuery) -> Objective:
        """Several labels a frame are learned otherwise."""
        return MultiLabelObjective() if query.multi_label else cls()

    def targets(
        self,
        labels: Sequence[str],
        sizes: Sequence[tuple[int, int]],
        classes: Sequence[str],
        preprocess: Preprocess | None = None,
    ) -> list[int]:
        """Class indices."""
        return [classes.index(label) for label in labels]

    def loss(self, model: nn.Module, outputs: Tensor, targets: list[int]) -> Tensor:
        """Cross-entropy of logits (N, C)."""
        labels = to_device(torch.tensor(targets), outputs.device)
        return F.cross_entropy(outputs, labels, label_smoothing=LABEL_SMOOTHING)

    def distill(self, model: nn.Module, outputs: Tensor, teacher: Tensor) -> Tensor:
        """Hinton, Vinyals and Dean 2015: divergence of softened distributions, scaled by T squared."""
        student = F.log_softmax(outputs / TEMPERATURE, dim=1)
        target = F.log_softmax(teacher / TEMPERATURE, dim=1)
        return F.kl_div(student, target, log_target=True, reduction="batchmean") * TEMPERATURE**2


class MultiLabelObjective(FrameObjective):
    """What a classifier of several labels learns."""

    def targets(
        self,
        labels: Sequence[LabelSet],
        sizes: Sequence[tuple[int, int]],
        classes: Sequence[str],
        preprocess: Preprocess | None = None,
    ) -> list[list[float]]:
        """1 for each class of a frame, 0 for others."""
        return [[float(name in label.classes) for name in classes] for label in labels]

    def loss(self, model: nn.Module, outputs: Tensor, targets: list[list[float]]) -> Tensor:
        """Binary cross-entropy of the mean class."""
        return F.binary_cross_entropy_with_logits(outputs, to_device(torch.tensor(targets), outputs.device))

    def distill(self, model: nn.Module, outputs: Tensor, teacher: Tensor) -> Tensor:
        """The divergence from the original's probabilities, of the mean class."""
        wanted = teacher.sigmoid()
        least = F.binary_cross_entropy_with_logits(teacher, wanted)
        return F.binary_cross_entropy_with_logits(outputs, wanted) - least


class EmbeddingObjective(FrameObjective):
    """What a network learns whose answer is a direction."""

    def targets(
        self,
        labels: Sequence[IdentityLabel],
        sizes: Sequence[tuple[int, int]],
        classes: Sequence[str],
        preprocess: Preprocess | None = None,
    ) -> list[int]:
        """Numbers of the identities."""
        numbers: dict[str, int] = {}
        return [numbers.setdefault(label.identity, len(numbers)) for label in labels]

    def loss(self, model: nn.Module, outputs: Tensor, targets: list[int]) -> Tensor:
        """The supervised contrastive loss (Khosla et al. 2020) of the batch."""
        numbers = to_device(torch.tensor(targets), outputs.device)
        units = F.normalize(outputs, dim=1)
        itself = torch.eye(len(units), dtype=torch.bool, device=units.device)
        alike = (numbers[:, None] == numbers) & ~itself
        odds = (units @ units.T / CONTRAST_TEMPERATURE).masked_fill(itself, float("-inf"))
        believed = odds.log_softmax(dim=1).masked_fill(~alike, 0).sum(dim=1) / alike.sum(dim=1).clamp(min=1)
        return -believed.sum() / alike.any(dim=1).sum().clamp(min=1)

    def distill(self, model: nn.Module, outputs: Tensor, teacher: Tensor) -> Tensor:
        """1 - the cosine with the original's vector."""
        return 1 - F.cosine_similarity(outputs, teacher, dim=1).mean()
