"""What sharing begins with: whose weights the layers of each set have."""

from __future__ import annotations

from collections.abc import Mapping

from gemel.merger.checkpoint import State, snapshots
from gemel.merger.context import MergeContext
from gemel.merger.init.average import copy_donor_weights, rank_donors
from gemel.models.sharing.plan import SharingPlan


def order_donors(ctx: MergeContext, plan: SharingPlan, tied: Mapping[str, State]) -> list[str]:
    """The queries that share, those first that give their weights; what is `tied` already gives before others."""
    # A detector's boxes hardly agree to within an IoU of 0.75 once its weights change: what others share is its own.
    ranked = sorted(rank_donors(plan, ctx.layers), key=lambda query: ctx.query(query).task != "detection")
    # What a bundle has stays as it is.
    return sorted(ranked, key=lambda query: (query in ctx.queries, query not in tied))


def start_states(ctx: MergeContext, plan: SharingPlan, tied: Mapping[str, State]) -> dict[str, State]:
    """The states of all queries of a plan with the weight of the first donor in every set; `tied` ones start there."""
    states = {**snapshots({query: ctx.bases[query] for query in plan.queries() - tied.keys()}), **tied}
    states = {query: states[query] for query in plan.queries()}
    return copy_donor_weights(plan, states, order_donors(ctx, plan, tied))
