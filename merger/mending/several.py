"""Several queries mended beside each other: shared weights stand still, so that none of them touches another."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from merger.checkpoint import StepCache
from merger.core.budget import Budget
from merger.core.context import MergeContext
from merger.core.merged import Merged
from merger.core.snapshot import training_flops
from merger.jobs import Job, run_jobs
from merger.mending.private import alone
from merger.mending.search import Case, enough, mend
from merger.mending.steps import MAX_STEPS
from models.sharing.plan import SharingPlan


def mend_all(
    ctx: MergeContext, merged: Merged, cases: Sequence[Case], journal: StepCache, budget: Budget
) -> tuple[Merged, list[dict[str, Any]]]:
    """What is merged once every query has what is required of it or has left, and the log's rows in order.

    Each that is below starts from what is merged now, with an equal share of the work that is left: what becomes of one
    does not depend on the others. Where the work is bounded and somebody would leave, those that have half of the
    margin are kept as they are. The one furthest below comes first.
    """
    below = sorted((case for case in cases if case.ratio < case.required), key=lambda case: case.ratio - case.required)
    if not below:
        return merged, []
    helped = [case for case in below if case.ratio < enough(ctx, case.query, case.required)] or below
    share = budget.flops_left / len(helped)
    ends_at = time.time() + budget.ends - budget.clock()  # a clock that other machines have too
    jobs = []
    for case in below:
        max_flops = share if case in helped or math.isinf(share) else 0.0
        own = Merged(merged.plan, {case.query: merged.states[case.query]})
        given = {"case": case.to_plain(), "merged": own.to_plain(), "max_flops": max_flops, "ends_at": ends_at}
        jobs.append(Job(case.query, mended, given, (case.query,)))
    found = dict(zip([case.query for case in below], run_jobs(ctx, journal, "repairs", jobs), strict=True))
    spent = ctx.flops.total - sum(one["flops"] for one in found.values())
    rows = []
    for one in found.values():
        rows += [{**row, "flops": spent + row["flops"]} for row in one["rows"]]
        spent += one["flops"]
    after = {query: Merged.from_plain(one["merged"]) for query, one in found.items()}
    states = {query: one.states[query] for query, one in after.items()}
    plan = combined(merged.plan, {query: one.plan for query, one in after.items()})
    return Merged(plan, {**merged.states, **states}), rows


def max_flops(ctx: MergeContext, cases: Sequence[Case], budget: Budget) -> float:
    """About what it takes at most to mend these, within the bounds."""
    below = [case for case in cases if case.ratio < case.required]
    flops = sum(training_flops(ctx, [case.query], alone(case.recipe)) for case in below)
    return min(MAX_STEPS * flops, budget.flops_left)


def mended(
    ctx: MergeContext,
    journal: StepCache,
    case: Mapping[str, Any],
    merged: Mapping[str, Any],
    max_flops: float,
    ends_at: float,
) -> dict[str, Any]:
    """The job: what is `merged` of one query once it was mended, and rows whose work counts from its beginning."""
    begun = ctx.flops.total
    budget = Budget(ctx.flops, begun + max_flops, time.monotonic() + ends_at - time.time())
    after, rows = mend(ctx, Merged.from_plain(merged), Case.from_plain(case), journal, budget)
    rows = [{**row, "flops": row["flops"] - begun} for row in rows]
    return {"merged": after.to_plain(), "flops": ctx.flops.total - begun, "rows": rows}


def combined(plan: SharingPlan, after: Mapping[str, SharingPlan]) -> SharingPlan:
    """The plan with the layers private that each of these queries shares no more once it was mended."""
    result = plan
    for query, changed in after.items():
        kept, before = _shared(changed, query), _shared(plan, query)
        result = result.with_private(query, [path for path in before if path not in kept])
    return result


def _shared(plan: SharingPlan, query: str) -> Sequence[str]:
    return [path for members in plan.shared for name, path in members if name == query]
