"""Weights that stand as they will be stored while gradients are found, and move as they are: straight through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from merger.widths.storing import Widths
from models.parts.widths import rounded


@contextmanager
def as_stored(models: Mapping[str, nn.Module], widths: Widths) -> Iterator[None]:
    """Within, the weights of these models, tied, are what their packed tensors would widen to; then as they were.

    A gradient found within counts for the weight as it was (a straight-through estimator: Bengio et al. 2013, section
    4), so that small steps add up until a weight gets another code.
    """
    kept: dict[int, tuple[nn.Parameter, Tensor]] = {}
    try:
        for query, model in models.items():
            for key, width in widths.get(query, {}).items():
                weight = model.get_parameter(key)
                if id(weight) not in kept:  # what is tied is rounded once
                    kept[id(weight)] = weight, weight.data
                    weight.data = rounded(weight, width)
        yield
    finally:
        for weight, data in kept.values():
            weight.data = data
