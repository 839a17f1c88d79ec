"""One frame in, its prediction out: what `model.predict` of a bundle's or a file's model does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from models.preprocess import Cropped

if TYPE_CHECKING:
    from torch import nn

    from models.predictions import Prediction


@dataclass(frozen=True)
class Predictor:
    """What a model answers to one frame, uint8 RGB (H, W, 3) or a PIL image; boxes in pixels of the whole frame.

    Detections begin at `min_score`.
    """

    model: nn.Module
    task: str
    classes: Sequence[str]
    prepare: Cropped
    min_score: float

    def __call__(self, frame: Any) -> Prediction:
        """The prediction of one frame."""
        import numpy as np
        import torch

        from models.tasks import task_of

        pixels = np.array(frame.convert("RGB")) if hasattr(frame, "convert") else frame
        batch, region = self.prepare(pixels), self.prepare.region
        size, whole = region.crop(pixels).shape[1::-1], (pixels.shape[1], pixels.shape[0])
        with torch.inference_mode():
            outputs = self.model(batch.to(next(self.model.parameters()).device))
            (found,) = task_of(self.task).predictions(
                self.model, outputs, [size], self.classes, self.min_score, self.prepare.preprocess
            )
        return found if region.roi is None else found.in_frame(*region.pixels(whole)[:2], whole)


def add_predictor(model: nn.Module, predictor: Predictor, name: str) -> nn.Module:
    """Give a model `preprocess`, `classes`, `predict` and a first line of its repr; a user's own names stay."""
    preprocess, classes = predictor.prepare.preprocess, tuple(predictor.classes)
    height, width = preprocess.size
    line = f"{name}: {predictor.task} of {', '.join(classes[:5])}{', ...' * (len(classes) > 5)}, {width} x {height}"
    own = {"preprocess": predictor.prepare, "classes": classes, "predict": predictor}
    for key, value in own.items():
        if not hasattr(model, key):
            setattr(model, key, value)
    model.extra_repr = partial(str, line)  # type: ignore[method-assign]
    return model
