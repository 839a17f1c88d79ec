"""What the schedules are compared on: the catalogue's workloads, three modelled devices, three memory settings."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gemel.analytic_costs import ceiling_costs, original_costs
from gemel.edge_runtime.scheduler import QuerySpec
from gemel.edge_runtime.scheduler.costs import Costs
from gemel.edge_runtime.simulation.device_profiles import PROFILES
from gemel.models.workload import load_workload
from gemel.planner import DEFAULT_FPS

WORKLOADS = Path(__file__).parents[1] / "workloads"
CATALOGUE = ("low", "medium", "high")
DEVICES = ("jetson-nano", "orin-nano-8gb", "xavier-nx")
SETTINGS = ("min", "50%", "75%")
ORDER = ("time-sharing", "gemel", "adaptive")


@dataclass(frozen=True)
class SimulatedCase:
    """A workload on a device: costs of the originals and of the merged models, and what its queries ask for."""

    workload: str
    device: str
    apart: Costs
    shared: Costs
    demands: Mapping[str, QuerySpec]


def catalogue() -> list[Path]:
    """The fifteen workload files that need no data."""
    return [path for path in sorted(WORKLOADS.glob("*.yaml")) if path.stem.partition("-")[0] in CATALOGUE]


def case_of(path: Path, device: str) -> SimulatedCase:
    """One workload on one device, merged at the ceiling: each group of layers shares one weight."""
    load, profile = load_workload(path), PROFILES[device]
    demands = {query.id: QuerySpec(query.fps or DEFAULT_FPS, float(query.priority)) for query in load.queries}
    return SimulatedCase(
        path.stem, device, original_costs(profile, load.queries), ceiling_costs(profile, load.queries), demands
    )


def arrivals_of(demands: Mapping[str, QuerySpec], seconds: float, seed: int) -> dict[str, list[float]]:
    """Frames at each query's rate, with phases drawn from the seed."""
    rng = random.Random(seed)
    return {
        query: [(phase + index) / demand.fps for index in range(int(seconds * demand.fps))]
        for query, demand in demands.items()
        for phase in [rng.random()]
    }


def markdown(headers: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    """A table for the docs."""
    lines = ["| " + " | ".join(headers) + " |", "| " + " | ".join("---" for _ in headers) + " |"]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])
