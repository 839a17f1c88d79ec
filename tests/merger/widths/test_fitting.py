"""Weights that train for the bits they are stored in: taken where that saves bytes, and only there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import merger.widths.fitting as fitting_module
from merger.bench.bounds import Bounds
from merger.bench.merged import Merged, snapshots
from merger.bench.workbench import Workbench
from merger.journal.steps import Journal
from merger.training.loop import Diverged, Training
from merger.widths.fitting import fit_widths, parts_of
from merger.widths.rounding import as_stored
from merger.widths.search import Search, needed
from merger.widths.storing import Storage, Weight, store, tied_models, weights_of, widths_of
from models.parts.terms import Width
from models.parts.widths import packed
from models.sharing.groups import groups
from models.sharing.plan import SharingPlan
from tests.merger.options import QUICK

LAST = "last.0.weight"
SHORT = replace(QUICK.recipe, epochs=1, frames_per_epoch=32)


@pytest.fixture
def tied(bench: Workbench) -> Merged:
    """Every group tied, nothing trained."""
    plan = SharingPlan.of(groups(bench.layers))
    return Merged(plan, snapshots(bench.tied(plan, bench.queries)))


@pytest.fixture
def alone(bench: Workbench) -> Merged:
    """Nothing shared."""
    return Merged(SharingPlan(), snapshots(bench.originals))


def test_within_weights_are_what_a_bundle_holds_and_after_that_what_they_were(bench: Workbench, tied: Merged) -> None:
    models, stored = tied_models(bench, tied, bench.queries), tied_models(bench, tied, bench.queries)
    widths = widths_of(weights_of(bench, tied, "int3"))
    store(stored, Storage(widths, {}))
    before = snapshots(models)
    with pytest.raises(Diverged), as_stored(models, widths):
        assert models["q0"].get_parameter(LAST) is models["q1"].get_parameter(LAST)
        for query, model in models.items():
            assert all(torch.equal(one, stored[query].state_dict()[key]) for key, one in model.state_dict().items())
        assert not torch.equal(models["q0"].state_dict()[LAST], before["q0"][LAST])
        raise Diverged
    for query, model in models.items():
        assert all(torch.equal(one, before[query][key]) for key, one in model.state_dict().items())


def test_gradients_are_those_of_rounded_weights_and_move_the_weights_as_they_were(
    bench: Workbench, tied: Merged
) -> None:
    widths = widths_of(weights_of(bench, tied, "int2"))

    def gradient_and_weight(training: Training) -> tuple[Any, Any]:
        training.epoch()
        weight = training.models["q0"].get_parameter(LAST)
        return weight.grad, weight.detach()

    one_step = replace(SHORT, frames_per_epoch=16)
    rounding = bench.training(tied_models(bench, tied, tied.states), one_step)
    rounding.rounding = partial(as_stored, rounding.models, widths)
    rounded = tied_models(bench, tied, tied.states)
    store(rounded, Storage(widths, {}))
    gradient, weight = gradient_and_weight(rounding)
    expected, moved = gradient_and_weight(bench.training(rounded, one_step))
    assert torch.equal(gradient, expected)
    steps = [weight - tied.states["q0"][LAST], moved - packed(tied.states["q0"][LAST], "int2").wide()]
    assert all(0 < float(step.abs().max()) < 3 * one_step.rate for step in steps)


def test_whoever_shares_is_one_part_and_whoever_does_not_another(bench: Workbench) -> None:
    plan = SharingPlan(((("q0", "last.0"), ("q2", "last.0")),))
    parts = list(parts_of(Merged(plan, snapshots(bench.originals))))
    assert [sorted(part.states) for part in parts] == [["q0", "q2"], ["q1"]]
    assert [part.plan.shared for part in parts] == [plan.shared, ()]


class _Fake:
    """Stands in for judging: a part holds in these widths after so many trainings, and in no narrower ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, holds: list[Width | None]) -> None:
        self.holds, self.trained = holds, list[dict[str, set]]()
        monkeypatch.setattr(Search, "_judged", self.judge)
        monkeypatch.setattr(Search, "_most_error_first", lambda search, weights, open_, short: list(open_))
        monkeypatch.setattr(fitting_module._Fitting, "_wide", lambda fitting, query: 1.0)
        monkeypatch.setattr(fitting_module, "as_stored", self.note)

    def note(self, models: Any, widths: dict[str, dict[str, Width]]) -> Any:
        self.trained.append({query: set(own.values()) for query, own in widths.items()})
        return as_stored(models, widths)

    def judge(self, weights: list[Weight], query: str, need: float) -> dict[str, Any]:
        order = ["int2", "int3", "int4", "int6", "int8", "fp16", None]
        trainings = len({str(one) for one in self.trained if query in one})
        least = order.index(self.holds[min(trainings, len(self.holds) - 1)])
        short = any(order.index(weight.width) < least for weight in weights if weight.used_by({query}))
        return {"ratio": 0.0 if short else 1.0, "norms": None}


@pytest.fixture
def fit(bench: Workbench) -> Callable[..., dict[str, Any]]:
    def run(merged: Merged, bounds: Bounds | None = None) -> dict[str, Any]:
        required = dict.fromkeys(bench.queries, 0.95)
        return fit_widths(bench, merged, "int2", required, Journal(), bounds or Bounds(bench.work), SHORT)

    return run


def _stored(found: dict[str, Any]) -> set[Width]:
    return {width for own in found["storage"]["widths"].values() for width in own.values()} - {"fp16"}


def _changed(found: dict[str, Any], merged: Merged) -> set[str]:
    states = found["merged"]["states"]
    return {q for q, own in merged.states.items() if any(not torch.equal(own[key], states[q][key]) for key in own)}


def test_weights_train_for_the_fewest_bits_and_for_one_width_more_where_that_was_in_vain(
    monkeypatch: pytest.MonkeyPatch, tied: Merged, fit: Callable[..., dict[str, Any]]
) -> None:
    fake = _Fake(monkeypatch, ["int6", "int8", "int3"])
    found = fit(tied)
    assert _stored(found) == {"int3"} and _changed(found, tied) == {"q0", "q1", "q2"}
    assert list(dict.fromkeys(str(one["q0"] - {"fp16"}) for one in fake.trained)) == ["{'int2'}", "{'int3'}"]
    *rows, last = found["rows"]
    assert {row["training"] for row in rows} == {0, 1, 2} and all(row["width"] == "int2" for row in (*rows, last))
    assert last["trained"] == ["q0", "q1", "q2"] and last["stored_bytes"]["int3"] > 0
    assert last["stored_bytes"] == rows[-1]["stored_bytes"]


def test_what_a_training_leaves_short_is_widened_and_kept_where_bytes_are_fewer(
    monkeypatch: pytest.MonkeyPatch, tied: Merged, fit: Callable[..., dict[str, Any]]
) -> None:
    fake = _Fake(monkeypatch, ["int6", "int4"])
    assert _stored(fit(tied)) == {"int4"}
    assert {str(one["q0"] - {"fp16"}) for one in fake.trained} == {"{'int2'}"}


def test_a_training_that_saves_nothing_leaves_every_bit_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tied: Merged, fit: Callable[..., dict[str, Any]]
) -> None:
    _Fake(monkeypatch, ["int4", "int4"])
    found = fit(tied)
    assert _stored(found) == {"int4"} and not _changed(found, tied) and found["rows"][-1]["trained"] == []
    assert {row.get("training") for row in found["rows"]} == {0, 1, 2, None}


def test_a_training_that_spoils_even_wide_weights_is_dropped(
    monkeypatch: pytest.MonkeyPatch, tied: Merged, fit: Callable[..., dict[str, Any]]
) -> None:
    fake = _Fake(monkeypatch, ["int4"])
    judge = fake.judge
    spoiled = {"ratio": 0.0, "norms": None}
    monkeypatch.setattr(Search, "_judged", lambda search, *asked: spoiled if fake.trained else judge(*asked))
    found = fit(tied)
    assert _stored(found) == {"int4"} and not _changed(found, tied)


def test_a_training_that_diverges_is_dropped(
    monkeypatch: pytest.MonkeyPatch, tied: Merged, fit: Callable[..., dict[str, Any]]
) -> None:
    _Fake(monkeypatch, ["int4", "int2"])

    def diverges(training: Training) -> float:
        raise Diverged("q0")

    monkeypatch.setattr(Training, "epoch", diverges)
    found = fit(tied)
    assert _stored(found) == {"int4"} and not _changed(found, tied)


def test_what_holds_in_the_fewest_bits_does_not_train_nor_does_anything_past_the_bounds(
    monkeypatch: pytest.MonkeyPatch, bench: Workbench, tied: Merged, fit: Callable[..., dict[str, Any]]
) -> None:
    fake = _Fake(monkeypatch, ["int2"])
    assert _stored(fit(tied)) == {"int2"}
    _Fake(monkeypatch, ["int4", "int2"])
    few = Bounds(bench.work, most_work=bench.work.total + 10)
    assert _stored(fit(tied, few)) == {"int4"} and not fake.trained
    monkeypatch.setattr(fitting_module, "training_speed", lambda *_: 1e-3)
    soon = Bounds(bench.work, ends=3600.0, clock=lambda: 0.0)
    assert _stored(fit(tied, soon)) == {"int4"} and not fake.trained


def test_originals_train_too_each_by_itself(
    monkeypatch: pytest.MonkeyPatch, alone: Merged, fit: Callable[..., dict[str, Any]]
) -> None:
    fake = _Fake(monkeypatch, ["int3", "int2"])
    found = fit(alone)
    assert all(len(one) == 1 for one in fake.trained) and {query for one in fake.trained for query in one} == {
        "q0",
        "q1",
        "q2",
    }
    assert _changed(found, alone)


def test_training_brings_tiny_networks_to_fewer_bytes_than_rounding(bench: Workbench, tied: Merged) -> None:
    required = dict.fromkeys(bench.queries, 0.95)
    wide = {query: bench.ratio(query, tied_models(bench, tied, [query])[query]) for query in bench.queries}

    def total(recipe: Any) -> int:
        found = fit_widths(bench, tied, "int2", required, Journal(), Bounds(bench.work), recipe)
        last = found["rows"][-1]
        assert all(ratio >= needed(0.95, 0.95, wide[query]) for query, ratio in last["ratios"].items())
        return sum(last["stored_bytes"].values())

    assert total(replace(QUICK.recipe, epochs=4)) < total(None)
