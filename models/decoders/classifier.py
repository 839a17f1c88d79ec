"""Classifiers: one row (C,) for each frame, logits or what the graph has made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.decoders.families import PLAIN
from models.decoders.registry import Decoder, GraphHead, parse, register
from models.preprocess import Preprocess, Size

LEAST = 1e-9
"""Probabilities below count as this one: their logarithm must be finite."""


@register
@dataclass(frozen=True)
class Classifier(Decoder):
    """`activation` is the last one in the graph: "Softmax", "Sigmoid", "LogSoftmax", or none where it gives logits."""

    name = "classifier"
    task = "classification"
    width: int
    index: int = 0
    activation: str = ""

    @classmethod
    def fit(cls, head: GraphHead) -> Sequence[Decoder]:
        """The first output of one row; maps of one pixel count as a row."""
        for index, output in enumerate(head.outputs):
            if output.shape and output.shape[0] > 1 and all(side == 1 for side in output.shape[1:]):
                last = [name for name in ("LogSoftmax", "Softmax", "Sigmoid") if name in output.tail]
                return [cls(output.shape[0], index, (last or [""])[0])]
        return []

    def preprocess(self, metadata: Mapping[str, str], size: Size) -> Preprocess | None:
        """As Ultralytics' or LibreYOLO's metadata say it; else nothing says it."""
        if mean := parse(metadata.get("norm_mean")):
            fraction = parse(metadata.get("crop_pct")) or 1.0
            resize = "stretch" if "stretch" in metadata.get("resize_mode", "") else "center-crop"
            std = parse(metadata.get("norm_std"))
            return Preprocess(
                size, resize, float(fraction), mean=tuple(mean), std=tuple(std) if std else (1.0, 1.0, 1.0)
            )
        if metadata.get("task") == "classify" and "model_family" not in metadata:
            return Preprocess(size, "center-crop", **PLAIN)
        return None

    def logits(self, outputs: Sequence[Tensor]) -> Tensor:
        """Values (N, C) whose softmax are the probabilities of the file; of independent ones the odds' logarithm."""
        values = outputs[self.index].float().flatten(1)
        if self.activation == "Softmax":
            return values.clamp_min(LEAST).log()
        return torch.logit(values, LEAST) if self.activation == "Sigmoid" else values
