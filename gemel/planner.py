"""What is to be simulated: a bundle or a workload on a device, its budget and the frames it is tried with.

`gemel plan`: before anything is shipped, what fits, what swaps, what rate each query has and what limits it.

`gemel simulate`: the box's own schedule on a virtual clock, or a recorded run replayed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_runtime.policies import policy_named
from edge_runtime.scheduler import Policy, QuerySpec
from edge_runtime.scheduler.costs import Costs, all_bytes, coalesced, memory_bytes
from edge_runtime.scheduler.eviction import Overflow, overflow_of
from edge_runtime.simulation.device_profiles import PROFILES, costs_for, overflow_layers
from edge_runtime.simulation.profile_io import measured_costs, profile_path, read_profile
from edge_runtime.simulation.replay import ReplayResult, replay
from edge_runtime.simulation.simulator import Simulation, simulate
from gemel.analytic_costs import bundle_originals, find_profile, merge_at_ceiling, workload_originals
from gemel.conditions import DEFAULT_CONDITIONS, DEFAULT_DEVICE, MEASURED, Conditions
from gemel.text import percent, size, table
from models.bundle import Bundle, open_bundle
from models.errors import InputError, one_line

WORKLOAD_SUFFIXES = (".yaml", ".yml")
DEFAULT_FPS = 10.0
MAX_FRAMES = 100_000
"""Of a simulation: a minute of a hundred queries at 30 frames a second."""
ORIGINALS, CEILING, BUNDLE = "originals, nothing shared", "merged as far as can be", "as bundled"


@dataclass(frozen=True)
class PlanInput:
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
    demands: Mapping[str, QuerySpec]
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

    def draw_arrivals(self, duration_s: float, seed: int) -> dict[str, list[float]]:
        """Frames at each query's rate, with phases drawn from the seed; InputError where they are too many to play."""
        asked_fps = sum(demand.fps for demand in self.demands.values())
        if duration_s * asked_fps > MAX_FRAMES:
            asked = f"{duration_s:g} s at {asked_fps:g} frames a second in all"
            fault = f"{asked} are more than the {MAX_FRAMES} frames that are played"
            raise InputError(self.source, fault, "ask for fewer frames a second, or simulate fewer seconds")
        return draw_arrivals(self.demands, duration_s, seed)


def load_plan_input(source: str | Path, conditions: Conditions) -> PlanInput:
    """A bundle or a workload under these conditions; InputError for a bad file, device or size."""
    source = Path(source)
    of_workload = source.suffix.lower() in WORKLOAD_SUFFIXES
    device = conditions.device or _default_device(source, of_workload)
    measured = device == MEASURED
    if measured and of_workload:
        raise InputError(source, "only bundles are measured", f"choose one of: {', '.join(PROFILES)}", "--device")
    # The memory settings need originals of the same architecture; their run times do not matter.
    profile = find_profile(DEFAULT_DEVICE if measured else device)
    unmerged, models = _of_workload(source, conditions.shared) if of_workload else _of_bundle(source, conditions)
    costs, title, kind = costs_for(profile, models), profile.title, "cuda"
    if measured:
        found = read_profile(models)
        costs, title, kind = measured_costs(models, found), f"{found.machine['name']} ({found.device})", found.device
    nbytes = memory_bytes(conditions.memory, costs_for(profile, unmerged), "--memory")
    queries = {query.id: query for query in models.queries}
    within = overflow_of(costs, nbytes, lambda query: overflow_layers(models, queries[query], kind))
    return PlanInput(
        source=str(source),
        device=device,
        title=title,
        modelled=profile.modelled and not measured,
        costs=coalesced(within.costs if conditions.overflow else costs),
        memory_bytes=nbytes,
        demands={query.id: QuerySpec(query.fps or DEFAULT_FPS, float(query.priority)) for query in models.queries},
        device_bytes=None if measured else profile.memory_bytes,
        sharing=(CEILING if conditions.shared else ORIGINALS) if of_workload else BUNDLE,
        whole=coalesced(costs),
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
    unmerged = workload_originals(queries)
    return unmerged, merge_at_ceiling(queries) if shared else unmerged


def _of_bundle(path: Path, conditions: Conditions) -> tuple[Bundle, Bundle]:
    """A bundle's originals, and the bundle."""
    bundle = open_bundle(path, conditions.factories, Path.cwd())
    for query in bundle.queries:
        if ":" in query.model and query.model not in conditions.factories:
            fault = f"query {query.id}: the model '{query.model}' is not in the zoo"
            raise InputError(path, fault, f"give --factory {query.model} if you trust it")
        bundle.check(query.id)
    return bundle_originals(bundle), bundle


def draw_arrivals(demands: Mapping[str, QuerySpec], duration_s: float, seed: int) -> dict[str, list[float]]:
    """When the frames of each query come, at its rate, with phases drawn from the seed."""
    rng = random.Random(seed)
    return {query: _ticks(demand.fps, rng.random(), duration_s) for query, demand in demands.items()}


def _ticks(fps: float, phase: float, duration_s: float) -> list[float]:
    return [(phase + index) / fps for index in range(int(duration_s * fps))]


DURATION_S = 60.0
# A query that brings this share of its frames in time is not called limited.
ENOUGH = 0.98
FITS_NOT, TOO_SLOW, MEMORY, DEVICE = "does not fit", "slower than its SLA", "memory", "device"


@dataclass(frozen=True)
class BoxPlan:
    """A plan as the virtual clock predicts it; keys of `to_json` are those of `gemel plan --json`."""

    subject: PlanInput
    policy: str
    fits: bool
    resident_bytes: int
    bytes_moved_per_s: float
    queries: tuple[dict[str, Any], ...]

    @property
    def in_time(self) -> float:
        """The share of all frames that are answered in time."""
        return self._share("fps")

    @property
    def in_time_if_all_fits(self) -> float:
        """The same with memory for all weights at once: what more memory could bring, and no faster device."""
        return self._share("fps_if_all_fits")

    def _share(self, key: str) -> float:
        return sum(row[key] for row in self.queries) / sum(row["asked_fps"] for row in self.queries)

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.subject.source,
            "device": self.subject.device,
            "modelled": self.subject.modelled,
            "sharing": self.subject.sharing,
            "policy": self.policy,
            "memory_bytes": self.subject.memory_bytes,
            "device_bytes": self.subject.device_bytes,
            "all_bytes": self.subject.all_bytes,
            "fits": self.fits,
            "resident_bytes": self.resident_bytes,
            "bytes_moved_per_s": self.bytes_moved_per_s,
            "asked_load": self.subject.asked_load,
            "in_time_fraction": self.in_time,
            "in_time_fraction_if_all_fits": self.in_time_if_all_fits,
            "queries": list(self.queries),
        }

    def to_text(self) -> str:
        rows = [
            (row["id"], size(row["alone_bytes"]), f"{row['run_ms']:.0f} ms", f"{row['sla_ms']:.0f} ms",
             _weights(row), f"{row['fps']:.3g}", f"{row['asked_fps']:.3g}",
             f"{row['fps_if_all_fits']:.3g}", percent(row["drop_fraction"], 0),
             "-" if row["age_p95_ms"] is None else f"{row['age_p95_ms']:.0f} ms", " and ".join(row["limited_by"]))
            for row in self.queries
        ]  # fmt: skip
        headers = (
            "query", "needs alone", "one run", "SLA", "weights", "fps", "of", "if all fits", "dropped", "age p95",
            "limited by",
        )  # fmt: skip
        swapped = "nothing is swapped" if self.fits else f"{size(self.bytes_moved_per_s)} a second are swapped"
        return "\n".join([
            table(headers, rows),
            "",
            f"{one_line(self.subject.named())}, policy {self.policy}: {percent(self.in_time, 0)} of all frames "
            f"in time, {percent(self.in_time_if_all_fits, 0)} if all weights fitted; {swapped}, at most "
            f"{size(self.resident_bytes)} of weights at a time",
            f"with no loads at all, runs would take {percent(self.subject.asked_load, 0)} of the device's time at best",
            self.subject.needs(),
        ])  # fmt: skip


@dataclass(frozen=True)
class DeviceComparison:
    """The same plan on every device, for whoever has yet to buy one."""

    plans: tuple[BoxPlan, ...]

    def to_json(self) -> dict[str, Any]:
        return {"devices": [plan.to_json() for plan in self.plans]}

    def to_text(self) -> str:
        rows = [
            (plan.subject.device, size(plan.subject.device_bytes or 0), percent(plan.subject.asked_load, 0),
             percent(plan.in_time, 0),
             percent(plan.in_time_if_all_fits, 0), size(plan.bytes_moved_per_s) + "/s",
             f"{sum(not row['limited_by'] for row in plan.queries)} of {len(plan.queries)}",
             ", ".join(row["id"] for row in plan.queries if TOO_SLOW in row["limited_by"]) or "none")
            for plan in self.plans
        ]  # fmt: skip
        headers = (
            "device", "its memory", "its time asked", "frames in time", "if all fits", "swapped",
            "queries served in full", "slower than their SLA",
        )  # fmt: skip
        first = self.plans[0]
        subject = first.subject
        return "\n".join([
            table(headers, rows),
            "",
            f"{one_line(subject.source)} ({subject.sharing}) with {size(subject.memory_bytes)} (virtual clock, "
            f"modelled), policy {first.policy}",
            subject.needs(),
        ])  # fmt: skip


def plan_box(source: str | Path, conditions: Conditions = DEFAULT_CONDITIONS) -> BoxPlan:
    """Predict what a bundle, or a workload's models, would do under these conditions.

    A query is `resident` when its weights stay once they are there (looked at in the second half of a simulated
    minute); `fps` counts results in time, `fps_if_all_fits` those with memory for everything, `drop_fraction` the
    frames that are not in time. `limited_by`: `memory` when more of it would help, `device` when frames are lost even
    with memory for everything, those aside that a resident query lost before its weights had come. `fits`: all
    weights and the largest workspace have room together. A query that overflows copies `overflow_bytes` in every run,
    which leaves `overflow_fps` runs a second at most. Raises InputError for a bad file, device, size or policy.
    """
    chosen, seed = policy_named(conditions.policy), conditions.seed
    subject = load_plan_input(source, conditions)
    fits = subject.all_bytes <= subject.memory_bytes
    played = _played(subject, subject.costs, chosen, subject.memory_bytes, seed)
    roomy = played if fits else _played(subject, subject.whole, chosen, subject.all_bytes, seed)
    costs, whole, unfit, overflowing = subject.costs, subject.whole, subject.unfit(), subject.overflowing
    staying = _staying(played) - overflowing.keys()
    queries = []
    awaited = _lost_while_loading(played, staying)
    for row, best in zip(played.per_query(), roomy.per_query(), strict=True):
        cost, asked = costs.queries[row["id"]], subject.demands[row["id"]].fps
        in_time, at_best = row["processed"] - row["late"], best["processed"] - best["late"]
        queries.append({
            "id": row["id"],
            "resident": row["id"] in staying,
            "fps": in_time / DURATION_S,
            "asked_fps": asked,
            "fps_if_all_fits": at_best / DURATION_S,
            "drop_fraction": 1 - in_time / row["received"] if row["received"] else 0.0,
            "age_p95_ms": row["age_p95_ms"],
            "alone_bytes": whole.alone_bytes(row["id"]),
            "overflow_bytes": overflowing.get(row["id"], 0),
            "overflow_fps": 1 / cost.run_s if row["id"] in overflowing else None,
            "run_ms": 1000 * cost.run_s,
            "sla_ms": 1000 * cost.sla_s,
            "limited_by": [FITS_NOT] if row["id"] in unfit else _limits(whole.queries[row["id"]].run_s > cost.sla_s,
                                                                        in_time, at_best,
                                                                        row["received"] - awaited[row["id"]]),
        })  # fmt: skip
    resident = max((change.resident_bytes for change in played.changes), default=0)
    return BoxPlan(subject, conditions.policy, fits, resident, played.bytes_moved / DURATION_S, tuple(queries))


def plan_every_device(source: str | Path, conditions: Conditions = DEFAULT_CONDITIONS) -> DeviceComparison:
    """`plan_box` on every device there is a profile of."""
    return DeviceComparison(tuple(plan_box(source, replace(conditions, device=device)) for device in PROFILES))


def _weights(row: Mapping[str, Any]) -> str:
    if row["overflow_bytes"]:
        return f"overflow of {size(row['overflow_bytes'])}"
    return "stays" if row["resident"] else "swaps"


def _played(subject: PlanInput, costs: Costs, policy: Policy, memory_bytes: int, seed: int) -> Simulation:
    arrivals = subject.draw_arrivals(DURATION_S, seed)
    return simulate(costs, arrivals, memory_bytes, policy, subject.demands)


def _limits(too_slow: bool, in_time: int, at_best: int, received: int) -> list[str]:
    if too_slow:
        return [TOO_SLOW]
    if in_time >= ENOUGH * received:
        return []
    return [MEMORY] * (in_time < ENOUGH * at_best) + [DEVICE] * (at_best < ENOUGH * received) or [MEMORY]


def _lost_while_loading(played: Simulation, staying: Collection[str]) -> Counter[str]:
    """Frames without a result that came before the weights of their query, of those that stay, were all there."""
    needed = {query: played.costs.queries[query].needed for query in staying}
    there = {
        query: max((one.at_s for one in played.changes if not names.isdisjoint(one.loaded)), default=0.0)
        for query, names in needed.items()
    }
    lost = [frame for frame in played.frames if frame.finished_at is None]
    return Counter(frame.query for frame in lost if frame.captured_at < there.get(frame.query, 0.0))


def _staying(played: Simulation) -> set[str]:
    """The queries whose weights are all there at half time and stay until the end."""
    half = DURATION_S / 2
    resident: set[str] = set()
    for change in played.changes:
        if change.at_s <= half:
            resident.difference_update(change.evicted)
            resident.update(change.loaded)
        else:
            resident.difference_update(change.evicted)
    return {query for query, cost in played.costs.queries.items() if cost.needed <= resident}


@dataclass(frozen=True)
class SimulationResult:
    """What a simulation says about a box: what was simulated, how, and what became of every query's frames."""

    subject: PlanInput
    policy: str
    duration_s: float
    simulation: Simulation

    def to_json(self) -> dict[str, Any]:
        """The keys of `gemel simulate --json`."""
        return {
            "source": self.subject.source,
            "device": self.subject.device,
            "clock": "virtual",
            "modelled": self.subject.modelled,
            "sharing": self.subject.sharing,
            "policy": self.policy,
            "duration_s": self.duration_s,
            "memory_bytes": self.subject.memory_bytes,
            "queries": [
                {
                    **row,
                    "dropped_by": _dropped_by(self.simulation, row["id"]),
                    "overflow_bytes": self.subject.overflowing.get(row["id"], 0),
                }
                for row in self.simulation.per_query()
            ],
            "bytes_moved": self.simulation.bytes_moved,
            "swaps": self.simulation.swaps,
        }

    def to_text(self) -> str:
        """The same for a terminal."""
        rows = [
            (row["id"], row["received"], row["processed"], percent(row["processed"] / max(1, row["received"]), 0),
             row["late"], row["dropped"], _reasons(self.simulation, row["id"]),
             "-" if row["age_p95_ms"] is None else f"{row['age_p95_ms']:.0f} ms")
            for row in self.simulation.per_query()
        ]  # fmt: skip
        return "\n".join([
            table(("query", "received", "processed", "share", "late", "dropped", "because of", "age p95"), rows),
            "",
            f"{one_line(self.subject.named())}, policy {self.policy}: {size(self.simulation.bytes_moved)} moved in "
            f"{self.simulation.swaps} loads over {self.duration_s:g} s",
            self.subject.needs(),
        ])  # fmt: skip


def _dropped_by(simulation: Simulation, query: str) -> dict[str, int]:
    return next(dict(account["dropped"]) for account in simulation.ledger.to_json() if account["query"] == query)


def _reasons(simulation: Simulation, query: str) -> str:
    return ", ".join(reason for reason, count in _dropped_by(simulation, query).items() if count) or "-"


def simulate_box(
    source: str | Path, conditions: Conditions = DEFAULT_CONDITIONS, duration_s: float = 60.0
) -> SimulationResult:
    """Run the schedule of a bundle, or of a workload's models, on a virtual clock.

    Frames arrive at each query's rate, with phases drawn from the seed. Raises InputError for a bad file, device, size
    or policy.
    """
    chosen = policy_named(conditions.policy)
    subject = load_plan_input(source, conditions)
    arrivals = subject.draw_arrivals(duration_s, conditions.seed)
    played = simulate(subject.costs, arrivals, subject.memory_bytes, chosen, subject.demands)
    return SimulationResult(subject, conditions.policy, duration_s, played)


def replay_run(trace: str | Path) -> ReplayResult:
    """Replay a trace that a box recorded (`trace:` in its config); InputError for a file that is none."""
    return replay(trace)


def format_replay(found: ReplayResult) -> str:
    """A replay for a terminal."""
    rows = [(row["id"], row["received"], row["processed"], row["predicted"]) for row in found.to_json()["queries"]]
    said = [
        table(("query", "received", "processed", "predicted"), rows),
        "",
        f"{found.same} of {found.decisions} decisions are the same with the recorded durations "
        f"({percent(found.agreement)}); predicted from the costs known at the start, processed frames are off by "
        f"{percent(found.error)} of those received (mean over queries)",
    ]
    return "\n".join(
        said + ([one_line(f"first difference: {found.first_difference}")] if found.first_difference else [])
    )
