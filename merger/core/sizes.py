"""What a merge under a plan weighs, in bytes, before anything is written."""

from __future__ import annotations

import math

from merger.core.context import MergeContext
from models.parts.residual import shapes
from models.sharing.layers import layers_of_all, model_bytes
from models.sharing.plan import Member, SharingPlan


def stored_bytes(ctx: MergeContext, plan: SharingPlan) -> int:
    """Bytes of all models under a plan, residuals included, as a bundle counts them (but for equal small tensors)."""
    queries = [ctx.asked(query, plan) for query in ctx.queries]
    residuals = bytes_of_residuals(ctx, plan).values()
    return sum(map(model_bytes, queries)) - plan.saved_bytes(layers_of_all(queries)) + sum(residuals)


def bytes_of_residuals(ctx: MergeContext, plan: SharingPlan) -> dict[Member, int]:
    """Layer -> bytes of the residual that it has under the plan."""
    return {
        (query, path): _bytes_of_residual(ctx, query, path, rank)
        for query, ranks in plan.residuals.items()
        for path, rank in ranks.items()
    }


def _bytes_of_residual(ctx: MergeContext, query: str, path: str, rank: int) -> int:
    layer = ctx.originals[query].get_submodule(path)
    count = sum(math.prod(shape) for shape in shapes(layer, rank))  # type: ignore[arg-type]
    return count * layer.weight.element_size()  # type: ignore[union-attr, operator]
