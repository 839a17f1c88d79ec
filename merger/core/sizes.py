"""The bytes of a merge under a plan, before anything is written."""

from __future__ import annotations

from merger.core.context import MergeContext
from models.sharing.layers import layers_of_all, model_bytes
from models.sharing.plan import SharingPlan


def stored_bytes(ctx: MergeContext, plan: SharingPlan) -> int:
    """Bytes of all models under a plan, as a bundle counts them (but for equal small tensors)."""
    queries = list(ctx.queries.values())
    return sum(map(model_bytes, queries)) - plan.saved_bytes(layers_of_all(queries))
