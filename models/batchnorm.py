"""BatchNorm recalibration: running statistics measured again after weights changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

FOLDED_TOLERANCE = 1e-3


def batchnorms_of(model: nn.Module) -> list[_BatchNorm]:
    """The model's batch norms that keep running statistics."""
    return [
        part
        for part in model.modules()
        if isinstance(part, _BatchNorm) and part.running_mean is not None
    ]


def is_frozen(norm: nn.Module) -> bool:
    """Whether the norm is frozen: it has parameters and none of them is trained."""
    parameters = list(norm.parameters(recurse=False))
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


@torch.no_grad()
def recalibrate_batchnorm(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """Replace running statistics by the average over `batches` of the batch statistics.

    Batches are inputs ready for the model, f32 (N, 3, H, W), weighted by their frames. Weights and frozen norms do not
    change; nothing happens without norms or batches. ValueError for a batch of one frame of which a norm sees one
    value a channel.
    """
    norms = [norm for norm in batchnorms_of(model) if not is_frozen(norm)]
    batches = iter(batches)
    first = next(batches, None)
    if not norms or first is None:
        return
    momenta = [norm.momentum for norm in norms]
    seen = 0
    with eval_mode(model):
        for norm in norms:
            norm.train()
            norm.reset_running_stats()
        try:
            for batch in chain([first], batches):
                seen += len(batch)
                for norm in norms:
                    norm.momentum = len(batch) / seen  # a cumulative average
                model(batch)
        finally:
            for norm, momentum in zip(norms, momenta):
                norm.momentum = momentum


def has_folded_norms(model: nn.Module) -> bool:
    """Whether the model has norms and all of them are identities: mean 0 and variance 1 in every channel."""
    norms = batchnorms_of(model)
    return bool(norms) and all(
        bool((norm.running_mean.abs() < FOLDED_TOLERANCE).all())  # type: ignore[union-attr]
        and bool(((norm.running_var - 1).abs() < FOLDED_TOLERANCE).all())  # type: ignore[operator]
        for norm in norms
    )


@torch.no_grad()
def unfold_batchnorm(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """Give norms the statistics of their data without changing the model's function in eval mode.

    A folded norm trains badly: in train mode it would normalise with the batch's statistics. Here its weight and bias
    absorb the difference: with s = sqrt(var + eps) of the
    data and r = sqrt(running_var + eps), weight' = weight * s / r and
    bias' = bias + weight * (mean - running_mean) / r.
    """
    norms = batchnorms_of(model)
    sums: dict[nn.Module, Tensor] = {}

    def watch(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].transpose(0, 1).flatten(1).double()  # (channels, values)
        sums[norm] = sums.get(norm, 0) + torch.stack(
            [torch.full_like(x[:, 0], x.shape[1]), x.sum(1), x.square().sum(1)]
        )

    handles = [norm.register_forward_pre_hook(watch) for norm in norms]
    try:
        with eval_mode(model):
            for batch in batches:
                model(batch)
    finally:
        for handle in handles:
            handle.remove()
    for norm in norms:
        if norm.affine and norm in sums:
            count, total, squares = sums[norm]
            mean = total / count
            variance = (squares / count - mean.square()).clamp_(min=0)
            old = (norm.running_var + norm.eps).sqrt()  # type: ignore[operator]
            norm.bias.add_(norm.weight * (mean - norm.running_mean) / old)  # type: ignore[operator]
            norm.weight.mul_((variance + norm.eps).sqrt() / old)
            norm.running_mean.copy_(mean)  # type: ignore[union-attr]
            norm.running_var.copy_(variance)  # type: ignore[union-attr]


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    modes = {part: part.training for part in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training
