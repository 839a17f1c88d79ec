"""Costs on paper: what a bundle or a workload costs on a device, and the memory and frames it is tried with."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from torch import nn

from edge_runtime.costs import Costs
from edge_runtime.measured import measured_costs, read_profile
from edge_runtime.pieces import condensed
from edge_runtime.profiles import PROFILES, DeviceProfile, costs_for
from edge_runtime.schedule import Demand
from edge_runtime.settings import memory_bytes
from models.bundle import Bundle, BundleQuery, open_bundle
from models.errors import InputError
from models.groups import groups
from models.layers import layers_of_all, weight_key
from models.low_rank import with_ranks
from models.workload import Query, load_workload
from models.zoo import build_query

WORKLOAD_SUFFIXES = (".yaml", ".yml")
MEASURED = "measured"
DEFAULT_FPS = 10.0
AnyQuery = Query | BundleQuery


@dataclass(frozen=True)
class Subject:
    """What is to be simulated: its costs over few names, the budget, what its queries ask for, and on which device."""

    source: str
    device: str
    title: str
    modelled: bool
    costs: Costs
    memory_bytes: int
    demands: Mapping[str, Demand]

    def arrivals(self, duration_s: float, seed: int) -> dict[str, list[float]]:
        """Frames at each query's rate, with phases drawn from the seed."""
        rng = random.Random(seed)
        return {query: _ticks(demand.fps, rng.random(), duration_s) for query, demand in self.demands.items()}


class _Unweighted:
    """A workload as `costs_for` sees a bundle: sizes and architectures without any weights.

    `names` gives weights, by query and state dict key, the name of a tensor that several share.
    """

    def __init__(self, queries: Iterable[AnyQuery], names: Mapping[tuple[str, str], str] | None = None) -> None:
        self.queries = tuple(queries)
        self._models = {query.id: _on_paper(query) for query in self.queries}
        self._bytes: dict[str, dict[str, int]] = {}
        for query, model in self._models.items():
            unique = {id(tensor): (path, tensor) for path, tensor in reversed(model.state_dict(keep_vars=True).items())}
            # Counters of batches seen are equal in a trained model, so a bundle holds them once.
            named = [("counter" if tensor.ndim == 0 else path, tensor) for path, tensor in reversed(unique.values())]
            self._bytes[query] = {(names or {}).get((query, path), f"{query}/{path}"): tensor.nbytes
                                  for path, tensor in named}  # fmt: skip
        self._all = {name: nbytes for sizes in self._bytes.values() for name, nbytes in sizes.items()}

    def build(self, query_id: str) -> nn.Module:
        return self._models[query_id]

    def names_in_order(self, query_id: str) -> tuple[str, ...]:
        return tuple(self._bytes[query_id])

    def nbytes(self, name: str) -> int:
        return self._all[name]


def _on_paper(query: AnyQuery) -> nn.Module:
    plain = replace(query, model_args=with_ranks(query.model_args, {}))  # a bundle's may have factors
    return build_query(plain, device="meta")


def costs_apart(profile: DeviceProfile, queries: Iterable[AnyQuery]) -> Costs:
    """The costs of these queries' originals, nothing shared: memory settings are computed from them."""
    return costs_for(profile, cast(Bundle, _Unweighted(queries)))


def costs_shared(profile: DeviceProfile, queries: Sequence[Query]) -> Costs:
    """The costs of these queries' models with each group of layers sharing one weight: as merged at the ceiling."""
    paths = {query.id: _on_paper(query).state_dict() for query in queries}
    names = {
        (query, weight_key(paths[query], path)): f"group{index:05}"
        for index, group in enumerate(groups(layers_of_all(queries)))
        for query, path in group.members
    }
    return costs_for(profile, cast(Bundle, _Unweighted(queries, names)))


def profile_named(name: str) -> DeviceProfile:
    """The device profile of this name; InputError when there is none."""
    if name not in PROFILES:
        raise InputError("--device", f"there is no profile '{name}'", f"choose one of: {', '.join(PROFILES)}")
    return PROFILES[name]


def subject_of(source: str | Path, device: str, memory: str, shared: bool = False) -> Subject:
    """A bundle or a workload on a device.

    `device` names a profile, or is `measured`: then the costs are those of BUNDLE.profile.json. `memory` is a size, or
    `min`, `50%`, `75%`, `all` of what the originals need. A workload's models share nothing, or with `shared` all that
    they could. Raises InputError for a bad file, device or size.
    """
    source = Path(source)
    of_workload = source.suffix.lower() in WORKLOAD_SUFFIXES
    if device == MEASURED and of_workload:
        raise InputError(source, "only bundles are measured", f"choose one of: {', '.join(PROFILES)}", "--device")
    # The memory settings need originals of the same architecture; their run times do not matter.
    profile = next(iter(PROFILES.values())) if device == MEASURED else profile_named(device)
    queries: Sequence[AnyQuery]
    title, modelled = profile.title, profile.modelled
    if of_workload:
        load = load_workload(source)
        queries = load.queries
        apart = costs_apart(profile, queries)
        costs = costs_shared(profile, load.queries) if shared else apart
    else:
        bundle = open_bundle(source)
        queries = bundle.queries
        apart = costs_apart(profile, queries)
        costs = costs_for(profile, bundle)
        if device == MEASURED:
            measured = read_profile(bundle)
            costs = measured_costs(bundle, measured)
            title, modelled = f"{measured.machine['name']} ({measured.device})", False
    demands = {query.id: Demand(query.fps or DEFAULT_FPS, float(query.priority)) for query in queries}
    nbytes = memory_bytes(memory, apart, "--memory")
    return Subject(str(source), device, title, modelled, condensed(costs), nbytes, demands)


def _ticks(fps: float, phase: float, duration_s: float) -> list[float]:
    return [(phase + index) / fps for index in range(int(duration_s * fps))]
