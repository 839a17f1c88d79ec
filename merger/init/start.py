"""What sharing begins with: the order of donors, and whether all originals are fine-tunes of one network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from merger.checkpoint import State, snapshots
from merger.config import TopDownConfig
from merger.context import MergeContext
from merger.events import Event
from merger.init.average import average_weights, copy_donor_weights, rank_donors, weight_similarity
from models.sharing.plan import SharingPlan


@dataclass(frozen=True)
class Start:
    """The donors, those with most shared bytes first, and the unshared `states`.

    With `averages` sharing starts from the mean of the weights, where all originals come from one pretrained network.
    """

    donors: tuple[str, ...]
    states: Mapping[str, State]
    averages: bool = False

    def initialise(self, plan: SharingPlan) -> dict[str, State]:
        """The states with the donor's weight, or the mean, in every set."""
        states = {query: self.states[query] for query in plan.queries()}
        return average_weights(plan, states) if self.averages else copy_donor_weights(plan, states, self.donors)


def prepare_start(ctx: MergeContext, plan: SharingPlan, config: TopDownConfig) -> Start:
    """Rank the donors, and tell whether the originals are kin."""
    originals = snapshots(ctx.bases)
    donors = rank_donors(plan, ctx.layers)
    similarity = weight_similarity(plan, ctx.layers, originals)
    kin = min(similarity.values()) >= config.kin_similarity
    ctx.report(Event.ANCESTRY, kin=kin, similarity=similarity, donor=donors[0])
    return Start(tuple(donors), originals, averages=kin and config.average_kin)
