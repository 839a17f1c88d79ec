"""One try past the ceiling: some steps are taken at once, trained, mended, and judged by every query they touch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from merger.bench.attempt import Easing, train_while
from merger.bench.bounds import Bounds
from merger.bench.merged import Merged
from merger.bench.merit import all_met, merit
from merger.bench.sizes import stored_bytes
from merger.bench.standing import tied_and_judged, training_flops
from merger.bench.workbench import Workbench
from merger.beyond.candidates import Candidate
from merger.beyond.proposing import MAX_RISK
from merger.beyond.risk import applied, inputs_of
from merger.journal.states import snapshots
from merger.journal.steps import Journal
from merger.mending.private import rest_shared, train_private
from merger.training.loop import Diverged
from merger.training.recipe import Recipe

SHORT, LONG = 0.5, 2
"""Epochs of one try, as parts of those a search gives an attempt."""
NEAR = 0.05
"""A query that lies no further below what is required may be helped by its private parts."""


@dataclass(frozen=True)
class Tried:
    """What came of a try: `merged` (None where it was refused), the ratios on val, epochs, and the bytes it gained."""

    merged: Merged | None
    ratios: Mapping[str, float]
    epochs: int
    gained_bytes: int

    def to_plain(self) -> dict[str, Any]:
        """Plain values and tensors, for a journal."""
        merged = self.merged.to_plain() if self.merged is not None else None
        return {**self.__dict__, "ratios": dict(self.ratios), "merged": merged}

    @classmethod
    def from_plain(cls, value: Mapping[str, Any]) -> Tried:
        """Inverse of `to_plain`."""
        merged = Merged.from_plain(value["merged"]) if value["merged"] is not None else None
        return cls(**{**value, "merged": merged})


@dataclass(frozen=True)
class Trying:
    """What every try is done with: the recipe, what is `required` of each query on val, and the bounds of the merge."""

    bench: Workbench
    recipe: Recipe
    required: Mapping[str, float]
    journal: Journal
    bounds: Bounds

    def take(self, merged: Merged, chunk: Sequence[Candidate]) -> Tried:
        """Take these steps at once, train, and see whether everyone still reaches what is required.

        Queries that lie just below it train their private parts alone.
        """
        inputs = self.journal.step("inputs", partial(inputs_of, self.bench, merged, chunk))
        at = merged
        for candidate in chunk:
            at = applied(self.bench, at, candidate, inputs)
        touched = {query for candidate in chunk for query in candidate.queries}
        queries = sorted(touched if chunk[0].alone else at.plan.tied_to(touched))
        epochs = self.epochs(queries, sum(candidate.risk for candidate in chunk))
        found = self.journal.step("trained", partial(self._trained, at, queries, chunk[0].alone, epochs))
        found = self._mended(at, found)
        gained = stored_bytes(self.bench, merged.plan) - stored_bytes(self.bench, at.plan)
        if not found["held"] or gained <= 0:
            return Tried(None, found["ratios"], found["epochs"], 0)
        return Tried(Merged(at.plan, {**at.states, **found["states"]}), found["ratios"], found["epochs"], gained)

    def epochs(self, queries: Sequence[str], risk: float) -> int:
        """How long a try of this risk trains these queries: long only where there is work for all of it."""
        if risk <= MAX_RISK:
            return self._part(SHORT)
        long = self._part(LONG)
        flops = training_flops(self.bench, queries, replace(self.recipe, epochs=long))
        return long if flops <= self.bounds.work_left else self._part(SHORT)

    def short(self, ratios: Mapping[str, float]) -> dict[str, float]:
        """What the queries lack that are below what is required."""
        return {query: self.required[query] - ratio for query, ratio in ratios.items() if ratio < self.required[query]}

    def _mended(self, at: Merged, found: dict[str, Any]) -> dict[str, Any]:
        """What was `found` by training, those that lie just below mended by their private parts; no bytes."""
        short = self.short(found["ratios"])
        if not short or max(short.values()) > NEAR:
            return found
        states, ratios = dict(found["states"]), dict(found["ratios"])
        recipe = replace(self.recipe, epochs=self._part(SHORT))
        for query in sorted(short, key=lambda query: -short[query]):
            required = self.required[query]
            train = partial(train_private, self.bench, [states[query]], at.plan, query, recipe, required, self.journal)
            mended = self.journal.step(f"{query} alone", train)
            states[query], ratios[query] = mended["state"], mended["ratio"]
            self.bench.progress("alone", query=query, ratio=mended["ratio"], required=required)
            if mended["ratio"] < required:
                break
        return {**found, "states": states, "ratios": ratios, "held": all_met(ratios, self.required)}

    def _part(self, part: float) -> int:
        """So many epochs of those a search gives an attempt."""
        return max(1, round(part * self.recipe.epochs))

    def _trained(self, start: Merged, queries: Sequence[str], alone: bool, epochs: int) -> dict[str, Any]:
        """The best state that a joint training of these queries' models passes through, and whether it `held`.

        It is of the first epoch at the earliest: what passes on val as it starts has not been trained to answer like
        its original. With `alone` what they share with others stands still.
        """
        bench, journal = self.bench, self.journal
        models, ratios = tied_and_judged(bench, journal, start.plan, queries, start.states)
        if alone:
            rest_shared(models, start.plan)
        best: dict[str, Any] = journal.part("best")
        if not best:
            best.update(ratios=ratios, states=snapshots(models), epochs=0, held=False)
        recipe, easing = replace(self.recipe, epochs=epochs), Easing(best["ratios"], self.required)
        judged = train_while(bench, models, recipe, journal, start.plan, easing=easing)
        try:
            while not best["held"] and (ratios := next(judged, None)) is not None:
                better = not best["epochs"] or merit(ratios, self.required) >= merit(best["ratios"], self.required)
                states = snapshots(models) if better else best["states"]
                best.update(
                    epochs=best["epochs"] + 1, states=states, ratios=ratios if better else best["ratios"],
                    held=all_met(ratios, self.required),
                )  # fmt: skip
        except Diverged as error:
            bench.progress("warning", text=f"the loss of {error} is no number any more; back to the best epoch")
        return dict(best)
