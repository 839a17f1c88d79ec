"""What a merge under a plan weighs, in bytes, before anything is written."""

from __future__ import annotations

import math

from merger.bench.workbench import Workbench
from models.parts.residual import shapes
from models.sharing.layers import layers_of_all, model_bytes
from models.sharing.plan import Member, SharingPlan


def stored_bytes(bench: Workbench, plan: SharingPlan) -> int:
    """Bytes of all models under a plan, residuals included, as a bundle counts them (but for equal small tensors)."""
    queries = [bench.asked(query, plan) for query in bench.queries]
    residuals = bytes_of_residuals(bench, plan).values()
    return sum(map(model_bytes, queries)) - plan.saved_bytes(layers_of_all(queries)) + sum(residuals)


def bytes_of_residuals(bench: Workbench, plan: SharingPlan) -> dict[Member, int]:
    """Layer -> bytes of the residual that it has under the plan."""
    return {
        (query, path): _bytes_of_residual(bench, query, path, rank)
        for query, ranks in plan.residuals.items()
        for path, rank in ranks.items()
    }


def _bytes_of_residual(bench: Workbench, query: str, path: str, rank: int) -> int:
    layer = bench.originals[query].get_submodule(path)
    count = sum(math.prod(shape) for shape in shapes(layer, rank))  # type: ignore[arg-type]
    return count * layer.weight.element_size()  # type: ignore[union-attr, operator]
