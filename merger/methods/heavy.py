"""The heaviest sets first: few layers hold most bytes, and a short training of these alone makes them hold early.

GEMEL adds the heaviest layers first, too (section 5.3), one after the other and for good. Here they train together, and
only as a step on the way: what the whole merge starts from then, and what it comes to at the least.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from merger.bench.merged import State
from merger.bench.standing import tied_and_judged, training_flops
from merger.methods.sprints import Sprints
from merger.start.alignment import by_shared_bytes
from merger.start.choosing import donated
from models.sharing.plan import SharingPlan

HEAVY = 0.75
"""The part of the bytes that sharing saves which the heaviest sets save together, at least."""
EPOCHS = 2
PART = 1 / 6
"""The training takes at most this part of the work that is left."""


def heavy_first(sprints: Sprints, own: Mapping[str, State], won: dict[str, Any]) -> dict[str, Any]:
    """The `states` of those who share after a short training in which the heaviest sets alone are tied; what is `won`,
    as plain values, the same as before unless more is; and `rows` for the log.

    All begin as their `own` states say, the heaviest sets with the weights of the model that shares most bytes. Where
    there is too little work for it nothing is trained, and there are no states.
    """
    bench, plan = sprints.bench, heaviest(sprints)
    recipe = replace(sprints.recipe, epochs=EPOCHS, seed=bench.seed)
    queries = sorted(plan.queries())
    if sprints.bounds.over or training_flops(bench, queries, recipe) > PART * sprints.bounds.work_left:
        return {"states": {}, "won": won, "rows": []}
    begins = donated(plan, own, by_shared_bytes(bench, sprints.plan)[0])
    models, ratios = tied_and_judged(bench, sprints.checkpoint, plan, queries, begins)
    begun = {"states": bench.states(models, plan), "ratios": ratios, "won": won}
    found = replace(sprints, plan=plan).sprint(begun, recipe)
    return {key: found[key] for key in ("states", "won", "rows")}


def heaviest(sprints: Sprints) -> SharingPlan:
    """The fewest sets that save so large a part of what the plan saves."""
    plan, layers = sprints.plan, sprints.bench.layers
    saves = {members: SharingPlan((members,)).saved_bytes(layers) for members in plan.shared}
    left, chosen = HEAVY * sum(saves.values()), list[tuple[tuple[str, str], ...]]()
    for members in sorted(saves, key=lambda members: -saves[members]):
        if left > 0:
            chosen.append(members)
            left -= saves[members]
    return replace(plan, shared=tuple(chosen))
