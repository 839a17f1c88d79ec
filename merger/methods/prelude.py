"""What holds before all train together: deep layers as they are, then the heaviest sets after a short training.

GEMEL adds the heaviest layers first, too (section 5.3), one after the other and for good. Here it is a step on the way:
what the merge comes to at the least, and what all start from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from merger.checkpoint import State, snapshots
from merger.core.merged import Merged
from merger.core.merit import all_met
from merger.core.snapshot import tie_and_evaluate, training_flops
from merger.methods.sprints import LOST, Sprints
from merger.start.alignment import by_shared_bytes
from merger.start.choosing import choose_start, donated
from models.sharing.plan import SharingPlan

RUNGS = (3 / 4, 15 / 16)
"""The parts of the bytes that sharing saves which the heaviest sets save together, at least, one training after the
other."""
EPOCHS = 2
SLOWER = 1 / 2
"""What follows the first of them trains at this part of the rate: all are near."""
PART = 1 / 6
"""What follows the first of them takes at most this part of the work that is left."""


@dataclass(frozen=True)
class Taken:
    """What is `merged` of deep layers, the best ratio of each that could take any, and how far each is in `taking`."""

    merged: Merged
    ratios: Mapping[str, float]
    taking: Mapping[str, Any]


NOTHING = Taken(Merged(SharingPlan(), {}), {}, {})


def prelude(sprints: Sprints, own: Mapping[str, State], far: bool) -> dict[str, Any]:
    """What is `won` before all train together, as plain values, the `states` of whoever trained for it, and the sets
    that are `tied` in these (a plan, as JSON).

    That is deep layers as they are, and where all begin `far` off the heaviest sets.
    """
    giver = by_shared_bytes(sprints.ctx, sprints.plan)[0]
    fewest = _took(sprints, own, giver, NOTHING, fewest=True) if far else NOTHING
    begun = fewest
    if (least := bears_least(fewest.ratios, sprints.required)) is not None:
        giver = least
        ratios = {query: ratio for query, ratio in fewest.ratios.items() if query != giver}
        begun = Taken(NOTHING.merged, ratios, fewest.taking)
    took = _took(sprints, own, giver, begun)
    won = max(took.merged, fewest.merged, key=lambda found: found.plan.saved_bytes(sprints.ctx.layers))
    found = {"won": won.to_plain(), "states": dict[str, State](), "tied": SharingPlan().to_json()}
    below = [query for query, ratio in took.ratios.items() if ratio < LOST * sprints.required[query]]
    others = replace(sprints, plan=sprints.plan.without(*below))
    for part in RUNGS if far else ():
        train = partial(heavy_first, others, own, giver, found, part)
        trained = sprints.checkpoint.step(f"heaviest sets, {part:g}", train)
        for row in trained["rows"]:
            sprints.checkpoint.add_row({"sprint": 0, **row})
        found = {key: trained[key] for key in found}
        if not trained["rows"] or not all_met(trained["ratios"], sprints.required):
            break
    return found


def bears_least(ratios: Mapping[str, float], required: Mapping[str, float]) -> str | None:
    """Who bears not even a few layers of the one that shares most bytes, the furthest below what is required; it stands
    for the others then. None where all bear some.

    A model that bears no other's layers has layers that others bear (measured: docs/lab-notes.md).
    """
    below = [query for query, ratio in ratios.items() if ratio < required[query]]
    return min(below, key=lambda query: ratios[query], default=None)


def _took(sprints: Sprints, own: Mapping[str, State], giver: str, begun: Taken, fewest: bool = False) -> Taken:
    """What comes of it where the others take deep layers of this one, or only the fewest that they could take, going on
    from what has `begun`, else as their `own` states say, with nothing trained.
    """
    takers = [query for query in by_shared_bytes(sprints.ctx, sprints.plan) if query != giver]
    standing = Merged(begun.merged.plan, {giver: own[giver], **begun.merged.states})
    deep = sprints.deep(sprints.budget, training=False, fewest=fewest)
    name = f"{'the fewest' if fewest else 'layers'} of {giver} as they are"
    found = sprints.took(name, partial(deep.run, standing, own, takers, begun.taking))
    merged, ratios = Merged.from_plain(found["merged"]), dict(begun.ratios)
    for row in found["rows"]:
        if "takes" in row:
            ratios[row["takes"]] = max(row["ratio"], ratios.get(row["takes"], 0.0))
    sharing = {query: merged.states[query] for query in sorted(merged.plan.queries())}
    return Taken(Merged(merged.plan, sharing), ratios, found["taking"])


def heavy_first(
    sprints: Sprints, own: Mapping[str, State], giver: str, before: Mapping[str, Any], part: float
) -> dict[str, Any]:
    """What was found `before` after a short training in which only the heaviest sets are tied, those that save such a
    `part`; the best `ratios` and `rows` for the log.

    At first all begin as their `own` states say, the heaviest sets with the weights of the `giver`; then as they are,
    and of what more is tied the best start is chosen. Where there is too little work for it, or no more to win, nothing
    is trained, and there are no rows.
    """
    ctx, plan = sprints.ctx, heaviest(sprints, part)
    tied = SharingPlan.from_json(before["tied"])
    recipe = replace(sprints.recipe, epochs=EPOCHS, seed=ctx.seed)
    queries, budget = sorted(plan.queries()), sprints.budget
    most = (PART if tied.shared else 1.0) * budget.flops_left
    little = budget.over or training_flops(ctx, queries, recipe) > most
    held = Merged.from_plain(before["won"]).plan.saved_bytes(ctx.layers)
    if little or plan.saved_bytes(ctx.layers) <= held or not besides(plan, tied).shared:
        return {**before, "ratios": {}, "rows": []}
    if tied.shared:
        recipe = replace(recipe, rate=SLOWER * recipe.rate)
        now = {**own, **before["states"]}
        begins = choose_start(ctx, besides(plan, tied), sprints.checkpoint, now, PART * budget.flops_left).states
    else:
        begins = donated(plan, own, giver)
    models, ratios = tie_and_evaluate(ctx, sprints.checkpoint, plan, queries, begins)
    begun = {"states": snapshots(models), "ratios": ratios, "won": before["won"]}
    found = replace(sprints, plan=plan).sprint(begun, recipe)
    return {**{key: found[key] for key in ("states", "won", "ratios", "rows")}, "tied": plan.to_json()}


def heaviest(sprints: Sprints, part: float) -> SharingPlan:
    """The fewest sets that save such a part of what the plan saves."""
    plan, layers = sprints.plan, sprints.ctx.layers
    saves = {members: SharingPlan((members,)).saved_bytes(layers) for members in plan.shared}
    left, chosen = part * sum(saves.values()), list[tuple[tuple[str, str], ...]]()
    for members in sorted(saves, key=lambda members: -saves[members]):
        if left > 0:
            chosen.append(members)
            left -= saves[members]
    return replace(plan, shared=tuple(chosen))


def besides(plan: SharingPlan, tied: SharingPlan) -> SharingPlan:
    """The sets of a plan that are not tied yet."""
    return replace(plan, shared=tuple(members for members in plan.shared if members not in tied.shared))
