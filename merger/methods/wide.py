"""Our method: tie every group at once, retrain all models together by distillation, and repair only what suffers.

GEMEL adds one group after the other and gives a group up when a model fails; here the merge starts at the ceiling,
one annealed training brings nearly all queries back, and a query that stays below its target is repaired narrowly
(merger.repair) while nothing that others share is touched.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from merger.attempt import train_while
from merger.checkpoint import Checkpoint
from merger.method import MergeOptions, method
from merger.rate import RATES
from merger.repair import repair
from merger.start import choose_start
from merger.training import Diverged, Recipe
from merger.workbench import Merged, State, Workbench, snapshot
from models.groups import groups
from models.layers import model_bytes
from models.likeness import cosine_likeness
from models.plan import SharingPlan

SPRINTS = (0.5, 1, 2)
"""The joint training goes in sprints, each annealed to its end: epochs, as parts of those a search gives an attempt."""
FEATURES = 1.0
"""What the features before the heads weigh beside the outputs."""


@method("wide")
def wide(bench: Workbench, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
    """Tie all, choose the start, train jointly, repair; a query that nothing helps gets its original back."""
    plan = whole_plan(bench, options)
    originals = {query: snapshot(model) for query, model in bench.originals.items()}
    if not plan.shared:
        bench.progress("warning", text="no two models have a layer in common that saves enough: nothing is shared")
        return Merged(plan, originals)
    required = {query: bench.required(query, options.margin) for query in bench.queries}
    started = time.monotonic() - checkpoint.seconds
    states = checkpoint.step("start", lambda: choose_start(bench, plan, checkpoint))
    recipe = replace(options.recipe, seed=bench.seed, features=options.recipe.features or FEATURES)
    found: dict[str, Any] = {"states": states, "ratios": {}, "rows": []}
    if options.choose_rate:
        found = checkpoint.step("trials", partial(_trials, bench, plan, states, recipe, required, checkpoint))
        recipe = replace(recipe, rate=found["rate"])
    for index, part in enumerate(SPRINTS):
        if found["ratios"] and _met(found["ratios"], required):
            break
        sprint = replace(recipe, epochs=max(1, round(part * recipe.epochs)), seed=bench.seed * len(SPRINTS) + index)
        run = partial(_sprint, bench, plan, found["states"], sprint, required, checkpoint)
        found = checkpoint.step(f"sprint {index + 1}", run)
        for row in found["rows"]:
            checkpoint.note({"sprint": index + 1, **row})
        if options.max_minutes is not None and time.monotonic() - started > 60 * options.max_minutes:
            bench.progress("warning", text=f"the joint training stopped after {options.max_minutes:g} minutes")
            break
    ratios: Mapping[str, float] = found["ratios"]
    merged = Merged(plan, {**originals, **found["states"]})
    for query in sorted(ratios, key=lambda query: ratios[query] - required[query]):
        if ratios[query] < required[query]:
            merged, rows = repair(bench, merged, query, recipe, required[query], checkpoint)
            for row in rows:
                checkpoint.note(row)
    return merged


def whole_plan(bench: Workbench, options: MergeOptions) -> SharingPlan:
    """Every group of the wide signature that saves enough, repeated layers paired by the likeness of their weights."""
    total = sum(model_bytes(query) for query in bench.queries.values())
    likeness = cosine_likeness({query: model.state_dict() for query, model in bench.originals.items()})
    found = groups(bench.layers, "wide", likeness=likeness)
    return SharingPlan.of(group for group in found if group.saved_bytes >= options.min_saving * total)


def _sharing(plan: SharingPlan) -> list[str]:
    return sorted({query for members in plan.shared for query, _ in members})


def _trials(
    bench: Workbench,
    plan: SharingPlan,
    states: Mapping[str, State],
    recipe: Recipe,
    required: Mapping[str, float],
    checkpoint: Checkpoint,
) -> dict[str, Any]:
    """What half an epoch makes of the start at the best of the rates; the merge goes on from there."""
    short = replace(recipe, epochs=1, frames_per_epoch=math.ceil(recipe.frames_per_epoch / 2))
    best = checkpoint.part("best of trials")
    for rate in RATES:
        if rate in best.get("tried", ()):
            continue
        sprint = partial(_sprint, bench, plan, states, replace(short, rate=rate), required, checkpoint)
        found = checkpoint.step(f"rate {rate:g}", sprint)
        reached = sum(found["ratios"].values()) / len(found["ratios"])
        bench.progress("rate", rate=rate, epochs=0.5, ratio=reached)
        if reached > best.get("reached", -1.0):
            best.update({**found, "rate": rate, "reached": reached})
        best["tried"] = [*best.get("tried", ()), rate]
        checkpoint.forget(f"rate {rate:g}")
    return dict(best)


def _sprint(
    bench: Workbench,
    plan: SharingPlan,
    states: Mapping[str, State],
    recipe: Recipe,
    required: Mapping[str, float],
    checkpoint: Checkpoint,
) -> dict[str, Any]:
    """Train all models that share until they reach `required`; the best state seen, its ratios, and log rows."""
    models = bench.tied(plan, _sharing(plan), states, checkpoint)
    best: dict[str, Any] = checkpoint.part("best")
    if not best:
        ratios = {query: bench.ratio(query, model) for query, model in models.items()}
        best.update(ratios=ratios, states=_states(models), rows=[_row(bench, plan, 0, ratios)])
    epochs = train_while(bench, models, recipe, checkpoint)
    try:
        while not _met(best["ratios"], required):
            ratios = next(epochs, None)
            if ratios is None:
                break
            rows = [*best["rows"], _row(bench, plan, len(best["rows"]), ratios)]
            better = _merit(ratios, required) > _merit(best["ratios"], required)
            best.update({"ratios": ratios, "states": _states(models)} if better else {}, rows=rows)
    except Diverged as error:
        bench.progress("warning", text=f"the loss of {error} is no number any more; going on from the best epoch")
    return dict(best)


def _met(ratios: Mapping[str, float], required: Mapping[str, float]) -> bool:
    return all(ratio >= required[query] for query, ratio in ratios.items())


def _merit(ratios: Mapping[str, float], required: Mapping[str, float]) -> tuple[int, float]:
    """How good a state is: the queries that reach what is required, then how near the others come."""
    shares = [min(1.0, ratio / required[query]) for query, ratio in ratios.items()]
    return sum(share >= 1 for share in shares), sum(shares)


def _states(models: Mapping[str, Any]) -> dict[str, State]:
    return {query: snapshot(model) for query, model in models.items()}


def _row(bench: Workbench, plan: SharingPlan, epoch: int, ratios: Mapping[str, float]) -> dict[str, Any]:
    saved = plan.saved_bytes(bench.layers)
    return {"epoch": epoch, "ratios": dict(ratios), "saved_bytes": saved, "work": bench.work.total}
