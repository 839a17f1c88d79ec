"""Who left a training on the way joins what came of it: its original, with as many shared layers as it bears.

What the others share stands still. A query begins with all its layers its own but some, in the order of channels that
the others have; how many it can take over is found as for one that is mended (merger.mending.search).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from merger.bench.bounds import Bounds
from merger.bench.merged import Merged
from merger.bench.workbench import Workbench
from merger.journal.outcomes import LEAVES
from merger.journal.steps import Journal
from merger.mending.search import Case
from merger.mending.several import mend_all
from models.sharing.layers import weight_key
from models.sharing.plan import Member, SharingPlan


def join_all(
    bench: Workbench, merged: Merged, whole: SharingPlan, cases: Sequence[Case], journal: Journal, bounds: Bounds
) -> tuple[Merged, list[dict[str, Any]]]:
    """What is merged once each case's query, of which the `own` state is known, shares what it bears; and log rows.

    `whole` says which layers they would share with those of `merged`. Who bears nothing is left out, without a row.
    """
    plan, states = merged.plan, dict(merged.states)
    for case in cases:
        assert case.own is not None
        pairs = _pairs(merged.plan, whole, case.query)
        plan, state = plan.with_pairs(pairs), dict(case.own)
        for (giver, theirs), (_, path) in pairs:
            state[weight_key(state, path)] = merged.states[giver][weight_key(merged.states[giver], theirs)]
        states[case.query] = state
    after, rows = mend_all(bench, Merged(plan, states), cases, journal, bounds)
    return after, [row for row in rows if row["repair"] != LEAVES]


def _pairs(plan: SharingPlan, whole: SharingPlan, query: str) -> list[tuple[Member, Member]]:
    """For each layer of a query that those who share under the plan have, too: theirs, shared by most, and its own."""
    sharing = plan.queries()
    shared_by = {member: len(members) for members in plan.shared for member in members}
    found = list[tuple[Member, Member]]()
    for members in whole.shared:
        givers = [member for member in members if member[0] in sharing]
        mine = [member for member in members if member[0] == query]
        if mine and givers:
            found.append((max(givers, key=lambda member: shared_by.get(member, 1)), mine[0]))
    return found
