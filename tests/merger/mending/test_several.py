"""Repairs of several queries: the same beside each other as one after the other."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

import merger.jobs as jobs_module
from merger.checkpoint import StepCache, snapshot
from merger.core.budget import Budget
from merger.core.context import MergeContext
from merger.core.elsewhere import Desk, Setup
from merger.core.merged import Merged
from merger.events import silent
from merger.jobs import Done, Job, Order
from merger.mending.search import Case
from merger.mending.several import combined, mend_all
from merger.methods.top_down import whole_plan
from models.sharing.plan import SharingPlan
from models.workload import Workload
from tests.merger.options import QUICK

pytestmark = pytest.mark.slow


class Elsewhere:
    """A worker with a workbench of its own, which does the last job first."""

    does_all = False

    def __init__(self, ctx: MergeContext) -> None:
        self._desk = Desk(Setup.of(ctx), silent)

    def do(self, jobs: Sequence[Job], order: Order, arrived: Callable[[Job, Done], None]) -> None:
        for job in reversed(jobs):
            arrived(job, self._desk.do(job, order))

    def close(self) -> None:
        """Nobody to end."""


def test_repairs_beside_each_other_are_those_one_after_the_other(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two queries of which too much is asked go through every step."""
    monkeypatch.setattr(jobs_module, "WORTH_SENDING", 0.0)
    alone, crowd, outcomes = MergeContext(workload), MergeContext(workload), []
    crowd.workers = Elsewhere(crowd)
    for ctx in (alone, crowd):
        plan = whole_plan(ctx, QUICK)
        models = ctx.tied(plan, ctx.queries)
        merged = Merged(plan, {query: snapshot(model) for query, model in models.items()})
        required, ctx.flops.total = {"q0": 1.5, "q1": 0.0, "q2": 1.5}, 1000
        ratios = {"q0": 0.5, "q1": 1.0, "q2": 0.4}
        recipe = replace(QUICK.recipe, epochs=1, frames_per_epoch=32)
        cases = [Case(query, ratio, required[query], recipe) for query, ratio in ratios.items()]
        after, rows = mend_all(ctx, merged, cases, StepCache(), Budget(ctx.flops))
        names = {query: _names(after.states[query]) for query in after.states}
        outcomes.append((after.plan, names, rows, ctx.flops.total))
    assert outcomes[0] == outcomes[1]
    _, _, rows, flops = outcomes[0]
    assert len(rows) > 3 and list(dict.fromkeys(row["query"] for row in rows)) == ["q2", "q0"]
    assert rows[0]["flops"] > 1000 and [row["flops"] for row in rows] == sorted(row["flops"] for row in rows)
    assert rows[-1]["flops"] <= flops


def test_what_queries_change_of_a_plan_is_put_together() -> None:
    first, second = (("a", "x"), ("b", "x"), ("c", "x")), (("a", "y"), ("b", "y"), ("c", "y"))
    plan = SharingPlan((first, second))
    after = {"a": plan.with_private("a", ["y"]), "b": plan.with_private("b", ["x"])}
    assert set(combined(plan, after).shared) == {(first[0], first[2]), second[1:]}
    assert combined(plan, {"a": plan.without("a"), "b": plan.without("b")}).shared == ()


def _names(state: dict[str, torch.Tensor]) -> list[str]:
    """What tells states apart bit by bit."""
    return [f"{name} {hashlib.sha256(tensor.numpy().tobytes()).hexdigest()}" for name, tensor in state.items()]
