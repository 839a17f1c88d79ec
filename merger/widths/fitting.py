"""The fewest bits that the weights of a merge can be stored in, with the weights trained for them.

Models that are tied, directly or through others, are one part: what is stored of it is nobody else's business. Each
part is first stored as it was merged (merger.widths.search). Where that is not all in the fewest bits that were asked
for, its models train once more, by the merge's own training, with every weight rounded to these bits while gradients
are found (merger.widths.rounding). What then has to be widened again is widened. That is kept if it comes to fewer
bytes with every query having what it must; else they train on for one width more, until nothing is left to be saved,
and what there was before stays. A part of one model without merging is trained the same way, told by its own original.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from merger.bench.bounds import Bounds
from merger.bench.merged import Merged, snapshots
from merger.bench.pace import training_speed
from merger.bench.standing import training_flops
from merger.bench.workbench import Workbench
from merger.journal.steps import Journal
from merger.training.loop import Diverged, Recipe
from merger.widths.rounding import as_stored
from merger.widths.search import Search, most_judged, needed
from merger.widths.storing import Storage, Weight, tied_models, weights_of, widths_of
from models.parts.terms import BITS, Width

EPOCHS = 1
"""How long weights train for fewer bits, in the epochs that a search gives an attempt."""
FEATURES = 1.0
"""What the features before the heads weigh beside the outputs."""
PRIVATE = 1.0
"""The part of the rate of what is private: it is rounded like what is shared, and has as far to go."""


def fit_widths(
    bench: Workbench,
    merged: Merged,
    width: Width,
    required: Mapping[str, float],
    journal: Journal,
    bounds: Bounds,
    recipe: Recipe | None,
) -> dict[str, Any]:
    """What is merged, its weights trained where that pays, and its `storage` for the `width` asked for; log `rows`.

    All of it plain. Without a `recipe` nothing trains, nor once the bounds are over; then all weights of a query that
    falls short are widened at once.
    """
    parts = []
    for part in parts_of(merged):
        fitting = _Fitting(bench, part, width, required, journal, bounds, recipe)
        parts.append(journal.step(f"widths of {' '.join(sorted(part.states))}", fitting.run))
    widths, norms, states = (_joined(parts, key) for key in ("widths", "norms", "states"))
    last = {
        "stored_bytes": dict(sum((Counter(part["stored_bytes"]) for part in parts), Counter())),
        "ratios": _joined(parts, "ratios"),
        "trained": sorted(states), "work": bench.work.total,
    }  # fmt: skip
    rows = [{"width": width, **row} for row in (*(row for part in parts for row in part["rows"]), last)]
    trained = Merged(merged.plan, {**merged.states, **states})
    return {"merged": trained.to_plain(), "storage": Storage(widths, norms).to_plain(), "rows": rows}


def _joined(parts: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    return {query: value for part in parts for query, value in part[key].items()}


def most_work(bench: Workbench, recipe: Recipe) -> float:
    """About what it takes at most: a training for every width."""
    trainings = len(BITS) * training_flops(bench, list(bench.queries), _recipe(bench, recipe, 0))
    return trainings + len(BITS) * most_judged(bench)


def parts_of(merged: Merged) -> Iterator[Merged]:
    """Each set of models that are tied, and each model that is not, by itself."""
    left = set(merged.states)
    for query in merged.states:
        if query in left:
            own = merged.plan.tied_to([query])
            left -= own
            plan = merged.plan.without(*(other for other in merged.states if other not in own))
            yield Merged(plan, {name: state for name, state in merged.states.items() if name in own})


def _recipe(bench: Workbench, recipe: Recipe, number: int) -> Recipe:
    """That of a training, which differs from the others in its frames alone."""
    features, seed = recipe.features or FEATURES, bench.seed * len(BITS) + number
    return replace(recipe, epochs=EPOCHS * recipe.epochs, features=features, private=PRIVATE, seed=seed)


@dataclass
class _Fitting:
    bench: Workbench
    part: Merged
    width: Width
    required: Mapping[str, float]
    journal: Journal
    bounds: Bounds
    recipe: Recipe | None

    def run(self) -> dict[str, Any]:
        """The fewest bits found for one part: what a search says of them, and `states` where its models trained.

        `rows` are those of all that was tried.
        """
        bench, part = self.bench, self.part
        wide = {query: self.journal.step(f"wide {query}", partial(self._wide, query)) for query in part.states}
        need = {
            query: needed(bench.queries[query].accuracy_target, self.required[query], ratio)
            for query, ratio in wide.items()
        }
        weights = weights_of(bench, part, self.width)
        best = self.journal.step("as merged", partial(self._stored, part, weights, need, 0, math.inf))
        best, rows, states = {**best, "states": {}}, best["rows"], part.states
        for number, width in enumerate(list(BITS)[list(BITS).index(self.width) :], 1):
            narrower = _at_most(weights, best["widths"], width)
            if not narrower or not self._may_train(number):
                break
            train = partial(self._trained, narrower, states, need, number, best["bytes"])
            found = self.journal.step(f"training {number}", train)
            rows, states = [*rows, *found["rows"]], found["states"]
            if found["sound"]:
                best = found
                break
        return {**best, "rows": rows}

    def _may_train(self, number: int) -> bool:
        """Whether there is a recipe, and work and time for one more training."""
        if self.recipe is None:
            return False
        queries, recipe, bounds = list(self.part.states), _recipe(self.bench, self.recipe, number), self.bounds
        if math.isfinite(bounds.ends):
            speed = self.journal.step("speed", partial(training_speed, self.bench, queries, recipe))
            bounds = replace(bounds, speed=speed)
        flops = training_flops(self.bench, queries, recipe)
        return self.journal.step(f"may train {number}", lambda: not bounds.over and flops <= bounds.work_left)

    def _trained(
        self,
        weights: Sequence[Weight],
        states: Mapping[str, Any],
        need: Mapping[str, float],
        number: int,
        most_bytes: int,
    ) -> dict[str, Any]:
        """What one training makes of these states with the weights in these widths, stored in fewer bytes."""
        bench, part = self.bench, Merged(self.part.plan, states)
        assert self.recipe is not None
        models, recipe = tied_models(bench, part, part.states), _recipe(bench, self.recipe, number)
        training = bench.training(models, recipe)
        training.rounding = partial(as_stored, models, widths_of(weights))
        self.journal.training("training", training)
        try:
            while training.epochs < recipe.epochs:
                if self.bounds.over:  # of a merge that goes on with less time
                    return {"sound": False, "rows": [], "states": dict(states)}
                loss = training.epoch()
                bench.progress("epoch", queries=[*models], epoch=training.epochs, epochs=recipe.epochs, loss=loss)
        except Diverged:
            return {"sound": False, "rows": [], "states": dict(states)}
        trained = Merged(part.plan, snapshots(models))
        return {**self._stored(trained, weights, need, number, most_bytes), "states": trained.states}

    def _stored(
        self, merged: Merged, weights: Sequence[Weight], need: Mapping[str, float], number: int, most_bytes: float
    ) -> dict[str, Any]:
        return Search(self.bench, merged, need, self.journal, self.bounds, most_bytes).run(weights, number)

    def _wide(self, query: str) -> float:
        return self.bench.ratio(query, tied_models(self.bench, self.part, [query])[query])


def _at_most(weights: Sequence[Weight], widths: Mapping[str, Mapping[str, Width]], width: Width) -> list[Weight]:
    """These weights as they are stored, but in this width where that is wider; none where no weight is."""
    stored = [_at(weight, widths) for weight in weights]
    bound = [replace(one, level=min(one.level, _level(one, width))) for one in stored]
    return bound if bound != stored else []


def _level(weight: Weight, width: Width) -> int:
    """The fewest bits of a weight that are no fewer than this width's."""
    levels = (level for level, own in enumerate(weight.widths) if BITS[own] >= BITS[width])
    return next(levels, len(weight.widths))


def _at(weight: Weight, widths: Mapping[str, Mapping[str, Width]]) -> Weight:
    query, key = weight.places[0]
    width = widths.get(query, {}).get(key)
    return replace(weight, level=len(weight.widths) if width is None else weight.widths.index(width))
