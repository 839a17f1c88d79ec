"""Classifiers: one row (C,) for each frame, logits or what the graph has made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gemel.models.arrays import Array, as_float, library_of, logarithm, logit
from gemel.models.decoders.decoder import Decoder, GraphHead, Outputs, order_by_weight
from gemel.models.decoders.families import PLAIN
from gemel.models.labels.class_names import parse
from gemel.models.preprocess import Preprocess, Size

LEAST = 1e-9
"""Probabilities below count as this one: their logarithm must be finite."""


@dataclass(frozen=True)
class Classifier(Decoder):
    """One row of classes for each frame, logits or what the graph made of them.

    `activation` is the last one in the graph: "Softmax", "Sigmoid", "LogSoftmax", or none where it gives logits.

    `is_single`: its only value is the odds of the second of two classes.
    """

    name = "classifier"
    task = "classification"
    width: int
    index: int = 0
    activation: str = ""
    is_single: bool = False

    @property
    def counted(self) -> str:
        """How many classes, and whether one value answers for both."""
        return "2 classes by one value (that of the second)" if self.is_single else super().counted

    @classmethod
    def fit(cls, head: GraphHead) -> Sequence[Decoder]:
        """Each output of one row, the likeliest first; maps of one pixel count as a row. One value must stand alone."""
        rows = [
            pair
            for pair in enumerate(head.outputs)
            if pair[1].shape and set(pair[1].shape[1:]) <= {1}
        ]
        fits = []
        for index, output in order_by_weight(rows):
            last = [name for name in ("LogSoftmax", "Softmax", "Sigmoid") if name in output.tail]
            is_single = output.shape[0] == 1
            # One value beside other outputs is seldom a class.
            if not is_single or len(head.outputs) == 1:
                fits.append(cls(max(2, output.shape[0]), index, (last or [""])[0], is_single))
        return fits

    def preprocess(self, metadata: Mapping[str, str], size: Size) -> Preprocess | None:
        """As Ultralytics' or LibreYOLO's metadata say it; else nothing says it."""
        if mean := parse(metadata.get("norm_mean")):
            fraction = parse(metadata.get("crop_pct")) or 1.0
            resize = "stretch" if "stretch" in metadata.get("resize_mode", "") else "center-crop"
            std = parse(metadata.get("norm_std"))
            return Preprocess(
                size,
                resize,
                float(fraction),
                mean=tuple(mean),
                std=tuple(std) if std else (1.0, 1.0, 1.0),
            )
        if metadata.get("task") == "classify" and "model_family" not in metadata:
            return Preprocess(size, "center-crop", **PLAIN)
        return None

    def logits(self, outputs: Outputs) -> Array:
        """Values (N, C) whose softmax are the probabilities of the file; of independent ones the odds' logarithm."""
        values = as_float(outputs[self.index])
        logits = as_logits(values.reshape(len(values), -1), self.activation)
        if not self.is_single:
            return logits
        library = library_of(logits)
        return library.concatenate([library.zeros_like(logits), logits], -1)


def as_logits(values: Array, activation: str) -> Array:
    """Values before the last activation of a graph, which may be none."""
    if activation == "Softmax":
        return logarithm(values, LEAST)
    return logit(values, LEAST) if activation == "Sigmoid" else values
