"""Whether the originals of a workload descend from common ancestors, read from the weights they could share."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from models.sharing.layers import Layer
from models.sharing.plan import SharingPlan
from models.sharing.similarity import cosine_likeness

COMMON = 0.2
"""The cosine of two weights from which an ancestor is taken for common. Independent weights of trained networks show
a few hundredths, because kernels everywhere look somewhat alike; those fine-tuned from one network above a half."""


def kinship(plan: SharingPlan, layers: list[Layer], states: Mapping[str, Mapping[str, Tensor]]) -> dict[str, float]:
    """Query -> mean cosine of its weights with those of the other members of its sets, weighted by bytes; 0 to 1."""
    likeness = cosine_likeness(states)
    by_member = {(layer.query, layer.path): layer for layer in layers}
    total: dict[str, float] = {}
    weight: dict[str, float] = {}
    for members in plan.shared:
        found = [by_member[member] for member in members]
        for layer in found:
            others = [likeness(layer, other) for other in found if other is not layer]
            total[layer.query] = total.get(layer.query, 0.0) + layer.bytes * sum(others)
            weight[layer.query] = weight.get(layer.query, 0.0) + layer.bytes * len(others)
    return {query: total[query] / weight[query] for query in total}
