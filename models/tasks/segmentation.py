"""Segmentation: a class for each pixel, measured by the mean IoU of the classes (mIoU)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gemel.models.objects.masks import IGNORED, resample
from gemel.models.predictions import MaskLabels, MaskPrediction, Task, join_shapes
from gemel.models.preprocess import Preprocess, Size
from gemel.models.tasks.classification import mean_ratio

MIN_SHARE = 1e-3
"""A class counts as shown in a frame where it covers this part of it."""


def visible_part(
    preprocess: Preprocess, size: tuple[int, int]
) -> tuple[slice, slice, tuple[float, ...]]:
    """The rows and columns of the input that show a frame (width, height), and their extent in pixels of the frame."""
    left, top, wide, high = preprocess.place(size)
    rows = slice(max(0, top), min(preprocess.size[0], top + high))
    columns = slice(max(0, left), min(preprocess.size[1], left + wide))
    across = size[0] / wide
    down = size[1] / high
    starts = ((columns.start - left) * across, (rows.start - top) * down)
    return rows, columns, (*starts, (columns.stop - left) * across, (rows.stop - top) * down)


def prepare_mask(mask: np.ndarray, preprocess: Preprocess) -> MaskLabels:
    """A mask of a whole frame as the labels of what the network takes of it, at the resolution of its input."""
    height, width = mask.shape
    rows, columns, extent = visible_part(preprocess, (width, height))
    shape = (rows.stop - rows.start, columns.stop - columns.start)
    return MaskLabels(resample(mask, (0, 0, width, height), shape, extent), extent)  # type: ignore[arg-type]


def choose_classes(logits: np.ndarray, size: Size) -> np.ndarray:
    """uint8 (H, W): the most probable class of each pixel; logits (C, h, w) are resized. Of equal ones the first."""
    import cv2

    best = np.full(size, -np.inf, np.float32)
    mask = np.zeros(size, np.uint8)
    for place, plane in enumerate(logits):
        if plane.shape != size:
            plane = cv2.resize(plane, (size[1], size[0]))
        better = plane > best
        np.copyto(best, plane, where=better)
        mask[better] = place
    return mask


class Segmentation(Task):
    """A class for each pixel, measured by the mean IoU of the classes.

    The model's outputs are logits (N, C, h, w), of any resolution.
    """

    name = "segmentation"
    answer, layout = "segments", "masks"
    metric = agreement = "miou"

    def predictions(
        self,
        reader: None,
        outputs: np.ndarray,
        sizes: Sequence[tuple[int, int]],
        classes: Sequence[str],
        min_score: float = 0.0,
        preprocess: Preprocess | None = None,
    ) -> list[MaskPrediction]:
        """The most probable class of each pixel that shows the frame, at the resolution of the input."""
        preprocess = preprocess or Preprocess(outputs.shape[-2:])  # type: ignore[arg-type]
        predictions = []
        for logits, size in zip(outputs, sizes, strict=True):
            mask = choose_classes(logits, preprocess.size)
            rows, columns, extent = visible_part(preprocess, size)
            predictions.append(MaskPrediction(mask[rows, columns], extent, size, tuple(classes)))  # type: ignore[arg-type]
        return predictions

    def tallies(
        self,
        predictions: Sequence[MaskPrediction | None],
        labels: Sequence[MaskLabels],
        classes: Sequence[str],
        threshold: float = 0.0,
    ) -> np.ndarray:
        """int64 (N, 2, C): pixels in which prediction and label agree on a class, and those in which either has it."""
        count = len(classes)
        counts = np.zeros((len(labels), 2, count), np.int64)
        for row, prediction, label in zip(counts, predictions, labels, strict=True):
            predicted = np.full(label.mask.shape, IGNORED, np.uint8)
            if prediction is not None:
                predicted = resample(
                    prediction.mask, prediction.extent, label.mask.shape, label.extent
                )  # type: ignore[arg-type]
            labelled = label.mask != IGNORED
            truth = label.mask[labelled]
            predicted = predicted[labelled]
            row[0] = np.bincount(truth[truth == predicted], minlength=count)[:count]
            row[1] = _areas(truth, count) + _areas(predicted, count) - row[0]
        return counts

    def metric_of(self, total: np.ndarray) -> float:
        """The mean IoU of the classes that occur."""
        return mean_ratio(*total)

    def labels_of(
        self, prediction: MaskPrediction, threshold: float, label: MaskLabels | None = None
    ) -> MaskLabels:
        """The mask."""
        return MaskLabels(prediction.mask, prediction.extent)

    def as_prediction(
        self, label: MaskLabels, size: tuple[int, int], classes: Sequence[str]
    ) -> MaskPrediction:
        """The mask."""
        return MaskPrediction(label.mask, label.extent, size, tuple(classes))

    def chance(self, classes: Sequence[str]) -> float:
        """The most that a constant prediction reaches."""
        return 1 / len(classes)

    def find_misfit(self, shapes: Sequence[tuple[int, ...]], width: int) -> str:
        """Logits (1, C, h, w)."""
        if len(shapes) == 1 and len(shapes[0]) == 4 and shapes[0][1] == width:
            return ""
        return f"answers one frame with {join_shapes(shapes)}, not with logits (1, {width}, h, w) of each pixel"

    def answers(self, label: MaskLabels, classes: Sequence[str]) -> tuple[str, ...]:
        """The classes that cover a visible part of the frame."""
        areas = _areas(label.mask, len(classes))
        return tuple(
            name
            for name, area in zip(classes, areas, strict=True)
            if area >= MIN_SHARE * label.mask.size
        )


def _areas(values: np.ndarray, count: int) -> np.ndarray:
    return np.bincount(values.ravel(), minlength=IGNORED + 1)[:count]
