"""The interface of detectors in torch: outputs that a reader takes, losses, an exportable form; and predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gemel.models.objects.candidates import (
    MAX_CANDIDATES,
    BoxReader,
    Candidates,
    DecodedReader,
    SuppressedReader,
)
from gemel.models.predictions import Task
from gemel.models.preprocess import Preprocess
from gemel.models.tensors import as_arrays


class BoxTarget(NamedTuple):
    """The objects of one frame: boxes (M, 4) x0 y0 x1 y1 in fractions of the input, labels (M,) int64 as indices
    into the query's classes, from 0.
    """

    boxes: Tensor
    labels: Tensor


class PoseTarget(NamedTuple):
    """As BoxTarget; points f32 (M, K, 3) are x and y in fractions of the input, and whether they are visible."""

    boxes: Tensor
    labels: Tensor
    points: Tensor


class Detector(nn.Module):
    """`forward`: x f32 (N, 3, H, W) -> a tuple of tensors, the raw outputs that the methods below take.

    In eval mode the forward depends on nothing but x, and runs on the meta device. `nms_iou` is the overlap from
    which the weaker of two candidates of one class is suppressed; None where the forward has done so itself.
    `has_points`: its candidates have points, for the task keypoints.
    """

    nms_iou: float | None = 0.45
    has_points: bool = False

    @property
    def reader(self) -> BoxReader:
        """Reads what `finish_outputs` returns, as NumPy's arrays; here boxes, scores, labels, and points if any.

        A class that defines `candidates` itself is read by that.
        """
        if type(self).candidates is not Detector.candidates:
            return OwnReader(self.nms_iou, self)
        return SuppressedReader(self.nms_iou)

    def finish_outputs(self, outputs: Any) -> tuple[Tensor, ...]:
        """The outputs of `forward` in eval mode as `reader` reads them: what training does not need is done here."""
        return outputs

    def candidates(self, outputs: Any, min_score: float) -> list[Candidates]:
        """The candidates of each frame with a score of `min_score` or more, before suppression, in NumPy's arrays."""
        return self.reader.candidates(as_arrays(self.finish_outputs(outputs)), min_score)

    def loss(self, outputs: Any, targets: Sequence[BoxTarget]) -> Tensor:
        """Scalar loss of a batch's outputs, made in train mode, against the labels."""
        raise NotImplementedError

    def distill(self, outputs: Any, teacher: Any) -> Tensor:
        """Scalar loss of outputs made in train mode against those of the original, made in eval mode."""
        raise NotImplementedError

    def export_outputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """What an exported network computes: tensors only, without a data-dependent branch."""
        return self.finish_outputs(self(x))


@dataclass(frozen=True)
class OwnReader(BoxReader):
    """Reads by the `candidates` that a user's class defines, which takes tensors and may return them."""

    nms_iou: float | None
    model: Detector

    def candidates(self, outputs: Sequence[np.ndarray], min_score: float) -> list[Candidates]:
        """What the class says."""
        frames = self.model.candidates(tuple(map(torch.from_numpy, outputs)), min_score)
        return [Candidates(*map(np.asarray, frame[:3])) for frame in frames]


class OneStage(Detector):
    """A detector without proposals; a family defines how its outputs are decoded.

    `most_candidates` bounds the candidates of one frame that suppression compares.
    """

    most_candidates: int = MAX_CANDIDATES

    @property
    def reader(self) -> BoxReader:
        """Reads decoded boxes and scores; non-maximum suppression stays outside the network."""
        return DecodedReader(self.nms_iou, self.most_candidates)

    def decode(self, outputs: Any) -> tuple[Tensor, Tensor]:
        """Boxes f32 (N, A, 4) in fractions of the input, and scores 0..1 (N, A, C), the background left out."""
        raise NotImplementedError

    def finish_outputs(self, outputs: Any) -> tuple[Tensor, ...]:
        """The decoded boxes and scores."""
        return self.decode(outputs)


def read_outputs(
    task: Task,
    model: nn.Module,
    outputs: Any,
    sizes: Sequence[tuple[int, int]],
    classes: Sequence[str],
    min_score: float = 0.0,
    preprocess: Preprocess | None = None,
) -> list[Any]:
    """`Task.predictions` of what a model's forward returned in eval mode."""
    reader = None
    if isinstance(model, Detector):
        reader = model.reader
        outputs = model.finish_outputs(outputs)
    return task.predictions(reader, as_arrays(outputs), sizes, classes, min_score, preprocess)
