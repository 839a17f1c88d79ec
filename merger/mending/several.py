"""Repairs of several queries beside each other: shared weights stand still, so that none of them touches another."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from merger.bench.bounds import Bounds
from merger.bench.standing import training_flops
from merger.bench.workbench import Merged, Workbench
from merger.journal.steps import Journal
from merger.mending.repair import MOST_STEPS, enough, repair
from merger.training.loop import Recipe
from merger.workers.jobs import Job, run
from models.sharing.plan import SharingPlan


def repair_all(
    bench: Workbench,
    merged: Merged,
    ratios: Mapping[str, float],
    recipe: Recipe,
    required: Mapping[str, float],
    journal: Journal,
    bounds: Bounds,
    alone: Collection[str] = (),
) -> tuple[Merged, list[dict[str, Any]]]:
    """What is merged once every query has what `required` asks for or has left, and the log's rows in order.

    Each starts from what is merged now, with an equal share of the work that is left: what becomes of one does not
    depend on the others. Where the work is bounded and somebody would leave, those that have half of the margin are
    kept as they are. The one furthest below comes first. The private parts of those `alone` were trained by themselves
    already.
    """
    below = [query for query in ratios if ratios[query] < required[query]]
    below.sort(key=lambda query: ratios[query] - required[query])
    if not below:
        return merged, []
    helped = [query for query in below if ratios[query] < enough(bench, query, required[query])] or below
    share = bounds.work_left / len(helped)
    shares = {query: share if query in helped or math.isinf(share) else 0.0 for query in below}
    ends_at = time.time() + bounds.ends - time.monotonic()  # a clock that other machines have too
    plan = merged.plan.to_json()
    jobs = [
        Job(
            query, repaired,
            {"query": query, "plan": plan, "state": dict(merged.states[query]), "ratio": ratios[query],
             "recipe": dict(recipe.__dict__), "required": required[query], "most_work": shares[query],
             "ends_at": ends_at, "alone": query in alone},
            (query,), min(shares[query], MOST_STEPS * training_flops(bench, [query], recipe)),
        )
        for query in below
    ]  # fmt: skip
    found = dict(zip(below, run(bench, journal, "repairs", jobs), strict=True))
    spent = bench.work.total - sum(one["work"] for one in found.values())
    rows = []
    for one in found.values():
        rows += [{**row, "work": spent + row["work"]} for row in one["rows"]]
        spent += one["work"]
    after = {query: SharingPlan.from_json(one["plan"]) for query, one in found.items()}
    states = {query: one["state"] for query, one in found.items()}
    return Merged(combined(merged.plan, after), {**merged.states, **states}), rows


def repaired(
    bench: Workbench,
    journal: Journal,
    query: str,
    plan: Mapping[str, Any],
    state: Mapping[str, Any],
    ratio: float,
    recipe: Mapping[str, Any],
    required: float,
    most_work: float,
    ends_at: float,
    alone: bool,
) -> dict[str, Any]:
    """The job: the plan and the state of one query after its repair, and rows whose work counts from its beginning."""
    begun = bench.work.total
    bounds = Bounds(bench.work, begun + most_work, time.monotonic() + ends_at - time.time())
    merged = Merged(SharingPlan.from_json(plan), {query: dict(state)})
    after, rows = repair(bench, merged, query, ratio, Recipe(**recipe), required, journal, bounds, alone)
    return {
        "plan": after.plan.to_json(), "state": dict(after.states[query]), "work": bench.work.total - begun,
        "rows": [{**row, "work": row["work"] - begun} for row in rows],
    }  # fmt: skip


def combined(plan: SharingPlan, after: Mapping[str, SharingPlan]) -> SharingPlan:
    """The plan with the layers private that each of these queries shares no more after its own repair."""
    result = plan
    for query, changed in after.items():
        kept, before = _shared(changed, query), _shared(plan, query)
        result = result.with_private(query, [path for path in before if path not in kept])
    return result


def _shared(plan: SharingPlan, query: str) -> Sequence[str]:
    return [path for members in plan.shared for name, path in members if name == query]
