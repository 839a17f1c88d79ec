"""Stage d of the method top-down: one joint training of all models that share.

All sets are tied to the donor's weights (the mean of kin). Unrelated models first train against the donor's frozen
weights: the donor stays its original, and the others learn with their norms, heads and private layers alone. Then all
weights train together by distillation from the originals, with the features before the heads in the loss. After every
epoch the queries at their requirement, and what they share without the others, are a candidate; the one that saves
most is kept. Training stops once all queries are at their requirement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from merger.checkpoint import snapshots
from merger.context import Merged, Plain
from merger.evaluate import all_met, objective, queries_at_target, satisfying_subset, tie_and_evaluate, training_flops
from merger.events import Event, TrainingKind
from merger.init.average import set_donor
from merger.init.start import Start
from merger.methods.epochs import freeze_shared, train_epochs
from merger.methods.registry import MergeTask
from merger.training.loop import Diverged
from merger.training.recipe import Recipe
from models.sharing.plan import SharingPlan, tie

TRAINING = "training the models that share"


@dataclass(frozen=True)
class JointState:
    """All models tied under a plan, their ratios on val, and the best state found so far that holds."""

    merged: Merged
    ratios: Mapping[str, float]
    best: Merged
    trained: bool = False

    def to_plain(self) -> Plain:
        """Plain values and tensors."""
        return {
            "merged": self.merged.to_plain(), "ratios": dict(self.ratios), "best": self.best.to_plain(),
            "trained": self.trained,
        }  # fmt: skip

    @classmethod
    def from_plain(cls, value: Mapping) -> JointState:
        """Inverse of `to_plain`."""
        merged, best = Merged.from_plain(value["merged"]), Merged.from_plain(value["best"])
        return cls(merged, value["ratios"], best, value["trained"])


def train_together(task: MergeTask, start: Start) -> JointState:
    """Tie all sets, then train until every query holds: against the donor's frozen weights, then all together."""
    tied = partial(_tie_untrained, start=start)
    found = JointState.from_plain(task.run_stage("tied untrained", tied))
    hard = objective(found.ratios, task.required) < task.config.hard_start
    if hard:
        early = early_layers(task)
        plan = plan_without(task.plan, early)
        found = JointState.from_plain(task.run_stage("tied without early layers", partial(tied, plan=plan)))
        task.log({"private_layers": early, "flops": task.ctx.flops.total})
    recipes = _recipes(task, hard)
    receivers = [query for query in sorted(found.ratios) if query not in intact_queries(found.merged.plan, start)]
    if task.config.freeze_donor_first and not start.kin and receivers:
        found = train_kind(task, TrainingKind.DONOR_FROZEN, found, recipes[TrainingKind.DONOR_FROZEN], receivers)
    if task.config.train_jointly:
        found = train_kind(task, TrainingKind.JOINT, found, recipes[TrainingKind.JOINT], sorted(found.ratios))
    return found


def max_training_flops(task: MergeTask) -> float:
    """FLOPs of a whole hard joint training, within the budget."""
    queries = sorted(task.plan.queries())
    flops = sum(training_flops(task.ctx, queries, recipe) for recipe in _recipes(task, True).values())
    return min(flops, task.budget.flops_left)


def early_layers(task: MergeTask) -> dict[str, list[str]]:
    """Query -> its first shareable layers, a small fraction of its shareable bytes; never all that a query shares."""
    found = dict[str, list[str]]()
    for query in sorted(task.plan.queries()):
        mine = {path for members in task.plan.shared for name, path in members if name == query}
        layers = [layer for layer in task.ctx.layers if layer.query == query and layer.path in mine]
        left = task.config.early_fraction * sum(layer.bytes for layer in layers)
        found[query] = []
        for layer in layers:
            left -= layer.bytes
            if left < 0:
                break
            found[query].append(layer.path)
    lost = task.plan.queries() - plan_without(task.plan, found).queries()
    needed = {member for members in task.plan.shared if lost & dict(members).keys() for member in members}
    return {query: [path for path in paths if (query, path) not in needed] for query, paths in found.items()}


def plan_without(plan: SharingPlan, private: Mapping[str, Sequence[str]]) -> SharingPlan:
    """The plan with these layers of each query private."""
    for query, paths in private.items():
        plan = plan.with_private(query, paths)
    return plan


def intact_queries(plan: SharingPlan, start: Start) -> set[str]:
    """The queries that give the weight of every set they are in."""
    if start.kin:
        return set()
    foreign = {query for members in plan.shared for query, _ in members if query != set_donor(members, start.donors)[0]}
    return plan.queries() - foreign


def _recipes(task: MergeTask, hard: bool) -> dict[TrainingKind, Recipe]:
    config, recipe = task.config, task.recipe
    features = recipe.features or config.feature_weight
    frozen = replace(
        recipe, epochs=config.frozen_epochs, frames_per_epoch=config.frozen_frames * recipe.frames_per_epoch,
        features=features, norms=config.norm_learning_rate / recipe.rate, private=1.0, seed=recipe.seed + 1,
    )  # fmt: skip
    joint = replace(recipe, epochs=recipe.epochs * (config.hard_epochs if hard else 1), features=features)
    return {TrainingKind.DONOR_FROZEN: frozen, TrainingKind.JOINT: joint}


def _tie_untrained(task: MergeTask, start: Start, plan: SharingPlan | None = None) -> Plain:
    """All sets tied at their initial weights, with recalibrated norms, evaluated."""
    plan = plan or task.plan
    queries, states = sorted(plan.queries()), start.initialise(plan)
    models, ratios = tie_and_evaluate(task.ctx, task.checkpoint, plan, queries, states)
    states = snapshots(models)
    best = satisfying_subset(plan, states, ratios, task.required)
    task.report(
        Event.START, ratios=ratios, hard=objective(ratios, task.required) < task.config.hard_start,
        saved_bytes=task.saved_bytes(best.plan),
    )  # fmt: skip
    return JointState(Merged(plan, states), ratios, best).to_plain()


def train_kind(
    task: MergeTask, kind: TrainingKind, found: JointState, recipe: Recipe, queries: Sequence[str]
) -> JointState:
    """Train these queries, unless all hold or not even one epoch fits the budget."""
    if all_met(found.ratios, task.required):
        return found
    fit = partial(task.fit_recipe, queries, recipe, task.recipe.frames_per_epoch)
    fitted = task.checkpoint.step(f"recipe {kind.value}", lambda: None if (r := fit()) is None else dict(r.__dict__))
    if fitted is None:
        task.report_time_over(f"{TRAINING} ({kind.value})", found.merged.plan, found.best.plan)
        return found
    train = partial(_train_epochs, kind=kind, found=found, recipe=Recipe(**fitted), queries=queries)
    return JointState.from_plain(task.run_stage(kind.value, train))


def _train_epochs(
    task: MergeTask, kind: TrainingKind, found: JointState, recipe: Recipe, queries: Sequence[str]
) -> Plain:
    ctx, plan = task.ctx, found.merged.plan
    models = ctx.models(queries, found.merged.states)
    tie(models, plan)
    if kind is TrainingKind.DONOR_FROZEN:
        freeze_shared(models, plan)
    progress = task.checkpoint.state("progress")
    if not progress:
        progress.update(state=found.to_plain(), rows=[])
    epochs = train_epochs(ctx, models, recipe, task.checkpoint)
    try:
        for trained in epochs:
            ratios = {**found.ratios, **trained}
            state = JointState.from_plain(progress["state"])
            states = {**found.merged.states, **snapshots(models)}
            state, row = _after_epoch(task, state, Merged(plan, states), ratios)
            epoch = len(progress["rows"]) + 1
            row = {"training": kind.value, "epoch": epoch, **row, "flops": ctx.flops.total}
            ctx.progress(Event.ROUND.value, **row)
            progress.update(state=state.to_plain(), rows=[*progress["rows"], row])
            if all_met(ratios, task.required) or task.budget.over:
                break
    except Diverged as error:
        ctx.progress(Event.WARNING.value, text=f"the training diverged at {error}; the state before it stays")
    for row in progress["rows"]:
        task.log(row)
    return progress["state"]


def _after_epoch(
    task: MergeTask, state: JointState, merged: Merged, ratios: Mapping[str, float]
) -> tuple[JointState, dict[str, object]]:
    """The state with this epoch's candidate, if it is better, and the log row of the epoch."""
    candidate = satisfying_subset(merged.plan, merged.states, ratios, task.required)
    saved = task.saved_bytes(candidate.plan)
    best = candidate if saved > task.saved_bytes(state.best.plan) else state.best
    if not state.trained or objective(ratios, task.required) >= objective(state.ratios, task.required):
        state = JointState(merged, ratios, best, True)
    else:
        state = replace(state, best=best)
    return state, {"ratios": dict(ratios), "met": queries_at_target(ratios, task.required), "saved_bytes": saved}
