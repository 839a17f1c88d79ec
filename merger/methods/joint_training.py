"""Stage c of the method top-down: all sets tied, then the receivers trained against a frozen donor, then all together.

After every epoch the queries at their requirement, and what they share without the others, are a candidate for the
best state. Training stops once all queries are at their requirement, but in a hard merge it runs to the end of its
schedule: there an early epoch is at its requirement by luck.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from merger.checkpoint import Row, Step, snapshots, storable
from merger.context import Merged
from merger.evaluate import (
    all_met,
    objective,
    queries_at_target,
    satisfying_subset,
    tie_and_evaluate,
    training_flops,
)
from merger.events import Event, TrainingKind
from merger.init.average import set_donor
from merger.init.start import Start
from merger.methods.epochs import freeze_shared, train_epochs
from merger.methods.registry import MergeTask
from merger.methods.repair import confirmed_queries, max_repair_flops, repair_queries
from merger.training.loop import Diverged
from merger.training.recipe import Recipe
from models.errors import join_names
from models.sharing.plan import SharingPlan, tie

TRAINING = "training the models that share"


@storable
@dataclass(frozen=True)
class JointState:
    """All models tied under a plan, their ratios on val, and the best state found so far that holds."""

    merged: Merged
    ratios: Mapping[str, float]
    best: Merged
    trained: bool = False


Untrained = tuple[JointState, bool]
"""All models tied at their initial weights, and whether the merge is hard."""


def train_together(task: MergeTask, early: MergeTask, start: Start, untrained: Untrained) -> Merged:
    """All sets of the plan trained (within `early`'s budget) and repaired; what saves most of all states."""
    config = task.config
    trained, hard = untrained
    kinds = [TrainingKind.DONOR_FROZEN] * (config.freeze_donor_first and not start.averages)
    for kind in [*kinds, *[TrainingKind.JOINT] * config.train_jointly]:
        trained = train_kind(early, kind, trained, start, hard)
    below = [query for query, ratio in trained.ratios.items() if ratio < task.required[query]]
    repaired = trained.merged.without(below)
    if config.repair and (trained.trained or not below):
        repaired = repair_queries(task, trained.merged, trained.ratios)
    best, saved = trained.best, task.saved_bytes(repaired.plan)
    if task.saved_bytes(best.plan) > saved:
        queries = best.plan.queries()
        best = best.without(queries - confirmed_queries(task, best, queries, "best"))
    if task.saved_bytes(best.plan) > saved:
        task.report(Event.RESTORE, accepted_bytes=task.saved_bytes(best.plan), instead_of_bytes=saved)
        return best
    return repaired


def tie_untrained(task: MergeTask, start: Start) -> Untrained:
    """All sets tied at their initial weights and evaluated, and whether the merge is hard.

    Where some query does not hold, light layers stay private in a hard merge and between fine-tunes of one network.
    """
    found = task.checkpoint.step(Step.TIED_UNTRAINED, partial(_tie, task, start, task.plan))
    hard = objective(found.ratios, task.required) < task.config.hard_start
    if hard or (start.averages and not all_met(found.ratios, task.required)):
        private = task.config.kin_private if start.averages else task.config.hard_private
        found = tie_heavier(task, start, private) or found
    return found, hard


def tie_heavier(task: MergeTask, start: Start, private: float) -> JointState | None:
    """All sets tied but in the lightest layers, this fraction of the bytes; None where no layer is so light."""
    light = light_layers(task, private)
    tie_others = partial(_tie, task, start, task.plan, light)
    return task.checkpoint.step(Step.TIED_WITHOUT_LIGHT_LAYERS, tie_others) if any(light.values()) else None


def train_kind(task: MergeTask, kind: TrainingKind, found: JointState, start: Start, hard: bool) -> JointState:
    """One training, unless all queries hold or not even one epoch fits the budget."""
    ctx, cache, plan = task.ctx, task.checkpoint, found.merged.plan
    frozen = kind is TrainingKind.DONOR_FROZEN
    intact = intact_queries(plan, start) if frozen else set[str]()
    queries = [query for query in sorted(found.ratios) if query not in intact]
    if not queries or (all_met(found.ratios, task.required) and _is_confirmed(task, found.merged, kind.value, "0")):
        return found
    asked = training_recipe(task, kind, hard)
    if start.averages:
        asked = replace(asked, rate=task.config.kin_rate * asked.rate)
    fit = partial(task.fit_recipe, queries, asked, task.recipe.frames_per_epoch)
    recipe = cache.step(Step.RECIPE, fit, kind.value)
    if recipe is None:
        saved = task.saved_bytes(found.best.plan)
        task.report_time_over(f"{TRAINING} ({kind.value})", task.saved_bytes(plan), saved)
        return found
    with cache.open_step(Step.TRAINED, kind.value) as step:
        if not step.done:
            models = ctx.models(queries, found.merged.states)
            tie(models, plan)
            if frozen:
                freeze_shared(models, plan)
            progress = cache.state(Step.PROGRESS)
            if not progress:
                progress.update(state=found, rows=[])
            try:
                for trained in train_epochs(ctx, models, recipe, cache):
                    ratios = {**found.ratios, **trained}
                    merged = Merged(plan, {**found.merged.states, **snapshots(models)})
                    state, row = _after_epoch(task, progress["state"], merged, ratios)
                    row = {"training": kind.value, "epoch": len(progress["rows"]) + 1, **row, "flops": ctx.flops.total}
                    may_end = all_met(ratios, task.required) and not (hard and kind is TrainingKind.JOINT)
                    done = may_end and _is_confirmed(task, merged, kind.value, str(row["epoch"]))
                    ctx.report(Event.ROUND, **row)
                    progress.update(state=state, rows=[*progress["rows"], row])
                    if done or task.budget.over:
                        break
            except Diverged as error:
                ctx.warn(f"the training diverged at {error}; the state before it stays")
            cache.log.extend(progress["rows"])
            step.value = progress["state"]
    return step.value


def _is_confirmed(task: MergeTask, merged: Merged, *parts: str) -> bool:
    """Whether training may end: no query that holds does so by luck."""
    return len(confirmed_queries(task, merged, merged.states, *parts)) == len(merged.states)


def training_recipe(task: MergeTask, kind: TrainingKind, hard: bool) -> Recipe:
    """How the queries are trained; a hard merge takes more epochs."""
    if kind is TrainingKind.JOINT:
        return replace(task.recipe, epochs=task.recipe.epochs * (task.config.hard_epochs if hard else 1))
    return task.private_recipe(1, seed=1)


def describe_reach(task: MergeTask) -> str:
    """What the budget reaches, stage by stage, each at its most FLOPs; empty without a budget."""
    left, speed, queries = task.budget.flops_left, task.budget.speed, sorted(task.ctx.judged)
    if not math.isfinite(left) or not queries:
        return ""
    frozen, joint = (training_flops(task.ctx, queries, training_recipe(task, kind, False)) for kind in TrainingKind)
    stages = {"an epoch against a frozen network": frozen, "a joint training": joint,
              "repairs of all queries": max_repair_flops(task)}  # fmt: skip
    totals = dict(zip(stages, itertools.accumulate(stages.values()), strict=True))
    reached = join_names([name for name, total in totals.items() if total <= left]) or "no training"
    whole = totals["repairs of all queries"]
    minutes = f", about {math.ceil(whole / speed / 60)} min here" if math.isfinite(speed) else ""
    return f"its {left:.1e} FLOPs reach {reached}; all stages take up to {whole:.1e}{minutes}"


def max_training_flops(task: MergeTask) -> float:
    """FLOPs of a whole hard joint training with repairs, within the budget."""
    queries = sorted(task.plan.queries() or task.ctx.judged)
    flops = sum(training_flops(task.ctx, queries, training_recipe(task, kind, True)) for kind in TrainingKind)
    return min(flops + max_repair_flops(task), task.budget.flops_left)


def light_layers(task: MergeTask, fraction: float) -> dict[str, list[str]]:
    """Query -> its lightest shareable layers, this fraction of its shareable bytes; never all that a query shares."""
    found = dict[str, list[str]]()
    for query in sorted(task.plan.queries()):
        mine = {path for members in task.plan.shared for name, path in members if name == query}
        layers = [layer for layer in task.ctx.layers if layer.query == query and layer.path in mine]
        left = fraction * sum(layer.bytes for layer in layers)
        found[query] = []
        for layer in sorted(layers, key=lambda layer: layer.bytes):
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
    foreign = {query for members in plan.shared for query, _ in members if query != set_donor(members, start.donors)[0]}
    return plan.queries() - foreign


def _tie(
    task: MergeTask, start: Start, plan: SharingPlan, private: Mapping[str, Sequence[str]] | None = None
) -> JointState:
    plan = plan_without(plan, private or {})
    queries, states = sorted(plan.queries()), start.initialise(plan)
    models, ratios = tie_and_evaluate(task.ctx, task.checkpoint, plan, queries, states)
    states = snapshots(models)
    best = satisfying_subset(plan, states, ratios, task.required)
    hard = objective(ratios, task.required) < task.config.hard_start
    donors = set(task.ctx.networks.values())
    network = next(iter(donors)) if len(donors) == 1 and plan.queries() <= task.ctx.networks.keys() | donors else None
    row = {"ratios": ratios, "network": network, "averages": start.averages, "hard": hard}
    private_row = {"private_layers": private} if private else {}
    task.report(Event.START, **row, saved_bytes=task.saved_bytes(best.plan), **private_row)
    return JointState(Merged(plan, states), ratios, best)


def _after_epoch(
    task: MergeTask, state: JointState, merged: Merged, ratios: Mapping[str, float]
) -> tuple[JointState, Row]:
    """The state with this epoch's candidate, if it is better, and the log row of the epoch."""
    candidate = satisfying_subset(merged.plan, merged.states, ratios, task.required)
    saved = task.saved_bytes(candidate.plan)
    best = candidate if saved > task.saved_bytes(state.best.plan) else state.best
    if not state.trained or objective(ratios, task.required) >= objective(state.ratios, task.required):
        state = JointState(merged, ratios, best, True)
    else:
        state = replace(state, best=best)
    return state, {"ratios": dict(ratios), "met": queries_at_target(ratios, task.required), "saved_bytes": saved}
