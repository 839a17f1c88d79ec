"""BatchNorm recalibration: running statistics measured again after weights changed."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def batchnorms_of(model: nn.Module) -> list[_BatchNorm]:
    """The model's batch norms that keep running statistics."""
    return [part for part in model.modules() if isinstance(part, _BatchNorm) and part.running_mean is not None]


def is_frozen(norm: _BatchNorm) -> bool:
    """Whether the norm is frozen: it has parameters and none of them is trained."""
    own = list(norm.parameters(recurse=False))
    return bool(own) and not any(parameter.requires_grad for parameter in own)


@torch.no_grad()
def recalibrate_batchnorm(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """Replace running statistics by the average over `batches` of the batch statistics.

    Batches are inputs ready for the model, f32 (N, 3, S, S), weighted by their frames. Weights and frozen norms do not
    change; nothing happens without norms or batches. ValueError for a batch of one frame of which a norm sees one
    value a channel.
    """
    norms = [norm for norm in batchnorms_of(model) if not is_frozen(norm)]
    batches = iter(batches)
    first = next(batches, None)
    if not norms or first is None:
        return
    modes = {part: part.training for part in model.modules()}
    momenta = [norm.momentum for norm in norms]
    model.eval()
    for norm in norms:
        norm.train()
        norm.reset_running_stats()
    seen = 0
    try:
        for batch in chain([first], batches):
            seen += len(batch)
            for norm in norms:
                norm.momentum = len(batch) / seen  # a cumulative average
            model(batch)
    finally:
        for norm, momentum in zip(norms, momenta):
            norm.momentum = momentum
        for part, training in modes.items():
            part.training = training
