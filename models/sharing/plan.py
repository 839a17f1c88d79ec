"""Sharing plans as plain values, and tying: making the members of a set use one tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from gemel.models.errors import InputError
from gemel.models.sharing.groups import Group
from gemel.models.sharing.layers import Layer, weight_of

Member = tuple[str, str]


@dataclass(frozen=True)
class SharingPlan:
    """Which layers share one weight: sets of (query, layer path) members.

    Several members of a set may be layers of one query.
    """

    shared: tuple[tuple[Member, ...], ...] = ()

    def __post_init__(self) -> None:
        seen: set[Member] = set()
        for members in self.shared:
            if len(members) < 2 or len(set(members)) < len(members):
                raise InputError(
                    "sharing plan", f"{members} is no set of different layers", "", "shared"
                )
            if twice := seen.intersection(members):
                raise InputError(
                    "sharing plan", f"{sorted(twice)} occurs in two sets", "", "shared"
                )
            seen.update(members)

    @classmethod
    def of(cls, groups: Iterable[Group]) -> SharingPlan:
        """The plan that shares these groups whole."""
        return cls(tuple(group.members for group in groups))

    def with_set(self, members: Iterable[Member]) -> SharingPlan:
        """This plan with one more set; a set of fewer than two members changes nothing."""
        members = tuple(members)
        return SharingPlan((*self.shared, members)) if len(members) > 1 else self

    def without(self, *queries: str) -> SharingPlan:
        """This plan with these queries in no set."""
        return self._filter(lambda query, _path: query not in queries)

    def with_private(self, query: str, paths: Iterable[str]) -> SharingPlan:
        """This plan with these layers of a query in no set."""
        private = {(query, path) for path in paths}
        return self._filter(lambda *member: member not in private)

    def with_pairs(self, pairs: Iterable[Sequence[Member]]) -> SharingPlan:
        """This plan with the second layer of each pair added to the first's set, or to a new one."""
        sets = [list(members) for members in self.shared]
        set_of = {member: members for members in sets for member in members}
        for donor, receiver in pairs:
            members = set_of.get(donor)
            if members is None:
                members = set_of[donor] = [donor]
                sets.append(members)
            members.append(receiver)
            set_of[receiver] = members
        return SharingPlan(tuple(tuple(members) for members in sets))

    def _filter(self, keep: Callable[[str, str], bool]) -> SharingPlan:
        shared = (tuple(member for member in members if keep(*member)) for members in self.shared)
        return SharingPlan(tuple(members for members in shared if len(members) > 1))

    def queries(self) -> set[str]:
        """The queries that share some layer."""
        return {query for members in self.shared for query, _ in members}

    def tied_to(self, queries: Iterable[str]) -> set[str]:
        """The queries that share a weight with these, directly or through others, and these themselves."""
        reached = set(queries)
        grown = True
        while grown:
            touched = {
                q
                for members in self.shared
                if reached & {q for q, _ in members}
                for q, _ in members
            }
            grown = not touched <= reached
            reached |= touched
        return reached

    def saved_bytes(self, layers: Iterable[Layer]) -> int:
        """Bytes of the weights that sharing makes unnecessary; `layers` are those of the models."""
        size = {(layer.query, layer.path): layer.bytes for layer in layers}
        return sum(size[members[0]] * (len(members) - 1) for members in self.shared)


def tie(models: Mapping[str, nn.Module], plan: SharingPlan) -> None:
    """Make the members of each set use the first member's weight parameter; queries not given are left out.

    A weight on the meta device, without values, is used where no member has another.
    """
    for members in plan.shared:
        slots = {
            member: weight_of(models[member[0]], member[1])
            for member in members
            if member[0] in models
        }
        weights = sorted(
            (getattr(*slot) for slot in slots.values()), key=lambda weight: weight.is_meta
        )
        for (query, path), (owner, name) in slots.items():
            if getattr(owner, name).shape != weights[0].shape:
                raise InputError(
                    "sharing plan",
                    f"{query}: {path} has another shape than {members[0]}",
                    "",
                    "shared",
                )
            setattr(owner, name, weights[0])
