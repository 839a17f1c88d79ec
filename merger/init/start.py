"""What sharing begins with: the order of donors, and whether all originals are fine-tunes of one network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gemel.merger.checkpoint import State, snapshots
from gemel.merger.context import MergeContext
from gemel.merger.init.average import average_weights, copy_donor_weights, rank_donors
from gemel.models.sharing.plan import SharingPlan


@dataclass(frozen=True)
class Start:
    """The donors, those with most shared bytes first, and the unshared `states`.

    With `averages` sharing starts from the mean of the weights, of models that come from one pretrained network.
    """

    donors: tuple[str, ...]
    states: Mapping[str, State]
    averages: bool = False

    def initialise(self, plan: SharingPlan) -> dict[str, State]:
        """The states with the donor's weight, or the mean, in every set."""
        states = {query: self.states[query] for query in plan.queries()}
        return average_weights(plan, states) if self.averages else copy_donor_weights(plan, states, self.donors)


def prepare_start(ctx: MergeContext, plan: SharingPlan, tied: Mapping[str, State]) -> Start:
    """Rank the donors; queries that are `tied` already start from there, and give their weights first."""
    # A detector's boxes hardly agree to within an IoU of 0.75 once its weights change: what others share is its own.
    ranked = sorted(rank_donors(plan, ctx.layers), key=lambda query: ctx.query(query).task != "detection")
    # What a bundle has stays as it is.
    donors = sorted(ranked, key=lambda query: (query in ctx.queries, query not in tied))
    bases = {query: ctx.bases[query] for query in (*ctx.bases, *ctx.lenders.values())}
    return Start(tuple(donors), {**snapshots(bases), **tied})
