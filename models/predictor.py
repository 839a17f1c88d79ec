"""One frame in, its prediction out: what `model.predict` of a bundle's or a file's model does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from gemel.models.preprocess import Cropped

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gemel.models.predictions import Prediction

    class FrameModel(nn.Module):
        """A module with what `add_predictor` gives it; of a file's, `decode` turns its outputs into boxes and scores
        or into probabilities."""

        preprocess: TensorPreprocess
        classes: tuple[str, ...]
        predict: Predictor
        decode: Callable[..., Any]


def read_frame(frame: Any) -> Any:
    """Pixels uint8 RGB (H, W, 3) of an array, of a PIL image, or of the picture at a path; other values as they are."""
    import numpy as np

    from gemel.models.files.pictures import read_picture

    if isinstance(frame, str | PathLike):
        return read_picture(Path(frame))
    return np.array(frame.convert("RGB")) if hasattr(frame, "convert") else frame


@dataclass(frozen=True)
class TensorPreprocess(Cropped):
    """A query's whole preparation, whose result is a tensor: `model.preprocess`."""

    def __call__(self, frame: Any) -> Tensor:  # type: ignore[override]
        """What `read_frame` takes -> float32 (1, 3, H, W), channels last in memory; InputError as `Cropped`."""
        import torch

        return torch.from_numpy(super().__call__(read_frame(frame))).contiguous(
            memory_format=torch.channels_last
        )


@dataclass(frozen=True)
class Predictor:
    """What a model answers to a frame as `read_frame` takes it, or to a list of them; boxes in pixels of whole frames.

    Detections begin at `min_score`.
    """

    model: nn.Module
    task: str
    classes: Sequence[str]
    prepare: TensorPreprocess
    min_score: float

    def __call__(self, frame: Any) -> Any:
        """The prediction of a frame, or a list of those of a list or tuple of frames."""
        if isinstance(frame, list | tuple):
            return [self.predict_frame(element) for element in frame]
        return self.predict_frame(frame)

    def predict_frame(self, frame: Any) -> Prediction:
        """The prediction of one frame."""
        import torch

        from gemel.models.detector import read_outputs
        from gemel.models.tasks import task_of

        pixels = read_frame(frame)
        batch = self.prepare(pixels)
        region = self.prepare.region
        size = region.crop(pixels).shape[1::-1]
        whole = (pixels.shape[1], pixels.shape[0])
        with torch.inference_mode():
            outputs = self.model(batch.to(next(self.model.parameters()).device))
            task = task_of(self.task)
            preprocess = self.prepare.preprocess
            (prediction,) = read_outputs(
                task, self.model, outputs, [size], self.classes, self.min_score, preprocess
            )
        return (
            prediction
            if region.roi is None
            else prediction.in_frame(*region.pixels(whole)[:2], whole)
        )


def add_predictor(model: nn.Module, predictor: Predictor, name: str) -> FrameModel:
    """Give a model `preprocess`, `classes`, `predict` and a first line of its repr; a user's own names stay."""
    preprocess = predictor.prepare.preprocess
    classes = tuple(predictor.classes)
    height, width = preprocess.size
    line = f"{name}: {predictor.task} of {', '.join(classes[:5])}{', ...' * (len(classes) > 5)}, {width} x {height}"
    attributes = {"preprocess": predictor.prepare, "classes": classes, "predict": predictor}
    for key, value in attributes.items():
        if not hasattr(model, key):
            setattr(model, key, value)
    model.extra_repr = partial(str, line)  # type: ignore[method-assign]
    return cast("FrameModel", model)
