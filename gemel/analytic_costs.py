"""Estimated costs of models without weights: a workload's originals, and the same with all layers shared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from gemel.edge_runtime.scheduler.costs import Costs
from gemel.edge_runtime.simulation.device_profiles import PROFILES, DeviceProfile, costs_for
from gemel.models.bundle import Bundle, BundleQuery
from gemel.models.bundle.format import ITEM_BYTES
from gemel.models.bundle.manifest import wide_code, wide_shape
from gemel.models.bundle.model_spec import ModelSpec, load_model_spec
from gemel.models.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from gemel.models.sharing.layers import Layer
    from gemel.models.workload import Query


Build = Callable[[], "nn.Module"]


class _Unweighted:
    """Queries as `costs_for` reads a bundle: sizes and architectures, no weights.

    `builds` make the architectures on the meta device; `names` has the shared tensor of a (query, state dict key).
    A `bundle` gives the documents of networks and the sizes of their tensors instead, without torch.
    """

    def __init__(
        self,
        queries: Iterable[BundleQuery],
        builds: Mapping[str, Build],
        names: Mapping[tuple[str, str], str] | None = None,
        bundle: Bundle | None = None,
    ) -> None:
        self._builds, self._bundle, self._all = builds, bundle, dict[str, int]()
        self.queries = tuple(
            replace(query, tensors=self._tensor_names(query, names or {}), stored={}) for query in queries
        )
        self._names = {query.id: tuple(dict.fromkeys(query.tensors.values())) for query in self.queries}

    def build(self, query_id: str, device: str) -> nn.Module:
        return self._builds[query_id]().to(device)

    def document_of(self, query_id: str) -> bytes:
        assert self._bundle is not None, "torch counts what these networks cost"
        return self._bundle.document_of(query_id)

    def names_in_order(self, query_id: str) -> tuple[str, ...]:
        return self._names[query_id]

    def nbytes(self, name: str) -> int:
        return self._all[name]

    def _spec_of(self, query: BundleQuery) -> ModelSpec:
        if self._bundle is None:
            return load_model_spec(query, self._builds[query.id])
        entries = {key: self._bundle.header.entries[name] for key, name in query.tensors.items()}
        tensors = {key: (wide_code(query, key, one), wide_shape(query, key, one)) for key, one in entries.items()}
        return ModelSpec(tensors, {})

    def _tensor_names(self, query: BundleQuery, names: Mapping[tuple[str, str], str]) -> dict[str, str]:
        """The tensor name of each state dict key; keys of one tensor have one name.

        Of an original in whose place another network answers, a bundle knows the bytes alone: one tensor.
        """
        if query.substitution is not None:
            name = f"{query.id}/original"
            self._all[name] = query.substitution.bytes
            return {"original": name}
        wanted, named = self._spec_of(query), dict[str, str]()
        for key, (dtype, shape) in wanted.tensors.items():
            # BatchNorm counters are equal in all layers unless a bundle says otherwise.
            own = key if shape else query.tensors.get(key, "counter")
            first = wanted.same.get(key)
            named[key] = names.get((query.id, own), f"{query.id}/{own}") if first is None else named[first]
            self._all[named[key]] = math.prod(shape) * ITEM_BYTES[dtype]
        return named


def bundle_originals(bundle: Bundle, by_document: bool = False) -> Bundle:
    """A bundle's queries before merging, nothing shared; `by_document`: as `cost_of_document` counts them."""
    builds: dict[str, Build] = {query.id: partial(bundle.build, query.id, "meta") for query in bundle.queries}
    return cast("Bundle", _Unweighted(bundle.queries, builds, bundle=bundle if by_document else None))


def workload_originals(queries: Iterable[Query]) -> Bundle:
    """The originals of these queries, nothing shared."""
    queries = tuple(queries)
    return cast("Bundle", _Unweighted(map(BundleQuery.of, queries), _builds(queries)))


def merge_at_ceiling(queries: Sequence[Query], layers: Iterable[Layer] | None = None) -> Bundle:
    """These queries' models with one weight for each group of layers, of all layers or of the given ones."""
    from gemel.models.sharing.groups import groups
    from gemel.models.sharing.layers import layers_of_all, weight_key

    builds = _builds(queries)
    keys = {query.id: load_model_spec(query, builds[query.id]).tensors for query in queries}
    names = {
        (query, weight_key(keys[query], path)): f"group{index:05}"
        for index, group in enumerate(groups(layers_of_all(queries) if layers is None else layers))
        for query, path in group.members
    }
    return cast("Bundle", _Unweighted(map(BundleQuery.of, queries), builds, names))


def _builds(queries: Iterable[Query]) -> dict[str, Build]:
    from gemel.models.zoo import build_query

    return {query.id: partial(build_query, query, device="meta") for query in queries}


def original_costs(profile: DeviceProfile, queries: Sequence[Query]) -> Costs:
    """Costs of the originals, from which memory settings are computed."""
    return costs_for(profile, workload_originals(queries))


def ceiling_costs(profile: DeviceProfile, queries: Sequence[Query], layers: Iterable[Layer] | None = None) -> Costs:
    """Costs with one weight for each group of layers, of all layers or of the given ones."""
    return costs_for(profile, merge_at_ceiling(queries, layers))


def find_profile(name: str, where: str | Path = "--device", key: str = "") -> DeviceProfile:
    """The device profile of this name; InputError when there is none."""
    if name not in PROFILES:
        raise InputError(where, f"there is no profile '{name}'", f"choose one of: {', '.join(PROFILES)}", key)
    return PROFILES[name]
