"""Distillation of features: the inputs of the heads of a model and of its original on the same frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gemel.models.sharing.layers import layers_of
from gemel.models.workload import Query

REGION_PROPOSALS = "rpn.head.cls_logits"
"""The only layer watched in a two-stage detector: in training its second stage sees other regions than the teacher."""
MIN_VARIANCE = 1e-6


def watched_layers(query: Query, model: nn.Module) -> list[str]:
    """Paths of the layers whose inputs are compared: the heads, or the last layer without one."""
    paths = {path for path, _ in model.named_modules()}
    if REGION_PROPOSALS in paths:
        return [REGION_PROPOSALS]
    layers = [layer for layer in layers_of(query) if layer.path in paths]
    return [layer.path for layer in layers if layer.head] or [layer.path for layer in layers[-1:]]


@contextmanager
def record_inputs(model: nn.Module, paths: Sequence[str]) -> Iterator[list[Tensor]]:
    """A list that collects the float32 inputs of these layers at every call within, in the order of the calls."""
    seen: list[Tensor] = []

    def record(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0].float())

    handles = [model.get_submodule(path).register_forward_pre_hook(record) for path in paths]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def feature_loss(features: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor:
    """Mean over the features of their mean squared error, divided by the variance of the original's.

    Features of different shapes are left out; 0 when none is left.
    """
    losses = [
        (mine - theirs).square().mean() / theirs.var(correction=0).clamp(min=MIN_VARIANCE)
        for mine, theirs in zip(features, wanted, strict=True)
        if mine.shape == theirs.shape
    ]
    return torch.stack(losses).mean() if losses else torch.zeros(())
