"""Models are judged with their norms as they are and measured again, and keep what serves them better."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from merger.bench.merged import Merged
from merger.bench.standing import judge_all, tied_and_judged
from merger.bench.workbench import Workbench
from merger.checkpoint import StepCache, snapshot
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
def val(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> Val:
    found = Val(0.9, 0.9, bench.originals["q0"].state_dict()["stem.1.running_mean"])
    monkeypatch.setattr(bench, "ratio", found.ratio)
    return found


@pytest.mark.parametrize(("as_is", "again"), [(0.9, 0.5), (0.5, 0.9), (0.9, 0.9)])
def test_the_better_norms_are_kept(bench: Workbench, val: Val, as_is: float, again: float) -> None:
    val.as_is, val.again = as_is, again
    models, ratios = tied_and_judged(bench, StepCache(), SharingPlan(), ["q0"], {})
    assert ratios == {"q0": 0.9}
    assert torch.equal(snapshot(models["q0"])["stem.1.running_mean"], val.original) == (as_is >= again)


def test_nothing_is_measured_again_where_nobody_asks_or_all_is_at_rest(bench: Workbench, val: Val) -> None:
    model, before = bench.models(["q0"])["q0"], bench.work.total
    judge_all(bench, StepCache(), "once", {"q0": model}, SharingPlan())
    assert bench.work.total == before
    judge_all(bench, StepCache(), "rests", {"q0": model.requires_grad_(False)}, SharingPlan(), 8)
    assert bench.work.total == before, "norms at rest stay as they are"


def test_mending_trains_nothing_where_it_is_enough_to_measure_the_norms_again(
    bench: Workbench, val: Val, monkeypatch: pytest.MonkeyPatch
) -> None:
    val.as_is, val.again = 0.5, 0.97
    monkeypatch.setattr(bench, "training", lambda *_: pytest.fail("there is nothing to train"))
    merged = Merged(SharingPlan(), {query: snapshot(model) for query, model in bench.originals.items()})
    found = train_private(bench, [merged.states["q0"]], merged.plan, "q0", Recipe(), 0.95, StepCache())
    assert (found["ratio"], found["epochs"]) == (0.97, 0)
    assert not torch.equal(found["state"]["stem.1.running_mean"], val.original)


def test_where_only_the_end_counts_a_training_goes_all_the_way_and_is_judged_once(
    bench: Workbench, val: Val, monkeypatch: pytest.MonkeyPatch
) -> None:
    val.as_is = val.again = 0.5
    merged = Merged(SharingPlan(), {query: snapshot(model) for query, model in bench.originals.items()})
    judged: list[str] = []
    monkeypatch.setattr("merger.bench.attempt.judge_all", lambda _b, _j, name, *_: judged.append(name) or {"q0": 0.99})
    for judged_from in (3, 1):
        begins, recipe = [merged.states["q0"]], Recipe(epochs=3, frames_per_epoch=32, judged_from=judged_from)
        found = train_private(bench, begins, merged.plan, "q0", recipe, 0.95, StepCache())
        assert (found["ratio"], found["trained"], found["epochs"]) == (0.99, judged_from, judged_from)
    assert judged == ["judged 3", "judged 1"]
