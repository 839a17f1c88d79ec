"""A query's private low-rank correction beside a shared weight, run as a parallel branch and never
materialised.

The weight in use is W + b.a. Linear: a (rank, in), b (out, rank). Convolution, groups = 1 only: a (rank, in,
kh, kw) run with the layer's own stride, padding and dilation, then b (out, rank, 1, 1).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.bits import residual_shapes


class ResidualConv2d(nn.Conv2d):
    """A convolution with a residual; made by `attach`."""

    residual_a: nn.Parameter
    residual_b: nn.Parameter

    def forward(self, input: Tensor) -> Tensor:
        """The shared convolution plus the private branch; shapes as for nn.Conv2d."""
        branch = F.conv2d(self._conv_forward(input, self.residual_a, None), self.residual_b)
        return super().forward(input) + branch


class ResidualLinear(nn.Linear):
    """A linear layer with a residual; made by `attach`."""

    residual_a: nn.Parameter
    residual_b: nn.Parameter

    def forward(self, input: Tensor) -> Tensor:
        """The shared layer plus the private branch; shapes as for nn.Linear."""
        return super().forward(input) + F.linear(F.linear(input, self.residual_a), self.residual_b)


ResidualLayer = ResidualConv2d | ResidualLinear
_CLASSES: dict[type, type] = {nn.Conv2d: ResidualConv2d, nn.Linear: ResidualLinear}


def attach(layer: nn.Module, rank: int, seed: int = 0) -> ResidualLayer:
    """Give a layer parameters `residual_a`, `residual_b` of this rank, in place, and return it.

    b starts at zero, so that the layer's outputs are unchanged; a starts normal with deviation 1/sqrt(fan
    in), from `seed`. Parameters take the weight's dtype and device; on the meta device nothing is allocated.
    Raises ValueError for a layer that cannot carry a residual of this rank.
    """
    if isinstance(layer, ResidualConv2d | ResidualLinear):
        raise ValueError("this layer has a residual already")
    if type(layer) not in _CLASSES:
        raise ValueError(f"{type(layer).__name__} cannot carry a residual: only Conv2d and Linear can")
    plain = cast("nn.Conv2d | nn.Linear", layer)
    shape_a, shape_b = shapes(plain, rank)
    weight = plain.weight
    fan_in = weight[0].numel()
    if weight.device.type == "meta":
        a = torch.empty(shape_a, dtype=weight.dtype, device="meta")
    else:
        start = torch.randn(shape_a, generator=torch.Generator().manual_seed(seed)) / fan_in**0.5
        a = start.to(weight.device, weight.dtype)
    layer.__class__ = _CLASSES[type(layer)]
    layer.register_parameter("residual_a", nn.Parameter(a))
    layer.register_parameter("residual_b", nn.Parameter(torch.zeros(shape_b, dtype=a.dtype, device=a.device)))
    return cast(ResidualLayer, layer)


def shapes(layer: nn.Conv2d | nn.Linear, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of a and b for a layer and a rank; ValueError when groups != 1 or the rank does not fit."""
    return residual_shapes(layer.weight.shape, layer.groups if isinstance(layer, nn.Conv2d) else 1, rank)


def residual_layers(model: nn.Module) -> dict[str, ResidualLayer]:
    """Layer path -> layer, of every layer that carries a residual."""
    found = model.named_modules()
    return {path: layer for path, layer in found if isinstance(layer, ResidualConv2d | ResidualLinear)}


def residual_bytes(model: nn.Module) -> int:
    """Bytes of all residual parameters of a model."""
    return sum(
        parameter.numel() * parameter.element_size()
        for layer in residual_layers(model).values()
        for parameter in (layer.residual_a, layer.residual_b)
    )
