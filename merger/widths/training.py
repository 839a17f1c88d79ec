"""Fewer bits than rounding bears: models that share train together, with every weight as it will be stored.

Training begins in the fewest bits that are asked for. Who falls short then may leave, if its original takes little; or
it gets its weights, shared ones for all, one step wider, and all train again from where they stood.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from merger.checkpoint import State, StepCache, snapshots
from merger.core.attempt import SETTLED, SETTLING_FRAMES
from merger.core.budget import Budget
from merger.core.context import MergeContext
from merger.core.merged import Merged
from merger.core.snapshot import evaluate_all, training_flops
from merger.training.loop import Diverged
from merger.training.recipe import Recipe
from merger.widths.rounding import Rounded
from merger.widths.storing import Weight, nbytes_of, tied_models, widths_of

FOR_BITS = Recipe(rate=2e-4, epochs=8, frames_per_epoch=512, features=1.0, private=1.0)
"""How models are trained for their bits: as long as a hard merge's first sprint, at the gentler of its rates."""
WIDTHS = 3
"""So many are tried at most: what does not bear four bits trained takes more as it is."""


@dataclass(frozen=True)
class ForBits:
    """The training of queries that share for as few bits as all bear; `need` as ratios on val.

    Whoever falls short may leave the others: `alone` says what its original takes then, None that nobody may.
    """

    ctx: MergeContext
    merged: Merged
    queries: Sequence[str]
    need: Mapping[str, float]
    journal: StepCache
    budget: Budget
    alone: Callable[[str], int] | None = None

    def run(self, weights: Sequence[Weight]) -> dict[str, Any]:
        """What takes least of what was `tried`, the `levels` and `ratios` of each training: the `states` of those who
        have what they need then, none where nobody has, the `levels` of their weights, and who `left`.

        Plain values and tensors.
        """
        levels, tried = [0] * len(weights), list[dict[str, Any]]()
        states: Mapping[str, State] = self.merged.states
        best: dict[str, Any] = {"states": {}, "levels": levels, "left": [], "nbytes": math.inf}
        while len(tried) < WIDTHS:
            now = [one.at(level) for one, level in zip(weights, levels, strict=True)]
            if nbytes_of(now) >= best["nbytes"]:
                break
            if self.budget.over or training_flops(self.ctx, self.queries, FOR_BITS) > self.budget.flops_left:
                break
            found = self.journal.step(f"bits {len(tried)}", partial(self._trained, states, now))
            tried.append({"levels": levels, "ratios": found["ratios"]})
            short = {query for query, ratio in found["ratios"].items() if ratio < self.need[query]}
            stay = set(self.queries) - short
            if (nbytes := self._nbytes(now, stay, short)) < best["nbytes"]:
                kept = {query: found["states"][query] for query in sorted(stay)}
                best = {"states": kept, "levels": levels, "left": sorted(short), "nbytes": nbytes}
            if not short:
                break
            states = {query: {**state, **found["wide"][query]} for query, state in found["states"].items()}
            levels = [
                min(at + one.used_by(short), len(one.widths) - 1) for one, at in zip(weights, levels, strict=True)
            ]
        return {**best, "tried": tried}

    def _nbytes(self, weights: Sequence[Weight], stay: set[str], short: set[str]) -> float:
        """What those who stay take together, and those who leave alone."""
        together = nbytes_of(one for one in weights if one.used_by(stay))
        if not short:
            return together
        return together + sum(map(self.alone, sorted(short))) if stay and self.alone is not None else math.inf

    def _trained(self, states: Mapping[str, State], weights: Sequence[Weight]) -> dict[str, Any]:
        """The ratios on val after a training with these weights rounded, the states, and the weights not rounded."""
        ctx, plan, queries = self.ctx, self.merged.plan, list(self.queries)
        nothing = {"ratios": dict.fromkeys(queries, 0.0), "states": {query: dict(states[query]) for query in queries},
                   "wide": {query: {} for query in queries}}  # fmt: skip
        models = tied_models(ctx, Merged(plan, states), queries)
        training = ctx.training(models, FOR_BITS, (), plan)
        rounded = Rounded(training, widths_of(weights))
        self.journal.training("training", rounded)
        try:
            while training.epochs < FOR_BITS.epochs:
                if self.budget.over:
                    return nothing
                training.epoch()
                loss = training.loss
                ctx.progress("epoch", queries=queries, epoch=training.epochs, epochs=FOR_BITS.epochs, loss=loss)
        except Diverged:
            return nothing
        settling = SETTLING_FRAMES if training.step < SETTLED else 0
        ratios = evaluate_all(ctx, self.journal, "evaluated", models, plan, settling)
        return {"ratios": ratios, "states": snapshots(models), "wide": rounded.wide()}
