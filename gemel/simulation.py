"""`gemel simulate`: the box's own schedule on a virtual clock; and what a workload costs with nothing shared."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch import nn

from edge_runtime.costs import Costs
from edge_runtime.profiles import PROFILES, DeviceProfile, costs_for
from edge_runtime.settings import memory_bytes
from edge_runtime.simulator import Simulation, simulate
from gemel.text import percent, size, table
from models.bundle import Bundle, BundleQuery, open_bundle
from models.errors import InputError
from models.low_rank import with_ranks
from models.workload import Query, load_workload
from models.zoo import build_query

WORKLOAD_SUFFIXES = (".yaml", ".yml")
DEFAULT_FPS = 10.0
AnyQuery = Query | BundleQuery


@dataclass(frozen=True)
class Simulated:
    """What a simulation says about a box: the memory it was given, and what became of every query's frames."""

    source: str
    profile: DeviceProfile
    memory_bytes: int
    duration_s: float
    simulation: Simulation

    def to_json(self) -> dict[str, Any]:
        """The keys of `gemel simulate --json`."""
        return {
            "source": self.source,
            "device": self.profile.name,
            "clock": "virtual",
            "modelled": self.profile.modelled,
            "duration_s": self.duration_s,
            "memory_bytes": self.memory_bytes,
            "queries": self.simulation.per_query(),
            "bytes_moved": self.simulation.bytes_moved,
            "swaps": self.simulation.swaps,
        }

    def to_text(self) -> str:
        """The same for a terminal."""
        rows = [
            (row["id"], row["received"], row["processed"], percent(row["processed"] / max(1, row["received"]), 0),
             row["late"], row["dropped"], "-" if row["age_p95_ms"] is None else f"{row['age_p95_ms']:.0f} ms")
            for row in self.simulation.per_query()
        ]  # fmt: skip
        modelled = ", modelled" if self.profile.modelled else ""
        return "\n".join([
            table(("query", "received", "processed", "share", "late", "dropped", "age p95"), rows),
            "",
            f"{self.source} with {size(self.memory_bytes)} on {self.profile.title} (virtual clock{modelled}): "
            f"{size(self.simulation.bytes_moved)} moved in {self.simulation.swaps} loads over {self.duration_s:g} s",
        ])  # fmt: skip


class _Apart:
    """A workload's originals as `costs_for` sees a bundle: sizes and architectures without any weights."""

    def __init__(self, queries: Iterable[AnyQuery]) -> None:
        self.queries = tuple(queries)
        self._models = {query.id: _on_paper(query) for query in self.queries}
        self._bytes: dict[str, dict[str, int]] = {}
        for query, model in self._models.items():
            unique = {id(tensor): (path, tensor) for path, tensor in reversed(model.state_dict(keep_vars=True).items())}
            # Counters of batches seen are equal in a trained model, so a bundle holds them once.
            named = [("counter" if tensor.ndim == 0 else path, tensor) for path, tensor in reversed(unique.values())]
            self._bytes[query] = {f"{query}/{path}": tensor.nbytes for path, tensor in named}

    def build(self, query_id: str) -> nn.Module:
        return self._models[query_id]

    def names_in_order(self, query_id: str) -> tuple[str, ...]:
        return tuple(self._bytes[query_id])

    def nbytes(self, name: str) -> int:
        return self._bytes[name.split("/", 1)[0]][name]


def _on_paper(query: AnyQuery) -> nn.Module:
    plain = replace(query, model_args=with_ranks(query.model_args, {}))  # a bundle's may have factors
    return build_query(plain, device="meta")


def costs_apart(profile: DeviceProfile, queries: Iterable[AnyQuery]) -> Costs:
    """The costs of these queries' originals, nothing shared: memory settings are computed from them."""
    return costs_for(profile, cast(Bundle, _Apart(queries)))


def profile_named(name: str) -> DeviceProfile:
    """The device profile of this name; InputError when there is none."""
    if name not in PROFILES:
        raise InputError("--device", f"there is no profile '{name}'", f"choose one of: {', '.join(PROFILES)}")
    return PROFILES[name]


def simulate_box(
    source: str | Path, device: str = "orin-nano-8gb", memory: str = "min", duration_s: float = 60.0, seed: int = 0
) -> Simulated:
    """Run a bundle's schedule, or that of a workload's originals, on a virtual clock.

    `memory` is a size, or `min`, `50%`, `75%`, `all` of what the originals need. Frames arrive at each query's
    rate, with phases drawn from the seed. Raises InputError for a bad file, device or size.
    """
    profile, source = profile_named(device), Path(source)
    if source.suffix.lower() in WORKLOAD_SUFFIXES:
        queries: tuple[AnyQuery, ...] = load_workload(source).queries
        costs = apart = costs_apart(profile, queries)
    else:
        bundle = open_bundle(source)
        queries = bundle.queries
        costs, apart = costs_for(profile, bundle), costs_apart(profile, queries)
    nbytes = memory_bytes(memory, apart, "--memory")
    rng = random.Random(seed)
    arrivals = {query.id: _ticks(query.fps or DEFAULT_FPS, rng.random(), duration_s) for query in queries}
    return Simulated(str(source), profile, nbytes, duration_s, simulate(costs, arrivals, nbytes))


def _ticks(fps: float, phase: float, duration_s: float) -> list[float]:
    return [(phase + index) / fps for index in range(int(duration_s * fps))]
