"""Eviction: what to evict so that a query fits, and what of a query larger than the budget stays in memory.

The rest of such a query, its overflow, is copied anew in every run: a layer's weights that are not used where they are
stored (packed or overflowing) are widened or copied into one scratch buffer, which is part of the workspace. Plain
numbers here; `engines/weight_streaming.py` moves the bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gemel.edge_runtime.scheduler.costs import BatchCost, Costs, QueryCost
from gemel.edge_runtime.scheduler.types import Plan, SchedulerState


def pick_evictions(
    state: SchedulerState, costs: Costs, plan: Plan, query: str, missing: Sequence[str], count: int
) -> tuple[str, ...] | None:
    """The tensors to evict so that `query` can run `count` frames once `missing` is loaded; None if it never fits.

    As `pick_evictions_for` that query alone.
    """
    return pick_evictions_for(state, costs, plan, (query,), missing, costs.queries[query].workspace_of(count))


def pick_evictions_for(
    state: SchedulerState,
    costs: Costs,
    plan: Plan,
    queries: tuple[str, ...],
    missing: Sequence[str],
    workspace_bytes: int,
) -> tuple[str, ...] | None:
    """The tensors to evict so that these queries can run together once `missing` is loaded; None if they never fit.

    In the plan's cyclic order, what the queries just before this one need is needed last. Among tensors that are
    needed at the same time the smallest that suffices goes; what then proves not to be in the way stays.
    """
    excess = state.resident_bytes + costs.resident_bytes(missing) + workspace_bytes - plan.budget_bytes
    if excess <= 0:
        return ()
    sizes, resident = costs.footprints, state.resident
    evict: list[str] = []
    order, here = plan.order, plan.order.index(queries[0])
    for names in plan.next_use.of(costs, (*order[here + 1 :], *order[:here]), queries, resident):
        freed = costs.resident_bytes(names)
        if freed > excess:
            names = _just_enough(names, sizes, excess)
            freed = costs.resident_bytes(names)
        evict += names
        excess -= freed
        if excess <= 0:
            return _keep_surplus(evict, sizes, -excess)
    return None


def _just_enough(names: Sequence[str], sizes: Mapping[str, int], excess: int) -> tuple[str, ...]:
    """Tensors that free so many bytes: the smallest that suffices, or the largest and what else it then takes."""
    ascending = sorted((sizes[name], name) for name in names)
    chosen = []
    while excess > 0:
        enough = min(bisect_left(ascending, (excess, "")), len(ascending) - 1)
        size, name = ascending.pop(enough)
        chosen.append(name)
        excess -= size
    return tuple(chosen)


def _keep_surplus(evict: list[str], sizes: Mapping[str, int], surplus: int) -> tuple[str, ...]:
    """What need not go after all stays, the largest first: `surplus` bytes are freed beyond what is needed."""
    if surplus >= min(map(sizes.__getitem__, evict)):
        for name in sorted(evict, key=lambda name: (-sizes[name], name)):
            if sizes[name] <= surplus:
                evict.remove(name)
                surplus -= sizes[name]
    return tuple(evict)


MIN_OVERFLOW_BYTES = 4096
"""Smaller tensors stay: together they are under 1 % of a model."""


@dataclass(frozen=True, slots=True)
class OverflowTensor:
    """A tensor as a layer uses it, its place in the state dict, and the bytes of scratch it takes: while it is
    resident (what it is widened to; 0 where it is used as it lies), and while it overflows.
    """

    key: str
    tensor: str
    kept_bytes: int
    overflow_bytes: int


@dataclass(frozen=True, slots=True)
class OverflowLayer:
    """What has to be there at once when the module at `path` is called.

    `outer` are the layers, by index, that are not done meanwhile: their scratch stays. `times` is how often a run fills
    its scratch at most.
    """

    path: str
    parts: tuple[OverflowTensor, ...]
    outer: tuple[int, ...] = ()
    times: int = 1


@dataclass(frozen=True)
class Overflow:
    """Costs within a budget, and of each query that overflows: the tensors that do, and the bytes they are in a run.

    `lacking` are the queries that do not fit even so, with the least budget they need. Where it `overlaps`, layers take
    turns with two scratches, and a copy runs beside the layer before it.
    """

    costs: Costs
    tensors: Mapping[str, frozenset[str]] = field(default_factory=dict)
    run_bytes: Mapping[str, int] = field(default_factory=dict)
    lacking: Mapping[str, int] = field(default_factory=dict)
    overlaps: bool = False


LayersOf = Callable[[str], Sequence[OverflowLayer]]


def tensor_scratch_bytes(part: OverflowTensor, overflow: Collection[str]) -> int:
    """The scratch of one tensor."""
    return part.overflow_bytes if part.tensor in overflow else part.kept_bytes


def scratch_spans(layers: Sequence[OverflowLayer], overflow: Collection[str] = ()) -> list[tuple[int, int]]:
    """Where each layer's scratch begins and ends: behind that of the layers around it."""
    sizes = [sum(tensor_scratch_bytes(part, overflow) for part in layer.parts) for layer in layers]
    begins = [sum(sizes[index] for index in layer.outer) for layer in layers]
    return [(begin, begin + size) for begin, size in zip(begins, sizes)]


def scratch_bytes(layers: Sequence[OverflowLayer], overflow: Collection[str] = (), overlaps: bool = False) -> int:
    """The most scratch in use at once; twice as much where copies overlap runs."""
    least = max((end for _, end in scratch_spans(layers, overflow)), default=0)
    return 2 * least if overlaps and overflow else least


def overflow_of(costs: Costs, budget_bytes: int, layers_of: LayersOf, overlaps: bool = False) -> Overflow:
    """The costs with every query that needs more than the budget alone keeping what it can, the rest overflowing.

    Such a query needs fewer tensors and more workspace, and each run takes longer: see `overflow_costs`.
    What others need too is kept first, then what would be copied most often in a run, then what is largest.
    `layers_of` gives a query's layers and is called for these queries alone; its workspace in `costs` holds the scratch
    of what is widened.
    """
    users = Counter(name for cost in costs.queries.values() for name in cost.tensors)
    chosen, layers, lacking = dict[str, set[str]](), dict[str, Sequence[OverflowLayer]](), {}
    for query, cost in costs.queries.items():
        if costs.alone_bytes(query) <= budget_bytes:
            continue
        own = layers[query] = layers_of(query)
        times = copies_by_tensor(own, costs)
        if (least := _alone_bytes(costs, cost, own, times.keys(), overlaps)) > budget_bytes:
            lacking[query] = least
            continue
        overflow = chosen[query] = set(times)
        for name in sorted(times, key=lambda one: (-(users[one] > 1), -times[one], -costs.tensor_bytes[one])):
            if _alone_bytes(costs, cost, own, overflow - {name}, overlaps) <= budget_bytes:
                overflow.remove(name)
    found = overflow_costs(costs, chosen, layers, overlaps)
    joint = [one.without(lacking) for one in found.costs.joint]
    return replace(found, costs=found.costs.with_joint(joint), lacking=lacking)


def overflow_costs(
    costs: Costs, overflow: Mapping[str, Collection[str]], layers: Mapping[str, Sequence[OverflowLayer]],
    overlaps: bool = False,
) -> Overflow:  # fmt: skip
    """The costs where these tensors of each query are copied in every run, at the rate of copying.

    A run and its copies take as long as both, or, where they overlap, as the longer of them and the largest copy.

    A pass copies once what all its queries copy; queries that copy something else than the others leave it.
    """
    queries, tensors, run_bytes = dict(costs.queries), {}, {}
    for query, names in overflow.items():
        tensors[query], times = frozenset(names), copies_by_tensor(layers[query], costs)
        run_bytes[query] = sum(times[name] * costs.tensor_bytes[name] for name in names)
        queries[query] = _overflowing(costs, queries[query], layers[query], names, run_bytes[query], overlaps)
    joint = []
    for one in costs.joint:
        copied = {tensors.get(query, frozenset()) for query in one.queries}
        if len(copied) > 1:
            joint.append(one.without([query for query in one.queries if tensors.get(query)]))
        elif names := copied.pop():
            first = one.queries[0]
            cost = _overflowing(costs, one.cost, layers[first], names, run_bytes[first], overlaps)
            joint.append(replace(one, cost=cost))
        else:
            joint.append(one)
    needed = {name for cost in queries.values() for name in cost.tensors}
    sizes, footprints = (
        {name: held for name, held in of.items() if name in needed} for of in (costs.tensor_bytes, costs.footprints)
    )
    within = Costs(queries, sizes, costs.copy_bytes_per_s, costs.load_latency_s, footprints).with_joint(joint)
    return Overflow(within, tensors, run_bytes, overlaps=overlaps)


def copies_by_tensor(layers: Sequence[OverflowLayer], costs: Costs) -> Counter[str]:
    """How often a run would copy each tensor that may overflow."""
    times: Counter[str] = Counter()
    for layer in layers:
        for part in layer.parts:
            if costs.tensor_bytes[part.tensor] >= MIN_OVERFLOW_BYTES:
                times[part.tensor] += layer.times
    return times


def overflow_workspace(
    workspace_bytes: int, layers: Sequence[OverflowLayer], overflow: Collection[str], overlaps: bool = False
) -> int:
    """A workspace with the scratch of what overflows."""
    return workspace_bytes - scratch_bytes(layers) + scratch_bytes(layers, overflow, overlaps)


def _alone_bytes(
    costs: Costs, cost: QueryCost, layers: Sequence[OverflowLayer], overflow: Collection[str], overlaps: bool
) -> int:
    kept = [name for name in cost.tensors if name not in overflow]
    return costs.resident_bytes(kept) + overflow_workspace(cost.workspace_bytes, layers, overflow, overlaps)


def _overflowing(
    costs: Costs, cost: QueryCost, layers: Sequence[OverflowLayer], overflow: Collection[str], nbytes: int,
    overlaps: bool,
) -> QueryCost:  # fmt: skip
    copy_s = nbytes / costs.copy_bytes_per_s
    largest_s = max((costs.tensor_bytes[name] for name in overflow), default=0) / costs.copy_bytes_per_s

    def run_of(count: int) -> float:
        run_s = cost.run_of(count)
        return max(run_s, copy_s) + largest_s if overlaps else run_s + copy_s

    batches = (
        BatchCost(count, run_of(count), overflow_workspace(cost.workspace_of(count), layers, overflow, overlaps))
        for count in (1, *(batch.count for batch in cost.larger))
    )
    return QueryCost.of_batches((name for name in cost.tensors if name not in overflow), cost.sla_s, batches)
