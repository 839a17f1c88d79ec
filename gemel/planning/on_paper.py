"""Costs on paper: what a bundle or a workload costs on a device, and the memory and frames it is tried with."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from torch import nn

from edge_runtime.rehearsal.measured import measured_costs, read_profile
from edge_runtime.rehearsal.profiles import PROFILES, DeviceProfile, costs_for, layers_on_paper
from edge_runtime.schedule import Demand
from edge_runtime.schedule.costs import Costs, all_bytes
from edge_runtime.schedule.overflow import Overflow, overflow_of
from edge_runtime.schedule.pieces import condensed
from edge_runtime.schedule.settings import memory_bytes
from gemel.text import size
from models.bundle import Bundle, BundleQuery, open_bundle
from models.bundle.reader import architecture
from models.errors import InputError
from models.parts.low_rank import with_ranks
from models.sharing.groups import groups
from models.sharing.layers import layers_of_all, weight_key
from models.workload import Query, load_workload
from models.zoo import build_query, is_zoo_name

WORKLOAD_SUFFIXES = (".yaml", ".yml")
MEASURED = "measured"
DEFAULT_FPS = 10.0
ORIGINALS, CEILING, BUNDLE = "originals, nothing shared", "merged as far as can be", "as bundled"


@dataclass(frozen=True)
class Subject:
    """What is to be simulated: its costs over few names, the budget, what its queries ask for, and on which device.

    `whole` are the costs with every weight resident, `costs` those that are played: with `stream`, queries too large
    for the memory stream, as `overflow` says. `device_bytes` is all the memory that the device has, None where it was
    not said; `sharing` says in words what shares weights.
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
    whole: Costs
    overflow: Overflow
    stream: bool

    @property
    def all_bytes(self) -> int:
        """The least memory in which nothing is ever swapped: all weights and the largest workspace."""
        return all_bytes(self.whole)

    @property
    def streamed(self) -> Mapping[str, int]:
        """The queries that stream, and the bytes that each copies in every run."""
        return self.overflow.run_bytes if self.stream else {}

    @property
    def asked_load(self) -> float:
        """The share of the device's time that runs alone would take, were every frame run in its best batch."""
        best = {
            query: min(cost.run_of(count) / count for count in range(1, cost.largest + 1))
            for query, cost in self.whole.queries.items()
        }
        return sum(demand.fps * best[query] for query, demand in self.demands.items())

    def unfit(self) -> dict[str, int]:
        """The queries that the memory is too small for even alone, and the bytes that each needs."""
        if self.stream:
            return dict(self.overflow.lacking)
        return {query: self.whole.alone_bytes(query) for query in (*self.overflow.tensors, *self.overflow.lacking)}

    def named(self) -> str:
        """What is looked at, where, in words."""
        modelled = ", modelled" if self.modelled else ""
        return (
            f"{self.source} ({self.sharing}) with {size(self.memory_bytes)} on {self.title} (virtual clock{modelled})"
        )

    def needs(self) -> str:
        """What memory it takes, in words, and what the memory given is too small for."""
        costs, whole = self.costs, self.whole
        largest = max(whole.queries, key=whole.alone_bytes)
        said = [
            f"needs at least {size(whole.alone_bytes(largest))} ({largest} alone); from {size(self.all_bytes)} on "
            "nothing is swapped"
        ]
        said += [
            f"{query} streams: {size(nbytes)} are copied in every run, at most "
            f"{1 / costs.queries[query].run_s:.3g} runs a second"
            for query, nbytes in self.streamed.items()
        ]
        said += [
            f"{query} needs {size(nbytes)} alone: none of its frames run in {size(self.memory_bytes)}"
            f"{self._if_streamed(query)}"
            for query, nbytes in self.unfit().items()
        ]
        said += [
            f"one run of {query} takes {1000 * cost.run_s:.0f} ms, its SLA is {1000 * cost.sla_s:.0f} ms: none of "
            "its frames are in time"
            for query, cost in costs.queries.items()
            if cost.run_s > cost.sla_s
        ]
        if self.device_bytes is not None and self.memory_bytes > self.device_bytes:
            said.append(f"{self.title} has no more than {size(self.device_bytes)}, for everything on it")
        return "\n".join(said)

    def _if_streamed(self, query: str) -> str:
        if self.stream:
            return " with its layers streamed"
        copied, least = self.overflow.run_bytes.get(query), self.overflow.lacking.get(query)
        return (
            f"; with --stream it needs {size(least)}"
            if least is not None
            else f"; with --stream it runs, copying {size(copied or 0)} in every run"
        )

    def arrivals(self, duration_s: float, seed: int) -> dict[str, list[float]]:
        """Frames at each query's rate, with phases drawn from the seed."""
        rng = random.Random(seed)
        return {query: _ticks(demand.fps, rng.random(), duration_s) for query, demand in self.demands.items()}


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


def _originals(bundle: Bundle) -> dict[str, nn.Module]:
    """The architectures that a bundle's queries had before merging, without the factors it may have given them."""
    return {
        query.id: architecture(
            replace(query, model_args=with_ranks(query.model_args, {})), bundle.factories, bundle.path, bundle.folder
        )
        for query in bundle.queries
    }


def _apart(queries: Iterable[Query]) -> Bundle:
    """These queries' originals, nothing shared."""
    queries = tuple(queries)
    return cast(Bundle, _Unweighted(map(BundleQuery.of, queries), _architectures(queries)))


def _shared(queries: Sequence[Query]) -> Bundle:
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
    return costs_for(profile, _apart(queries))


def costs_shared(profile: DeviceProfile, queries: Sequence[Query]) -> Costs:
    """The costs of these queries' models, merged at the ceiling."""
    return costs_for(profile, _shared(queries))


def profile_named(name: str) -> DeviceProfile:
    """The device profile of this name; InputError when there is none."""
    if name not in PROFILES:
        raise InputError("--device", f"there is no profile '{name}'", f"choose one of: {', '.join(PROFILES)}")
    return PROFILES[name]


def subject_of(
    source: str | Path,
    device: str,
    memory: str,
    shared: bool = False,
    factories: Sequence[str] = (),
    stream: bool = False,
) -> Subject:
    """A bundle or a workload on a device.

    `device` names a profile, or is `measured`: then the costs are those of BUNDLE.profile.json. `memory` is a size, or
    `min`, `50%`, `75%`, `all` of what the originals need. A workload's models share nothing, or with `shared` all that
    they could. `factories` are the `package.module:factory` models of a bundle that may be imported, from the current
    folder or Python's path; a workload's own always may. With `stream`, queries too large for the memory
    stream. Raises InputError for a bad file, device or size.
    """
    source = Path(source)
    of_workload = source.suffix.lower() in WORKLOAD_SUFFIXES
    if device == MEASURED and of_workload:
        raise InputError(source, "only bundles are measured", f"choose one of: {', '.join(PROFILES)}", "--device")
    # The memory settings need originals of the same architecture; their run times do not matter.
    profile = next(iter(PROFILES.values())) if device == MEASURED else profile_named(device)
    title, modelled, kind = profile.title, profile.modelled, "cuda"
    if of_workload:
        load = load_workload(source)
        apart = costs_apart(profile, load.queries)
        models = _shared(load.queries) if shared else _apart(load.queries)
        costs = costs_for(profile, models)
    else:
        models = open_bundle(source, factories, Path.cwd())
        for query in models.queries:
            if not is_zoo_name(query.model) and query.model not in factories:
                fault = f"query {query.id}: the model '{query.model}' is not in the zoo"
                raise InputError(source, fault, f"give --factory {query.model} if you trust it")
        apart = costs_for(profile, cast(Bundle, _Unweighted(models.queries, _originals(models))))
        costs = costs_for(profile, models)
        if device == MEASURED:
            measured = read_profile(models)
            costs, kind = measured_costs(models, measured), measured.device
            title, modelled = f"{measured.machine['name']} ({measured.device})", False
    queries = {query.id: query for query in models.queries}
    demands = {query.id: Demand(query.fps or DEFAULT_FPS, float(query.priority)) for query in queries.values()}
    nbytes = memory_bytes(memory, apart, "--memory")
    within = overflow_of(costs, nbytes, lambda query: layers_on_paper(models, queries[query], kind))
    return Subject(
        str(source),
        device,
        title,
        modelled,
        condensed(within.costs if stream else costs),
        nbytes,
        demands,
        None if device == MEASURED else profile.memory_bytes,
        (CEILING if shared else ORIGINALS) if of_workload else BUNDLE,
        condensed(costs),
        within,
        stream,
    )


def _ticks(fps: float, phase: float, duration_s: float) -> list[float]:
    return [(phase + index) / fps for index in range(int(duration_s * fps))]
