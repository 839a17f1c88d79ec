"""Preprocessing: crop, resize and normalise a decoded frame into a network's input."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from models.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


Roi = tuple[float, float, float, float]
"""x0, y0, x1, y1 in pixels of the frame."""
FURTHEST_PIXEL = 1e6
"""Bound of pixel coordinates: no frame is this wide."""


def crop(frame: np.ndarray, roi: Roi | None) -> np.ndarray:
    """The part of a frame that a query looks at."""
    if roi is None:
        return frame
    x0, y0, x1, y1 = (round(value) for value in roi)
    return frame[y0:y1, x0:x1]


@dataclass(frozen=True)
class Preprocess:
    """Resize to input_size x input_size (bilinear, antialiased), scale to 0..1, subtract mean, divide by deviation.

    Every manifest holds one, so torch is imported only where a frame is prepared.
    """

    input_size: int
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

    def __call__(self, frame: np.ndarray) -> Tensor:
        """uint8 RGB (H, W, 3) -> float32 (1, 3, S, S): one frame as a batch."""
        return self.normalise(self.resize(frame)[None])

    def resize(self, frame: np.ndarray) -> Tensor:
        """uint8 RGB (H, W, 3) -> uint8 (3, S, S)."""
        import numpy as np
        import torch
        from torchvision.transforms.v2 import functional as F

        image = torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1)
        side = [self.input_size, self.input_size]
        return image.contiguous() if list(image.shape[1:]) == side else F.resize(image, side, antialias=True)

    def normalise(self, batch: Tensor) -> Tensor:
        """uint8 (N, 3, S, S) -> float32 of the same shape, in channels-last order."""
        import torch

        mean, std = (_cached_constants if batch.is_cuda else _constants)(self.mean, self.std, batch.device)
        return batch.to(torch.float32).sub_(mean).div_(std).contiguous(memory_format=torch.channels_last)

    def to_json(self) -> dict[str, Any]:
        """The value as a bundle's manifest holds it."""
        return {"input_size": self.input_size, "mean": list(self.mean), "std": list(self.std)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Preprocess:
        """Inverse of `to_json`."""
        mean, std = (tuple(float(x) for x in value[key]) for key in ("mean", "std"))
        return cls(int(value["input_size"]), mean, std)  # type: ignore[arg-type]


def _constants(mean: tuple[float, ...], std: tuple[float, ...], device: Any) -> tuple[Tensor, Tensor]:
    """Mean and deviation of pixels of 0..255, each f32 (1, 3, 1, 1)."""
    import torch

    return tuple(torch.tensor(each, device=device).view(1, 3, 1, 1) * 255 for each in (mean, std))  # type: ignore[return-value]


@functools.lru_cache(maxsize=64)
def _cached_constants(mean: tuple[float, ...], std: tuple[float, ...], device: Any) -> tuple[Tensor, Tensor]:
    """`_constants`, cached on the GPU: another copy would wait for the copies under way."""
    import torch

    with torch.inference_mode(False):
        return _constants(mean, std, device)


@dataclass(frozen=True)
class Cropped:
    """A query's whole preparation: the part of the frame that it looks at, as its network takes it."""

    preprocess: Preprocess
    roi: Roi | None = None

    def __call__(self, frame: np.ndarray) -> Tensor:
        """uint8 RGB (H, W, 3) -> float32 (1, 3, S, S); boxes found in it are fractions of the part looked at.

        Raises InputError for another dtype or shape: a frame of 0..1 would be answered, too, and wrongly.
        """
        dtype, shape = str(getattr(frame, "dtype", type(frame).__name__)), tuple(getattr(frame, "shape", ()))
        if dtype != "uint8" or shape[2:] != (3,):
            remedy = "give a decoded frame, uint8 RGB (H, W, 3)"
            raise InputError("the frame", f"is {dtype} {shape}" if shape else f"is {dtype}", remedy)
        part = crop(frame, self.roi)
        if not part.size:
            height, width = frame.shape[:2]
            fault = f"has {width} x {height} pixels, in which nothing lies at the query's roi {list(self.roi or ())}"
            raise InputError("the frame", fault, "give whole frames of the query's camera")
        return self.preprocess(part)
