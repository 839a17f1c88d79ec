"""The arms that search for nothing: `none`, `ceiling` and `joint`."""

from __future__ import annotations

from dataclasses import replace

from merger.checkpoint import Checkpoint, snapshot, snapshots
from merger.core.attempt import train_while
from merger.core.context import MergeContext
from merger.core.merged import Merged
from merger.core.method import MergeOptions, method
from merger.core.snapshot import ModelSnapshot, training_flops
from merger.methods.rate import CHOOSING, at_rates, choose_recipe, chosen, max_flops, tell
from merger.outcomes import Rows, Trial, all_at_once
from merger.training.loop import Diverged
from models.sharing.groups import groups
from models.sharing.plan import SharingPlan

TRAINING = "training all models as they are"


@method("none")
def none(ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
    """The originals as they are."""
    return Merged(SharingPlan(), snapshots(ctx.originals))


def _sets_tried(ctx: MergeContext, options: MergeOptions, log: Rows, flops: float) -> list[Trial]:
    return all_at_once([group.members for group in groups(ctx.layers)], log, options.required(ctx), flops)


@method("ceiling", _sets_tried)
def ceiling(ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
    """Every group tied at once, norm statistics measured again, nothing retrained: the most that tying could save."""
    plan = SharingPlan.of(groups(ctx.layers))
    models = ctx.tied(plan, ctx.queries)
    return Merged(plan, snapshots(models))


@method("joint")
def joint(ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
    """The same retraining with nothing shared; a query keeps its best state on val, or its original's."""
    recipe, every = replace(options.recipe, seed=ctx.seed), list(ctx.queries)
    ctx.stages.announce([*([CHOOSING] if options.choose_rate else []), TRAINING])
    if options.choose_rate:
        start = ModelSnapshot(SharingPlan(), snapshots(ctx.originals))
        recipes = at_rates(recipe)
        ctx.begin(CHOOSING, flops=max_flops(ctx, every, recipes))
        recipe = chosen(ctx, checkpoint, lambda: choose_recipe(ctx, start, recipes, checkpoint))
    else:
        tell(ctx, checkpoint, recipe)
    models = ctx.models(ctx.queries)
    best = checkpoint.state("best")
    try:
        ctx.begin(TRAINING, flops=training_flops(ctx, every, recipe))
        for ratios in train_while(ctx, models, recipe, checkpoint):
            for query, ratio in ratios.items():
                if ratio > best.get(query, (1.0,))[0]:
                    best[query] = (ratio, snapshot(models[query]))
    except Diverged as error:
        ctx.progress("warning", text=f"the joint training diverged at {error}; the states before it stay")
    better = {query: state for query, (_, state) in best.items()}
    return Merged(SharingPlan(), snapshots(ctx.originals) | better)
