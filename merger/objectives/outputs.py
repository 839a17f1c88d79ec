"""Segmentation, and tensors of any kind: outputs compared value by value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gemel.merger.objectives.augmentation import draw_changes, recolour, warp
from gemel.merger.objectives.base import Objective
from gemel.merger.objectives.classes import TEMPERATURE
from gemel.models.device import to_device
from gemel.models.objects.masks import IGNORED
from gemel.models.predictions import MaskLabels, TaskQuery
from gemel.models.preprocess import Preprocess
from gemel.models.tasks.segmentation import visible_part
from gemel.models.tasks.tensor import choice_axis

MIN_VARIANCE = 1e-6


class SegmentationObjective(Objective):
    """What a network learns whose outputs are logits (N, C, h, w)."""

    def targets(
        self,
        labels: Sequence[MaskLabels],
        sizes: Sequence[tuple[int, int]],
        classes: Sequence[str],
        preprocess: Preprocess | None = None,
    ) -> list[Tensor]:
        """uint8 (H, W) of each input: positions of classes, IGNORED in borders."""
        assert preprocess is not None
        found = []
        for label, size in zip(labels, sizes, strict=True):
            rows, columns, _ = visible_part(preprocess, size)
            whole = torch.full(preprocess.size, IGNORED, dtype=torch.uint8)
            whole[rows, columns] = torch.from_numpy(label.mask)
            found.append(whole)
        return found

    def augment(self, images: Tensor, targets: list | None, generator: torch.Generator) -> tuple[Tensor, list | None]:
        """As for detection: mirror, zoom, shift, and change light and colour; masks follow."""
        changes = draw_changes(len(images), generator)
        changed = recolour(warp(images, changes), generator)
        if targets is None:
            return changed, None
        masks = to_device(torch.stack(targets)[:, None], images.device)
        return changed, list(warp(masks, changes, "nearest")[:, 0].to(torch.uint8))

    def loss(self, model: nn.Module, outputs: Tensor, targets: list[Tensor]) -> Tensor:
        """Cross-entropy of every labelled pixel."""
        labels = to_device(torch.stack(targets), outputs.device).long()
        logits = F.interpolate(outputs, size=labels.shape[1:], mode="bilinear", align_corners=False)
        labelled = (labels != IGNORED).sum().clamp(min=1)
        return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") / labelled

    def distill(self, model: nn.Module, outputs: Tensor, teacher: Tensor) -> Tensor:
        """The divergence of softened distributions, as for classification, of the mean pixel."""
        student, target = (F.log_softmax(logits / TEMPERATURE, dim=1) for logits in (outputs, teacher))
        return F.kl_div(student, target, log_target=True, reduction="none").sum(dim=1).mean() * TEMPERATURE**2


class TensorObjective(Objective):
    """What a network learns of whose outputs nothing is known but how they are compared (`models.tasks.tensor`)."""

    def __init__(self, agreement: str = "cosine") -> None:
        self.by = agreement

    @classmethod
    def of_query(cls, query: TaskQuery) -> Objective:
        """By the agreement that the query names."""
        return cls(query.agreement or "cosine")

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


def _floats(outputs: Any) -> list[Tensor]:
    """The outputs that are of floating point."""
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
