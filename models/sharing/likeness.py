"""How alike two layers' weights are, read from the weights themselves."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from models.sharing.groups import Likeness
from models.sharing.layers import Layer, weight_key


def cosine_likeness(states: Mapping[str, Mapping[str, Tensor]]) -> Likeness:
    """Likeness as the cosine of two weights as vectors, 0 where it is negative; `states` by query id.

    Weights that come from one ancestor keep a cosine far above 0; independently trained ones have about 0, and then
    roles and places decide. A query without a state is like nothing.
    """
    units: dict[tuple[str, str], Tensor] = {}

    def unit(layer: Layer) -> Tensor | None:
        key = layer.query, layer.path
        if key not in units:
            state = states.get(layer.query)
            if state is None:
                return None
            vector = state[weight_key(state, layer.path)].detach().flatten().float()
            units[key] = vector / vector.norm().clamp(min=torch.finfo(torch.float32).tiny)
        return units[key]

    def likeness(one: Layer, other: Layer) -> float:
        a, b = unit(one), unit(other)
        return 0.0 if a is None or b is None else max(0.0, float(a @ b))

    return likeness
