"""The interface of detectors: candidates, losses, an exportable form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class BoxTarget(NamedTuple):
    """The objects of one frame: boxes (M, 4) x0 y0 x1 y1 in fractions of the input, labels (M,) int64 as indices
    into the query's classes, from 0.
    """

    boxes: Tensor
    labels: Tensor


class Candidates(NamedTuple):
    """The candidates of one frame: boxes f32 (K, 4) in fractions of the input, scores (K,), labels (K,) from 0."""

    boxes: Tensor
    scores: Tensor
    labels: Tensor


class PoseTarget(NamedTuple):
    """As BoxTarget; points f32 (M, K, 3) are x and y in fractions of the input, and whether they are visible."""

    boxes: Tensor
    labels: Tensor
    points: Tensor


class PoseCandidates(NamedTuple):
    """As Candidates; points f32 (K, P, 3) are x and y in fractions of the input, and their scores."""

    boxes: Tensor
    scores: Tensor
    labels: Tensor
    points: Tensor


class Detector(nn.Module):
    """`forward`: x f32 (N, 3, H, W) -> a tuple of tensors, the raw outputs that the methods below take.

    In eval mode the forward depends on nothing but x, and runs on the meta device. `nms_iou` is the overlap from
    which the weaker of two candidates of one class is suppressed; None where the forward has done so itself.
    `has_points`: its candidates are PoseCandidates, for the task keypoints.
    """

    nms_iou: float | None = 0.45
    has_points: bool = False

    def candidates(self, outputs: Any, min_score: float) -> list[Candidates]:
        """The candidates of each frame with a score of `min_score` or more, before suppression."""
        raise NotImplementedError

    def loss(self, outputs: Any, targets: Sequence[BoxTarget]) -> Tensor:
        """Scalar loss of a batch's outputs, made in train mode, against the labels."""
        raise NotImplementedError

    def distill(self, outputs: Any, teacher: Any) -> Tensor:
        """Scalar loss of outputs made in train mode against those of the original, made in eval mode."""
        raise NotImplementedError

    def export_outputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """What an exported network computes: tensors only, without a data-dependent branch."""
        raise NotImplementedError


def places_from(scores: Tensor, least: float) -> Tensor:
    """The places of the scores (N,) from `least` on; NumPy finds few of many several times as fast as torch."""
    if scores.device.type != "cpu":
        return (scores >= least).nonzero().squeeze(1)
    return torch.from_numpy((scores.detach().float().numpy() >= least).nonzero()[0])


class OneStage(Detector):
    """A detector without proposals; a family defines how its outputs are decoded.

    `most_candidates` bounds the candidates of one frame that suppression compares.
    """

    most_candidates: int = 300

    def decode(self, outputs: Any) -> tuple[Tensor, Tensor]:
        """Boxes f32 (N, A, 4) in fractions of the input, and scores 0..1 (N, A, C), the background left out."""
        raise NotImplementedError

    def candidates(self, outputs: Any, min_score: float) -> list[Candidates]:
        """The best `most_candidates` of each frame with a score of `min_score` or more."""
        return [self.best_candidates(*each, min_score=min_score) for each in zip(*self.decode(outputs))]

    def best_candidates(self, boxes: Tensor, scores: Tensor, *points: Tensor, min_score: float) -> Candidates:
        """The candidates among a frame's boxes (A, 4), scores (A, C) and points (A, K, 3)."""
        flat = scores.flatten()
        kept = places_from(flat, min_score)
        if len(kept) > self.most_candidates:
            kept = kept[flat[kept].topk(self.most_candidates).indices]
        box, label = kept // scores.shape[1], kept % scores.shape[1]
        plain = Candidates(boxes[box].clamp(0, 1), flat[kept], label)
        return PoseCandidates(*plain, points[0][box]) if points else plain  # type: ignore[return-value]

    def export_outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Boxes (N, A, 4) and scores (N, A, C); non-maximum suppression stays outside."""
        return self.decode(self(x))
