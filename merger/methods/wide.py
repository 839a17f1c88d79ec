"""Our method: tie every group at once, retrain all models together by distillation, and repair only what suffers.

GEMEL adds one group after the other and gives a group up when a model fails; here the merge starts at the ceiling,
one annealed training brings nearly all queries back, and a query that stays below its target is repaired narrowly
(merger.repair) while nothing that others share is touched. Of a hard merge a query of which next to nothing is left at
the start waits: the others are merged and accepted without it, and then it joins them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from merger.account import JOINING, LEAVES, Rows, Trial, all_at_once
from merger.attempt import train_while
from merger.beyond import beyond, stored_bytes
from merger.bounds import Bounds
from merger.checkpoint import Checkpoint
from merger.merit import all_met, merit, met
from merger.method import MergeOptions, method
from merger.repair import train_private
from merger.repairs import repair_all
from merger.similarity import forecast
from merger.standing import judge_all, training_flops
from merger.start import Start, choose_start
from merger.training import Diverged, Recipe
from merger.workbench import Merged, State, Workbench, snapshot
from models.groups import groups
from models.layers import model_bytes
from models.likeness import cosine_likeness
from models.plan import SharingPlan, tie

SPRINTS = (0.75, 2, 4)
"""The joint training goes in sprints, each annealed to its end: epochs, as parts of those a search gives an attempt."""
FAR = 0.9
"""Where a query is below this part of what is required after the trials, or another waits, there is no short sprint:
most of what is won comes while the rate falls, and a hard merge wants one long fall."""
LOST = 0.85
"""A query that is below this part of what is required after a sprint leaves before the next one."""
RATES = (5e-4, 2e-4, 1e-3)
NEAR = 0.95
"""A query that reaches this part of what is required may mend itself by its private parts alone."""
JOINT = 0.9
"""The part of the time or work that the joint training may use up; the rest is kept for repairs."""
FIRST = 0.5
"""Of that, what those may use up who are merged before others join them."""
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
    trained = joint.run(options.choose_rate)
    merged = Merged(trained.plan, {**originals, **trained.states})
    merged, rows = repair_all(
        bench, merged, trained.ratios, trained.recipe, required, checkpoint, bounds, alone=trained.alone
    )
    for row in rows:
        checkpoint.note(row)
    accepted = trained.accepted
    lost = stored_bytes(bench, merged.plan) - stored_bytes(bench, accepted.plan) if accepted.plan.shared else 0
    if lost > 0:
        bench.progress("warning", text="with all of them less is saved than without those who waited: back to that")
        saved = accepted.plan.saved_bytes(bench.layers)
        checkpoint.note({"accepted_bytes": saved, "instead_of_bytes": saved - lost, "work": bench.work.total})
        for query in sorted(plan.queries() - accepted.plan.queries()):
            why = {"after": JOINING, "ratio": trained.ratios.get(query), "required": required[query]}
            checkpoint.note({"query": query, "repair": LEAVES, **why, "work": bench.work.total})
        merged = Merged(accepted.plan, {**originals, **accepted.states})
    return beyond(bench, merged, trained.recipe, required, checkpoint, bounds) if options.beyond else merged


def whole_plan(bench: Workbench, options: MergeOptions) -> SharingPlan:
    """Every group of the wide signature that saves enough, repeated layers paired by the likeness of their weights."""
    total = sum(model_bytes(query) for query in bench.queries.values())
    likeness = cosine_likeness({query: model.state_dict() for query, model in bench.originals.items()})
    found = groups(bench.layers, "wide", likeness=likeness)
    return SharingPlan.of(group for group in found if group.saved_bytes >= options.min_saving * total)


@dataclass(frozen=True)
class _Trained:
    """What the joint training came to: those that still share, their best states and ratios on val, and its recipe.

    `alone` are those whose private parts were trained by themselves last, `sprints` how many there were. `accepted` is
    what held before those who waited joined, without the others' originals.
    """

    plan: SharingPlan
    states: Mapping[str, State]
    ratios: Mapping[str, float]
    recipe: Recipe
    alone: Collection[str]
    sprints: int
    accepted: Merged = field(default_factory=lambda: Merged(SharingPlan(), {}))


@dataclass(frozen=True)
class _Joint:
    """The training of all models that share, from the best start until all reach what is `required`.

    Whoever stays far off leaves between sprints, or, where `all_join` afterwards, waits with those who are not in the
    plan. Sprints are planned within `bounds`. No epoch begins past the `end`, but the first: the work of a sprint in
    which eased queries had to come back may be more than was planned.
    """

    bench: Workbench
    plan: SharingPlan
    recipe: Recipe
    required: Mapping[str, float]
    checkpoint: Checkpoint
    bounds: Bounds
    end: Bounds
    all_join: bool = False

    def run(self, choose_rate: bool) -> _Trained:
        """Train all together, or, where some wait, the others and then all.

        Then there are no trials: half an epoch makes nothing better that was solved, whatever the rate.
        """
        start = self.checkpoint.step("start", self._start)
        self.checkpoint.note(start["forecast"])
        if not start["waits"]:
            found = self.checkpoint.step("trials", partial(self._trials, start)) if choose_rate else start
            rate = found.get("rate", self.recipe.rate)
            return replace(self, recipe=replace(self.recipe, rate=rate))._sprints(found)
        for query, error in start["waits"].items():
            row = {"waits": query, "after": "the start", "lost": error, "required": self.required[query],
                   "work": self.bench.work.total}  # fmt: skip
            self.bench.progress("waits", **row)
            self.checkpoint.note(row)
        plan, bounds = _without(self.plan, start["waits"]), self.bounds.part(FIRST)
        others = replace(self, plan=plan, bounds=bounds, all_join=True)
        found = self.checkpoint.step("start of the others", partial(others._begun, start["apart"]))
        first = others._sprints(found)
        accepted = _without(first.plan, set(first.ratios) - set(met(first.ratios, self.required)))
        saved = accepted.saved_bytes(self.bench.layers)
        self.bench.progress("accepted", saved_bytes=saved, ratios=first.ratios)
        self.checkpoint.note({"accepted_bytes": saved, "work": self.bench.work.total})
        apart = {**start["apart"], **first.states}
        found = self.checkpoint.step("start of all", partial(self._begun, apart))
        trained = self._sprints(found, first.sprints)
        states = {query: first.states[query] for query in accepted.queries()}
        return replace(trained, accepted=Merged(accepted, states))

    def _sprints(self, found: dict[str, Any], before: int = 0) -> _Trained:
        """The sprints until all reach what is required, after so many of those who were merged before all joined."""
        joint, number = self, before
        hard = self.all_join or self._near(found) < FAR
        for fallen, part in enumerate(SPRINTS[1:] if hard else SPRINTS):
            eased = met(found["ratios"], self.required) if number else []
            epochs = joint._epochs(part * self.recipe.epochs, eased)
            if all_met(found["ratios"], self.required) or self.bounds.over or not epochs:
                break
            number += 1
            seed = self.bench.seed * len(SPRINTS) + number
            sprint = replace(self.recipe, epochs=epochs, seed=seed, rate=self.recipe.rate / 2**fallen)
            found = self.checkpoint.step(f"sprint {number}", partial(joint._sprint, found, sprint, number > 1))
            for row in found["rows"]:
                self.checkpoint.note({"sprint": number, **row})
            found = self.checkpoint.step(f"alone {number}", partial(joint._alone, found))
            for row in found["rows"]:
                self.checkpoint.note({"sprint": number, **row})
            joint, found = joint._without_lost(found, number)
        alone = found.get("alone", ())
        return _Trained(joint.plan, found["states"], found["ratios"], self.recipe, alone, number)

    def _near(self, found: Mapping[str, Any]) -> float:
        """The part of what is required that the query furthest from it reaches."""
        return min((ratio / self.required[query] for query, ratio in found["ratios"].items()), default=1.0)

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
                what = {"waits": query} if self.all_join else {"query": query, "repair": LEAVES}
                row = {**what, "after": f"sprint {sprint}", "ratio": ratio, "required": self.required[query],
                       "work": self.bench.work.total}  # fmt: skip
                self.bench.progress("waits" if self.all_join else "repair", **row)
                self.checkpoint.note(row)
        joint = replace(self, plan=plan)
        left = {key: {query: found[key][query] for query in joint._queries()} for key in ("states", "ratios")}
        return joint, {**found, **left}

    def _start(self) -> dict[str, Any]:
        """What is found before anything is trained: the forecast, the best start, and who waits, with what they need.

        Nobody waits where nothing would be left to share.
        """
        forecast_row = self._forecast()
        start = choose_start(self.bench, self.plan, self.checkpoint)
        if start.far_behind and _without(self.plan, start.far_behind).shared:
            return {"forecast": forecast_row, "waits": start.far_behind, "apart": start.apart}
        return {"forecast": forecast_row, "waits": {}, **self._tied(start)}

    def _begun(self, apart: Mapping[str, State]) -> dict[str, Any]:
        """The best start of models that have their channels in one order, tied."""
        return self._tied(choose_start(self.bench, self.plan, self.checkpoint, apart))

    def _tied(self, start: Start) -> dict[str, Any]:
        """The models of a start, tied, with their norms measured again, and their ratios on val."""
        models = self.bench.tied(self.plan, self._queries(), start.states, self.checkpoint)
        ratios = judge_all(self.bench, self.checkpoint, "judged", models, self.plan)
        return {"states": _states(models), "ratios": ratios}

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

    def _alone(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Before all models train again for the sake of a few: what the private parts of those few can do alone.

        The one furthest below goes first, for where it fails all train again anyhow.
        """
        states, ratios, rows = dict(found["states"]), dict(found["ratios"]), []
        recipe = replace(self.recipe, epochs=max(1, self.recipe.epochs // 2))
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
        holding = met(ratios, self.required)
        saved = _without(self.plan, set(ratios) - set(holding)).saved_bytes(self.bench.layers)
        return {
            "epoch": epoch, "ratios": dict(ratios), "met": holding, "saved_bytes": saved,
            "work": self.bench.work.total,
        }  # fmt: skip


def _without(plan: SharingPlan, queries: Collection[str]) -> SharingPlan:
    """The plan with these out of all sets."""
    for query in sorted(queries):
        plan = plan.without(query)
    return plan


def _regained(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """The part of what was lost, on the sum of the queries, that training brought back."""
    lost = sum(max(0.0, 1 - ratio) for ratio in before.values())
    return 1 - sum(max(0.0, 1 - ratio) for ratio in after.values()) / lost if lost else 1.0


def _states(models: Mapping[str, Any]) -> dict[str, State]:
    return {query: snapshot(model) for query, model in models.items()}
