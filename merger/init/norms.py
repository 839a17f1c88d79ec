"""Norms that keep no statistics of batches, fitted to weights that changed: without training, on a few frames."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gemel.models.batchnorm import batchnorms_of, eval_mode, is_frozen
from gemel.models.graph.unfold import ChannelAffine

MIN_DEVIATION = 1e-12


def fixed_norms(model: nn.Module, eval_norms: bool) -> dict[str, nn.Module]:
    """Name -> norm with a scale and a shift for each channel that no recalibration changes.

    These are the affines of an exported file, and the batch norms where `eval_norms` keeps them in eval mode; not what
    is frozen.
    """
    found = {norm for norm in batchnorms_of(model) if norm.affine and eval_norms}
    found |= {part for part in model.modules() if isinstance(part, ChannelAffine)}
    return {name: part for name, part in model.named_modules() if part in found and not is_frozen(part)}


@torch.no_grad()
def match_norm_outputs(model: nn.Module, original: nn.Module, names: Collection[str], images: Tensor) -> None:
    """Give each channel of the output of each of these norms the mean and deviation that it has in the original.

    Scales and shifts change in the order in which the norms run (REPAIR, Jordan et al., ICLR 2023). `images`, f32
    (N, 3, H, W), are ready for both models, which have the same modules.
    """
    wanted = dict[str, tuple[Tensor, Tensor]]()
    matched = set[str]()

    def record(name: str, _: nn.Module, __: Any, output: Tensor) -> None:
        wanted.setdefault(name, _channel_statistics(output))

    def match(name: str, norm: Any, _: Any, output: Tensor) -> Tensor | None:
        if name in matched or name not in wanted:
            return None
        matched.add(name)
        deviation, mean = _channel_statistics(output)
        factor = torch.where(deviation > MIN_DEVIATION, wanted[name][0] / deviation.clamp_min(MIN_DEVIATION), 1.0)
        shift = wanted[name][1] - factor * mean
        norm.weight.mul_(factor)
        norm.bias.mul_(factor).add_(shift)
        shape = 1, -1, *[1] * (output.ndim - 2)
        return factor.view(shape) * output + shift.view(shape)

    for one, hook in ((original, record), (model, match)):
        handles = [one.get_submodule(name).register_forward_hook(partial(hook, name)) for name in names]
        try:
            with eval_mode(one):
                one(images)
        finally:
            for handle in handles:
                handle.remove()


def _channel_statistics(values: Tensor) -> tuple[Tensor, Tensor]:
    """Standard deviation and mean of each channel of (N, C, ...)."""
    return torch.std_mean(values.float(), [dim for dim in range(values.ndim) if dim != 1])
