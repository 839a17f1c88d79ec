"""Arms to compare with: `ceiling` and `joint`, methods of this process."""

from __future__ import annotations

from dataclasses import replace

from gemel.merger.checkpoint import Checkpoint, Step, snapshot, snapshots
from gemel.merger.config import MergeOptions
from gemel.merger.context import MergeContext, Merged
from gemel.merger.methods.epochs import train_epochs
from gemel.merger.methods.registry import METHODS, Method
from gemel.merger.training.loop import Diverged
from gemel.models.sharing.groups import groups
from gemel.models.sharing.plan import SharingPlan


class Ceiling(Method):
    """The layer-sharing bound."""

    name = "ceiling"
    accepts = False

    def run(self, ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
        """Every group tied at once with recalibrated norms and no training."""
        plan = SharingPlan.of(groups(ctx.layers))
        return Merged(plan, snapshots(ctx.tie_models(plan, ctx.queries)))


class Joint(Method):
    """What the training alone brings."""

    name = "joint"
    accepts = False

    def run(self, ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
        """The same retraining with nothing shared; a query keeps its best state, or its original's."""
        recipe = replace(options.recipe, seed=ctx.seed)
        checkpoint.add_row({"recipe": dict(recipe.__dict__), "flops": ctx.flops.total})
        models, best = ctx.models(ctx.judged), checkpoint.state(Step.BEST)
        try:
            for ratios in train_epochs(ctx, models, recipe, checkpoint) if models else ():
                for query, ratio in ratios.items():
                    if ratio > best.get(query, (1.0,))[0]:
                        best[query] = (ratio, snapshot(models[query]))
        except Diverged as error:
            ctx.warn(f"the joint training diverged at {error}; the states before it stay")
        better = {query: state for query, (_, state) in best.items()}
        return Merged(SharingPlan(), snapshots(ctx.originals) | better)


METHODS.added |= {one.name: one for one in (Ceiling, Joint)}
