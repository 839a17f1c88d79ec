"""What is to be simulated: a bundle or a workload on a device, its budget and the frames it is tried with."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.rehearsal.measured import measured_costs, profile_path, read_profile
from edge_runtime.rehearsal.profiles import PROFILES, costs_for, layers_on_paper
from edge_runtime.schedule import Demand
from edge_runtime.schedule.costs import Costs, all_bytes
from edge_runtime.schedule.overflow import Overflow, overflow_of
from edge_runtime.schedule.pieces import condensed
from edge_runtime.schedule.settings import memory_bytes
from gemel.planning.conditions import DEFAULT_DEVICE, MEASURED, Conditions
from gemel.planning.on_paper import apart, at_ceiling, originals, profile_named
from gemel.text import size
from models.bundle import Bundle, open_bundle
from models.errors import InputError

WORKLOAD_SUFFIXES = (".yaml", ".yml")
DEFAULT_FPS = 10.0
MAX_FRAMES = 100_000
"""Of a simulation: a minute of a hundred queries at 30 frames a second."""
ORIGINALS, CEILING, BUNDLE = "originals, nothing shared", "merged as far as can be", "as bundled"


@dataclass(frozen=True)
class Subject:
    """What is to be simulated: its costs over few names, the budget, what its queries ask for, and on which device.

    `whole` are the costs with every weight resident, `costs` those that are played: with `overflow`, queries too large
    for the memory overflow. `device_bytes` is all the memory that the device has, None where it was
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
    overflows: bool

    @property
    def all_bytes(self) -> int:
        """The least memory in which nothing is ever swapped: all weights and the largest workspace."""
        return all_bytes(self.whole)

    @property
    def overflowing(self) -> Mapping[str, int]:
        """The queries that overflow, and the bytes that each copies in every run."""
        return self.overflow.run_bytes if self.overflows else {}

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
        if self.overflows:
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
            f"{query} overflows: {size(nbytes)} are copied in every run, at most "
            f"{1 / costs.queries[query].run_s:.3g} runs a second"
            for query, nbytes in self.overflowing.items()
        ]
        said += [
            f"{query} needs {size(nbytes)} alone: none of its frames run in {size(self.memory_bytes)}"
            f"{self._if_overflowing(query)}"
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

    def _if_overflowing(self, query: str) -> str:
        if self.overflows:
            return " even with an overflow"
        copied, least = self.overflow.run_bytes.get(query), self.overflow.lacking.get(query)
        return (
            f"; with --overflow it needs {size(least)}"
            if least is not None
            else f"; with --overflow it runs, copying {size(copied or 0)} in every run"
        )

    def arrivals(self, duration_s: float, seed: int) -> dict[str, list[float]]:
        """Frames at each query's rate, with phases drawn from the seed; InputError where they are too many to play."""
        asked_fps = sum(demand.fps for demand in self.demands.values())
        if duration_s * asked_fps > MAX_FRAMES:
            asked = f"{duration_s:g} s at {asked_fps:g} frames a second in all"
            fault = f"{asked} are more than the {MAX_FRAMES} frames that are played"
            raise InputError(self.source, fault, "ask for fewer frames a second, or simulate fewer seconds")
        return arrivals(self.demands, duration_s, seed)


def subject_of(source: str | Path, conditions: Conditions) -> Subject:
    """A bundle or a workload under these conditions; InputError for a bad file, device or size."""
    source = Path(source)
    of_workload = source.suffix.lower() in WORKLOAD_SUFFIXES
    device = conditions.device or _default_device(source, of_workload)
    measured = device == MEASURED
    if measured and of_workload:
        raise InputError(source, "only bundles are measured", f"choose one of: {', '.join(PROFILES)}", "--device")
    # The memory settings need originals of the same architecture; their run times do not matter.
    profile = profile_named(DEFAULT_DEVICE if measured else device)
    unmerged, models = _of_workload(source, conditions.shared) if of_workload else _of_bundle(source, conditions)
    costs, title, kind = costs_for(profile, models), profile.title, "cuda"
    if measured:
        found = read_profile(models)
        costs, title, kind = measured_costs(models, found), f"{found.machine['name']} ({found.device})", found.device
    nbytes = memory_bytes(conditions.memory, costs_for(profile, unmerged), "--memory")
    queries = {query.id: query for query in models.queries}
    within = overflow_of(costs, nbytes, lambda query: layers_on_paper(models, queries[query], kind))
    return Subject(
        source=str(source),
        device=device,
        title=title,
        modelled=profile.modelled and not measured,
        costs=condensed(within.costs if conditions.overflow else costs),
        memory_bytes=nbytes,
        demands={query.id: Demand(query.fps or DEFAULT_FPS, float(query.priority)) for query in models.queries},
        device_bytes=None if measured else profile.memory_bytes,
        sharing=(CEILING if conditions.shared else ORIGINALS) if of_workload else BUNDLE,
        whole=condensed(costs),
        overflow=within,
        overflows=conditions.overflow,
    )


def _default_device(source: Path, of_workload: bool) -> str:
    """This machine as it was measured with the bundle, where it was."""
    return MEASURED if not of_workload and profile_path(source).exists() else DEFAULT_DEVICE


def _of_workload(path: Path, shared: bool) -> tuple[Bundle, Bundle]:
    """A workload's originals, and its models as they are to be simulated."""
    from models.workload import load_workload

    queries = load_workload(path).queries
    unmerged = apart(queries)
    return unmerged, at_ceiling(queries) if shared else unmerged


def _of_bundle(path: Path, conditions: Conditions) -> tuple[Bundle, Bundle]:
    """A bundle's originals, and the bundle."""
    bundle = open_bundle(path, conditions.factories, Path.cwd())
    for query in bundle.queries:
        if ":" in query.model and query.model not in conditions.factories:
            fault = f"query {query.id}: the model '{query.model}' is not in the zoo"
            raise InputError(path, fault, f"give --factory {query.model} if you trust it")
        bundle.check(query.id)
    return originals(bundle), bundle


def arrivals(demands: Mapping[str, Demand], duration_s: float, seed: int) -> dict[str, list[float]]:
    """When the frames of each query come, at its rate, with phases drawn from the seed."""
    rng = random.Random(seed)
    return {query: _ticks(demand.fps, rng.random(), duration_s) for query, demand in demands.items()}


def _ticks(fps: float, phase: float, duration_s: float) -> list[float]:
    return [(phase + index) / fps for index in range(int(duration_s * fps))]
