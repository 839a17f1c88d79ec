"""Sharing plans as plain values, and tying: making the members of a set use one tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from models.bits import FACTORS
from models.errors import InputError
from models.sharing.groups import Group
from models.sharing.layers import Layer, weight_of

Member = tuple[str, str]


@dataclass(frozen=True)
class SharingPlan:
    """Which layers share one weight, with which residual rank per query, and which layers are two factors.

    `shared` holds the sets, each of (query, layer path) members; past the ceiling several may be layers of one query.
    `residuals` and `low_rank` map query -> layer path -> rank; the factors of a layer are layers themselves, `PATH.a`
    and `PATH.b` (models.parts.low_rank).
    """

    shared: tuple[tuple[Member, ...], ...] = ()
    residuals: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    low_rank: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seen: set[Member] = set()
        for members in self.shared:
            if len(members) < 2 or len(set(members)) < len(members):
                raise InputError("sharing plan", f"{members} is no set of different layers", "", "shared")
            if twice := seen.intersection(members):
                raise InputError("sharing plan", f"{sorted(twice)} stands in two sets", "", "shared")
            seen.update(members)

    @classmethod
    def of(cls, groups: Iterable[Group]) -> SharingPlan:
        """The plan that shares these groups whole."""
        return cls(tuple(group.members for group in groups))

    def with_set(self, members: Iterable[Member]) -> SharingPlan:
        """This plan with one more set; a set of fewer than two members changes nothing."""
        members = tuple(members)
        return replace(self, shared=(*self.shared, members)) if len(members) > 1 else self

    def with_residuals(self, query: str, ranks: Mapping[str, int]) -> SharingPlan:
        """This plan with these residuals of one query in place of those it had."""
        return replace(self, residuals={**self.residuals, query: dict(ranks)})

    def factorised(self, members: Iterable[Member], rank: int) -> SharingPlan:
        """This plan with these layers as two factors of this rank; what shared one weight shares both factors.

        The members share with nobody else; InputError where one has a residual or is two factors already.
        """
        members = tuple(members)
        low_rank = {query: dict(ranks) for query, ranks in self.low_rank.items()}
        for query, path in members:
            if path in self.residuals.get(query, {}) or path in low_rank.get(query, {}):
                raise InputError("sharing plan", f"{query}: {path} has a residual or is two factors", "", "low_rank")
            low_rank.setdefault(query, {})[path] = rank
        shared = tuple(own for own in self.shared if not set(own) & set(members))
        if len(members) > 1:
            shared += tuple(tuple((query, f"{path}.{factor}") for query, path in members) for factor in FACTORS)
        return replace(self, shared=shared, low_rank=low_rank)

    def without(self, *queries: str) -> SharingPlan:
        """This plan with these queries as their originals: in no set, no residuals, no layer of two factors."""
        plan = self._with_members(lambda query, _path: query not in queries)
        return replace(plan, low_rank={query: own for query, own in self.low_rank.items() if query not in queries})

    def with_private(self, query: str, paths: Iterable[str]) -> SharingPlan:
        """This plan with these layers of a query in no set and without residuals."""
        gone = {(query, path) for path in paths}
        return self._with_members(lambda *member: member not in gone)

    def with_pairs(self, pairs: Iterable[Sequence[Member]]) -> SharingPlan:
        """This plan with the second layer of each pair beside the first, in the set that has this or a new one."""
        sets = [list(members) for members in self.shared]
        where = {member: own for own in sets for member in own}
        for giver, taker in pairs:
            own = where.get(giver)
            if own is None:
                own = where[giver] = [giver]
                sets.append(own)
            own.append(taker)
            where[taker] = own
        return replace(self, shared=tuple(tuple(members) for members in sets))

    def _with_members(self, stays: Callable[[str, str], bool]) -> SharingPlan:
        """This plan with those layers in sets and with residuals of which `stays` says so."""
        shared = (tuple(member for member in members if stays(*member)) for members in self.shared)
        ranks = {name: {p: r for p, r in own.items() if stays(name, p)} for name, own in self.residuals.items()}
        return SharingPlan(
            tuple(members for members in shared if len(members) > 1),
            {name: own for name, own in ranks.items() if own},
            self.low_rank,
        )

    def queries(self) -> set[str]:
        """The queries that share some layer."""
        return {query for members in self.shared for query, _ in members}

    def tied_to(self, queries: Iterable[str]) -> set[str]:
        """The queries that share a weight with these, directly or through others, and these themselves."""
        reached = set(queries)
        grown = True
        while grown:
            touched = {q for members in self.shared if reached & {q for q, _ in members} for q, _ in members}
            grown = not touched <= reached
            reached |= touched
        return reached

    def saved_bytes(self, layers: Iterable[Layer]) -> int:
        """Bytes of the weights that sharing makes unnecessary (residuals are not counted here).

        `layers` are those of the models under this plan, factors among them.
        """
        size = {(layer.query, layer.path): layer.bytes for layer in layers}
        return sum(size[members[0]] * (len(members) - 1) for members in self.shared)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "shared": [[list(member) for member in members] for members in self.shared],
            "residuals": {query: dict(ranks) for query, ranks in self.residuals.items()},
            "low_rank": {query: dict(ranks) for query, ranks in self.low_rank.items()},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SharingPlan:
        """Inverse of `to_json`; InputError when the value is not a plan."""
        try:
            shared = tuple(tuple((str(q), str(path)) for q, path in members) for members in value["shared"])
            residuals, low_rank = (
                {str(q): {str(p): int(r) for p, r in ranks.items()} for q, ranks in value[key].items()}
                for key in ("residuals", "low_rank")
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError("sharing plan", f"is malformed: {error!r}", "write it with `to_json`") from error
        return cls(shared, residuals, low_rank)


def tie(models: Mapping[str, nn.Module], plan: SharingPlan) -> None:
    """Make the members of each set use the first member's weight parameter; queries not given are left out."""
    for members in plan.shared:
        present = [(query, path) for query, path in members if query in models]
        if not present:
            continue
        first, path = present[0]
        owner, name = weight_of(models[first], path)
        weight = getattr(owner, name)
        for query, path in present[1:]:
            owner, name = weight_of(models[query], path)
            if getattr(owner, name).shape != weight.shape:
                raise InputError("sharing plan", f"{query}: {path} has another shape than {members[0]}", "", "shared")
            setattr(owner, name, weight)
