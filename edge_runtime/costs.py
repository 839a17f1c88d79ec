"""What running and moving things costs: plain numbers that the schedule, the simulator and the daemon all read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

ALIGNMENT_BYTES = 512


def footprint_bytes(nbytes: int) -> int:
    """What a tensor of `nbytes` occupies when resident: its bytes rounded up to the arena's alignment."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class QueryCost:
    """One query's costs: its tensors by content name in load order, one run in seconds, its workspace in bytes."""

    tensors: tuple[str, ...]
    run_s: float
    workspace_bytes: int
    sla_s: float
    needed: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.run_s < 0 or self.workspace_bytes < 0 or self.sla_s <= 0:
            raise ValueError(f"a cost is negative or the SLA is not positive: {self}")
        object.__setattr__(self, "needed", frozenset(self.tensors))


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of all queries on one device.

    `tensor_bytes` are bytes as stored; they are what a load moves. What a resident tensor occupies is its
    footprint (`footprint_bytes`), and every comparison with a budget is made in footprints. A load takes
    `load_latency_s` once and then the bytes at `copy_bytes_per_s`.
    """

    queries: Mapping[str, QueryCost]
    tensor_bytes: Mapping[str, int]
    copy_bytes_per_s: float
    load_latency_s: float = 0.0

    def __post_init__(self) -> None:
        if self.copy_bytes_per_s <= 0 or self.load_latency_s < 0:
            raise ValueError("copy_bytes_per_s must be positive and load_latency_s not negative")
        for query, cost in self.queries.items():
            unknown = cost.needed - self.tensor_bytes.keys()
            if unknown:
                raise ValueError(f"query {query} needs tensors of unknown size: {sorted(unknown)[:3]}")

    def load_s(self, nbytes: int) -> float:
        """Seconds one load of `nbytes` takes; nothing to load takes no time."""
        return self.load_latency_s + nbytes / self.copy_bytes_per_s if nbytes else 0.0

    def moved_bytes(self, names: Iterable[str]) -> int:
        """Bytes a load of these tensors moves."""
        return sum(map(self.tensor_bytes.__getitem__, names))

    def resident_bytes(self, names: Collection[str]) -> int:
        """Bytes these tensors occupy when resident."""
        return sum(footprint_bytes(self.tensor_bytes[name]) for name in names)

    def weights_bytes(self, query: str) -> int:
        """Bytes one query's tensors occupy when resident."""
        return self.resident_bytes(self.queries[query].needed)

    def alone_bytes(self, query: str) -> int:
        """The least budget under which this query can run: its resident weights and its workspace."""
        return self.weights_bytes(query) + self.queries[query].workspace_bytes

    def with_measured(self, query: str, run_s: float, copy_bytes_per_s: float) -> Costs:
        """The same costs with one query's run time and the copy rate replaced by measured ones."""
        queries = {**self.queries, query: replace(self.queries[query], run_s=run_s)}
        return replace(self, queries=queries, copy_bytes_per_s=copy_bytes_per_s)
