"""Similarity of weights: cosines of layers, layers and models that are identical before any merge."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import chain

import torch
from torch import Tensor

from gemel.models.sharing.groups import Likeness, ceiling_bytes
from gemel.models.sharing.layers import Layer, Signature, weight_key
from gemel.models.sharing.plan import Member, SharingPlan


def cosine_likeness(states: Mapping[str, Mapping[str, Tensor]]) -> Likeness:
    """Likeness as the cosine of two weights as vectors, 0 where it is negative; `states` by query id.

    Weights that come from one ancestor keep a cosine far above 0; independently trained ones have about 0, and then
    roles and places decide. A query without a state is like nothing.
    """
    vectors: dict[tuple[str, str], tuple[Tensor, float]] = {}

    def vector(layer: Layer) -> tuple[Tensor, float] | None:
        key = layer.query, layer.path
        if key not in vectors:
            state = states.get(layer.query)
            if state is None:
                return None
            weight = state[weight_key(state, layer.path)].detach().flatten().float()
            vectors[key] = weight, float(weight.norm())
        return vectors[key]

    def likeness(first: Layer, other: Layer) -> float:
        a = vector(first)
        b = vector(other)
        if a is None or b is None or not a[1] * b[1]:
            return 0.0
        return max(0.0, float(a[0] @ b[0]) / (a[1] * b[1]))

    return likeness


States = Mapping[str, Mapping[str, Tensor]]


def identical_sets(plan: SharingPlan, states: States) -> SharingPlan:
    """A plan's sets, each split into members with equal weights; tying these changes no model."""
    split = SharingPlan()
    for members in plan.shared:
        kinds: list[tuple[Tensor, list[Member]]] = []
        for query, path in members:
            weight = states[query][weight_key(states[query], path)]
            for example, kind_members in kinds:
                if torch.equal(example, weight):
                    kind_members.append((query, path))
                    break
            else:
                kinds.append((weight, [(query, path)]))
        for _, kind_members in kinds:
            split = split.with_set(kind_members)
    return split


def queries_identical(plan: SharingPlan, equal: SharingPlan) -> set[str]:
    """The queries that share only equal weights under a plan, as does everybody whom they share with."""
    whole = set(equal.shared)
    unequal = chain.from_iterable(members for members in plan.shared if members not in whole)
    return plan.queries() - plan.tied_to({query for query, _ in unequal})


def add_identical(
    plan: SharingPlan, equal: SharingPlan, queries: Collection[str], donors: Collection[str] = ()
) -> SharingPlan:
    """A plan with the equal weights of these queries tied, too; they are in no set of it, as donors may be."""
    for members in equal.shared:
        lent = [member for member in members if member[0] in donors]
        added = [member for member in members if member[0] in queries]
        plan = (
            plan.with_pairs((lent[0], member) for member in added) if lent else plan.with_set(added)
        )
    return plan


def copies(states: States) -> dict[str, str]:
    """Queries whose whole model is another's before them, tensor by tensor -> whose."""
    original_of: dict[str, str] = {}
    for query, state in states.items():
        for other in states:
            if other == query:
                break
            if other not in original_of and equal_states(state, states[other]):
                original_of[query] = other
                break
    return original_of


def ceiling_with_copies(
    layers: Iterable[Layer],
    sizes: Mapping[str, int],
    twins: Collection[str],
    signature: Signature = "wide",
) -> int:
    """Bytes that could be saved: every group shared, and nothing at all for a query whose model is a copy of another's.

    `sizes` are the bytes of each query's model, `twins` the copies.
    """
    layers_left = (layer for layer in layers if layer.query not in twins)
    return ceiling_bytes(layers_left, signature) + sum(sizes[query] for query in twins)


def equal_states(state: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two state dicts have the same tensors, bit by bit."""
    return state.keys() == other.keys() and all(
        torch.equal(tensor, other[key]) for key, tensor in state.items()
    )
