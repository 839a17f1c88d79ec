"""Detection and keypoints: objects as targets, in fractions of the input; the losses are the detector's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gemel.merger.objectives.augmentation import Changes, draw_changes, move_boxes, recolour, warp
from gemel.merger.objectives.base import Objective
from gemel.models.detector import BoxTarget, Detector, PoseTarget
from gemel.models.predictions import BoxLabels, PoseLabels
from gemel.models.preprocess import Preprocess


class DetectionObjective(Objective):
    """What a `Detector` learns."""

    def targets(
        self,
        labels: Sequence[BoxLabels],
        sizes: Sequence[tuple[int, int]],
        classes: Sequence[str],
        preprocess: Preprocess | None = None,
    ) -> list[BoxTarget]:
        """Boxes in fractions of the input; objects of no named class, or outside the input, are left out."""
        return [place_boxes(boxes, size, classes, preprocess)[0] for boxes, size in zip(labels, sizes, strict=True)]

    def augment(self, images: Tensor, targets: list | None, generator: torch.Generator) -> tuple[Tensor, list | None]:
        """Mirror, zoom, shift, and change light and colour."""
        changes = self._draw(len(images), generator)
        changed = recolour(warp(images, changes), generator)
        return changed, targets and [self._move(target, changes, place) for place, target in enumerate(targets)]

    def _draw(self, frames: int, generator: torch.Generator) -> Changes:
        return draw_changes(frames, generator)

    def _move(self, target: Any, changes: Changes, index: int) -> BoxTarget | PoseTarget:
        boxes, visible = _move_boxes(target.boxes, changes, index)
        return BoxTarget(boxes, target.labels[visible])

    def loss(self, model: Detector, outputs: Any, targets: list[BoxTarget]) -> Tensor:
        """The loss of the detector's family."""
        return model.loss(outputs, targets)

    def distill(self, model: Detector, outputs: Any, teacher: Any) -> Tensor:
        """The distance from the original's outputs, as the detector's family measures it."""
        return model.distill(outputs, teacher)


class KeypointObjective(DetectionObjective):
    """What a `Detector` with points learns."""

    def targets(  # type: ignore[override]
        self,
        labels: Sequence[PoseLabels],
        sizes: Sequence[tuple[int, int]],
        classes: Sequence[str],
        preprocess: Preprocess | None = None,
    ) -> list[PoseTarget]:
        """Boxes and points in fractions of the input; points outside it are not visible."""
        placed = []
        for label, size in zip(labels, sizes, strict=True):
            target, rows = place_boxes(label, size, classes, preprocess)
            width = len(label.points[0]) if label.points else 0
            points = np.array([label.points[row] for row in rows], np.float32).reshape(-1, width, 3)
            places = points[..., :2] / np.array(size, np.float32)
            if preprocess is not None:
                pairs = np.tile(places.reshape(-1, 2), 2)  # a box without sides
                places = preprocess.from_frame(pairs, size)[:, :2].reshape(places.shape)
            visible = torch.from_numpy(points[..., 2])
            placed.append(PoseTarget(*target, _hide_outside(torch.from_numpy(places), visible)))
        return placed

    def _draw(self, frames: int, generator: torch.Generator) -> Changes:
        """Not mirrored, since left and right points would change places."""
        drawn = draw_changes(frames, generator)
        return Changes(drawn.scale, torch.ones_like(drawn.mirror), drawn.shift)

    def _move(self, target: PoseTarget, changes: Changes, index: int) -> PoseTarget:
        boxes, visible = _move_boxes(target.boxes, changes, index)
        points = target.points[visible]
        places = 0.5 + (points[..., :2] - 0.5) * float(changes.scale[index]) + changes.shift[index]
        return PoseTarget(boxes, target.labels[visible], _hide_outside(places, points[..., 2]))


def place_boxes(
    labels: BoxLabels, size: tuple[int, int], classes: Sequence[str], preprocess: Preprocess | None
) -> tuple[BoxTarget, list[int]]:
    """The objects of named classes that the input shows, in its fractions; and their places among the labels."""
    wanted = [index for index, name in enumerate(labels.classes) if name in classes]
    numbers = np.array([classes.index(labels.classes[index]) for index in wanted], np.int64)
    boxes = np.array([labels.boxes[index] for index in wanted], np.float32).reshape(-1, 4)
    boxes = boxes / np.array([*size, *size], np.float32)
    if preprocess is not None:
        boxes = preprocess.from_frame(boxes, size)
    boxes = boxes.clip(0, 1)
    shown = np.flatnonzero((boxes[:, 2:] > boxes[:, :2]).all(axis=1))
    rows = [wanted[place] for place in shown]
    return BoxTarget(torch.from_numpy(boxes[shown]), torch.from_numpy(numbers[shown])), rows


def _move_boxes(boxes: Tensor, changes: Changes, index: int) -> tuple[Tensor, Tensor]:
    scale, mirror = float(changes.scale[index]), float(changes.mirror[index])
    return move_boxes(boxes, scale, mirror, changes.shift[index])


def _hide_outside(places: Tensor, visible: Tensor) -> Tensor:
    """Points (M, K, 3) of places in fractions of the input; those outside it are 0 and not visible."""
    inside = ((places >= 0) & (places <= 1)).all(dim=-1)
    return torch.cat([places * inside[..., None], (visible * inside)[..., None]], dim=-1)
