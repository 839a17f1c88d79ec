"""What sharing begins with: whose weights the layers of each set have."""

from __future__ import annotations

from collections.abc import Mapping

from gemel.merger.checkpoint import State, snapshot
from gemel.merger.context import MergeContext
from gemel.merger.init.average import copy_donor_weights, rank_donors
from gemel.models.sharing.plan import SharingPlan


def order_donors(ctx: MergeContext, plan: SharingPlan, tied: Mapping[str, State]) -> list[str]:
    """The queries that share, those first that give their weights; what is `tied` already gives before others."""

    def rank(query: str) -> tuple[bool, ...]:
        # What a bundle has stays as it is. A detector's boxes hardly agree once its weights change.
        return query in ctx.queries, query not in tied, ctx.query(query).task != "detection"

    return sorted(rank_donors(plan, ctx.layers), key=rank)


def start_states(ctx: MergeContext, plan: SharingPlan, tied: Mapping[str, State]) -> dict[str, State]:
    """The states of all queries of a plan with the weight of the first donor in every set; `tied` ones start there."""
    states = {query: tied.get(query) or snapshot(ctx.bases[query]) for query in plan.queries()}
    return copy_donor_weights(plan, states, order_donors(ctx, plan, tied))
