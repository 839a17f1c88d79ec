"""The arms that search for nothing: `none`, `ceiling` and `joint`."""

from __future__ import annotations

from dataclasses import replace

from merger.bench.attempt import train_while
from merger.bench.merged import Merged
from merger.bench.method import MergeOptions, method
from merger.bench.pace import begins
from merger.bench.standing import Standing, training_flops
from merger.bench.workbench import Workbench
from merger.checkpoint import Checkpoint, snapshot, snapshots
from merger.methods.rate import CHOOSING, at_rates, choose_recipe, chosen, most_work, tell
from merger.outcomes import Rows, Trial, all_at_once
from merger.training.loop import Diverged
from models.sharing.groups import groups
from models.sharing.plan import SharingPlan

TRAINING = "training all models as they are"


def _all_as_they_are(bench: Workbench, options: MergeOptions) -> Standing:
    return begins(SharingPlan(), bench.queries)


@method("none")
def none(bench: Workbench, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
    """The originals as they are."""
    return Merged(SharingPlan(), snapshots(bench.originals))


def _sets_tried(bench: Workbench, options: MergeOptions, log: Rows, work: float) -> list[Trial]:
    return all_at_once([group.members for group in groups(bench.layers)], log, options.required(bench), work)


@method("ceiling", _sets_tried)
def ceiling(bench: Workbench, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
    """Every group tied at once, norm statistics measured again, nothing retrained: the most that tying could save."""
    plan = SharingPlan.of(groups(bench.layers))
    models = bench.tied(plan, bench.queries)
    return Merged(plan, snapshots(models))


@method("joint", trains=_all_as_they_are)
def joint(bench: Workbench, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
    """The same retraining with nothing shared; a query keeps its best state on val, or its original's."""
    recipe, every = replace(options.recipe, seed=bench.seed), list(bench.queries)
    bench.stages.announce([*([CHOOSING] if options.choose_rate else []), TRAINING])
    if options.choose_rate:
        start = Standing(SharingPlan(), snapshots(bench.originals))
        recipes = at_rates(recipe)
        bench.begin(CHOOSING, work=most_work(bench, every, recipes))
        recipe = chosen(bench, checkpoint, lambda: choose_recipe(bench, start, recipes, checkpoint))
    else:
        tell(bench, checkpoint, recipe)
    models = bench.models(bench.queries)
    best = checkpoint.state("best")
    try:
        bench.begin(TRAINING, work=training_flops(bench, every, recipe))
        for ratios in train_while(bench, models, recipe, checkpoint):
            for query, ratio in ratios.items():
                if ratio > best.get(query, (1.0,))[0]:
                    best[query] = (ratio, snapshot(models[query]))
    except Diverged as error:
        bench.progress("warning", text=f"the joint training diverged at {error}; the states before it stay")
    better = {query: state for query, (_, state) in best.items()}
    return Merged(SharingPlan(), snapshots(bench.originals) | better)
