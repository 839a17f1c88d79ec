"""GEMEL's search: what is kept, what is halved, what is adopted on the way, in which order groups come."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemel.merger.methods.gemel as module
from gemel.merger import merge
from gemel.merger.budget import Budget
from gemel.merger.checkpoint import StepCache, snapshots
from gemel.merger.context import Merged
from gemel.merger.methods.gemel import attempt_set, smaller_set
from gemel.merger.training.loop import Diverged
from gemel.merger.training.recipe import Flops, Recipe
from gemel.models.sharing.plan import SharingPlan, tie
from gemel.models.workload import Workload
from tests.merger.guarantees import ratios_on_val
from tests.merger.options import QUICK

A, B, C, D = (("a", "conv"), ("b", "conv"), ("c", "conv"), ("d", "conv"))
REQUIRED = dict.fromkeys("abcd", 0.95)


@dataclass
class ScriptedContext:
    """Ratios on val are dictated: `script[epoch][query]`; a model with an old weight has `reverted`."""

    script: list[dict[str, float]]
    reverted: dict[str, float] = field(default_factory=dict)

    def models(self, queries: Any, states: Any) -> dict[str, nn.Module]:
        return {query: _net(states[query]) for query in queries}

    def snapshots(self, models: Any) -> dict[str, Any]:
        return snapshots(models)

    def recalibrate(self, query: str, model: nn.Module) -> None:
        pass

    def ratio(self, query: str, model: nn.Module) -> float:
        return self.reverted[query]


@pytest.fixture(autouse=True)
def script_training(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scripted context trains by adding 1 to all weights."""
    if "workload" in request.fixturenames or "ctx" in request.fixturenames:
        return

    def tie_scripted(ctx: ScriptedContext, cache: Any, plan: SharingPlan, queries: Any, states: Any) -> Any:
        models = ctx.models(queries, states)
        tie(models, plan)
        return models, dict(ctx.script[0])

    def train(ctx: ScriptedContext, models: Any, recipe: Recipe, *_: Any) -> Any:
        for epoch in range(1, recipe.epochs + 1):
            with torch.no_grad():
                for model in models.values():
                    model.conv.weight.add_(1.0)
            yield dict(ctx.script[min(epoch, len(ctx.script) - 1)])

    monkeypatch.setattr(module, "tie_and_evaluate", tie_scripted)
    monkeypatch.setattr(module, "train_epochs", train)


def _net(state: Any) -> nn.Module:
    net = nn.Sequential()
    net.add_module("conv", nn.Conv2d(1, 1, 1, bias=False))
    net.add_module("early", nn.Conv2d(1, 1, 1, bias=False))
    net.load_state_dict(state)
    return net


def _accept(queries: str, plan: SharingPlan | None = None) -> Merged:
    states = {
        query: {"conv.weight": torch.full((1, 1, 1, 1), float(index)), "early.weight": torch.ones(1, 1, 1, 1)}
        for index, query in enumerate(queries)
    }
    return Merged(plan or SharingPlan(), states)


def _try(script: list, accepted: Merged, members: list, epochs: int, reverted: dict | None = None) -> Any:
    ctx: Any = ScriptedContext(script, reverted or {})
    return attempt_set(ctx, accepted, members, Recipe(epochs=epochs), REQUIRED, StepCache(), Budget(Flops()))


def test_attempt_success_ends_at_once() -> None:
    script = [{"a": 0.5, "b": 0.5}, {"a": 0.96, "b": 0.97}, {"a": 0.0, "b": 0.0}]
    tried = _try(script, _accept("ab"), [A, B], 5)
    assert tried.kept == (A, B) and tried.epochs == 1 and tried.merged.plan.shared == ((A, B),)
    assert torch.equal(tried.merged.states["a"]["conv.weight"], tried.merged.states["b"]["conv.weight"])


def test_attempt_failing_member_gets_its_weight_back() -> None:
    accepted = _accept("abc")
    tried = _try([{"a": 0.5, "b": 0.5, "c": 0.5}, {"a": 0.96, "b": 0.97, "c": 0.2}], accepted, [A, B, C], 3)
    assert tried.kept == (A, B) and tried.merged.plan.shared == ((A, B),)
    assert torch.equal(tried.merged.states["c"]["conv.weight"], accepted.states["c"]["conv.weight"])
    assert not torch.equal(tried.merged.states["a"]["conv.weight"], accepted.states["a"]["conv.weight"])


@pytest.mark.parametrize(("ratio", "kept"), [(0.96, (A, B)), (0.90, ())])
def test_attempt_failing_member_tied_elsewhere_must_hold(ratio: float, kept: tuple) -> None:
    accepted = _accept("abc", SharingPlan(((("a", "early"), ("c", "early")),)))
    tried = _try([{"a": 0.96, "b": 0.97, "c": 0.2}], accepted, [A, B, C], 1, {"c": ratio})
    assert tried.kept == kept and (tried.merged is None) == (not kept)


def test_attempt_failing_bystander_prevents_adoption() -> None:
    accepted = _accept("abd", SharingPlan(((("a", "early"), ("d", "early")),)))
    assert _try([{"a": 0.99, "b": 0.99, "d": 0.9}], accepted, [A, B], 2).merged is None


def test_attempt_one_more_member_replaces_the_state() -> None:
    script = [{"a": 0.96, "b": 0.96, "c": 0.4}, {"a": 0.9, "b": 0.96, "c": 0.9}, dict.fromkeys("abc", 0.96)]
    tried = _try(script, _accept("abc"), [A, B, C], 4)
    assert tried.kept == (A, B, C) and tried.epochs == 2


def test_attempt_gain_too_small_ends_early() -> None:
    tried = _try([{"a": 0.5 + 0.001 * epoch, "b": 1.0} for epoch in range(40)], _accept("ab"), [A, B], 30)
    assert tried.kept == () and tried.epochs < 10


def test_attempt_divergence_keeps_what_was_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: Any) -> Any:
        raise Diverged("a")
        yield

    monkeypatch.setattr(module, "train_epochs", explode)
    tried = _try([{"a": 0.96, "b": 0.97, "c": 0.2}], _accept("abc"), [A, B, C], 3)
    assert tried.diverged and tried.kept == (A, B)


def test_attempt_out_of_time_keeps_what_was_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "train_epochs", lambda *_: iter(()))
    tried = _try([{"a": 0.96, "b": 0.97, "c": 0.2}], _accept("abc"), [A, B, C], 3)
    assert not tried.diverged and tried.kept == (A, B)


def test_smaller_set_keeps_the_better_half_of_the_failing() -> None:
    ratios = {"a": 0.9, "b": 0.5, "c": 0.8, "d": 0.99}
    assert smaller_set((A, B, C, D), (), ratios) == (A, D)
    assert smaller_set((A, B, C, D), (D, C), ratios) == (A, C, D)
    assert smaller_set((A, B, D), (A, D), ratios) == (A, D)


def test_search_saves_bytes_and_keeps_targets(workload: Workload, tmp_path: Path) -> None:
    out = tmp_path / "b.safetensors"
    report = merge(workload, out, "gemel", options=QUICK)
    assert report.saved_fraction > 0
    assert min(ratios_on_val(workload, out).values()) >= 0.95
    rows = [json.loads(line) for line in Path(f"{out}.log.jsonl").read_text().splitlines()]
    saved = sum(row["saved_bytes"] for row in rows if "set" in row)
    assert saved == pytest.approx(report.bytes_before - report.bytes_after, rel=0.01)


def test_search_out_of_budget_leaves_groups_untried(workload: Workload, tmp_path: Path) -> None:
    out = tmp_path / "b.safetensors"
    merge(workload, out, "gemel", options=replace(QUICK, max_flops=1.0))
    rows = [json.loads(line) for line in Path(f"{out}.log.jsonl").read_text().splitlines()]
    assert {row["outcome"] for row in rows if "set" in row} == {"untried"}
