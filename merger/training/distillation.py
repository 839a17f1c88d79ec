"""Distillation of features: what goes into the heads of a model and of its original on the same frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from models.sharing.layers import layers_of
from models.workload import Query

REGION_PROPOSALS = "rpn.head.cls_logits"
"""Of a two-stage detector the first stage's head is watched: the second's sees other regions in training."""
MIN_VARIANCE = 1e-6


def watched_layers(query: Query, model: nn.Module) -> list[str]:
    """Paths of the layers whose inputs are compared: the heads, whose width the classes set."""
    paths = {path for path, _ in model.named_modules()}
    if REGION_PROPOSALS in paths:
        return [REGION_PROPOSALS]
    return [layer.path for layer in layers_of(query) if layer.head and layer.path in paths]


@contextmanager
def record_inputs(model: nn.Module, paths: Sequence[str]) -> Iterator[list[Tensor]]:
    """A list that gathers, within, the inputs of these layers, float32, in the order in which they are reached.

    A layer that answers for several maps is reached once for each.
    """
    seen: list[Tensor] = []

    def note(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0].float())

    handles = [model.get_submodule(path).register_forward_pre_hook(note) for path in paths]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def feature_loss(seen: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor:
    """Mean over the features of the mean squared error, each over the variance of the original's.

    Features of differing shapes (the two saw different regions) are left out; 0 where none is left.
    """
    losses = [
        (mine - theirs).square().mean() / theirs.var(correction=0).clamp(min=MIN_VARIANCE)
        for mine, theirs in zip(seen, wanted, strict=True)
        if mine.shape == theirs.shape
    ]
    return torch.stack(losses).mean() if losses else torch.zeros(())
