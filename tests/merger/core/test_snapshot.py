"""Models are judged with their norms as they are and measured again, and keep what serves them better."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from merger.checkpoint import StepCache, snapshot
from merger.core.context import MergeContext
from merger.core.merged import Merged
from merger.core.snapshot import evaluate_all, tie_and_evaluate
from merger.mending.private import train_private
from merger.training.recipe import Recipe
from models.sharing.plan import SharingPlan


@dataclass
class Val:
    """What val says of a model: `as_is` by its original's norms, `again` by those measured again."""

    as_is: float
    again: float
    original: torch.Tensor

    def ratio(self, _query: str, model: nn.Module) -> float:
        same = torch.equal(model.state_dict()["stem.1.running_mean"], self.original)
        return self.as_is if same else self.again


@pytest.fixture
def val(ctx: MergeContext, monkeypatch: pytest.MonkeyPatch) -> Val:
    found = Val(0.9, 0.9, ctx.originals["q0"].state_dict()["stem.1.running_mean"])
    monkeypatch.setattr(ctx, "ratio", found.ratio)
    return found


@pytest.mark.parametrize(("as_is", "again"), [(0.9, 0.5), (0.5, 0.9), (0.9, 0.9)])
def test_the_better_norms_are_kept(ctx: MergeContext, val: Val, as_is: float, again: float) -> None:
    val.as_is, val.again = as_is, again
    models, ratios = tie_and_evaluate(ctx, StepCache(), SharingPlan(), ["q0"], {})
    assert ratios == {"q0": 0.9}
    assert torch.equal(snapshot(models["q0"])["stem.1.running_mean"], val.original) == (as_is >= again)


def test_nothing_is_measured_again_where_nobody_asks_or_all_is_at_rest(ctx: MergeContext, val: Val) -> None:
    model, before = ctx.models(["q0"])["q0"], ctx.flops.total
    evaluate_all(ctx, StepCache(), "once", {"q0": model}, SharingPlan())
    assert ctx.flops.total == before
    evaluate_all(ctx, StepCache(), "rests", {"q0": model.requires_grad_(False)}, SharingPlan(), 8)
    assert ctx.flops.total == before, "norms at rest stay as they are"


def test_mending_trains_nothing_where_it_is_enough_to_measure_the_norms_again(
    ctx: MergeContext, val: Val, monkeypatch: pytest.MonkeyPatch
) -> None:
    val.as_is, val.again = 0.5, 0.97
    monkeypatch.setattr(ctx, "training", lambda *_: pytest.fail("there is nothing to train"))
    merged = Merged(SharingPlan(), {query: snapshot(model) for query, model in ctx.originals.items()})
    found = train_private(ctx, [merged.states["q0"]], merged.plan, "q0", Recipe(), 0.95, StepCache())
    assert (found["ratio"], found["epochs"]) == (0.97, 0)
    assert not torch.equal(found["state"]["stem.1.running_mean"], val.original)


def test_where_only_the_end_counts_a_training_goes_all_the_way_and_is_judged_once(
    ctx: MergeContext, val: Val, monkeypatch: pytest.MonkeyPatch
) -> None:
    val.as_is = val.again = 0.5
    merged = Merged(SharingPlan(), {query: snapshot(model) for query, model in ctx.originals.items()})
    evaluated: list[str] = []
    monkeypatch.setattr(
        "merger.core.attempt.evaluate_all", lambda _b, _j, name, *_: evaluated.append(name) or {"q0": 0.99}
    )
    for evaluate_from in (3, 1):
        begins, recipe = [merged.states["q0"]], Recipe(epochs=3, frames_per_epoch=32, evaluate_from=evaluate_from)
        found = train_private(ctx, begins, merged.plan, "q0", recipe, 0.95, StepCache())
        assert (found["ratio"], found["trained"], found["epochs"]) == (0.99, evaluate_from, evaluate_from)
    assert evaluated == ["judged 3", "judged 1"]
