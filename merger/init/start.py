"""What sharing begins with: the order of donors, and every query's own model with its channels matched to theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from merger.checkpoint import State, Step, StepCache, snapshots
from merger.config import TopDownConfig
from merger.context import MergeContext
from merger.events import Event
from merger.init.average import average_weights, copy_donor_weights, rank_donors, weight_similarity
from merger.init.permutation import align_channels
from models.sharing.plan import SharingPlan


@dataclass(frozen=True)
class Start:
    """The donors, those with most shared bytes first; whether all originals are `kin`; the unshared `states`.

    Originals are kin if their weights come from one pretrained network. Their channels match already, and with
    `averages` their mean is what they start from.
    """

    donors: tuple[str, ...]
    kin: bool
    states: Mapping[str, State]
    averages: bool = False

    def initialise(self, plan: SharingPlan) -> dict[str, State]:
        """The states with the donor's weight, or the mean, in every set."""
        states = {query: self.states[query] for query in plan.queries()}
        return average_weights(plan, states) if self.averages else copy_donor_weights(plan, states, self.donors)


def prepare_start(ctx: MergeContext, plan: SharingPlan, cache: StepCache, config: TopDownConfig) -> Start:
    """Rank the donors, tell whether the originals are kin, and match the channels of those that are not."""
    originals = snapshots(ctx.bases)
    donors = rank_donors(plan, ctx.layers)
    similarity = weight_similarity(plan, ctx.layers, originals)
    kin = min(similarity.values()) >= config.kin_similarity
    ctx.report(Event.ANCESTRY, kin=kin, similarity=similarity, donor=donors[0])
    states: Mapping[str, State] = originals
    if config.permute_channels and not kin:
        states = cache.step(Step.CHANNELS, lambda: align_channels(ctx, plan, donors[0], cache, originals))
    return Start(tuple(donors), kin, states, averages=kin and config.average_kin)
