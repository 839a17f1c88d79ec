"""Streaming: all queries keep in memory what fits beside each other, a run copies the rest, and nothing is swapped.

Whether that brings more frames in time than swapping is found by simulation.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import product

from gemel.edge_runtime.policies.gemel import GemelPolicy
from gemel.edge_runtime.scheduler import QuerySpec
from gemel.edge_runtime.scheduler.costs import Costs, all_bytes, coalesce_tensors
from gemel.edge_runtime.scheduler.eviction import (
    LayersOf,
    Overflow,
    OverflowLayer,
    copies_by_tensor,
    overflow_costs,
    overflow_of,
    overflow_workspace,
)
from gemel.edge_runtime.simulation.simulator import simulate

SIMULATED_S = 10.0
"""Seconds of frames on which swapping and streaming are compared, under turns as `gemel` takes them."""
PASS_FRAMES = (1, 2)
"""Frames of a pass for which memory is left beside what stays: with two, a pass can copy once for two queries."""


def pick_overflow(
    costs: Costs, specs: Mapping[str, QuerySpec], budget_bytes: int, layers_of: LayersOf, can_overlap: bool = False
) -> Overflow:  # fmt: skip
    """Swapping, where only a query too large for the budget overflows, or streaming: what brings more frames in time.

    Swapping where everything fits, and where run times are unknown. Where copies can overlap runs, as on a GPU, both
    are also tried so: that takes a second scratch.
    """
    swapped = overflow_of(costs, budget_bytes, layers_of)
    if all_bytes(costs) <= budget_bytes or not all(cost.run_s > 0 for cost in costs.queries.values()):
        return swapped
    layers = {query: tuple(layers_of(query)) for query in costs.queries}
    options = [swapped]
    for overlaps in (False, True) if can_overlap else (False,):
        if overlaps:
            options.append(overflow_of(costs, budget_bytes, layers.__getitem__, overlaps))
        able = {query for query, cost in costs.queries.items() if cost.run_s <= cost.sla_s}
        for _, frames in product(range(2), PASS_FRAMES):  # the second time for those alone whose runs are short enough
            streamed = stream_within(costs, specs, budget_bytes, layers, able, frames, overlaps)
            if streamed is not None:
                options.append(streamed)
                if frames == PASS_FRAMES[-1]:
                    runs = streamed.costs.queries
                    able = {query for query in able if runs[query].run_s <= runs[query].sla_s}
    least = min(len(one.lacking) for one in options)
    options = [one for one in options if len(one.lacking) == least]
    return max(options, key=lambda one: frames_in_time(one.costs, specs, budget_bytes))


def frames_in_time(costs: Costs, specs: Mapping[str, QuerySpec], budget_bytes: int) -> float:
    """Frames in time in `SIMULATED_S`, each by its urgency; the queries' frames come at different moments."""
    arrivals = {
        query: [(place / len(specs) + index) / spec.fps for index in range(int(SIMULATED_S * spec.fps))]
        for place, (query, spec) in enumerate(specs.items())
    }
    played = simulate(coalesce_tensors(costs), arrivals, budget_bytes, GemelPolicy(), specs)
    return sum(specs[row["id"]].urgency * (row["processed"] - row["late"]) for row in played.per_query())


def stream_within(
    costs: Costs, specs: Mapping[str, QuerySpec], budget_bytes: int, layers: Mapping[str, Sequence[OverflowLayer]],
    able: Collection[str], pass_frames: int = 1, overlaps: bool = False,
) -> Overflow | None:  # fmt: skip
    """The costs where what every query keeps is in memory at once, beside the largest workspace; None for lack of it.

    Kept first is what the queries in `able` would copy most often in a second, and of that the largest. What is private
    in a pass is never copied: a pass copies only what all its queries have. `pass_frames` are the frames of a pass that
    memory must hold.
    """
    times = {query: copies_by_tensor(layers[query], costs) for query in costs.queries}
    intermediates = {query: cost.workspace_bytes for query, cost in costs.queries.items()}
    for joint in costs.joint:
        common = set.intersection(*(set(times[query]) for query in joint.queries))
        for query in joint.queries:
            times[query] = Counter({name: count for name, count in times[query].items() if name in common})
            if 1 < pass_frames <= joint.cost.largest:
                intermediates[query] = max(intermediates[query], joint.cost.workspace_of(pass_frames))
    rates, users = defaultdict[str, float](float), dict[str, list[str]]()
    for query, own in times.items():
        for name, count in own.items():
            rates[name] += count * specs[query].fps * (query in able)
            users.setdefault(name, []).append(query)
    overflow = {query: set(own) for query, own in times.items()}

    def workspace_bytes(query: str) -> int:
        return overflow_workspace(intermediates[query], layers[query], overflow[query], overlaps)

    workspaces = {query: workspace_bytes(query) for query in costs.queries}
    kept_bytes = costs.resident_bytes([name for name in costs.tensor_bytes if name not in users])
    if kept_bytes + max(workspaces.values()) > budget_bytes:
        return None
    for name in sorted(users, key=lambda name: (-rates[name], -costs.tensor_bytes[name])):
        for query in users[name]:
            overflow[query].remove(name)
        changed = workspaces | {query: workspace_bytes(query) for query in users[name]}
        if kept_bytes + costs.footprints[name] + max(changed.values()) <= budget_bytes:
            kept_bytes, workspaces = kept_bytes + costs.footprints[name], changed
        else:
            for query in users[name]:
                overflow[query].add(name)
    return overflow_costs(costs, overflow, layers, overlaps)
