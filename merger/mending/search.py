"""Which help is tried first for a query that stays below its target, and what is kept: the fewest bytes that do.

Private norms and head alone come first, then private copies of the layers where the query's features are furthest from
its original's, and at last the original itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from merger.checkpoint import StepCache, snapshot
from merger.core.budget import Budget
from merger.core.context import MergeContext
from merger.core.merged import Merged
from merger.mending.private import alone, train_private
from merger.mending.steps import Step, bytes_shared, copies, private_parts
from merger.outcomes import LEAVES
from merger.training.recipe import Recipe

HALF = 0.5
"""The part of the margin that a query needs when nothing helps it further. The best of many tries on val flatters: with
no margin at all it is likely to miss on test."""
MIN_BYTES = 0.05
"""The part of its shared bytes that a query with half of the margin may give back for the other half."""
Reached = tuple[float, Merged]
"""A ratio on val, and what is merged then."""


@dataclass(frozen=True)
class Case:
    """A query at a `ratio` on val, what is `required` of it, and the recipe that the joint training ended with.

    `alone` says that its private parts were trained by themselves already, from the state it is in, in vain; `takes`
    that, where it leaves, it can take deep layers of those that stand (merger.methods.deep): private copies of more
    than a few bytes are not tried then.
    """

    query: str
    ratio: float
    required: float
    recipe: Recipe
    alone: bool = False
    takes: bool = False

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for a job."""
        return {**self.__dict__, "recipe": dict(self.recipe.__dict__)}

    @classmethod
    def from_plain(cls, value: Mapping[str, Any]) -> Case:
        """Inverse of `to_plain`."""
        return cls(**{**value, "recipe": Recipe(**value["recipe"])})


def mend(
    ctx: MergeContext, merged: Merged, case: Case, journal: StepCache, budget: Budget
) -> tuple[Merged, list[dict[str, Any]]]:
    """What is merged once the case's query has what is required of it on val, and a log row per step tried.

    No step begins once the bounds are over. A query that came half of the margin above its target by then is kept with
    the fewest bytes that did it; any other leaves. One that has half of it from the beginning is kept as it is, unless
    `MIN_BYTES` bring it the other half.
    """
    search = _Search(ctx, case, journal, budget, merged)
    least, free = enough(ctx, case.query, case.required), (case.ratio, merged)
    if not case.alone and not budget.over:
        free = max(free, search.take(private_parts(merged)), key=lambda one: one[0])
    if free[0] >= case.required:
        return free[1], search.rows
    if case.takes and free[0] < least:
        return search.given_up(merged)
    steps = [] if budget.over else copies(ctx, merged, case.query, journal)
    if free[0] >= least:
        most = MIN_BYTES * sum(bytes_shared(ctx, merged, case.query).values())
        steps = [step for step in steps if step.cost_bytes <= most]
    found = search.cheapest(steps, case.required)
    if found is None:
        if budget.over:
            ctx.progress("warning", text=f"{case.query}: no time is left to repair it")
        found = free if free[0] >= least else search.cheapest(steps, least)
        if found is not None:
            ctx.progress("warning", text=_with_half(ctx, case.query, found[0]))
    return (found[1], search.rows) if found is not None else search.given_up(merged)


def enough(ctx: MergeContext, query: str, required: float) -> float:
    """The ratio on val with which a query is kept that nothing brings to what is required: half of the margin."""
    target = ctx.queries[query].accuracy_target
    return target + HALF * (required - target)


@dataclass
class _Search:
    """The steps taken for one query: log `rows`, and what was reached with each.

    `merged` is what the next step starts from: private parts carry on what they learned where nothing else changed.
    """

    ctx: MergeContext
    case: Case
    journal: StepCache
    budget: Budget
    merged: Merged
    rows: list[dict[str, Any]] = field(default_factory=list)
    reached: dict[str, Reached] = field(default_factory=dict)

    def take(self, step: Step) -> Reached:
        """The best ratio on val that training comes to with this step, and what is merged then."""
        ctx, case, merged = self.ctx, self.case, self.merged
        recipe, begins = alone(case.recipe), merged.states[case.query]
        train = partial(train_private, ctx, [begins], step.plan, case.query, recipe, case.required, self.journal)
        found = self.journal.step(step.what, train)
        if step.plan.shared == merged.plan.shared:
            carried = {name: found["state"][name] for name in begins}
            self.merged = Merged(merged.plan, {**merged.states, case.query: carried})
        row = {"query": case.query, "repair": step.what, "cost_bytes": step.cost_bytes, "ratio": found["ratio"],
               "required": case.required, "epochs": found["epochs"], "flops": ctx.flops.total}  # fmt: skip
        self.rows.append({**row, "private": list(step.private)} if step.private else row)
        ctx.progress("repair", **row)
        return found["ratio"], Merged(step.plan, {**merged.states, case.query: found["state"]})

    def cheapest(self, steps: Sequence[Step], wanted: float) -> Reached | None:
        """The cheapest of these, in ascending order of bytes, that comes to `wanted`, as what it reaches; None if none.

        The dearest step is tried first (what it cannot do, the others cannot), then those between by bisection. Each
        takes a training: one by one the bounds would be over before the dearer ones.
        """
        ratios = {place: self.reached[step.what][0] for place, step in enumerate(steps) if step.what in self.reached}
        held = min((place for place, ratio in ratios.items() if ratio >= wanted), default=len(steps))
        failed = max((place for place in ratios if place < held), default=-1)
        while held - failed > 1 and not self.budget.over:
            place = (failed + held) // 2 if held < len(steps) else len(steps) - 1
            found = self.reached[steps[place].what] = self.take(steps[place])
            if found[0] >= wanted:
                held = place
            else:
                failed = place
        return self.reached[steps[held].what] if held < len(steps) else None

    def given_up(self, merged: Merged) -> tuple[Merged, list[dict[str, Any]]]:
        """The query leaves: it gets its original back, and shares nothing."""
        query = self.case.query
        row = {"query": query, "repair": LEAVES, "required": self.case.required, "flops": self.ctx.flops.total}
        self.ctx.progress("repair", **row)
        original = {query: snapshot(self.ctx.originals[query])}
        return Merged(merged.plan.without(query), {**merged.states, **original}), [*self.rows, row]


def _with_half(ctx: MergeContext, query: str, ratio: float) -> str:
    target = ctx.queries[query].accuracy_target
    return f"{query}: {ratio:.3f} of its original on val, its target of {target:g} with half the margin"
