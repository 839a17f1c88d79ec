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
from gemel.text import size
from models.bundle import Bundle, BundleQuery, open_bundle
from models.bundle.reader import architecture
from models.errors import InputError
from models.groups import groups
from models.layers import layers_of_all, weight_key
from models.low_rank import with_ranks
from models.workload import Query, load_workload
from models.zoo import build_query, is_zoo_name

WORKLOAD_SUFFIXES = (".yaml", ".yml")
MEASURED = "measured"
DEFAULT_FPS = 10.0
ORIGINALS, CEILING, BUNDLE = "originals, nothing shared", "merged as far as can be", "as bundled"


@dataclass(frozen=True)
class Subject:
    """What is to be simulated: its costs over few names, the budget, what its queries ask for, and on which device.

    `device_bytes` is all the memory that the device has, None where it was not said; `sharing` says in words what
    shares weights.
    """

    source: str
    device: str
    title: str
    modelled: bool
    costs: Costs
    memory_bytes: int
    demands: Mapping[str, Demand]
    device_bytes: int | None
    sharing: str

    @property
    def all_bytes(self) -> int:
        """The least memory in which nothing is ever swapped: all weights and the largest workspace."""
        costs = self.costs
        workspace = max(cost.workspace_bytes for cost in costs.queries.values())
        return costs.resident_bytes(costs.tensor_bytes.keys()) + workspace

    @property
    def asked_load(self) -> float:
        """The share of the device's time that runs alone would take, were every frame run in its best batch."""
        best = {query: min(cost.run_of(count) / count for count in range(1, cost.largest + 1))
                for query, cost in self.costs.queries.items()}
        return sum(demand.fps * best[query] for query, demand in self.demands.items())

    def unfit(self) -> dict[str, int]:
        """The queries that the memory is too small for even alone, and the bytes that each needs."""
        needed = {query: self.costs.alone_bytes(query) for query in self.costs.queries}
        return {query: nbytes for query, nbytes in needed.items() if nbytes > self.memory_bytes}

    def named(self) -> str:
        """What is looked at, where, in words."""
        modelled = ", modelled" if self.modelled else ""
        return (f"{self.source} ({self.sharing}) with {size(self.memory_bytes)} on {self.title} "
                f"(virtual clock{modelled})")

    def needs(self) -> str:
        """What memory it takes, in words, and what the memory given is too small for."""
        costs = self.costs
        largest = max(costs.queries, key=costs.alone_bytes)
        said = [f"needs at least {size(costs.alone_bytes(largest))} ({largest} alone); from {size(self.all_bytes)} on "
                "nothing is swapped"]
        said += [f"{query} needs {size(nbytes)} alone: none of its frames run in {size(self.memory_bytes)}"
                 for query, nbytes in self.unfit().items()]
        said += [f"one run of {query} takes {1000 * cost.run_s:.0f} ms, its SLA is {1000 * cost.sla_s:.0f} ms: none of "
                 "its frames are in time" for query, cost in costs.queries.items() if cost.run_s > cost.sla_s]
        if self.device_bytes is not None and self.memory_bytes > self.device_bytes:
            said.append(f"{self.title} has no more than {size(self.device_bytes)}, for everything on it")
        return "\n".join(said)

    def arrivals(self, duration_s: float, seed: int) -> dict[str, list[float]]:
        """Frames at each query's rate, with phases drawn from the seed."""
        rng = random.Random(seed)
        return {query: _ticks(demand.fps, rng.random(), duration_s) for query, demand in self.demands.items()}


class _Unweighted:
    """A workload as `costs_for` sees a bundle: sizes and architectures without any weights.

    `models` are the queries' architectures on the meta device; `names` gives weights, by query and state dict key, the
    name of a tensor that several share.
    """

    def __init__(self, queries: Iterable[Query | BundleQuery], models: Mapping[str, nn.Module],
                 names: Mapping[tuple[str, str], str] | None = None) -> None:
        self.queries = tuple(queries)
        self._models = models
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


def _architectures(queries: Iterable[Query]) -> dict[str, nn.Module]:
    return {query.id: build_query(query, device="meta") for query in queries}


def _originals(bundle: Bundle) -> dict[str, nn.Module]:
    """The architectures that a bundle's queries had before merging, without the factors it may have given them."""
    return {query.id: architecture(replace(query, model_args=with_ranks(query.model_args, {})), bundle.factories,
                                   bundle.path, bundle.folder) for query in bundle.queries}


def costs_apart(profile: DeviceProfile, queries: Sequence[Query]) -> Costs:
    """The costs of these queries' originals, nothing shared: memory settings are computed from them."""
    return costs_for(profile, cast(Bundle, _Unweighted(queries, _architectures(queries))))


def costs_shared(profile: DeviceProfile, queries: Sequence[Query]) -> Costs:
    """The costs of these queries' models with each group of layers sharing one weight: as merged at the ceiling."""
    models = _architectures(queries)
    paths = {query: model.state_dict() for query, model in models.items()}
    names = {
        (query, weight_key(paths[query], path)): f"group{index:05}"
        for index, group in enumerate(groups(layers_of_all(queries)))
        for query, path in group.members
    }
    return costs_for(profile, cast(Bundle, _Unweighted(queries, models, names)))


def profile_named(name: str) -> DeviceProfile:
    """The device profile of this name; InputError when there is none."""
    if name not in PROFILES:
        raise InputError("--device", f"there is no profile '{name}'", f"choose one of: {', '.join(PROFILES)}")
    return PROFILES[name]


def subject_of(source: str | Path, device: str, memory: str, shared: bool = False,
               factories: Sequence[str] = ()) -> Subject:
    """A bundle or a workload on a device.

    `device` names a profile, or is `measured`: then the costs are those of BUNDLE.profile.json. `memory` is a size, or
    `min`, `50%`, `75%`, `all` of what the originals need. A workload's models share nothing, or with `shared` all that
    they could. `factories` are the `package.module:factory` models of a bundle that may be imported, from the current
    folder or Python's path; a workload's own always may. Raises InputError for a bad file, device or size.
    """
    source = Path(source)
    of_workload = source.suffix.lower() in WORKLOAD_SUFFIXES
    if device == MEASURED and of_workload:
        raise InputError(source, "only bundles are measured", f"choose one of: {', '.join(PROFILES)}", "--device")
    # The memory settings need originals of the same architecture; their run times do not matter.
    profile = next(iter(PROFILES.values())) if device == MEASURED else profile_named(device)
    queries: Sequence[Query | BundleQuery]
    title, modelled = profile.title, profile.modelled
    if of_workload:
        load = load_workload(source)
        queries = load.queries
        apart = costs_apart(profile, queries)
        costs = costs_shared(profile, load.queries) if shared else apart
    else:
        bundle = open_bundle(source, factories, Path.cwd())
        queries = bundle.queries
        for query in queries:
            if not is_zoo_name(query.model) and query.model not in factories:
                fault = f"query {query.id}: the model '{query.model}' is not in the zoo"
                raise InputError(source, fault, f"give --factory {query.model} if you trust it")
        apart = costs_for(profile, cast(Bundle, _Unweighted(queries, _originals(bundle))))
        costs = costs_for(profile, bundle)
        if device == MEASURED:
            measured = read_profile(bundle)
            costs = measured_costs(bundle, measured)
            title, modelled = f"{measured.machine['name']} ({measured.device})", False
    demands = {query.id: Demand(query.fps or DEFAULT_FPS, float(query.priority)) for query in queries}
    nbytes = memory_bytes(memory, apart, "--memory")
    return Subject(str(source), device, title, modelled, condensed(costs), nbytes, demands,
                   None if device == MEASURED else profile.memory_bytes,
                   (CEILING if shared else ORIGINALS) if of_workload else BUNDLE)


def _ticks(fps: float, phase: float, duration_s: float) -> list[float]:
    return [(phase + index) / fps for index in range(int(duration_s * fps))]
