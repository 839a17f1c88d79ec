"""Initial weights of shared layers: one donor's or the mean, and which models come from one pretrained network."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gemel.merger.checkpoint import State
from gemel.models.sharing.layers import Layer, weight_key
from gemel.models.sharing.plan import Member, SharingPlan
from gemel.models.sharing.similarity import cosine_likeness


def set_similarity(
    plan: SharingPlan, layers: Sequence[Layer], states: Mapping[str, Mapping[str, Tensor]]
) -> dict[tuple[Member, ...], float]:
    """Each set -> mean cosine of its members' weights with each other, 0 to 1."""
    likeness = cosine_likeness(states)
    by_member = {(layer.query, layer.path): layer for layer in layers}
    similarity = dict[tuple[Member, ...], float]()
    for members in plan.shared:
        pairs = list(itertools.combinations((by_member[member] for member in members), 2))
        similarity[members] = sum(likeness(*pair) for pair in pairs) / len(pairs)
    return similarity


def kin_pairs(
    layers: Sequence[Layer], states: Mapping[str, Mapping[str, Tensor]], similarity: float
) -> frozenset[tuple[str, str]]:
    """The pairs of queries whose networks have the same layers but heads, with weights of at least this mean cosine."""
    own = {query: [layer for layer in layers if layer.query == query and not layer.head] for query in states}
    shapes = {query: [(layer.path, layer.wide) for layer in mine] for query, mine in own.items()}
    found = set[tuple[str, str]]()
    for one, other in itertools.combinations(own, 2):
        if own[one] and shapes[one] == shapes[other]:
            plan = SharingPlan(tuple(((one, layer.path), (other, layer.path)) for layer in own[one]))
            likeness = set_similarity(plan, [*own[one], *own[other]], states)
            sizes = {layer.path: layer.bytes for layer in own[one]}
            total = sum(sizes[members[0][1]] * value for members, value in likeness.items())
            if total >= similarity * sum(sizes.values()):
                found |= {(one, other), (other, one)}
    return frozenset(found)


def copy_donor_weights(plan: SharingPlan, states: Mapping[str, State], donors: Sequence[str]) -> dict[str, State]:
    """The states with the donor's weight in every set: the donor is the first of `donors` among its members."""
    changed = {query: dict(state) for query, state in states.items()}
    for members in plan.shared:
        donor, path = min(members, key=lambda member: donors.index(member[0]))
        _set_weight(changed, members, states[donor][weight_key(states[donor], path)])
    return changed


def average_weights(plan: SharingPlan, states: Mapping[str, State]) -> dict[str, State]:
    """The states with the mean of its members' weights in every set (Wortsman et al., Model soups, ICML 2022)."""
    changed = {query: dict(state) for query, state in states.items()}
    for members in plan.shared:
        weights = [states[query][weight_key(states[query], path)] for query, path in members]
        _set_weight(changed, members, torch.stack([one.float() for one in weights]).mean(0).to(weights[0].dtype))
    return changed


def rank_donors(plan: SharingPlan, layers: Sequence[Layer]) -> list[str]:
    """The queries that share, those with the most bytes in shared layers first."""
    size = {(layer.query, layer.path): layer.bytes for layer in layers}
    held = {layer.query: 0 for layer in layers}
    for members in plan.shared:
        for member in members:
            held[member[0]] += size[member]
    return sorted((query for query in held if held[query]), key=lambda query: -held[query])


def _set_weight(states: Mapping[str, State], members: Sequence[Member], weight: Tensor) -> None:
    for query, path in members:
        states[query][weight_key(states[query], path)] = weight
