"""The arms without a search: `none`, `ceiling` and `joint`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from merger.checkpoint import Checkpoint, Row, Step, snapshot, snapshots
from merger.config import MergeOptions
from merger.context import MergeContext, Merged
from merger.evaluate import required_ratios, training_flops
from merger.methods.epochs import train_epochs
from merger.methods.registry import register_method
from merger.outcomes import SetTrial, explain_joint
from merger.training.loop import Diverged
from models.sharing.groups import groups
from models.sharing.plan import SharingPlan

TRAINING_ALONE = "training all models without sharing"


def explain_ceiling(ctx: MergeContext, options: MergeOptions, log: Sequence[Row], flops: float) -> list[SetTrial]:
    """Every group is tied."""
    sets = [group.members for group in groups(ctx.layers)]
    return explain_joint(sets, log, required_ratios(ctx, options.margin), flops)


@register_method("none")
def none(ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
    """The originals, nothing shared."""
    return Merged(SharingPlan(), snapshots(ctx.originals))


@register_method("ceiling", explain_ceiling, accepts=False)
def ceiling(ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
    """Every group tied at once with recalibrated norms and no training: the layer-sharing bound."""
    plan = SharingPlan.of(groups(ctx.layers))
    return Merged(plan, snapshots(ctx.tie_models(plan, ctx.queries)))


@register_method("joint", accepts=False)
def joint(ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
    """The same retraining with nothing shared; a query keeps its best state on val, or its original's."""
    recipe = replace(options.recipe, seed=ctx.seed)
    checkpoint.add_row({"recipe": dict(recipe.__dict__), "flops": ctx.flops.total})
    ctx.stages.announce([TRAINING_ALONE])
    ctx.begin(TRAINING_ALONE, flops=training_flops(ctx, ctx.judged, recipe))
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
