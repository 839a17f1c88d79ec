"""Linear layers and convolutions as two factors of low rank, asked for by a model's arguments:
`low_rank: {classifier.0: 64}`.

The layer at the path becomes two, W ~ b.a: `PATH.a.weight` (rank, in), then `PATH.b.weight` (out, rank) with the
layer's own bias, `PATH.b.bias`. Of a convolution, `a` is one with its kernel, stride and padding and `rank` channels,
and `b` is 1x1 (scheme 2 of Zhang et al. 2015, arXiv 1505.06798). Since that is an argument of the architecture,
whoever can build the model can build this one, and each factor is a layer that may be shared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from models.bits import LOW_RANK
from models.errors import InputError

EXACT_BELOW = 512
"""Up to this smaller side a weight is decomposed exactly; above, by random projection."""
OVERSAMPLED, POWER_ITERATIONS = 32, 4
MIN_SCALE = 1e-3
"""The least weight of an input beside the mean input: one that never fires in the frames seen may fire later."""
READS_WEIGHTS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Modules that read the weights of their linear layers without calling them."""


class LowRankLinear(nn.Module):
    """A linear layer as two of low rank; made by `factorise`."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.a = nn.Linear(layer.in_features, rank, bias=False, dtype=layer.weight.dtype)
        self.b = nn.Linear(rank, layer.out_features, bias=layer.bias is not None, dtype=layer.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return self.b(self.a(x))


class LowRankConv2d(nn.Module):
    """A convolution as one to `rank` channels and one of 1x1; made by `factorise`."""

    def __init__(self, layer: nn.Conv2d, rank: int) -> None:
        super().__init__()
        self.in_channels, self.out_channels = layer.in_channels, layer.out_channels
        padding: Any = layer.padding  # a pair or a word, as nn.Conv2d takes it
        self.a = nn.Conv2d(
            layer.in_channels, rank, layer.kernel_size, layer.stride, padding, layer.dilation, bias=False,  # type: ignore[arg-type]
            padding_mode=layer.padding_mode, dtype=layer.weight.dtype,
        )  # fmt: skip
        self.b = nn.Conv2d(rank, layer.out_channels, 1, bias=layer.bias is not None, dtype=layer.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(N, in, H, W) -> (N, out, H', W')."""
        return self.b(self.a(x))


def factorise(model: nn.Module, ranks: Mapping[str, int], name: str = "") -> nn.Module:
    """Replace the layers at these paths by two factors each, in place, with new weights; returns the model.

    Raises InputError, with `name` in front, for a path whose layer cannot be factorised or a rank that does not fit.
    """
    name = name or type(model).__name__
    for path, rank in ranks.items():
        layer = factorisable(model, path)
        if layer is None:
            fault = f"{path} is no linear layer or convolution that can be factorised"
            raise InputError(name, fault, "correct the path", _key(path))
        most = largest_rank_of(layer.weight.shape)
        if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= most:
            raise InputError(name, f"rank {rank!r} does not fit {path}", f"give 1 to {most}", _key(path))
        with torch.device(layer.weight.device):
            made = LowRankLinear(layer, rank) if isinstance(layer, nn.Linear) else LowRankConv2d(layer, rank)
        owner, _, own = path.rpartition(".")
        setattr(model.get_submodule(owner), own, made.train(layer.training))
    return model


def factorisable(model: nn.Module, path: str) -> nn.Linear | nn.Conv2d | None:
    """The linear layer or ungrouped convolution at a path if it can be replaced by factors, else None."""
    try:
        layer, parent = model.get_submodule(path), model.get_submodule(path.rpartition(".")[0])
    except AttributeError:
        return None
    # A subclass may be more than its weight: a residual, an attention's projection that is never called.
    if path and type(layer) is nn.Linear and not isinstance(parent, READS_WEIGHTS):
        return layer
    return layer if path and type(layer) is nn.Conv2d and layer.groups == 1 else None


def largest_rank_of(shape: Sequence[int]) -> int:
    """The rank beyond which two factors of a weight (out, in, ...) hold nothing more."""
    return min(shape[0], math.prod(shape[1:]))


def numel_of_factors(shape: Sequence[int], rank: int) -> int:
    """Numbers that two factors of a weight (out, in, ...) hold."""
    return rank * (shape[0] + math.prod(shape[1:]))


def ranks_of(model_args: Mapping[str, Any], name: str) -> dict[str, int]:
    """Path -> rank as a model's arguments ask for it; empty where they do not. InputError when it is no such thing."""
    ranks = model_args.get(LOW_RANK, {})
    if not isinstance(ranks, Mapping) or not all(isinstance(path, str) for path in ranks):
        raise InputError(
            name, "low_rank is no mapping of paths to ranks", f"write {LOW_RANK}: {{PATH: RANK}}", _key("")
        )
    return dict(ranks)


def factors(weight: Tensor, rank: int, scale: Tensor | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
    """a (rank, in, ...) and b (out, rank, 1, ...) with b.a nearest to a weight (out, in, ...).

    With `scale` (in), the root mean square of each input, the outputs are near instead: the error of W.diag(scale) is
    the least (truncated singular values; the plain case is Eckart and Young 1936). Large weights: Halko, Martinsson
    and Tropp 2011, from `seed`.
    """
    held = weight.detach().float().flatten(1)
    if scale is not None:
        scale = scale.to(held).clamp(min=float(scale.mean()) * MIN_SCALE)
        scale = scale.repeat_interleave(held.shape[1] // len(scale))  # an input channel meets the whole kernel
        held = held * scale
    if min(held.shape) <= EXACT_BELOW:
        u, s, vh = torch.linalg.svd(held, full_matrices=False)
        v = vh.mT
    else:
        devices = [held.device] if held.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            u, s, v = torch.svd_lowrank(held, min(rank + OVERSAMPLED, *held.shape), POWER_ITERATIONS)
    root = s[:rank].sqrt()  # split evenly, so that neither factor's gradients dwarf the other's
    a, b = (v[:, :rank] * root).mT, u[:, :rank] * root
    if scale is not None:
        a = a / scale
    a, b = a.reshape(rank, *weight.shape[1:]), b.reshape(len(b), rank, *(1,) * (weight.ndim - 2))
    return a.to(weight.dtype).contiguous(), b.to(weight.dtype).contiguous()


def _key(path: str) -> str:
    return f"model_args.{LOW_RANK}" + (f".{path}" if path else "")
