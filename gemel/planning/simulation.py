"""`gemel simulate`: the box's own schedule on a virtual clock, or a recorded run replayed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_runtime.policies import policy_named
from edge_runtime.rehearsal.replay import Replayed, replay
from edge_runtime.rehearsal.simulator import Simulation, simulate
from gemel.planning.conditions import STANDARD, Conditions
from gemel.planning.subject import Subject, subject_of
from gemel.text import percent, size, table
from models.errors import one_line


@dataclass(frozen=True)
class Simulated:
    """What a simulation says about a box: what was simulated, how, and what became of every query's frames."""

    subject: Subject
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


def simulate_box(source: str | Path, conditions: Conditions = STANDARD, duration_s: float = 60.0) -> Simulated:
    """Run the schedule of a bundle, or of a workload's models, on a virtual clock.

    Frames arrive at each query's rate, with phases drawn from the seed. Raises InputError for a bad file, device, size
    or policy.
    """
    chosen = policy_named(conditions.policy)
    subject = subject_of(source, conditions)
    arrivals = subject.arrivals(duration_s, conditions.seed)
    played = simulate(subject.costs, arrivals, subject.memory_bytes, chosen, subject.demands)
    return Simulated(subject, conditions.policy, duration_s, played)


def replay_run(trace: str | Path) -> Replayed:
    """Replay a trace that a box recorded (`trace:` in its config); InputError for a file that is none."""
    return replay(trace)


def replayed_text(found: Replayed) -> str:
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
