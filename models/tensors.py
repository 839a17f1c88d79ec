"""Between NumPy, which prepares frames and reads outputs, and torch, which trains and runs models."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gemel.models.preprocess import Preprocess


def normalise_frames(preprocess: Preprocess, batch: Tensor, channels_last: bool = True) -> Tensor:
    """`Preprocess.normalise` of uint8 RGB (N, 3, H, W) on any device, to the bit; channels last in memory, or not."""
    if batch.device.type == "cpu":
        values = torch.from_numpy(preprocess.normalise(batch.numpy()))
    else:
        batch = batch.flip(1) if preprocess.channels == "bgr" else batch
        mean, deviation = _device_constants(preprocess, batch.device)
        values = batch.to(torch.float32).sub_(mean).div_(deviation)
    return values.contiguous(
        memory_format=torch.channels_last if channels_last else torch.contiguous_format
    )


@functools.lru_cache(maxsize=64)
def _device_constants(preprocess: Preprocess, device: Any) -> tuple[Tensor, Tensor]:
    """The mean and the deviation; kept, since another copy would wait for the copies under way."""
    with torch.inference_mode(False):
        mean, deviation = (
            torch.from_numpy(values).to(device) for values in preprocess.pixel_constants()
        )
        return mean, deviation


def as_arrays(outputs: Any) -> Any:
    """What a forward returned as NumPy's arrays on the CPU: of one tensor one, else a tuple of all; floats as f32."""
    if isinstance(outputs, Tensor):
        return _as_array(outputs)
    return tuple(_as_array(leaf) for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))


def _as_array(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach()
    return (tensor.float() if tensor.is_floating_point() else tensor).cpu().numpy()
