"""BatchNorm recalibration: running statistics measured again after weights changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

FOLDED_TOLERANCE = 1e-3


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
    sums = {norm: _Moments() for norm in norms}
    with _eval_mode(model), _watch_inputs(norms, lambda norm, x: sums[norm].add(x)):
        for batch in batches:
            model(batch)
    for norm in norms:
        if sums[norm].count:
            _set_statistics(norm, *sums[norm].mean_and_variance())


def _set_statistics(norm: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    assert norm.running_mean is not None and norm.running_var is not None
    old = (norm.running_var + norm.eps).sqrt()
    if norm.affine:
        norm.bias.add_(norm.weight * (mean - norm.running_mean) / old)
        norm.weight.mul_((variance + norm.eps).sqrt() / old)
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance)


class _Moments:
    """Mean and variance per channel over batches, joined as in Chan, Golub and LeVeque 1979."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor | float = 0.0
        self.spread: Tensor | float = 0.0

    def add(self, x: Tensor) -> None:
        others = [axis for axis in range(x.dim()) if axis != 1]
        variance, mean = (value.double() for value in torch.var_mean(x, others, correction=0))
        count = x.numel() // x.shape[1]
        step = mean - self.mean
        total = self.count + count
        self.spread = self.spread + variance * count + step.square() * (self.count * count / total)
        self.mean = self.mean + step * (count / total)
        self.count = total

    def mean_and_variance(self) -> tuple[Tensor, Tensor]:
        return torch.as_tensor(self.mean).float(), torch.as_tensor(self.spread / self.count).float()


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    modes = {part: part.training for part in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


@contextmanager
def _watch_inputs(norms: list[_BatchNorm], see: Callable[[_BatchNorm, Tensor], None]) -> Iterator[None]:
    def watcher(norm: _BatchNorm) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, inputs: see(norm, inputs[0])

    handles = [norm.register_forward_pre_hook(watcher(norm)) for norm in norms]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
