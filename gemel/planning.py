"""`gemel plan`: before anything is shipped, what fits, what swaps, and what rate each query will have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_runtime.policies import DEFAULT_POLICY, policy_named
from edge_runtime.simulator import Simulation, simulate
from gemel.on_paper import Subject, subject_of
from gemel.text import percent, size, table

DURATION_S = 60.0


@dataclass(frozen=True)
class Planned:
    """A plan as the virtual clock predicts it; keys of `to_json` are those of `gemel plan --json`."""

    subject: Subject
    policy: str
    fits: bool
    resident_bytes: int
    bytes_moved_per_s: float
    queries: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.subject.source,
            "device": self.subject.device,
            "modelled": self.subject.modelled,
            "policy": self.policy,
            "memory_bytes": self.subject.memory_bytes,
            "fits": self.fits,
            "resident_bytes": self.resident_bytes,
            "bytes_moved_per_s": self.bytes_moved_per_s,
            "queries": list(self.queries),
        }

    def to_text(self) -> str:
        rows = [
            (row["id"], "stays" if row["resident"] else "swaps", f"{row['fps']:.3g}", f"{row['asked_fps']:.3g}",
             percent(row["drop_fraction"], 0), "-" if row["age_p95_ms"] is None else f"{row['age_p95_ms']:.0f} ms")
            for row in self.queries
        ]  # fmt: skip
        fits = "everything stays resident" if self.fits else f"{size(self.bytes_moved_per_s)} a second are swapped"
        modelled = ", modelled" if self.subject.modelled else ""
        return "\n".join([
            table(("query", "weights", "fps", "of", "dropped", "age p95"), rows),
            "",
            f"{self.subject.source} with {size(self.subject.memory_bytes)} on {self.subject.title} (virtual "
            f"clock{modelled}), policy {self.policy}: {fits}; at most {size(self.resident_bytes)} of weights at a time",
        ])  # fmt: skip


def plan_box(
    source: str | Path,
    memory: str,
    device: str = "orin-nano-8gb",
    policy: str = DEFAULT_POLICY,
    shared: bool = False,
    seed: int = 0,
) -> Planned:
    """Predict what a bundle, or a workload's models, would do with so much memory.

    A query is `resident` when its weights stay once they are there (looked at in the second half of a simulated
    minute); `fps` counts results in time, `drop_fraction` the other frames. `fits`: all weights and the largest
    workspace have room together. Raises InputError as `subject_of` does.
    """
    chosen = policy_named(policy)
    subject = subject_of(source, device, memory, shared)
    played = simulate(subject.costs, subject.arrivals(DURATION_S, seed), subject.memory_bytes, chosen, subject.demands)
    costs = played.costs
    workspace = max(cost.workspace_bytes for cost in costs.queries.values())
    everything = costs.resident_bytes(costs.tensor_bytes.keys())
    staying = _staying(played)
    queries = []
    for row in played.per_query():
        in_time = row["processed"] - row["late"]
        queries.append({
            "id": row["id"],
            "resident": row["id"] in staying,
            "fps": in_time / DURATION_S,
            "asked_fps": subject.demands[row["id"]].fps,
            "drop_fraction": 1 - in_time / row["received"] if row["received"] else 0.0,
            "age_p95_ms": row["age_p95_ms"],
        })  # fmt: skip
    resident = max((change.resident_bytes for change in played.changes), default=0)
    return Planned(subject, policy, everything + workspace <= subject.memory_bytes, resident,
                   played.bytes_moved / DURATION_S, tuple(queries))  # fmt: skip


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
