"""Our method: tie every group at once, retrain all models together by distillation, and repair only what suffers.

GEMEL adds one group after the other and gives a group up when a model fails; here the merge starts at the ceiling,
one annealed training brings nearly all queries back, and a query that stays below its target is repaired narrowly
(merger.repair) while nothing that others share is touched.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from merger.account import LEAVES, Rows, Trial, all_at_once
from merger.attempt import train_while
from merger.beyond import beyond
from merger.bounds import Bounds
from merger.checkpoint import Checkpoint
from merger.merit import all_met, merit, met
from merger.method import MergeOptions, method
from merger.repair import train_private
from merger.repairs import repair_all
from merger.similarity import forecast
from merger.standing import judge_all, training_flops
from merger.start import choose_start
from merger.training import Diverged, Recipe
from merger.workbench import Merged, State, Workbench, snapshot
from models.groups import groups
from models.layers import model_bytes
from models.likeness import cosine_likeness
from models.plan import SharingPlan, tie

SPRINTS = (0.75, 2, 4)
"""The joint training goes in sprints, each annealed to its end: epochs, as parts of those a search gives an attempt."""
FAR = 0.9
"""Where a query is below this part of what is required after the trials, the first sprint is left out: most of what is
won comes while the rate falls, and a hard merge wants one long fall."""
LOST = 0.85
"""A query that is below this part of what is required after a sprint leaves before the next one."""
RATES = (5e-4, 2e-4, 1e-3)
NEAR = 0.95
"""A query that reaches this part of what is required may mend itself by its private parts alone."""
JOINT = 0.9
"""The part of the time or work that the joint training may use up; the rest is kept for repairs."""
FEATURES = 1.0
"""What the features before the heads weigh beside the outputs."""


def _sets_tried(bench: Workbench, options: MergeOptions, log: Rows, work: float) -> list[Trial]:
    return all_at_once(whole_plan(bench, options).shared, log, options.required(bench), work)


@method("wide", _sets_tried)
def wide(bench: Workbench, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
    """Tie all, choose the start, train jointly, repair; a query that nothing helps gets its original back.

    With `beyond`, on from there past the ceiling.
    """
    plan = whole_plan(bench, options)
    originals = {query: snapshot(model) for query, model in bench.originals.items()}
    recipe = replace(options.recipe, seed=bench.seed, features=options.recipe.features or FEATURES)
    required = {query: bench.required(query, options.margin) for query in bench.queries}
    bounds = Bounds.of(bench, options, checkpoint)
    if not plan.shared:
        bench.progress("warning", text="no two models have a layer in common that saves enough: nothing is shared")
        merged = Merged(plan, originals)
        return beyond(bench, merged, recipe, required, checkpoint, bounds) if options.beyond else merged
    planned = bounds.part(JOINT)
    end = replace(planned, most_work=bounds.most_work)
    joint = _Joint(bench, plan, recipe, required, checkpoint, planned, end)
    plan, found, recipe = joint.run(options.choose_rate)
    merged = Merged(plan, {**originals, **found["states"]})
    ratios, alone = found["ratios"], found.get("alone", ())
    merged, rows = repair_all(bench, merged, ratios, recipe, required, checkpoint, bounds, alone=alone)
    for row in rows:
        checkpoint.note(row)
    return beyond(bench, merged, recipe, required, checkpoint, bounds) if options.beyond else merged


def whole_plan(bench: Workbench, options: MergeOptions) -> SharingPlan:
    """Every group of the wide signature that saves enough, repeated layers paired by the likeness of their weights."""
    total = sum(model_bytes(query) for query in bench.queries.values())
    likeness = cosine_likeness({query: model.state_dict() for query, model in bench.originals.items()})
    found = groups(bench.layers, "wide", likeness=likeness)
    return SharingPlan.of(group for group in found if group.saved_bytes >= options.min_saving * total)


@dataclass(frozen=True)
class _Joint:
    """The training of all models that share, from the best start until all reach what is `required`.

    Whoever stays far off leaves between sprints. Sprints are planned within `bounds`. No epoch begins past the `end`,
    but the first: the work of a sprint in which eased queries had to come back may be more than was planned.
    """

    bench: Workbench
    plan: SharingPlan
    recipe: Recipe
    required: Mapping[str, float]
    checkpoint: Checkpoint
    bounds: Bounds
    end: Bounds

    def run(self, choose_rate: bool) -> tuple[SharingPlan, dict[str, Any], Recipe]:
        """The plan with those that are left, their best `states` and `ratios` on val, the recipe with its rate."""
        found = self.checkpoint.step("start", self._start)
        self.checkpoint.note(found["forecast"])
        if choose_rate:
            found = self.checkpoint.step("trials", partial(self._trials, found))
        recipe, joint = replace(self.recipe, rate=found["rate"]), self
        sprints = SPRINTS[1:] if self._near(found) < FAR else SPRINTS
        for number, part in enumerate(sprints, 1):
            eased = met(found["ratios"], self.required) if number > 1 else []
            epochs = joint._epochs(part * recipe.epochs, eased)
            if all_met(found["ratios"], self.required) or self.bounds.over or not epochs:
                break
            seed = self.bench.seed * len(SPRINTS) + number
            sprint = replace(recipe, epochs=epochs, seed=seed, rate=recipe.rate / 2 ** (number - 1))
            found = self.checkpoint.step(f"sprint {number}", partial(joint._sprint, found, sprint, number > 1))
            for row in found["rows"]:
                self.checkpoint.note({"sprint": number, **row})
            found = self.checkpoint.step(f"alone {number}", partial(joint._alone, found, recipe))
            for row in found["rows"]:
                self.checkpoint.note({"sprint": number, **row})
            joint, found = joint._without_lost(found, number)
        return joint.plan, found, recipe

    def _near(self, found: Mapping[str, Any]) -> float:
        """The part of what is required that the query furthest from it reaches."""
        return min(ratio / self.required[query] for query, ratio in found["ratios"].items())

    def _epochs(self, wanted: float, eased: Collection[str]) -> int:
        """So many epochs, or as many as there is work for: a sprint is annealed to its end, or not begun."""
        one = training_flops(self.bench, self._queries(), replace(self.recipe, epochs=1), eased)
        return int(min(max(1, round(wanted)), self.bounds.work_left / one)) if self.plan.shared else 0

    def _without_lost(self, found: dict[str, Any], sprint: int) -> tuple[_Joint, dict[str, Any]]:
        """The training of those that are left when whoever is far off leaves, and what was found of them."""
        plan = self.plan
        for query, ratio in found["ratios"].items():
            if ratio < LOST * self.required[query]:
                plan = plan.without(query)
                row = {"query": query, "repair": LEAVES, "after": f"sprint {sprint}", "ratio": ratio,
                       "required": self.required[query], "work": self.bench.work.total}  # fmt: skip
                self.bench.progress("repair", **row)
                self.checkpoint.note(row)
        joint = replace(self, plan=plan)
        left = {key: {query: found[key][query] for query in joint._queries()} for key in ("states", "ratios")}
        return joint, {**found, **left}

    def _start(self) -> dict[str, Any]:
        """The best start, tied, with its norms measured again: what is found before anything is trained."""
        forecast_row = self._forecast()
        states = choose_start(self.bench, self.plan, self.checkpoint)
        models = self.bench.tied(self.plan, self._queries(), states, self.checkpoint)
        ratios = judge_all(self.bench, self.checkpoint, "judged", models, self.plan)
        return {"states": _states(models), "ratios": ratios, "rate": self.recipe.rate, "forecast": forecast_row}

    def _forecast(self) -> dict[str, Any]:
        """The log's row of how alike the members of each set are, those least alike first."""
        likeness = self.checkpoint.step("forecast", partial(forecast, self.bench, self.plan, self.checkpoint))
        rows = [{"set": [list(member) for member in self.plan.shared[i]], "likeness": x} for i, x in likeness.items()]
        rows.sort(key=lambda row: row["likeness"])
        if rows:
            least, median, most = (rows[place]["likeness"] for place in (0, len(rows) // 2, -1))
            self.bench.progress("forecast", sets=len(rows), least=least, median=median, most=most)
        return {"forecast": rows, "work": self.bench.work.total}

    def _trials(self, start: Mapping[str, Any]) -> dict[str, Any]:
        """What half an epoch makes of the start at a good rate; the merge goes on from there.

        The first rate that brings any of it back is taken, else the best of all: half an epoch flatters a low rate, and
        the work of a trial is worth more in training.
        """
        frames = math.ceil(self.recipe.frames_per_epoch / 2)
        best = self.checkpoint.part("best of trials")
        for rate in RATES:
            if rate in best.get("tried", ()) or best.get("reached", -1.0) > 0:
                continue
            short = replace(self.recipe, rate=rate, epochs=1, frames_per_epoch=frames)
            found = self.checkpoint.step(f"rate {rate:g}", partial(self._sprint, start, short))
            reached = _regained(start["ratios"], found["ratios"])
            self.bench.progress("rate", rate=rate, epochs=0.5, regained=reached)
            if reached > best.get("reached", -1.0):
                best.update({**found, "rate": rate, "reached": reached})
            best["tried"] = [*best.get("tried", ()), rate]
            self.checkpoint.forget(f"rate {rate:g}")
        return dict(best)

    def _alone(self, found: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
        """Before all models train again for the sake of a few: what the private parts of those few can do alone.

        The one furthest below goes first, for where it fails all train again anyhow.
        """
        states, ratios, rows = dict(found["states"]), dict(found["ratios"]), []
        recipe = replace(recipe, epochs=max(1, recipe.epochs // 2))
        merged = Merged(self.plan, states)
        below = sorted((ratio / self.required[q], q) for q, ratio in ratios.items() if ratio < self.required[q])
        for near, query in below:
            if near < NEAR or self.bounds.over:
                break
            required = self.required[query]
            train = partial(train_private, self.bench, merged, self.plan, query, recipe, required, self.checkpoint)
            tried = self.checkpoint.step(query, train)
            states[query], ratios[query] = tried["state"], tried["ratio"]
            row = {"alone": query, "ratio": tried["ratio"], "required": required, "epochs": tried["epochs"]}
            self.bench.progress("alone", query=query, ratio=tried["ratio"], required=required)
            rows.append({**row, "work": self.bench.work.total})
            if tried["ratio"] < required:
                break
        tried = [row["alone"] for row in rows]
        return {**found, "states": states, "ratios": ratios, "rows": rows, "alone": tried}

    def _sprint(self, found: Mapping[str, Any], recipe: Recipe, easing: bool = False) -> dict[str, Any]:
        """One annealed training; ends early when all reach what is required. The best state seen, and log rows."""
        models = self.bench.models(self._queries(), found["states"], self.plan)
        tie(models, self.plan)
        best: dict[str, Any] = self.checkpoint.part("best")
        if not best:
            rows = [self._row(0, found["ratios"])]
            best.update(ratios=found["ratios"], states=found["states"], rows=rows, rate=recipe.rate)
        first = (recipe.epochs + 1) // 2  # while the rate is high, to judge is work for nothing
        required = self.required if easing else None
        epochs = train_while(
            self.bench, models, recipe, self.checkpoint, judged_from=first, begins=found["ratios"], required=required
        )
        try:
            while not all_met(best["ratios"], self.required):
                if self.end.over and len(best["rows"]) > 1:
                    self.bench.progress("warning", text="the joint training is out of time")
                    break
                ratios = next(epochs, None)
                if ratios is None:
                    break
                rows = [*best["rows"], self._row(first + len(best["rows"]) - 1, ratios)]
                better = merit(ratios, self.required) > merit(best["ratios"], self.required)
                best.update({"ratios": ratios, "states": _states(models)} if better else {}, rows=rows)
        except Diverged as error:
            self.bench.progress("warning", text=f"the loss of {error} is no number any more; back to the best epoch")
        return dict(best)

    def _queries(self) -> list[str]:
        return sorted(self.plan.queries())

    def _row(self, epoch: int, ratios: Mapping[str, float]) -> dict[str, Any]:
        saved, holding = self.plan, met(ratios, self.required)
        for query in set(ratios) - set(holding):
            saved = saved.without(query)
        return {
            "epoch": epoch, "ratios": dict(ratios), "met": holding, "saved_bytes": saved.saved_bytes(self.bench.layers),
            "work": self.bench.work.total,
        }  # fmt: skip


def _regained(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """The part of what was lost, on the sum of the queries, that training brought back."""
    lost = sum(max(0.0, 1 - ratio) for ratio in before.values())
    return 1 - sum(max(0.0, 1 - ratio) for ratio in after.values()) / lost if lost else 1.0


def _states(models: Mapping[str, Any]) -> dict[str, State]:
    return {query: snapshot(model) for query, model in models.items()}
