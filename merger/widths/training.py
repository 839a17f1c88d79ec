"""Fewer bits than rounding bears: models that share train together, with every weight as it will be stored.

Training begins in the fewest bits that are asked for. Who falls short then gets its weights, shared ones for all, one
step wider, and all train again from where they stood; so on while that takes less than rounding alone has found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from merger.bench.attempt import SETTLED, SETTLING_FRAMES
from merger.bench.bounds import Bounds
from merger.bench.merged import Merged, State, snapshots
from merger.bench.standing import judge_all, training_flops
from merger.bench.workbench import Workbench
from merger.journal.steps import Journal
from merger.training.loop import Diverged
from merger.training.recipe import Recipe
from merger.widths.rounding import Rounded
from merger.widths.storing import Weight, tied_models, widths_of

FOR_BITS = Recipe(rate=2e-4, epochs=8, frames_per_epoch=512, features=1.0)
"""How models are trained for their bits: as long as a hard merge's first sprint, at the gentler of its rates."""


@dataclass(frozen=True)
class ForBits:
    """The training of what is merged for fewer bits than its weights were `fitted` to; `need` as ratios on val."""

    bench: Workbench
    merged: Merged
    fitted: Sequence[Weight]
    need: Mapping[str, float]
    journal: Journal
    bounds: Bounds

    def run(self) -> tuple[dict[str, State], list[dict[str, Any]]]:
        """The states of those who have what they need in less than they were fitted to, and what was `tried`: each the
        `queries` that trained together, the `levels` of all weights, and the `ratios`.
        """
        states, tried, done = dict[str, State](), list[dict[str, Any]](), set[str]()
        for query in self.bench.queries:
            if query not in done:
                together = self.merged.plan.tied_to([query])
                found = self.journal.step(f"bits of {query}", partial(self._climbed, sorted(together)))
                done, states, tried = done | together, states | found["states"], [*tried, *found["tried"]]
        return states, tried

    def at(self, tried: Mapping[str, Any]) -> list[Weight]:
        """The weights of the queries that were tried together, as they were then."""
        return self._used(tried["levels"], tried["queries"])

    def stored(self, tried: Sequence[Mapping[str, Any]]) -> list[Weight]:
        """All weights as they are stored with what was tried last of each where that is enough."""
        chosen = {weight.places: weight for weight in self.fitted}
        for one in tried:
            if all(ratio >= self.need[query] for query, ratio in one["ratios"].items()):
                chosen |= {weight.places: weight for weight in self.at(one)}
        return list(chosen.values())

    def _climbed(self, queries: list[str]) -> dict[str, Any]:
        """What training these came to: `states` once all have what they need, and what was `tried`."""
        levels, tried = [0] * len(self.fitted), list[dict[str, Any]]()
        states: Mapping[str, State] = self.merged.states
        most = sum(weight.nbytes for weight in self.fitted if weight.used_by(set(queries)))
        while sum(weight.nbytes for weight in self._used(levels, queries)) < most:
            if self.bounds.over or training_flops(self.bench, queries, FOR_BITS) > self.bounds.work_left:
                break
            train = partial(self._trained, queries, states, self._used(levels, queries))
            found = self.journal.step(f"bits {len(tried)}", train)
            tried.append({"queries": queries, "levels": levels, "ratios": found["ratios"]})
            short = {query for query, ratio in found["ratios"].items() if ratio < self.need[query]}
            if not short:
                return {"states": found["states"], "tried": tried}
            states = {query: {**state, **found["wide"][query]} for query, state in found["states"].items()}
            wider = self._wider(levels, short)
            if wider == levels:
                break
            levels = wider
        return {"states": {}, "tried": tried}

    def _wider(self, levels: Sequence[int], short: set[str]) -> list[int]:
        """The levels with the weights of those who fall short one step wider, float16 at most."""
        return [
            min(level + one.used_by(short), len(one.widths) - 1) for level, one in zip(levels, self.fitted, strict=True)
        ]

    def _used(self, levels: Sequence[int], queries: Sequence[str]) -> list[Weight]:
        """The weights that stand in these models, in these widths."""
        users = set(queries)
        return [one.at(level) for level, one in zip(levels, self.fitted, strict=True) if one.used_by(users)]

    def _trained(self, queries: list[str], states: Mapping[str, State], weights: Sequence[Weight]) -> dict[str, Any]:
        """The ratios on val after a training with these weights rounded, the states, and the weights not rounded."""
        bench, plan, begun = self.bench, self.merged.plan, {query: dict(states[query]) for query in queries}
        models = tied_models(bench, Merged(plan, states), queries)
        training = bench.training(models, FOR_BITS, (), plan)
        rounded = Rounded(training, widths_of(weights))
        self.journal.training("training", rounded)
        try:
            while training.epochs < training.recipe.epochs:
                training.epoch()
                loss = training.loss
                bench.progress("epoch", queries=queries, epoch=training.epochs, epochs=FOR_BITS.epochs, loss=loss)
        except Diverged:
            return {"ratios": dict.fromkeys(queries, 0.0), "states": begun, "wide": {query: {} for query in queries}}
        settling = SETTLING_FRAMES if training.step < SETTLED else 0
        ratios = judge_all(bench, self.journal, "judged", models, plan, settling)
        return {"ratios": ratios, "states": snapshots(models), "wide": rounded.wide()}
