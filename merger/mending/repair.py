"""Narrow repairs of one query that stays below its target while the shared weights stand still for all others.

With the fewest bytes that do: private norms and head alone, private copies of the layers where the query's features are
furthest from its original's, and at last the original itself. Nothing of it touches another query, so none need be
judged again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from merger.bench.attempt import train_while
from merger.bench.bounds import Bounds
from merger.bench.probing import modules_among
from merger.bench.workbench import Merged, State, Workbench, snapshot
from merger.journal.outcomes import LEAVES
from merger.journal.steps import Journal
from merger.mending.similarity import parted
from merger.training.loop import Diverged, Recipe
from models.sharing.layers import weight_of
from models.sharing.plan import SharingPlan

HALF = 0.5
"""The part of the margin that a query needs when nothing helps it further. The best of many tries on val flatters: with
no margin at all it is likely to miss on test."""
NARROW = 0.05
"""The part of its shared bytes that a query with half of the margin may give back for the other half."""
GENTLE = 0.25
"""The part of the rate at which a model is mended alone: it stands where a falling rate has brought it, and is near."""
UNSHARED = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""The part of a query's shared bytes that become private copies, step by step."""
MOST_STEPS = 1 + len(UNSHARED).bit_length()
"""About so many steps are taken: private parts, then the dearest copies and a bisection."""


@dataclass(frozen=True)
class Step:
    """One repair: what is done, the plan it leads to, the bytes it costs, and the layers that become private."""

    what: str
    plan: SharingPlan
    cost_bytes: int
    private: tuple[str, ...] = ()


def repair(
    bench: Workbench,
    merged: Merged,
    query: str,
    ratio: float,
    recipe: Recipe,
    required: float,
    journal: Journal,
    bounds: Bounds,
    alone: bool = False,
) -> tuple[Merged, list[dict[str, Any]]]:
    """What is merged once this query reaches `required` on val, and a log row per step tried.

    `alone` says that its private parts were trained by themselves already, from the state it is in, in vain.

    No step begins once the bounds are over. A query that came half of the margin above its target by then is kept with
    the fewest bytes that did it; any other leaves. One that has half of it from the beginning is kept as it is, unless
    few bytes (`NARROW`) bring it the other half.
    """
    recipe = replace(recipe, epochs=max(1, recipe.epochs // 2))
    search = _Search(bench, query, recipe, required, journal, bounds, merged)
    least = enough(bench, query, required)
    free = (ratio, merged)
    if not alone and not bounds.over:
        free = max(free, search.take(Step("norms and head", merged.plan, 0)), key=lambda one: one[0])
    if free[0] >= required:
        return free[1], search.rows
    steps = [] if bounds.over else copies(bench, merged, query, journal)
    if free[0] >= least:
        most = NARROW * sum(_bytes_shared(bench, merged, query).values())
        steps = [step for step in steps if step.cost_bytes <= most]
    found = search.cheapest(steps, required)
    if found is None:
        if bounds.over:
            bench.progress("warning", text=f"{query}: no time is left to repair it")
        found = free if free[0] >= least else search.cheapest(steps, least)
        if found is not None:
            target = bench.queries[query].accuracy_target
            text = f"{query}: {found[0]:.3f} of its original on val, its target of {target:g} with half the margin"
            bench.progress("warning", text=text)
    if found is not None:
        return found[1], search.rows
    row = {"query": query, "repair": LEAVES, "required": required, "work": bench.work.total}
    bench.progress("repair", **row)
    original = {query: snapshot(bench.originals[query])}
    return Merged(merged.plan.without(query), {**merged.states, **original}), [*search.rows, row]


@dataclass
class _Search:
    """The steps taken for one query: log `rows`, and what was reached with each.

    `merged` is what the next step starts from: private parts carry on what they learned where nothing else changed.
    """

    bench: Workbench
    query: str
    recipe: Recipe
    required: float
    journal: Journal
    bounds: Bounds
    merged: Merged
    rows: list[dict[str, Any]] = field(default_factory=list)
    reached: dict[str, tuple[float, Merged]] = field(default_factory=dict)

    def take(self, step: Step) -> tuple[float, Merged]:
        """The best ratio on val that training comes to with this step, and what is merged then."""
        bench, query, merged = self.bench, self.query, self.merged
        train = partial(train_private, bench, merged, step.plan, query, self.recipe, self.required, self.journal)
        found = self.journal.step(step.what, train)
        self.merged = Merged(merged.plan, {**merged.states, query: {**merged.states[query], **found["carried"]}})
        row = {"query": query, "repair": step.what, "cost_bytes": step.cost_bytes, "ratio": found["ratio"],
               "required": self.required, "epochs": found["epochs"], "work": bench.work.total}  # fmt: skip
        self.rows.append({**row, "private": list(step.private)} if step.private else row)
        bench.progress("repair", **row)
        return found["ratio"], Merged(step.plan, {**merged.states, query: found["state"]})

    def cheapest(self, steps: Sequence[Step], wanted: float) -> tuple[float, Merged] | None:
        """The cheapest of these, in ascending order of bytes, that comes to `wanted`, as what it reaches; None if none.

        The dearest step is tried first (what it cannot do, the others cannot), then those between by bisection. Each
        takes a training: one by one the bounds would be over before the dearer ones.
        """
        ratios = {place: self.reached[step.what][0] for place, step in enumerate(steps) if step.what in self.reached}
        held = min((place for place, ratio in ratios.items() if ratio >= wanted), default=len(steps))
        failed = max((place for place in ratios if place < held), default=-1)
        while held - failed > 1 and not self.bounds.over:
            place = (failed + held) // 2 if held < len(steps) else len(steps) - 1
            found = self.reached[steps[place].what] = self.take(steps[place])
            if found[0] >= wanted:
                held = place
            else:
                failed = place
        return self.reached[steps[held].what] if held < len(steps) else None


def enough(bench: Workbench, query: str, required: float) -> float:
    """The ratio on val with which a query is kept that nothing brings to what is required: half of the margin."""
    target = bench.queries[query].accuracy_target
    return target + HALF * (required - target)


def copies(bench: Workbench, merged: Merged, query: str, journal: Journal) -> list[Step]:
    """Private copies of ever more of the layers that the query shares, in ascending order of bytes."""
    size = _bytes_shared(bench, merged, query)
    furthest = journal.step("parted", partial(_furthest, bench, merged, query, list(size)))
    steps: list[Step] = []
    for part in UNSHARED:
        chosen, cost = [], 0
        for path in furthest:
            if cost < part * sum(size.values()):
                chosen.append(path)
                cost += size[path]
        if not steps or cost > steps[-1].cost_bytes:
            what = f"{cost / sum(size.values()):.1%} of its shared bytes private"
            steps.append(Step(what, merged.plan.with_private(query, chosen), cost, tuple(chosen)))
    return steps


def _bytes_shared(bench: Workbench, merged: Merged, query: str) -> dict[str, int]:
    """Path -> bytes of each layer that the query shares."""
    size = {layer.path: layer.bytes for layer in bench.layers if layer.query == query}
    return {path: size[path] for members in merged.plan.shared for name, path in members if name == query}


def _furthest(bench: Workbench, merged: Merged, query: str, shared: Sequence[str]) -> list[str]:
    model = bench.models([query], merged.states, merged.plan)[query]
    found = parted(bench, query, model, shared)
    return sorted(modules_among(model, shared), key=lambda path: -found.get(path, 0.0))


def train_private(
    bench: Workbench, merged: Merged, plan: SharingPlan, query: str, recipe: Recipe, required: float, journal: Journal
) -> dict[str, Any]:
    """Train what is private under the plan; the best ratio on val, its state, and what a next step may carry on."""
    model = bench.models([query], merged.states, plan)[query]
    rest_shared({query: model}, plan)
    best: dict[str, Any] = journal.part("best")
    if not best:
        best.update(ratio=bench.ratio(query, model), state=snapshot(model), epochs=0)
    gentle = replace(recipe, seed=recipe.seed + 1, rate=GENTLE * recipe.rate)
    epochs = train_while(bench, {query: model}, gentle, journal, plan)
    try:
        for epoch, ratios in enumerate(epochs, 1):
            if ratios[query] > best["ratio"]:
                best.update(ratio=ratios[query], state=snapshot(model), epochs=epoch)
            if best["ratio"] >= required:
                break
    except Diverged:
        pass
    known: State = dict(merged.states[query])
    carried = {name: tensor for name, tensor in best["state"].items() if name in known}
    return {**best, "carried": carried if plan.shared == merged.plan.shared else {}}


def rest_shared(models: Mapping[str, nn.Module], plan: SharingPlan) -> None:
    """Let training leave alone what these models share with others."""
    for members in plan.shared:
        for query, path in members if len({query for query, _ in members}) > 1 else ():
            if query in models:
                owner, attribute = weight_of(models[query], path)
                getattr(owner, attribute).requires_grad_(False)
