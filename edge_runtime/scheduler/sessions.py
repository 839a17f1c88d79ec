"""Sessions in the costs: queries that an engine runs over weights of its own, which no other session shares."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from edge_runtime.scheduler.costs import BatchCost, Costs, QueryCost, all_bytes


@dataclass(frozen=True)
class SessionCost:
    """The queries of one session: its engine, its bytes for as long as they serve, and each query's runs by batch."""

    engine: str
    nbytes: int
    batches: Mapping[str, tuple[BatchCost, ...]]

    def saved_s(self, costs: Costs) -> float:
        """Seconds that one frame of each query takes less than in `costs`."""
        return sum(costs.queries[query].run_s - batches[0].run_s for query, batches in self.batches.items())


def with_sessions(costs: Costs, sessions: Collection[SessionCost]) -> Costs:
    """The same costs, queries of sessions without tensors of the arena."""
    queries = dict(costs.queries)
    for one in sessions:
        for query, batches in one.batches.items():
            queries[query] = QueryCost.of_batches((), costs.queries[query].sla_s, batches)
    needed = {name for cost in queries.values() for name in cost.needed}
    sizes, footprints = (
        {name: held for name, held in of.items() if name in needed} for of in (costs.tensor_bytes, costs.footprints)
    )
    taken = {query for one in sessions for query in one.batches}
    joint = tuple(left for one in costs.joint if (left := one.without(taken)) is not None)
    return replace(costs, queries=queries, tensor_bytes=sizes, footprints=footprints, joint=joint)


def pick_sessions(costs: Costs, sessions: Sequence[SessionCost], budget_bytes: int) -> tuple[SessionCost, ...]:
    """The sessions to use: those that save most time for their bytes, as long as all other weights stay resident.

    One that saves no time is left out, and so is a second one of the same query.
    """
    picked: list[SessionCost] = []
    for one in sorted(sessions, key=lambda one: -one.saved_s(costs) / max(1, one.nbytes)):
        taken = {query for other in picked for query in other.batches}
        wanted = [*picked, one]
        needed = all_bytes(with_sessions(costs, wanted)) + sum(other.nbytes for other in wanted)
        if one.saved_s(costs) > 0 and taken.isdisjoint(one.batches) and needed <= budget_bytes:
            picked = wanted
    return tuple(picked)
