"""Costs on paper: what a workload's originals cost on a device, and what they would cost merged at the ceiling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import cast

from torch import nn

from edge_runtime.rehearsal.profiles import PROFILES, DeviceProfile, costs_for
from edge_runtime.schedule.costs import Costs
from models.bundle import Bundle, BundleQuery
from models.bundle.reader import architecture
from models.errors import InputError
from models.parts.low_rank import with_ranks
from models.sharing.groups import groups
from models.sharing.layers import layers_of_all, weight_key
from models.workload import Query
from models.zoo import build_query


class _Unweighted:
    """A workload as `costs_for` sees a bundle: sizes and architectures without any weights.

    `models` are the queries' architectures on the meta device; `names` gives weights, by query and state dict key, the
    name of a tensor that several share.
    """

    def __init__(
        self,
        queries: Iterable[BundleQuery],
        models: Mapping[str, nn.Module],
        names: Mapping[tuple[str, str], str] | None = None,
    ) -> None:
        self._models, self._all = models, dict[str, int]()
        self.queries = tuple(
            replace(query, tensors=self._named(query.id, names or {}), residuals={}, stored={}) for query in queries
        )
        self._names = {query.id: tuple(dict.fromkeys(query.tensors.values())) for query in self.queries}

    def build(self, query_id: str, device: str) -> nn.Module:
        return self._models[query_id].to(device)

    def names_in_order(self, query_id: str) -> tuple[str, ...]:
        return self._names[query_id]

    def nbytes(self, name: str) -> int:
        return self._all[name]

    def _named(self, query: str, names: Mapping[tuple[str, str], str]) -> dict[str, str]:
        """The name of each tensor by its key; what is one tensor in the model has one name."""
        named, known = dict[str, str](), dict[int, str]()
        for key, tensor in self._models[query].state_dict(keep_vars=True).items():
            # Counters of batches seen are equal in a trained model, so a bundle holds them once.
            own = "counter" if tensor.ndim == 0 else key
            named[key] = known.setdefault(id(tensor), names.get((query, own), f"{query}/{own}"))
            self._all[named[key]] = tensor.nbytes
        return named


def _architectures(queries: Iterable[Query]) -> dict[str, nn.Module]:
    return {query.id: build_query(query, device="meta") for query in queries}


def originals(bundle: Bundle) -> Bundle:
    """A bundle's queries as they were before merging, nothing shared, without the factors it may have given them."""
    models = {
        query.id: architecture(
            replace(query, model_args=with_ranks(query.model_args, {})), bundle.factories, bundle.path, bundle.folder
        )
        for query in bundle.queries
    }
    return cast(Bundle, _Unweighted(bundle.queries, models))


def apart(queries: Iterable[Query]) -> Bundle:
    """These queries' originals, nothing shared."""
    queries = tuple(queries)
    return cast(Bundle, _Unweighted(map(BundleQuery.of, queries), _architectures(queries)))


def at_ceiling(queries: Sequence[Query]) -> Bundle:
    """These queries' models with each group of layers sharing one weight: as merged at the ceiling."""
    models = _architectures(queries)
    paths = {query: model.state_dict() for query, model in models.items()}
    names = {
        (query, weight_key(paths[query], path)): f"group{index:05}"
        for index, group in enumerate(groups(layers_of_all(queries)))
        for query, path in group.members
    }
    return cast(Bundle, _Unweighted(map(BundleQuery.of, queries), models, names))


def costs_apart(profile: DeviceProfile, queries: Sequence[Query]) -> Costs:
    """The costs of these queries' originals, nothing shared: memory settings are computed from them."""
    return costs_for(profile, apart(queries))


def costs_shared(profile: DeviceProfile, queries: Sequence[Query]) -> Costs:
    """The costs of these queries' models, merged at the ceiling."""
    return costs_for(profile, at_ceiling(queries))


def profile_named(name: str) -> DeviceProfile:
    """The device profile of this name; InputError when there is none."""
    if name not in PROFILES:
        raise InputError("--device", f"there is no profile '{name}'", f"choose one of: {', '.join(PROFILES)}")
    return PROFILES[name]
