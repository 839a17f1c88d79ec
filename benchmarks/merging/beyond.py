"""How many bytes could be saved past the ceiling, on paper: upper bounds, whatever it would do to accuracy.

Usage: python -m benchmarks.merging.beyond [WORKLOAD.yaml ...]      (default: all of benchmarks/workloads)

For each workload, in % of the originals' bytes, on top of the ceiling:
  inside    repeated layers of a stage in one model become one weight (merger.beyond.candidates)
  low rank  layers that save at least 0.2 % become two factors, their rank a quarter of their smaller side
  leading   a weight is the leading channels of a larger one of the same kind and kernel in a model of another query
  fp32      the ceiling, inside and low rank together (a layer that repeats is factorised once)
  fp16      that with every float stored in 2 bytes; int8: weights in 1 byte and a scale of 4 bytes per output channel
`leading` is not built: the column says what it could bring at most. Nothing is trained, no weights are read.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from merger.beyond.candidates import Unit, neighbours, saved_by_rank, units
from merger.beyond.proposing import MIN_SAVING
from models.sharing.groups import groups
from models.sharing.layers import Layer, layers_of_all, model_bytes
from models.sharing.plan import SharingPlan
from models.workload import load_workload

WORKLOADS = Path(__file__).parents[1] / "workloads"
SCALE_BYTES = 4


@dataclass(frozen=True)
class Weight:
    """One stored weight: the layers that use it, its kind with everything but its width, its shape and its bytes."""

    unit: Unit
    kind: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def queries(self) -> frozenset[str]:
        """The queries that use it."""
        return frozenset(query for query, _ in self.unit)

    def holds(self, other: Weight) -> bool:
        """Whether the other's weight could be the leading channels of this one."""
        narrower = all(mine >= theirs for mine, theirs in zip(self.shape, other.shape, strict=True))
        return self.shape != other.shape and narrower and not self.queries & other.queries


def weights(layers: Sequence[Layer], plan: SharingPlan) -> list[Weight]:
    """Every weight that could be shared, each once, as it is stored under the plan."""
    by_member = {(layer.query, layer.path): layer for layer in layers}
    found = []
    for unit in units(layers, plan):
        layer = by_member[unit[0]]
        kind, sides, *rest = layer.wide.split()
        shape = tuple(map(int, sides.split("x")))
        kernel = "x".join(map(str, shape[2:]))
        found.append(Weight(unit, " ".join([kind, kernel, *rest]), shape, layer.bytes))
    return found


def repeats(layers: Sequence[Layer], plan: SharingPlan) -> set[Unit]:
    """The units that are stored no more when every chain of neighbours becomes one weight."""
    chain: dict[Unit, Unit] = {}

    def end(unit: Unit) -> Unit:
        while unit in chain:
            unit = chain[unit]
        return unit

    for _, one, other in neighbours(layers, plan):
        if end(one) != end(other):
            chain[end(one)] = end(other)
    return set(chain)


def low_rank_bytes(stored: Sequence[Weight], least_bytes: float) -> int:
    """What is saved when layers become two factors of the largest rank that is tried, where that saves enough."""
    saved = 0
    for weight in stored:
        kind, *rest = weight.kind.split()
        if kind != "linear" and "groups=1" not in rest:
            continue
        *_, gain = saved_by_rank(weight.shape, weight.nbytes // math.prod(weight.shape)).values()
        saved += gain if gain >= least_bytes else 0
    return saved


def leading_bytes(stored: Sequence[Weight]) -> int:
    """What is saved when every weight that fits into a larger one of another query's model lies in it."""
    by_kind: dict[str, list[Weight]] = defaultdict(list)
    for weight in stored:
        by_kind[weight.kind].append(weight)
    return sum(
        weight.nbytes for same in by_kind.values() for weight in same if any(other.holds(weight) for other in same)
    )


def row(path: Path) -> list[str]:
    """One line of the table."""
    workload = load_workload(path)
    queries = workload.queries
    layers = layers_of_all(queries)
    before = sum(map(model_bytes, queries))
    plan = SharingPlan.of(groups(layers))
    stored = weights(layers, plan)
    ceiling = plan.saved_bytes(layers)
    repeated = repeats(layers, plan)
    kept = [weight for weight in stored if weight.unit not in repeated]
    inside = sum(weight.nbytes for weight in stored) - sum(weight.nbytes for weight in kept)
    least = MIN_SAVING * before
    low_rank, leading = low_rank_bytes(stored, least), leading_bytes(stored)
    factorised = low_rank_bytes(kept, least)
    left = before - ceiling - inside - factorised
    in_weights = sum(weight.nbytes for weight in kept) - factorised  # the rest are norms, biases, heads
    scales = SCALE_BYTES * sum(weight.shape[0] for weight in kept)
    int8 = (left - in_weights) + in_weights / 4 + scales
    parts = (ceiling, inside, low_rank, leading, before - left, before - left / 2, before - int8)
    gain = (before - left) / ceiling if ceiling else float("inf")
    percents = [f"{100 * part / before:.1f}" for part in parts]
    return [workload.name, f"{before / 1e6:,.0f}", *percents[:5], f"{gain:.2f}", *percents[5:]]


def main() -> None:
    """Print the table (Markdown)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", type=Path, default=sorted(WORKLOADS.glob("*.yaml")))
    head = ["workload", "MB", "ceiling", "inside", "low rank", "leading", "fp32", "/ ceiling", "fp16", "int8"]
    print("| " + " | ".join(head) + " |")
    print("| --- |" + " ---: |" * (len(head) - 1))
    for path in parser.parse_args().workloads:
        print("| " + " | ".join(row(path)) + " |", flush=True)


if __name__ == "__main__":
    main()
