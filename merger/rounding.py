"""Codes of int4 weights that keep what layers answer: rounding by reconstruction.

The nearest codes err least in the weights. Here the weights of a layer are rounded one input after the other, and what
that changes in its outputs, on the inputs that train frames bring, is made up for by those that are not rounded yet
(Frantar and others, GPTQ, ICLR 2023). Layers are rounded as one pass of the frames reaches them, so each makes up for
what rounding those before it changed. Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemel.models.bits import max_code
from gemel.models.quantization import pack, scales_of


@dataclass(frozen=True)
class RoundingConfig:
    """How weights are rounded."""

    frames: int = 32
    """Train frames, in one pass."""
    positions: int = 256
    """Places of a frame at which the inputs of a convolution count."""
    max_inputs: int = 4608
    """Inputs of an output above which codes are the nearest: what they take rises with the cube."""
    damping: float = 0.01
    """Added to the mean square of each input, as a part of that of all: 1 % is the paper's."""
    block: int = 64
    """Inputs that are rounded before what is left of the layer is changed."""


RECONSTRUCTION = RoundingConfig()


@torch.no_grad()
def round_weights(model: nn.Module, keys: Collection[str], frames: Tensor) -> dict[str, Tensor]:
    """Codes int8 (out, ...) of those weights (by state dict key) that are of plain layers and not too wide.

    `frames` f32 (N, 3, H, W) pass once; the model keeps the rounded weights.
    """
    codes = dict[str, Tensor]()
    modules, handles = dict(model.named_modules()), []

    def round_layer(key: str, layer: Any, inputs: tuple[Tensor, ...]) -> None:
        if key in codes:  # a layer may run several times
            return
        moments = measure_moments(layer, inputs[0])
        if bool(moments.isfinite().all()):
            found = choose_codes(layer.weight, moments)
            layer.weight.copy_(pack(layer.weight, "int4", found).wide())
            codes[key] = found.cpu()

    for key in keys:
        layer = modules.get(key.rpartition(".")[0])
        if layer is not None and is_plain(layer):
            handles.append(layer.register_forward_pre_hook(partial(round_layer, key)))
    try:
        model(frames)
    finally:
        for handle in handles:
            handle.remove()
    return codes


def is_plain(layer: Any) -> bool:
    """Whether each output of a layer is a sum over all of its inputs, of which there are not too many."""
    if isinstance(layer, nn.Conv2d):
        is_dense = layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    else:
        is_dense = isinstance(layer, nn.Linear)
    return is_dense and layer.weight[0].numel() <= RECONSTRUCTION.max_inputs


def measure_moments(layer: Any, inputs: Tensor) -> Tensor:
    """The sums f32 (K, K) of products of the K inputs of an output."""
    if isinstance(layer, nn.Linear):
        rows = inputs.float().reshape(-1, layer.in_features)
        return rows.T @ rows
    moments = inputs.new_zeros(())
    for frame in inputs.float().split(1):
        columns = F.unfold(frame, layer.kernel_size, layer.dilation, layer.padding, layer.stride)[0]
        step = columns.shape[1] // RECONSTRUCTION.positions | 1  # odd, so that it runs through all columns
        columns = columns[:, ::step]
        moments = moments + columns @ columns.T
    return moments


def choose_codes(weight: Tensor, moments: Tensor) -> Tensor:
    """The codes int8 of a weight (out, ...) whose inputs have these sums of products."""
    limit = max_code("int4")
    left = weight.reshape(len(weight), -1) / scales_of(weight, "int4")[:, None]
    size = float(moments.diag().mean()) or 1.0
    damped = moments + RECONSTRUCTION.damping * size * torch.eye(len(moments), device=moments.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped.double()))
    factor = torch.linalg.cholesky(inverse, upper=True).float()
    codes = torch.zeros_like(left)
    for start in range(0, len(moments), RECONSTRUCTION.block):
        end = min(start + RECONSTRUCTION.block, len(moments))
        errors = torch.zeros_like(left[:, start:end])
        for place in range(start, end):
            codes[:, place] = left[:, place].round().clamp(-limit, limit)
            errors[:, place - start] = (left[:, place] - codes[:, place]) / factor[place, place]
            left[:, place + 1 : end] -= errors[:, place - start].outer(factor[place, place + 1 : end])
        left[:, end:] -= errors @ factor[start:end, end:]
    return codes.to(torch.int8).view(weight.shape)
