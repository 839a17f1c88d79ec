"""The joint training of `wide`: sprints, each annealed to its end, until every query has what is required."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from merger.checkpoint import Checkpoint, State, snapshots
from merger.core.attempt import Subsampling, train_while
from merger.core.budget import Budget
from merger.core.context import MergeContext
from merger.core.merged import Merged
from merger.core.merit import all_met, held, merit, met
from merger.core.snapshot import training_flops
from merger.mending.private import alone, train_private
from merger.methods.deep import Deep
from merger.outcomes import LEAVES
from merger.start.alignment import by_shared_bytes
from merger.training.loop import Diverged
from merger.training.recipe import Recipe
from models.sharing.plan import SharingPlan, tie

SPRINTS = (0.75, 2, 4)
"""The epochs of sprints, as parts of those a search gives an attempt."""
HARD = 0.9
"""Where a query begins below this part of what is required, others wait or early layers are apart, there is one sprint,
as long as the second: most of what is won comes while the rate falls, a hard merge wants a long fall, and a second one
undoes it."""
NEARER = 1
"""It is only so long where the heaviest sets have trained before."""
LOST = 0.85
"""A query that is below this part of what is required after a sprint leaves before the next one."""
DEEP = 0.8
"""The part of the work that is left which those below may use up to take deep layers."""
NEAR = 0.95
"""A query that reaches this part of what is required may mend itself by its private parts alone."""


@dataclass(frozen=True)
class Trained:
    """What sprints came to: those that still share, their best states and ratios on val, and the recipe.

    `alone` are those whose private parts were trained by themselves last, `sprints` how many there were. `won` is what
    saved most bytes, of all that was judged on the way, with every query that shares having what is required. `first`
    is what was trained before those who waited joined, where some did. `own` are the originals with their channels in
    the order of what was trained.
    """

    plan: SharingPlan
    states: Mapping[str, State]
    ratios: Mapping[str, float]
    recipe: Recipe
    alone: Collection[str]
    sprints: int
    won: Merged
    first: Trained | None = None
    own: Mapping[str, State] = field(default_factory=dict)


@dataclass(frozen=True)
class Sprints:
    """The training of all models that share, until all reach what is `required`.

    Whoever stays far off leaves between sprints, or waits where `lost_wait`, to be tried again when the others are
    merged; `others_wait` says that some do from the start. Whoever is below after the first sprint takes deep layers of
    those that are not, beginning as in `own`: that may be what is won. Sprints are planned within `bounds`. No epoch
    begins past the `end`, but the first: the work of a sprint in which subsampled queries had to come back may be
    more than was planned. The `whole` plan has early layers, too, where that of the training has none. The `pace` is
    the part of the rate at which sprints begin.
    """

    ctx: MergeContext
    plan: SharingPlan
    recipe: Recipe
    required: Mapping[str, float]
    checkpoint: Checkpoint
    budget: Budget
    end: Budget
    others_wait: bool = False
    lost_wait: bool = False
    own: Mapping[str, State] = field(default_factory=dict)
    whole: SharingPlan | None = None
    pace: float = 1.0

    def run(self, found: Mapping[str, Any], before: int = 0) -> Trained:
        """Go on from the states and ratios `found`, after so many sprints of those who were merged before all joined.

        Each sprint is half as fast as the one before it; a hard merge has one. What was `won` before is kept until more
        is.
        """
        now, number = self, before
        hard = self.others_wait or self.whole is not None or self._near(found) < HARD
        parts = (NEARER,) if self.pace < 1 else SPRINTS[1:2] if hard else SPRINTS
        for fallen, part in enumerate(parts):
            if all_met(found["ratios"], self.required):
                break
            subsampled = met(found["ratios"], self.required) if number else []
            plan = partial(now._epochs, part * self.recipe.epochs, subsampled, joined=bool(before) and hard)
            name = f"epochs of sprint {number + 1} of {len(now._queries())}"  # a merge that goes on keeps to its plan
            epochs = self.checkpoint.step(name, plan)
            if not epochs:
                break
            number, last = number + 1, part == parts[-1]
            seed = self.ctx.seed * len(SPRINTS) + number
            recipe = replace(self.recipe, epochs=epochs, seed=seed, rate=self.pace * self.recipe.rate / 2**fallen)
            found = self.checkpoint.step(f"sprint {number}", partial(now.sprint, found, recipe, number > 1))
            for row in found["rows"]:
                self.checkpoint.add_row({"sprint": number, **row})
            found = self.checkpoint.step(f"alone {number}", partial(now._alone, found, last))
            for row in found["rows"]:
                self.checkpoint.add_row({"sprint": number, **row})
            if fallen == 0:
                found = {**found, "won": now._with_deep_layers(found, number)}
            now, found = now._without_lost(found, number)
        won, alone_last = Merged.from_plain(now._won(found)), found.get("alone", ())
        return Trained(now.plan, found["states"], found["ratios"], self.recipe, alone_last, number, won, own=self.own)

    def took(self, name: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What comes of a run in which some take deep layers from those that stand; the log has rows of it."""
        found = self.checkpoint.step(name, lambda: self.ctx.run_on_rank0(run))
        for row in found["rows"]:
            self.checkpoint.add_row(row)
        return found

    def deep(self, budget: Budget, training: bool = True, fewest: bool = False) -> Deep:
        """How who shares takes deep layers within these bounds."""
        recipe = self.recipe if training else None
        return Deep(self.ctx, self.plan, self.required, self.checkpoint, budget, recipe, fewest)

    def _with_deep_layers(self, found: Mapping[str, Any], sprint: int) -> dict[str, Any]:
        """What is won (plain) once those who are below took deep layers from those who have what is required.

        Where nobody has, the nearest learns to stand: all that it has, for itself, until it does.
        """
        standing: list[str] = met(found["ratios"], self.required)
        takers = [query for query in by_shared_bytes(self.ctx, self.plan) if query in self.own.keys() - standing]
        name, budget = f"deep layers after sprint {sprint}", self.budget.fraction_of_rest(DEEP)
        if not takers or self.checkpoint.step(f"no {name}", lambda: self.budget.over):
            return self._won(found)
        states = {query: found["states"][query] for query in standing}
        if not standing:
            nearest = max(takers, key=lambda query: found["ratios"][query] / self.required[query])
            stand = partial(self.deep(budget).stand, nearest, takers, found["states"][nearest])
            alone = self.checkpoint.step(f"who gives {name}", lambda: self.ctx.run_on_rank0(stand))
            self.checkpoint.add_row(alone["row"])
            if alone["state"] is None:
                return self._won(found)
            states, takers = {nearest: alone["state"]}, [query for query in takers if query != nearest]
        run = partial(self.deep(budget).run, Merged(self.plan.without(*takers), states), self.own, takers)
        merged = Merged.from_plain(self.took(name, run)["merged"])
        sharing = {query: merged.states[query] for query in sorted(merged.plan.queries())}
        return self._more(Merged(merged.plan, sharing), found.get("won"))

    def max_flops(self) -> float:
        """About what all sprints take at most, and the trials of rates before them."""
        epochs = sum(SPRINTS) * self.recipe.epochs
        flops = training_flops(self.ctx, self._queries(), replace(self.recipe, epochs=max(1, round(epochs))))
        return min(flops, self.budget.flops_left)

    def sprint(self, found: Mapping[str, Any], recipe: Recipe, subsampling: bool = False) -> dict[str, Any]:
        """One annealed training; ends early when all reach what is required. The best state seen, and log rows."""
        models = self.ctx.models(self._queries(), found["states"], self.plan)
        tie(models, self.plan)
        best: dict[str, Any] = self.checkpoint.state("best")
        if not best:
            rows = [self._row(0, found["ratios"])]
            best.update(
                ratios=found["ratios"], states=found["states"], rows=rows, rate=recipe.rate, won=self._won(found)
            )
        first = (recipe.epochs + 1) // 2  # while the rate is high, to judge is work for nothing
        subsampled = Subsampling(found["ratios"], self.required) if subsampling else None
        epochs = train_while(
            self.ctx, models, recipe, self.checkpoint, self.plan, evaluate_from=first, subsampling=subsampled
        )
        try:
            while not all_met(best["ratios"], self.required):
                if self.end.over and len(best["rows"]) > 1:
                    self.ctx.progress("warning", text="the joint training is out of time")
                    break
                ratios = next(epochs, None)
                if ratios is None:
                    break
                rows = [*best["rows"], self._row(first + len(best["rows"]) - 1, ratios)]
                now = {"ratios": ratios, "states": snapshots(models)}
                better = merit(ratios, self.required) > merit(best["ratios"], self.required)
                best.update(now if better else {}, rows=rows, won=self._won({**now, "won": best["won"]}))
        except Diverged as error:
            self.ctx.progress("warning", text=f"the loss of {error} is no number any more; back to the best epoch")
        return dict(best)

    def _alone(self, found: Mapping[str, Any], last: bool) -> dict[str, Any]:
        """Before all models train again for the sake of a few: what the private parts of those few can do alone.

        The nearest goes first: the others can take deep layers of it once it has what is required. Where it fails all
        have to train again, unless this was the `last` sprint.
        """
        states, ratios, rows = dict(found["states"]), dict(found["ratios"]), []
        recipe = alone(self.recipe)
        below = [(ratio / self.required[q], q) for q, ratio in ratios.items() if ratio < self.required[q]]
        for near, query in sorted(below, key=lambda one: (-one[0], one[1])):
            if near < NEAR or self.budget.over:
                break
            required = self.required[query]
            train = partial(
                train_private, self.ctx, [states[query]], self.plan, query, recipe, required, self.checkpoint
            )
            tried = self.checkpoint.step(query, partial(self.ctx.once, train, query))
            states[query], ratios[query] = tried["state"], tried["ratio"]
            row = {"alone": query, "ratio": tried["ratio"], "required": required, "epochs": tried["epochs"]}
            self.ctx.progress("alone", query=query, ratio=tried["ratio"], required=required)
            rows.append({**row, "flops": self.ctx.flops.total})
            if tried["ratio"] < required and not last:
                break
        tried = [row["alone"] for row in rows]
        found = {**found, "states": states, "ratios": ratios, "rows": rows, "alone": tried}
        return {**found, "won": self._won(found)}

    def _without_lost(self, found: dict[str, Any], sprint: int) -> tuple[Sprints, dict[str, Any]]:
        """The training of those that are left when whoever is far off leaves, and what was found of them."""
        lost = {query: ratio for query, ratio in found["ratios"].items() if ratio < LOST * self.required[query]}
        for query, ratio in lost.items():
            what = {"waits": query} if self.lost_wait else {"query": query, "repair": LEAVES}
            row = {**what, "after": f"sprint {sprint}", "ratio": ratio, "required": self.required[query],
                   "flops": self.ctx.flops.total}  # fmt: skip
            self.ctx.progress("waits" if self.lost_wait else "repair", **row)
            self.checkpoint.add_row(row)
        left = replace(self, plan=self.plan.without(*lost))
        kept = {key: {query: found[key][query] for query in left._queries()} for key in ("states", "ratios")}
        return left, {**found, **kept}

    def _near(self, found: Mapping[str, Any]) -> float:
        """The part of what is required that the query furthest from it reaches."""
        return min(ratio / self.required[query] for query, ratio in found["ratios"].items())

    @property
    def may_begin(self) -> bool:
        """Whether there is work left for an epoch of all."""
        return self._epochs(1, ()) > 0

    def leaves_enough(self, trial: Recipe) -> bool:
        """Whether the work that is left is enough for a trial and the shortest sprint after it."""
        shortest = replace(self.recipe, epochs=max(1, round(SPRINTS[0] * self.recipe.epochs)))
        flops = sum(training_flops(self.ctx, self._queries(), recipe) for recipe in (trial, shortest))
        return flops <= self.budget.flops_left

    def _epochs(self, wanted: float, subsampled: Collection[str], joined: bool = False) -> int:
        """So many epochs, or as many as there is work for: a sprint is annealed to its end, or not begun.

        Where others have `joined`, who begin with next to nothing and want a long fall, up to twice as many, planned as
        though nobody was subsampled.
        """
        queries, one_epoch = self._queries(), replace(self.recipe, epochs=1)
        left = 0.0 if self.budget.over else self.budget.flops_left
        if not queries:
            return 0
        most = left / training_flops(self.ctx, queries, one_epoch, () if joined else subsampled)
        return int(min(max(1, round(2 * wanted if joined else wanted)), most))

    def _won(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """What holds of the states `found`, as plain values, or what was `won` before where that saves no less."""
        now = held(self.plan, found["states"], found["ratios"], self.required)
        return self._more(now, found.get("won"))

    def _more(self, now: Merged, before: dict[str, Any] | None) -> dict[str, Any]:
        """What saves more, as plain values."""
        saved = now.plan.saved_bytes(self.ctx.layers)
        if before is not None and Merged.from_plain(before).plan.saved_bytes(self.ctx.layers) >= saved:
            return before
        return now.to_plain()

    def _row(self, epoch: int, ratios: Mapping[str, float]) -> dict[str, Any]:
        holding = met(ratios, self.required)
        saved = self.plan.without(*(set(ratios) - set(holding))).saved_bytes(self.ctx.layers)
        return {
            "epoch": epoch, "ratios": dict(ratios), "met": holding, "saved_bytes": saved,
            "flops": self.ctx.flops.total,
        }  # fmt: skip

    def _queries(self) -> list[str]:
        return sorted(self.plan.queries())
