"""What could be stored once or smaller past the ceiling: repeated layers of one model, and layers as two factors.

A unit is one stored weight with the layers that use it: a set of the plan, or a layer on its own.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from torch import nn

from models.parts.low_rank import factorisable, largest_rank_of, numel_of_factors
from models.sharing.layers import Layer
from models.sharing.plan import Member, SharingPlan

INSIDE, LOW_RANK = "inside", "low rank"
Unit = tuple[Member, ...]
NUMBERED = re.compile(r"(\D*)(\d+)")
RANK_PARTS = (1 / 64, 1 / 16, 1 / 4)
"""Ranks tried for a layer, as parts of its smaller side: 64, 256 and 1024 of 4096."""
MIN_RANK = 4


@dataclass(frozen=True)
class Candidate:
    """One step past the ceiling, the bytes it saves, and its `risk`: what it does to the heads before any training.

    INSIDE: the units `first` and `second` become one, which starts from `start` ("mean", "first" or "second").
    LOW_RANK: the unit `first` becomes two factors of `rank`.
    """

    kind: str
    first: Unit
    second: Unit = ()
    rank: int = 0
    saved_bytes: int = 0
    start: str = "mean"
    risk: float = 0.0

    @property
    def queries(self) -> set[str]:
        """The queries whose layers it changes."""
        return {query for query, _ in (*self.first, *self.second)}

    @property
    def alone(self) -> bool:
        """Whether no other query has the weights that it changes."""
        return len(self.queries) == 1

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for a journal."""
        return dict(self.__dict__)

    @classmethod
    def from_plain(cls, value: Mapping[str, Any]) -> Candidate:
        """Inverse of `to_plain`."""
        units = {key: tuple((q, path) for q, path in value[key]) for key in ("first", "second")}
        return cls(**{**value, **units})

    def as_set(self, plan: SharingPlan) -> SharingPlan:
        """The plan with this step taken."""
        if self.kind == LOW_RANK:
            return plan.factorised(self.first, self.rank)
        others = tuple(members for members in plan.shared if members not in (self.first, self.second))
        return replace(plan, shared=others).with_set((*self.first, *self.second))


def units(layers: Iterable[Layer], plan: SharingPlan) -> list[Unit]:
    """Every stored weight as the layers that use it, in the order of the network; heads and factors are left out."""
    places = {
        (layer.query, layer.path): layer.position
        for layer in layers
        if not layer.head and layer.path not in plan.low_rank.get(layer.query, {})
    }
    found = [members for members in plan.shared if all(member in places for member in members)]
    shared = {member for members in found for member in members}
    found += [(member,) for member in places if member not in shared]
    return sorted(found, key=lambda unit: sum(places[member] for member in unit) / len(unit))


def steps_between(one: str, other: str) -> tuple[bool, int] | None:
    """How far apart two layers of a repeated block stand: (other roles in one block, blocks between).

    Paths of such layers differ in one number (`layer3.1.conv1`, `layer3.2.conv1`); None where they differ in more.
    """
    a, b = one.split("."), other.split(".")
    unequal = [index for index, (x, y) in enumerate(zip(a, b)) if x != y]
    if len(a) != len(b) or len(unequal) != 1:
        return None
    index = unequal[0]
    left, right = NUMBERED.fullmatch(a[index]), NUMBERED.fullmatch(b[index])
    if left is None or right is None or left[1] != right[1]:
        return None
    other_role = index == len(a) - 1 and left[1] != ""
    return other_role, abs(int(left[2]) - int(right[2]))


def neighbours(layers: Sequence[Layer], plan: SharingPlan) -> Iterator[tuple[tuple[bool, int], Unit, Unit]]:
    """Pairs of units of one signature that repeat each other in some model, and how far apart they stand there."""
    signature = {(layer.query, layer.path): layer.wide for layer in layers}
    alike: dict[str, list[Unit]] = defaultdict(list)
    for unit in units(layers, plan):
        alike[signature[unit[0]]].append(unit)
    for same in alike.values():
        for one, other in combinations(same, 2):
            steps = [
                step
                for query, path in one
                for name, place in other
                if query == name and (step := steps_between(path, place)) is not None
            ]
            if steps:
                yield min(steps), one, other


def inside(layers: Sequence[Layer], plan: SharingPlan, least_bytes: float) -> list[Candidate]:
    """Disjoint pairs of neighbours, the nearest first, each saving one weight of `least_bytes` or more.

    A stage of four equal blocks becomes two weights; once these are accepted, the next pairs make it one.
    """
    size = {(layer.query, layer.path): layer.bytes for layer in layers}
    taken: set[Unit] = set()
    found = []
    for _, one, other in sorted(neighbours(layers, plan), key=lambda pair: pair[0]):
        if size[one[0]] >= least_bytes and not taken & {one, other}:
            taken |= {one, other}
            found.append(Candidate(INSIDE, one, other, saved_bytes=size[one[0]]))
    return found


def low_rank(
    layers: Sequence[Layer], originals: Mapping[str, nn.Module], plan: SharingPlan, least_bytes: float
) -> list[list[Candidate]]:
    """For every unit that can be two factors its candidates by ascending rank, each saving `least_bytes` or more."""
    found = []
    for unit in units(layers, plan):
        whole = [factorisable(originals[query], path) for query, path in unit]
        if None in whole or any(path in plan.residuals.get(query, {}) for query, path in unit):
            continue
        assert whole[0] is not None
        weight = whole[0].weight
        saved = saved_by_rank(weight.shape, weight.itemsize)
        ladder = [Candidate(LOW_RANK, unit, rank=rank, saved_bytes=nbytes) for rank, nbytes in saved.items()]
        if ladder := [one for one in ladder if one.saved_bytes >= max(1, least_bytes)]:
            found.append(ladder)
    return found


def saved_by_rank(shape: Sequence[int], itemsize: int) -> dict[int, int]:
    """Every rank that is tried for a weight (out, in, ...), ascending, and the bytes its factors save."""
    ranks = sorted({max(MIN_RANK, round(part * largest_rank_of(shape))) for part in RANK_PARTS})
    return {rank: (math.prod(shape) - numel_of_factors(shape, rank)) * itemsize for rank in ranks}
