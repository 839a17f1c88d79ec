"""`gemel plan` and `gemel simulate`: a bundle or a workload's originals on a box, on the virtual clock."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemel.analytic_costs import bundle_originals, find_profile, merge_at_ceiling, workload_originals
from gemel.conditions import DEFAULT_CONDITIONS, DEFAULT_DEVICE, MEASURED, Conditions
from gemel.edge_runtime.memory.usage import planned_base_bytes
from gemel.edge_runtime.policies import policy_named
from gemel.edge_runtime.policies.streaming import pick_overflow
from gemel.edge_runtime.scheduler import QuerySpec
from gemel.edge_runtime.scheduler.costs import Costs, all_bytes, coalesce_tensors, memory_settings, parse_memory
from gemel.edge_runtime.scheduler.eviction import Overflow, OverflowLayer, overflow_of
from gemel.edge_runtime.simulation.device_profiles import (
    PROFILES,
    CostOf,
    cost_of_document,
    cost_of_module,
    costs_for,
    overflow_layers,
)
from gemel.edge_runtime.simulation.profile_io import measured_costs, note_machine, profile_path, read_profile
from gemel.edge_runtime.simulation.replay import ReplayResult
from gemel.edge_runtime.simulation.simulator import Simulation, simulate
from gemel.models.bundle import Bundle, BundleQuery, open_bundle
from gemel.models.errors import InputError, join_names, one_line
from gemel.models.files.extras import is_installed, require_merge
from gemel.models.notes import add_note
from gemel.models.process import import_torch
from gemel.models.sharing.flop_rates import FlopRates, prefix_rates
from gemel.text import percent, size, table

if TYPE_CHECKING:
    from gemel.models.workload import Query

WORKLOAD_SUFFIXES = (".yaml", ".yml")
DEFAULT_FPS = 10.0
MAX_FRAMES = 100_000
"""Maximum frames of a simulation: a minute of a hundred queries at 30 frames a second."""
PLAN_S, MIN_PLAN_S, PLAN_FRAMES = 60.0, 20.0, 15_000
"""Simulated time of a plan: less of many queries, whose decisions take longer, while it has so many frames."""
AT_ONCE = 1e18
"""Bytes a second of a load that takes no time."""
SERVED_FRACTION = 0.98
"""A query with this fraction of its frames in time is not limited by anything."""
ORIGINALS, CEILING, BUNDLE = "originals, nothing shared", "all layers shared that can be", "as bundled"


class Limit(str, Enum):
    """What keeps a query from having all its frames in time."""

    DOES_NOT_FIT = "does not fit"
    SLOWER_THAN_SLA = "slower than its SLA"
    MEMORY = "memory"
    DEVICE = "device"


@dataclass(frozen=True)
class PlanInput:
    """What is simulated: costs, memory, the rate of each query, and the device.

    `resident_costs` are the costs with all weights resident; `costs` are those that are simulated, in which queries
    too large for the memory overflow where that is allowed (`overflow_allowed`). `budget_bytes` is what weights and
    workspaces may take, `base_bytes` what the process takes besides. `device_bytes` is the memory of the device, None
    if unknown.
    """

    source: str
    device: str
    title: str
    modelled: bool
    costs: Costs
    resident_costs: Costs
    budget_bytes: int
    base_bytes: int
    device_bytes: int | None
    specs: Mapping[str, QuerySpec]
    sharing: str
    overflow: Overflow
    overflow_allowed: bool
    flops: FlopRates

    @property
    def memory_bytes(self) -> int:
        """What the whole process may take."""
        return self.base_bytes + self.budget_bytes

    @property
    def all_bytes(self) -> int:
        """The process, all weights and the largest workspace: memory in which nothing is read twice."""
        return self.base_bytes + all_bytes(self.resident_costs)

    @property
    def plan_s(self) -> float:
        """The simulated seconds of a plan."""
        frames_per_s = sum(spec.fps for spec in self.specs.values())
        return min(PLAN_S, max(MIN_PLAN_S, PLAN_FRAMES / frames_per_s))

    @property
    def overflow_bytes(self) -> Mapping[str, int]:
        """Bytes that each overflowing query copies in every run."""
        return {query: nbytes for query, nbytes in self.overflow.run_bytes.items() if nbytes and self.overflow_allowed}

    @property
    def load(self) -> float:
        """The share of the device's time that all frames would take in their best batches, without any swap."""
        return sum(spec.fps * self.resident_costs.queries[query].frame_s for query, spec in self.specs.items())

    def unfit_bytes(self) -> dict[str, int]:
        """The bytes of each query that does not fit the memory even alone."""
        if self.overflow_allowed:
            return dict(self.overflow.lacking)
        unfit = (*self.overflow.tensors, *self.overflow.lacking)
        return {query: self.resident_costs.alone_bytes(query) for query in unfit}

    def simulate(self, policy: str, duration_s: float, seed: int, resident: bool = False) -> Simulation:
        """Run the scheduler on the virtual clock; `resident`: with all weights in memory."""
        fps = sum(spec.fps for spec in self.specs.values())
        if duration_s * fps > MAX_FRAMES:
            problem = f"{duration_s:g} s at {fps:g} frames a second are more than {MAX_FRAMES} frames"
            raise InputError(self.source, problem, "give fewer frames a second, or simulate fewer seconds")
        arrivals = draw_arrivals(self.specs, duration_s, seed)
        costs, nbytes = (self.costs, self.budget_bytes)
        if resident:
            costs, nbytes = replace(self.resident_costs, load_latency_s=0.0, copy_bytes_per_s=AT_ONCE), self.all_bytes
        return simulate(costs, arrivals, nbytes, policy_named(policy), self.specs)

    def describe(self) -> str:
        """Source, memory and device in one line."""
        clock = "virtual clock, modelled" if self.modelled else "virtual clock"
        return one_line(f"{self.source} ({self.sharing}) with {size(self.memory_bytes)} on {self.title} ({clock})")

    def describe_needs(self) -> str:
        """The memory and time that the queries need, and which of them the given memory or SLA excludes."""
        resident = self.resident_costs
        largest = max(resident.queries, key=resident.alone_bytes)
        workspace = resident.queries[largest].workspace_bytes
        lines = [
            f"needs {size(self.base_bytes + resident.alone_bytes(largest))} in all: {size(self.base_bytes)} the "
            f"process itself, {size(workspace)} a run, {size(resident.weights_bytes(largest))} weights ({largest} "
            f"alone); from {size(self.all_bytes)} on nothing is read twice"
        ]
        for query, nbytes in self.overflow_bytes.items():
            runs = 1 / self.costs.queries[query].run_s
            lines.append(f"{query} overflows: copies {size(nbytes)} in every run, at most {runs:.3g} runs a second")
        for query, nbytes in self.unfit_bytes().items():
            lines.append(
                f"{query} needs {size(nbytes)} alone: none of its frames run in {size(self.budget_bytes)}"
                f"{self._describe_overflow(query)}"
            )
        for query, cost in self.costs.queries.items():
            if cost.run_s > cost.sla_s:
                lines.append(
                    f"one run of {query} takes {1000 * cost.run_s:.0f} ms, its SLA is {1000 * cost.sla_s:.0f} ms: none "
                    "of its frames are in time"
                )
        if self.device_bytes is not None and self.memory_bytes > self.device_bytes:
            lines.append(f"{self.title} has only {size(self.device_bytes)} for everything on it")
        return "\n".join(lines)

    def _describe_overflow(self, query: str) -> str:
        if self.overflow_allowed:
            return " even with an overflow"
        if query in self.overflow.lacking:
            return f"; with --overflow it needs {size(self.overflow.lacking[query])}"
        return f"; with --overflow it runs and copies {size(self.overflow.run_bytes.get(query, 0))} in every run"


def load_plan_input(source: str | Path, conditions: Conditions) -> PlanInput:
    """A bundle or a workload under these conditions; InputError for a bad file, device or size."""
    source = Path(source)
    is_workload = source.suffix.lower() in WORKLOAD_SUFFIXES
    has_profile = not is_workload and profile_path(source).exists()
    device = conditions.device or (MEASURED if has_profile else DEFAULT_DEVICE)
    measured = device == MEASURED
    if measured and is_workload:
        problem = "only bundles have measured costs"
        raise InputError(source, problem, f"choose one of: {', '.join(PROFILES)}", "--device")
    # The memory settings come from the originals' sizes, which do not depend on the device.
    profile = find_profile(DEFAULT_DEVICE if measured else device)
    load = _load_workload if is_workload else _load_bundle
    originals, models, cost_of = load(source, conditions)
    costs, title, kind = costs_for(profile, models, cost_of), profile.title, "cuda"
    found = None
    if measured:
        found = read_profile(models)
        note_machine(models, found)
        costs, kind = measured_costs(models, found, in_pages=True), found.device
        title = f"{found.machine['name']} ({found.device})"
    base = planned_base_bytes(len({query.camera for query in models.queries}))
    note_default_fps(source, models.queries)
    queries = {query.id: query for query in models.queries}
    specs = {query.id: QuerySpec(query.fps or DEFAULT_FPS, float(query.priority)) for query in models.queries}
    if not (is_workload or measured):
        costs = _costs_in_pages(costs, models) or costs
    # Pages and measured workspaces may be more than the originals' tensors: what is named runs every query.
    least = max(costs.alone_bytes(query) for query in queries)
    settings = memory_settings(costs_for(profile, originals, cost_of)).items()
    nbytes = _budget_bytes(conditions.memory, {name: max(size, least) for name, size in settings}, base)

    def layers(query: str) -> Sequence[OverflowLayer]:
        own = overflow_layers(models, queries[query], kind)
        # Ranges of pages come and go, and no tensor of them overflows.
        return own if all(part.tensor in costs.tensor_bytes for layer in own for part in layer.parts) else ()

    if conditions.overflow:
        overflow = pick_overflow(costs, specs, nbytes, layers, kind != "cpu")
    else:
        overflow = overflow_of(costs, nbytes, layers)
    return PlanInput(
        source=str(source),
        device=device,
        title=title,
        modelled=profile.modelled and not measured,
        costs=coalesce_tensors(overflow.costs if conditions.overflow else costs),
        resident_costs=coalesce_tensors(costs),
        budget_bytes=nbytes,
        base_bytes=base,
        device_bytes=None if measured else profile.memory_bytes,
        specs=specs,
        sharing=(CEILING if conditions.shared else ORIGINALS) if is_workload else BUNDLE,
        overflow=overflow,
        overflow_allowed=conditions.overflow,
        flops=prefix_rates(
            models.queries,
            {query.id: cost_of(models, query).layers for query in models.queries},
            {query: spec.fps for query, spec in specs.items()},
            models.nbytes,
        ),
    )


def _budget_bytes(memory: str, settings: Mapping[str, int], base: int) -> int:
    """What weights and workspaces may take: a named setting, or what a size for the whole process leaves."""
    if memory in settings:
        return settings[memory]
    nbytes = parse_memory(memory, "--memory", named=f"{', '.join(settings)} or ")
    if nbytes <= base:
        problem = f"the process alone takes {size(base)}, without any weights"
        raise InputError("--memory", problem, f"give more than {size(base)}")
    return nbytes - base


def _costs_in_pages(costs: Costs, bundle: Bundle) -> Costs | None:
    """The costs over the ranges of pages that a box loads, where the bundle is prepared here for all its queries."""
    from gemel.edge_runtime.engines.prepare import find_prepared
    from gemel.edge_runtime.engines.prepared import page_segments

    prepared = find_prepared(bundle) if any(query.network_document for query in bundle.queries) else None
    if prepared is None or prepared.index.queries.keys() < costs.queries.keys():
        return None
    extents, names = page_segments(prepared.index)
    queries = {query: replace(cost, tensors=names[query]) for query, cost in costs.queries.items()}
    sizes = {name: extent.nbytes for name, extent in extents.items()}
    return Costs(queries, sizes, costs.copy_bytes_per_s, costs.load_latency_s, joint=costs.joint)


def note_default_fps(path: str | Path, queries: Iterable[Query | BundleQuery]) -> None:
    """Note the queries without a rate of their own, which are simulated at DEFAULT_FPS."""
    if names := [query.id for query in queries if not query.fps]:
        text = f"queries without `fps` are planned at {DEFAULT_FPS:g} frames a second: {join_names(names, 5)}"
        add_note(path, text, "set `fps`: without it they take every frame of their camera")


def _load_workload(path: Path, conditions: Conditions) -> tuple[Bundle, Bundle, CostOf]:
    """A workload's originals, its models as they are simulated, and what counts their costs."""
    require_merge(f"a plan of the workload {path.name}")
    import_torch()
    from gemel.models.workload import load_workload

    queries = load_workload(path).queries
    originals = workload_originals(queries)
    return originals, merge_at_ceiling(queries) if conditions.shared else originals, cost_of_module


def _load_bundle(path: Path, conditions: Conditions) -> tuple[Bundle, Bundle, CostOf]:
    """As `_load_workload` of a bundle: by its documents where it has them all, so that no network is built."""
    bundle = open_bundle(path, conditions.factories, Path.cwd())
    by_document = all(query.network_document for query in bundle.queries) or not is_installed("torchvision")
    for query in bundle.queries:
        if by_document:
            bundle.check_document(query.id)
            continue
        if ":" in query.model and query.model not in conditions.factories:
            problem = f"query {query.id}: the model '{query.model}' is not in the zoo"
            raise InputError(path, problem, f"give --factory {query.model} if you trust it")
        bundle.check(query.id)
    return bundle_originals(bundle, by_document), bundle, cost_of_document if by_document else cost_of_module


def draw_arrivals(specs: Mapping[str, QuerySpec], duration_s: float, seed: int) -> dict[str, list[float]]:
    """Arrival times of each query's frames at its rate, with a phase drawn from the seed."""
    rng = random.Random(seed)
    arrivals = {}
    for query, spec in specs.items():
        phase = rng.random()
        arrivals[query] = [(phase + index) / spec.fps for index in range(int(duration_s * spec.fps))]
    return arrivals


@dataclass(frozen=True)
class BoxPlan:
    """What a box is predicted to do; `queries` are rows of `gemel plan --json`."""

    plan_input: PlanInput
    policy: str
    fits: bool
    resident_bytes: int
    bytes_moved_per_s: float
    queries: tuple[dict[str, Any], ...]
    joint_runs: int = 0

    @property
    def in_time(self) -> float:
        """The fraction of all frames that are in time."""
        return self._fraction("fps")

    @property
    def in_time_if_all_fits(self) -> float:
        """The same with memory for all weights: what more memory could bring."""
        return self._fraction("fps_if_all_fits")

    def _fraction(self, key: str) -> float:
        return sum(row[key] for row in self.queries) / sum(row["asked_fps"] for row in self.queries)

    def to_json(self) -> dict[str, Any]:
        given = self.plan_input
        return {
            "source": given.source, "device": given.device, "modelled": given.modelled, "sharing": given.sharing,
            "policy": self.policy, "memory_bytes": given.memory_bytes, "base_bytes": given.base_bytes,
            "budget_bytes": given.budget_bytes, "device_bytes": given.device_bytes, "all_bytes": given.all_bytes,
            "fits": self.fits, "resident_bytes": self.resident_bytes, "bytes_moved_per_s": self.bytes_moved_per_s,
            "asked_load": given.load, "in_time_fraction": self.in_time,
            "in_time_fraction_if_all_fits": self.in_time_if_all_fits, **given.flops.to_json(),
            "joint": [list(one.queries) for one in given.costs.joint],
            "joint_runs_per_s": self.joint_runs / given.plan_s,
            "queries": list(self.queries),
        }  # fmt: skip

    def to_text(self) -> str:
        rows = [
            (row["id"], size(row["alone_bytes"]), f"{row['run_ms']:.0f} ms", f"{row['sla_ms']:.0f} ms",
             _describe_residency(row), f"{row['fps']:.3g}", f"{row['asked_fps']:.3g}",
             f"{row['fps_if_all_fits']:.3g}", percent(row["drop_fraction"], 0),
             _format_age(row["age_p95_ms"]), " and ".join(row["limited_by"]))
            for row in self.queries
        ]  # fmt: skip
        headers = (
            "query", "needs alone", "one run", "SLA", "weights", "fps", "of", "if all fits", "dropped", "age p95",
            "limited by",
        )  # fmt: skip
        swaps = "no swaps" if self.fits else f"{size(self.bytes_moved_per_s)} a second swapped"
        return "\n".join([
            table(headers, rows),
            "",
            f"{self.plan_input.describe()}, policy {self.policy}: {percent(self.in_time, 0)} of all frames in time, "
            f"{percent(self.in_time_if_all_fits, 0)} if all weights fitted; {swaps}, at most "
            f"{size(self.resident_bytes)} of weights resident",
            f"without swaps, all frames take {percent(self.plan_input.load, 0)} of the device's time at best",
            self.plan_input.flops.to_text(),
            *self._describe_passes(),
            self.plan_input.describe_needs(),
        ])  # fmt: skip

    __repr__ = to_text

    def _describe_passes(self) -> list[str]:
        """A line for each pass that serves several queries."""
        lines = [f"one pass for {', '.join(one.queries)}" for one in self.plan_input.costs.joint]
        runs_per_s = self.joint_runs / self.plan_input.plan_s
        return [*lines, f"{runs_per_s:.1f} runs of several queries a second"] if lines else []


@dataclass(frozen=True)
class DeviceComparison:
    """The same plan on every device profile."""

    plans: tuple[BoxPlan, ...]

    def to_json(self) -> dict[str, Any]:
        return {"devices": [plan.to_json() for plan in self.plans]}

    def to_text(self) -> str:
        rows = [
            (plan.plan_input.device, size(plan.plan_input.device_bytes or 0), percent(plan.plan_input.load, 0),
             percent(plan.in_time, 0), percent(plan.in_time_if_all_fits, 0), size(plan.bytes_moved_per_s) + "/s",
             f"{sum(not row['limited_by'] for row in plan.queries)} of {len(plan.queries)}",
             ", ".join(row["id"] for row in plan.queries if Limit.SLOWER_THAN_SLA in row["limited_by"]) or "none")
            for plan in self.plans
        ]  # fmt: skip
        headers = (
            "device", "memory", "load", "frames in time", "if all fits", "swapped", "queries served in full",
            "slower than their SLA",
        )  # fmt: skip
        first = self.plans[0].plan_input
        title = f"{one_line(first.source)} ({first.sharing}) with {size(first.memory_bytes)}"
        clock = f"(virtual clock, modelled), policy {self.plans[0].policy}"
        return "\n".join([table(headers, rows), "", f"{title} {clock}", first.describe_needs()])

    __repr__ = to_text


def plan_box(source: str | Path, conditions: Conditions = DEFAULT_CONDITIONS) -> BoxPlan:
    """Predict residency, rate and what limits each query, from a simulated minute.

    A query is `resident` if its weights are there at half time and stay. `fps` counts frames in time,
    `fps_if_all_fits` the same with memory for all weights. `limited_by` is `memory` where more memory would help,
    `device` where frames are lost even so; frames that a resident query loses before its first load do not count.
    Raises InputError for a bad file, device, size or policy.
    """
    given, seed = load_plan_input(source, conditions), conditions.seed
    seconds = given.plan_s
    fits = given.all_bytes <= given.memory_bytes
    played = given.simulate(conditions.policy, seconds, seed)
    roomy = played if fits else given.simulate(conditions.policy, seconds, seed, resident=True)
    staying = _resident_queries(played, seconds) - given.overflow_bytes.keys()
    lost_early = _frames_lost_before_loading(played, staying)
    queries = []
    for row, best in zip(played.per_query(), roomy.per_query(), strict=True):
        query = row["id"]
        cost, resident_cost = given.costs.queries[query], given.resident_costs.queries[query]
        in_time, at_best = row["processed"] - row["late"], best["processed"] - best["late"]
        if query in given.unfit_bytes():
            limits = [Limit.DOES_NOT_FIT]
        elif resident_cost.run_s > cost.sla_s:
            limits = [Limit.SLOWER_THAN_SLA]
        else:
            limits = _find_limits(in_time, at_best, row["received"] - lost_early[query])
        queries.append({
            "id": query,
            "resident": query in staying,
            "fps": in_time / seconds,
            "asked_fps": given.specs[query].fps,
            "fps_if_all_fits": at_best / seconds,
            "drop_fraction": 1 - in_time / row["received"] if row["received"] else 0.0,
            "age_p95_ms": row["age_p95_ms"],
            "alone_bytes": given.resident_costs.alone_bytes(query),
            "overflow_bytes": given.overflow_bytes.get(query, 0),
            "overflow_fps": 1 / cost.run_s if query in given.overflow_bytes else None,
            "run_ms": 1000 * cost.run_s,
            "sla_ms": 1000 * cost.sla_s,
            "limited_by": [limit.value for limit in limits],
        })  # fmt: skip
    resident_bytes = max((change.resident_bytes for change in played.changes), default=0)
    return BoxPlan(
        given, conditions.policy, fits, resident_bytes, played.bytes_moved / seconds, tuple(queries), played.joint_runs
    )


def plan_every_device(source: str | Path, conditions: Conditions = DEFAULT_CONDITIONS) -> DeviceComparison:
    """`plan_box` on every device profile."""
    return DeviceComparison(tuple(plan_box(source, replace(conditions, device=device)) for device in PROFILES))


def _describe_residency(row: Mapping[str, Any]) -> str:
    if row["overflow_bytes"]:
        return f"overflow of {size(row['overflow_bytes'])}"
    return "stays" if row["resident"] else "swaps"


def _find_limits(in_time: int, at_best: int, received: int) -> list[Limit]:
    if in_time >= SERVED_FRACTION * received:
        return []
    by_memory, by_device = in_time < SERVED_FRACTION * at_best, at_best < SERVED_FRACTION * received
    return [Limit.MEMORY] * by_memory + [Limit.DEVICE] * by_device or [Limit.MEMORY]


def _frames_lost_before_loading(played: Simulation, staying: Collection[str]) -> Counter[str]:
    """Unanswered frames that came before all weights of their resident query were loaded."""
    needed = {query: played.costs.queries[query].needed for query in staying}
    loaded_at = {
        query: max((one.at_s for one in played.changes if not names.isdisjoint(one.loaded)), default=0.0)
        for query, names in needed.items()
    }
    lost = [frame for frame in played.frames if frame.finished_at is None]
    return Counter(frame.query for frame in lost if frame.captured_at < loaded_at.get(frame.query, 0.0))


def _resident_queries(played: Simulation, seconds: float) -> set[str]:
    """Queries whose weights are all resident at half time and until the end."""
    resident: set[str] = set()
    for change in played.changes:
        resident.difference_update(change.evicted)
        if change.at_s <= seconds / 2:
            resident.update(change.loaded)
    return {query for query, cost in played.costs.queries.items() if cost.needed <= resident}


@dataclass(frozen=True)
class SimulationResult:
    """A simulation with what was simulated."""

    plan_input: PlanInput
    policy: str
    duration_s: float
    simulation: Simulation

    def to_json(self) -> dict[str, Any]:
        """The keys of `gemel simulate --json`."""
        given = self.plan_input
        return {
            "source": given.source, "device": given.device, "clock": "virtual", "modelled": given.modelled,
            "sharing": given.sharing, "policy": self.policy, "duration_s": self.duration_s,
            "memory_bytes": given.memory_bytes, "budget_bytes": given.budget_bytes,
            "bytes_moved": self.simulation.bytes_moved, "swaps": self.simulation.swaps,
            "queries": [{**row, "overflow_bytes": given.overflow_bytes.get(row["id"], 0)}
                        for row in self.simulation.per_query()],
        }  # fmt: skip

    def to_text(self) -> str:
        """A table of the queries, and what was simulated."""
        rows = [
            (row["id"], row["received"], row["processed"], percent(row["processed"] / max(1, row["received"]), 0),
             row["late"], row["dropped"], ", ".join(row["dropped_by"]) or "-", _format_age(row["age_p95_ms"]))
            for row in self.simulation.per_query()
        ]  # fmt: skip
        headers = ("query", "received", "processed", "fraction", "late", "dropped", "reasons", "age p95")
        return "\n".join([
            table(headers, rows),
            "",
            f"{self.plan_input.describe()}, policy {self.policy}: {size(self.simulation.bytes_moved)} moved in "
            f"{self.simulation.swaps} loads in {self.duration_s:g} s",
            self.plan_input.describe_needs(),
        ])  # fmt: skip

    __repr__ = to_text


def _format_age(age_ms: float | None) -> str:
    return "-" if age_ms is None else f"{age_ms:.0f} ms"


def simulate_box(
    source: str | Path, conditions: Conditions = DEFAULT_CONDITIONS, duration_s: float = 60.0
) -> SimulationResult:
    """Run the scheduler on the virtual clock; InputError for a bad file, device, size or policy."""
    given = load_plan_input(source, conditions)
    simulation = given.simulate(conditions.policy, duration_s, conditions.seed)
    return SimulationResult(given, conditions.policy, duration_s, simulation)


def format_replay(found: ReplayResult) -> str:
    """A replay as text."""
    rows = [(row["id"], row["received"], row["processed"], row["predicted"]) for row in found.to_json()["queries"]]
    lines = [
        table(("query", "received", "processed", "predicted"), rows),
        "",
        f"{found.same} of {found.decisions} decisions are equal with the recorded durations "
        f"({percent(found.agreement)}); with the costs known at the start, the predicted processed frames differ by "
        f"{percent(found.error)} of the received ones (mean over queries)",
    ]
    if found.first_difference:
        lines.append(one_line(f"first difference: {found.first_difference}"))
    return "\n".join(lines)
