"""What running and moving things costs: plain numbers that the schedule, the simulator and the daemon all read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, TypeVar

from edge_runtime.memory.placing import footprint_bytes

BATCHES = (1, 2, 4, 8)
"""The batch sizes that are profiled; what lies between them is interpolated."""

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class BatchCost:
    """One run of `count` frames together: seconds for all of them, workspace in bytes."""

    count: int
    run_s: float
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class QueryCost:
    """One query's costs: its tensors by content name in load order, one run in seconds, its workspace in bytes.

    `run_s` and `workspace_bytes` are those of one frame; `larger` holds what is known of larger batches, in
    ascending order; costs between two known batches lie on the line between them. A tensor named twice counts once.
    """

    tensors: tuple[str, ...]
    run_s: float
    workspace_bytes: int
    sla_s: float
    larger: tuple[BatchCost, ...] = ()
    needed: frozenset[str] = field(init=False, repr=False, compare=False)
    runs_s: tuple[float, ...] = field(init=False, repr=False, compare=False)
    workspaces: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.run_s < 0 or self.workspace_bytes < 0 or self.sla_s <= 0:
            raise ValueError(f"a cost is negative or the SLA is not positive: {self}")
        known = [BatchCost(1, self.run_s, self.workspace_bytes), *self.larger]
        if any(a.count >= b.count or a.run_s > b.run_s for a, b in pairwise(known)):
            raise ValueError(f"larger batches must ascend and take no less time: {self.larger}")
        object.__setattr__(self, "tensors", tuple(dict.fromkeys(self.tensors)))
        object.__setattr__(self, "needed", frozenset(self.tensors))
        object.__setattr__(self, "runs_s", tuple(_every([(one.count, one.run_s) for one in known])))
        spaces = _every([(one.count, one.workspace_bytes) for one in known])
        object.__setattr__(self, "workspaces", tuple(round(nbytes) for nbytes in spaces))

    @property
    def largest(self) -> int:
        """The largest batch whose cost is known."""
        return len(self.runs_s)

    def run_of(self, count: int) -> float:
        """Seconds that `count` frames take in one run; ValueError beyond the largest known batch."""
        return self.run_s if count == 1 else self.runs_s[self._place(count)]

    def workspace_of(self, count: int) -> int:
        """Workspace of `count` frames in one run."""
        return self.workspace_bytes if count == 1 else self.workspaces[self._place(count)]

    def _place(self, count: int) -> int:
        if not 1 <= count <= len(self.runs_s):
            raise ValueError(f"nothing is known of batches of {count}, only up to {self.largest}")
        return count - 1

    def slowed(self, factor: float) -> QueryCost:
        """The same query with runs of every batch taking `factor` times as long."""
        return self.timed([factor * run_s for run_s in self.runs_s])

    def timed(self, runs_s: Sequence[float]) -> QueryCost:
        """The same query with the run times of every batch replaced, from that of one frame on."""
        larger = tuple(BatchCost(one.count, runs_s[one.count - 1], one.workspace_bytes) for one in self.larger)
        return _changed(self, run_s=runs_s[0], larger=larger, runs_s=tuple(runs_s))


def _every(known: Sequence[tuple[int, float]]) -> list[float]:
    """The value of every batch from 1 to the largest known, on the line between its neighbours.

    Worked out once, since every decision looks several up.
    """
    every = [known[0][1]]
    for (low, below), (high, above) in pairwise(known):
        every += [below + (count - low) / (high - low) * (above - below) for count in range(low + 1, high)]
        every.append(above)
    return every


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of all queries on one device.

    `tensor_bytes` are bytes as stored; they are what a load moves. What a resident tensor occupies is its
    footprint, and every comparison with a budget is made in footprints. A load takes `load_latency_s` once and then
    the bytes at `copy_bytes_per_s`. `footprints` follow from `tensor_bytes` unless given.
    """

    queries: Mapping[str, QueryCost]
    tensor_bytes: Mapping[str, int]
    copy_bytes_per_s: float
    load_latency_s: float = 0.0
    footprints: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.copy_bytes_per_s <= 0 or self.load_latency_s < 0:
            raise ValueError("copy_bytes_per_s must be positive and load_latency_s not negative")
        for query, cost in self.queries.items():
            # Not by a difference of sets: that would look at all tensors for every query.
            unknown = [name for name in cost.needed if name not in self.tensor_bytes]
            if unknown:
                raise ValueError(f"query {query} needs tensors of unknown size: {sorted(unknown)[:3]}")
        if not self.footprints:
            occupied = {name: footprint_bytes(nbytes) for name, nbytes in self.tensor_bytes.items()}
            object.__setattr__(self, "footprints", occupied)

    def load_s(self, nbytes: int) -> float:
        """Seconds one load of `nbytes` takes; nothing to load takes no time."""
        return self.load_latency_s + nbytes / self.copy_bytes_per_s if nbytes else 0.0

    def moved_bytes(self, names: Iterable[str]) -> int:
        """Bytes a load of these tensors moves."""
        return sum(map(self.tensor_bytes.__getitem__, names))

    def resident_bytes(self, names: Collection[str]) -> int:
        """Bytes these tensors occupy when resident."""
        return sum(map(self.footprints.__getitem__, names))

    def weights_bytes(self, query: str) -> int:
        """Bytes one query's tensors occupy when resident."""
        return self.resident_bytes(self.queries[query].needed)

    def alone_bytes(self, query: str) -> int:
        """The least budget under which this query can run: its resident weights and its workspace."""
        return self.weights_bytes(query) + self.queries[query].workspace_bytes

    def with_query(self, query: str, cost: QueryCost) -> Costs:
        """The same costs with one query's replaced by `cost`, which needs the same tensors."""
        return _changed(self, queries={**self.queries, query: cost})

    def timed_as(self, other: Costs) -> Costs:
        """The same tensors with the run times of the other's queries, which are the same, and its rate of copying."""
        queries = {query: one.timed(other.queries[query].runs_s) for query, one in self.queries.items()}
        return _changed(self, queries=queries, copy_bytes_per_s=other.copy_bytes_per_s)

    def with_measured(self, query: str, run_s: float, copy_bytes_per_s: float) -> Costs:
        """The same costs with one query's run time (of one frame; larger batches in proportion) and the copy rate
        replaced by measured ones.
        """
        cost = self.queries[query]
        # A query whose runs had no known time: a batch takes as long as its frames one after the other.
        changed = (
            cost.slowed(run_s / cost.run_s)
            if cost.run_s > 0
            else cost.timed([count * run_s for count in range(1, cost.largest + 1)])
        )
        return _changed(self, queries={**self.queries, query: changed}, copy_bytes_per_s=copy_bytes_per_s)


def _changed(value: Value, **changes: Any) -> Value:
    """A copy of a frozen dataclass with fields replaced and nothing checked or computed again.

    Costs are corrected with every frame; checking thousands of tensors each time would cost more than a frame.
    """
    copy = object.__new__(type(value))
    for one in fields(value):  # type: ignore[arg-type]
        object.__setattr__(copy, one.name, changes.get(one.name, getattr(value, one.name)))
    return copy


def all_bytes(costs: Costs) -> int:
    """The least budget in which nothing is ever swapped: all weights and the largest workspace."""
    largest = max(cost.workspace_bytes for cost in costs.queries.values())
    return costs.resident_bytes(costs.tensor_bytes.keys()) + largest


def apart(costs: Costs) -> Costs:
    """The same costs with nothing shared: a tensor that several queries need becomes one copy for each.

    Names become `tensor@query` (`stored_name` undoes that).
    """
    queries: dict[str, QueryCost] = {}
    sizes: dict[str, int] = {}
    footprints: dict[str, int] = {}
    for query, cost in costs.queries.items():
        named = {name: f"{name}@{query}" for name in cost.tensors}
        queries[query] = QueryCost(tuple(named.values()), cost.run_s, cost.workspace_bytes, cost.sla_s, cost.larger)
        for name, own in named.items():
            sizes[own], footprints[own] = costs.tensor_bytes[name], costs.footprints[name]
    return Costs(queries, sizes, costs.copy_bytes_per_s, costs.load_latency_s, footprints)


def stored_name(name: str) -> str:
    """The content name behind a name that `apart` gave."""
    return name.rpartition("@")[0] or name
