"""The paper's search: what is kept, what is halved, what is adopted on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import merger.core.attempt as attempt_module
from merger.checkpoint import snapshot
from merger.core.attempt import SETTLED, attempt
from merger.core.merged import Merged
from merger.distributed import SINGLE_PROCESS, ProcessGroup
from merger.methods.paper import smaller
from merger.training.loop import Diverged
from merger.training.recipe import Recipe
from models.sharing.plan import SharingPlan, tie

A, B, C, D = (("a", "conv"), ("b", "conv"), ("c", "conv"), ("d", "conv"))


@dataclass
class FakeBench:
    """A workbench whose ratios on val are dictated: `script[epoch][query]`; reverted models get `reverted`."""

    script: list[dict[str, float]]
    reverted: dict[str, float] = field(default_factory=dict)
    epoch: int = 0
    handed_out: list = field(default_factory=list)
    group: ProcessGroup = SINGLE_PROCESS

    def tie_and_evaluate(self, plan, queries, states):
        models = {query: _net(states[query]) for query in queries}
        tie(models, plan)
        self.handed_out = list(models.values())
        return models, {query: self.ratio(query, model) for query, model in models.items()}

    def models(self, queries, states):
        return {query: _net(states[query]) for query in queries}

    def calibrate(self, query, model):
        pass

    def ratio(self, query, model):
        if not any(model is one for one in self.handed_out):
            return self.reverted[query]
        return self.script[min(self.epoch, len(self.script) - 1)][query]

    def progress(self, event, **fields):
        pass

    def training(self, models, recipe, eased, plan):
        return self._Training(self, models)

    class _Training:
        def __init__(self, ctx, models):
            self.ctx, self.models = ctx, models
            self.epochs, self.loss, self.step = 0, 0.0, SETTLED

        def epoch(self):
            self.epochs += 1
            self.ctx.epoch += 1
            with torch.no_grad():
                for model in self.models.values():
                    model.conv.weight.add_(1.0)
            return 0.0


@pytest.fixture(autouse=True)
def ratios_without_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake workbench has no val split, and dictates the ratio of the very models at work."""

    def evaluate_all(ctx, journal, name, models, *_):
        return {query: ctx.ratio(query, model) for query, model in models.items()}

    monkeypatch.setattr(attempt_module, "judge_all", evaluate_all)
    tie_and_evaluate = lambda ctx, _journal, *given: ctx.tie_and_evaluate(*given)  # noqa: E731
    monkeypatch.setattr(attempt_module, "tied_and_judged", tie_and_evaluate)


def _net(state):
    net = nn.Sequential()
    net.add_module("conv", nn.Conv2d(1, 1, 1, bias=False))
    net.add_module("early", nn.Conv2d(1, 1, 1, bias=False))
    net.load_state_dict(state)
    return net


def _accepted(queries, plan=None):
    states = {}
    for index, query in enumerate(queries):
        states[query] = {"conv.weight": torch.full((1, 1, 1, 1), float(index)), "early.weight": torch.ones(1, 1, 1, 1)}
    return Merged(plan or SharingPlan(), states)


REQUIRED = dict.fromkeys("abcd", 0.95)


def _try(ctx: Any, accepted: Merged, members: list, epochs: int) -> Any:
    return attempt(ctx, accepted, members, Recipe(epochs=epochs), REQUIRED)


def test_success_ends_the_attempt_at_once() -> None:
    ctx = FakeBench([{"a": 0.5, "b": 0.5}, {"a": 0.96, "b": 0.97}, {"a": 0.0, "b": 0.0}])
    tried = _try(ctx, _accepted("ab"), [A, B], epochs=5)
    assert tried.kept == (A, B) and tried.epochs == 1
    assert tried.merged.plan.shared == ((A, B),)
    assert torch.equal(tried.merged.states["a"]["conv.weight"], tried.merged.states["b"]["conv.weight"])


def test_no_training_where_tying_alone_holds() -> None:
    ctx = FakeBench([{"a": 0.99, "b": 1.0}])
    assert _try(ctx, _accepted("ab"), [A, B], epochs=5).epochs == 0


def test_members_that_hold_keep_sharing_and_the_others_get_their_weights_back() -> None:
    ctx = FakeBench([{"a": 0.5, "b": 0.5, "c": 0.5}, {"a": 0.96, "b": 0.97, "c": 0.2}])
    accepted = _accepted("abc")
    tried = _try(ctx, accepted, [A, B, C], epochs=3)
    assert tried.kept == (A, B)
    assert tried.merged.plan.shared == ((A, B),)
    assert torch.equal(tried.merged.states["c"]["conv.weight"], accepted.states["c"]["conv.weight"])
    assert not torch.equal(tried.merged.states["a"]["conv.weight"], accepted.states["a"]["conv.weight"])


@pytest.mark.parametrize(("ratio", "kept"), [(0.96, (A, B)), (0.90, ())])
def test_a_failing_member_tied_elsewhere_must_hold_without_the_new_set(ratio: float, kept: tuple) -> None:
    accepted = _accepted("abc", SharingPlan(((("a", "early"), ("c", "early")),)))
    ctx = FakeBench([{"a": 0.96, "b": 0.97, "c": 0.2}], reverted={"c": ratio})
    tried = _try(ctx, accepted, [A, B, C], epochs=1)
    assert tried.kept == kept
    assert (tried.merged is None) == (not kept)


def test_a_bystander_that_falls_below_its_target_stops_the_adoption() -> None:
    accepted = _accepted("abd", SharingPlan(((("a", "early"), ("d", "early")),)))
    ctx = FakeBench([{"a": 0.99, "b": 0.99, "d": 0.9}])
    tried = _try(ctx, accepted, [A, B], epochs=2)
    assert tried.kept == () and tried.merged is None


def test_one_more_member_replaces_the_adopted_state() -> None:
    script = [{"a": 0.96, "b": 0.96, "c": 0.4}, {"a": 0.9, "b": 0.96, "c": 0.9}, {"a": 0.96, "b": 0.96, "c": 0.96}]
    tried = _try(FakeBench(script), _accepted("abc"), [A, B, C], epochs=4)
    assert tried.kept == (A, B, C) and tried.epochs == 2


def test_a_gain_too_small_ends_the_attempt_early() -> None:
    script = [{"a": 0.5 + 0.001 * epoch, "b": 1.0} for epoch in range(40)]
    tried = _try(FakeBench(script), _accepted("ab"), [A, B], epochs=30)
    assert tried.kept == () and tried.epochs < 10


def test_divergence_refuses_the_set_and_keeps_what_was_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*args):
        raise Diverged("a")
        yield

    monkeypatch.setattr(attempt_module, "train_while", explode)
    ctx = FakeBench([{"a": 0.96, "b": 0.97, "c": 0.2}])
    tried = _try(ctx, _accepted("abc"), [A, B, C], epochs=3)
    assert tried.diverged and tried.kept == (A, B)


def test_of_the_failing_members_the_better_half_is_tried_again() -> None:
    ratios = {"a": 0.9, "b": 0.5, "c": 0.8, "d": 0.99}
    assert smaller((A, B, C, D), (), ratios) == (A, D)
    assert smaller((A, B, C, D), (D, C), ratios) == (A, C, D)
    assert smaller((A, B, D), (A, D), ratios) == (A, D)


def test_a_snapshot_does_not_follow_its_model() -> None:
    net = nn.Linear(2, 2)
    state = snapshot(net)
    with torch.no_grad():
        net.weight.zero_()
    assert not torch.equal(state["weight"], net.weight)
