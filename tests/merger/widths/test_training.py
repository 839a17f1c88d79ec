"""Training for the bits that weights are stored in: what steps see, what they move, how far it goes, what is kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import merger.widths.search as search_module
import merger.widths.training as training_module
from merger.checkpoint import Checkpoint, StepCache, snapshot
from merger.core.budget import Budget
from merger.core.context import MergeContext
from merger.core.merged import Merged
from merger.training.loop import Diverged, Training
from merger.training.recipe import Recipe
from merger.widths.rounding import Rounded
from merger.widths.search import fit_widths
from merger.widths.storing import Storage, Weight, store, tied_models, weights_of, widths_of
from merger.widths.training import ForBits
from models.bits import BIT_WIDTHS, Bits
from models.quantization import pack
from models.sharing.groups import groups
from models.sharing.plan import SharingPlan

SHORT = Recipe(rate=1e-3, epochs=2, frames_per_epoch=64, features=1.0)
LAST = "last.0.weight"


@pytest.fixture
def tied(ctx: MergeContext) -> Merged:
    """Every group tied, nothing trained."""
    plan = SharingPlan.of(groups(ctx.layers))
    return Merged(plan, {query: snapshot(model) for query, model in ctx.tied(plan, ctx.queries).items()})


def rounded(ctx: MergeContext, tied: Merged, width: Any = "int3") -> Rounded:
    models = tied_models(ctx, tied, ctx.queries)
    return Rounded(ctx.training(models, SHORT, (), tied.plan), widths_of(weights_of(ctx, tied, width)))


def test_steps_see_rounded_weights_and_move_what_is_not(
    ctx: MergeContext, tied: Merged, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rounded(ctx, tied)
    model = one.training.models["q1"]
    before, seen = one.wide()["q1"][LAST], list[int]()
    learn = Training._learn_all

    def learning(self: Training) -> None:
        rows = model.get_parameter(LAST).detach().flatten(1)
        seen.append(max(len(row.unique()) for row in rows))
        learn(self)

    monkeypatch.setattr(Training, "_learn_all", learning)
    one.training.epoch()
    assert seen and max(seen) <= 7, "codes -3 to 3"
    after = one.wide()["q1"][LAST]
    assert not torch.equal(before, after) and len(after.flatten(1)[0].unique()) > 7
    assert torch.equal(after, one.wide()["q0"][LAST]), "tied"
    assert model.get_parameter("head.weight").detach().equal(model.get_parameter("head.weight").half().float())


def test_small_steps_add_up_and_are_not_rounded_away(
    ctx: MergeContext, tied: Merged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.SHORT", replace(SHORT, rate=1e-9))
    one = rounded(ctx, tied)
    before = one.wide()["q1"]
    one.training.epoch()
    for name, after in one.wide()["q1"].items():
        torch.testing.assert_close(after, before[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("width", ["int2", "int3", "int4", "int6", "int8"])
def test_what_is_judged_is_what_packing_stores(ctx: MergeContext, tied: Merged, width: Any) -> None:
    one = rounded(ctx, tied, width)
    one.training.epoch()
    for query, model in one.training.models.items():
        for key, stored in widths_of(weights_of(ctx, tied, width))[query].items():
            weight = model.get_parameter(key).detach()
            torch.testing.assert_close(pack(weight, stored).wide(), weight, atol=0, rtol=1e-6)
            if stored != "fp16":
                wide = one.wide()[query][key]
                torch.testing.assert_close(pack(wide, stored).wide(), weight, atol=0, rtol=1e-6)


def test_an_interrupted_one_goes_on_where_it_stood(ctx: MergeContext, tied: Merged) -> None:
    whole, stopped, again = (rounded(ctx, tied) for _ in range(3))
    stops = []

    def note() -> None:
        if stopped.training.step == 5:
            stops.append(copy.deepcopy(stopped.state_dict()))

    stopped.after_step = note
    for one in (whole, stopped):
        one.training.epoch()
        one.training.epoch()
    assert stops, "in the midst of an epoch"
    again.load_state_dict(stops[0])
    while again.training.epochs < 2:
        again.training.epoch()
    for query, model in whole.training.models.items():
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, again.training.models[query].state_dict()[name]), f"{query} {name}"
        assert all(torch.equal(value, again.wide()[query][name]) for name, value in whole.wide()[query].items())


class _Taught:
    """Stands in for training: every query bears what a function of its weights says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ratios: Any) -> None:
        self.tried: list[dict[str, str | None]] = []

        def trained(self_: ForBits, states: Any, weights: Sequence[Weight]) -> dict[str, Any]:
            own = {query: next(w.width for w in weights if (query, LAST) in w.places) for query in self_.queries}
            self.tried.append(own)
            after = {query: {**states[query], "head.bias": torch.full((2,), float(len(self.tried)))} for query in own}
            return {"ratios": ratios(own), "states": after, "wide": {query: {} for query in own}}

        monkeypatch.setattr(ForBits, "_trained", trained)


def trained(
    ctx: MergeContext, merged: Merged, budget: Budget | None = None, alone: Callable[[str], int] | None = None
) -> dict[str, Any]:
    need = dict.fromkeys(ctx.queries, 0.95)
    for_bits = ForBits(ctx, merged, list(need), need, StepCache(), budget or Budget(ctx.flops), alone)
    return for_bits.run(weights_of(ctx, merged, "int2"))


def test_whoever_falls_short_gets_its_next_width_and_so_do_those_who_share_it(
    ctx: MergeContext, tied: Merged, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught = _Taught(monkeypatch, lambda own: {q: 0.9 if q == "q1" and w == "int2" else 1.0 for q, w in own.items()})
    found = trained(ctx, tied)
    assert taught.tried == [dict.fromkeys(ctx.queries, "int2"), dict.fromkeys(ctx.queries, "int3")]
    assert set(found["states"]) == set(ctx.queries)
    assert all(float(state["head.bias"][0]) == 2 for state in found["states"].values())
    assert [one["ratios"]["q1"] for one in found["tried"]] == [0.9, 1.0]


def test_what_does_not_bear_four_bits_is_left_to_rounding(
    ctx: MergeContext, tied: Merged, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught = _Taught(monkeypatch, lambda own: {q: 0.9 if q == "q1" else 1.0 for q in own})
    assert trained(ctx, tied)["states"] == {}
    assert [own["q1"] for own in taught.tried] == ["int2", "int3", "int4"]


@pytest.mark.parametrize(("tries", "width"), [(1, "int2"), (2, "int3"), (3, "int4")])
def test_who_takes_less_alone_leaves_the_others(
    ctx: MergeContext, tied: Merged, monkeypatch: pytest.MonkeyPatch, tries: int, width: Bits
) -> None:
    """Others are tried as long as the next width of all takes less than the others do and the one that leaves."""
    taught = _Taught(monkeypatch, lambda own: {q: 0.9 if q == "q1" else 1.0 for q in own})
    weights = weights_of(ctx, tied, "int2")
    rest = sum(one.nbytes for one in weights if one.used_by({"q0", "q2"}))
    level = list(BIT_WIDTHS).index(width)
    takes = 1 + sum(one.at(min(level, len(one.widths) - 1)).nbytes for one in weights) - rest
    found = trained(ctx, tied, alone=lambda _query: takes)
    assert len(taught.tried) == tries
    assert found["left"] == ["q1"] and set(found["states"]) == {"q0", "q2"} and not any(found["levels"])


def test_who_leaves_is_stored_as_its_original_bears_it(
    ctx: MergeContext, tied: Merged, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluated(_self: Any, weights: list[Weight], query: str, need: float) -> dict[str, Any]:
        shared = any(len(weight.places) > 1 for weight in weights)
        return {"ratio": 0.0 if shared else 1.0, "norms": None, "learnt": False}

    fitted, asked = search_module._Search._fitted, list[list[str]]()

    def told(self: Any, width: Any, weights: list[Weight], party: list[str]) -> Any:
        asked.append(party)
        return fitted(self, width, weights, party)

    monkeypatch.setattr(search_module._Search, "_judged", evaluated)
    monkeypatch.setattr(search_module._Search, "_wide", lambda *_: 1.0)
    monkeypatch.setattr(search_module._Search, "_fitted", told)
    _Taught(monkeypatch, lambda own: {q: 0.9 if q == "q1" else 1.0 for q in own})
    found = fit_widths(ctx, tied, "int2", dict.fromkeys(ctx.queries, 0.95), StepCache(), Budget(ctx.flops))
    assert asked == [["q0", "q1", "q2"], ["q1"]], "what it takes alone is found out once"
    assert found["left"] == ["q1"] and set(found["states"]) == {"q0", "q1", "q2"}
    original = ctx.originals["q1"].state_dict()
    assert all(torch.equal(original[name], tensor) for name, tensor in found["states"]["q1"].items())
    assert {own[LAST] for own in found["storage"]["widths"].values()} == {"int2"}
    stored = sum(found["stored_bytes"].values())
    weights = weights_of(ctx, tied, "int2")
    rest = sum(one.nbytes for one in weights if one.used_by({"q0", "q2"}))
    alone = sum(one.nbytes for one in weights if one.used_by({"q1"}))
    assert stored == rest + alone


def test_nothing_trains_that_there_is_no_work_for(
    ctx: MergeContext, tied: Merged, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught = _Taught(monkeypatch, lambda own: dict.fromkeys(own, 1.0))
    assert trained(ctx, tied, Budget(ctx.flops, ctx.flops.total + 1))["tried"] == []
    assert not taught.tried


def test_a_training_whose_time_is_over_ends_with_an_epoch_and_is_no_help(
    ctx: MergeContext, tied: Merged, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, epochs = [0.0], []

    def passes(training: Training) -> None:
        epochs.append(training.step)
        training.step += training.steps
        now[0] += 10

    monkeypatch.setattr(Training, "epoch", passes)
    found = trained(ctx, tied, Budget(ctx.flops, ends=15.0, clock=lambda: now[0]))
    assert len(epochs) == 2 and not found["states"] and len(found["tried"]) == 1


def test_a_training_that_diverges_is_no_help(ctx: MergeContext, tied: Merged, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverges(_self: Training) -> float:
        raise Diverged("q0")

    monkeypatch.setattr(Training, "epoch", diverges)
    found = trained(ctx, tied)
    assert not found["states"] and len(found["tried"]) == 3


@pytest.mark.parametrize(("bears", "stored"), [("int2", "int2"), ("int3", "int3"), ("int6", "int4")])
def test_what_takes_less_is_stored_rounded_or_trained(
    ctx: MergeContext, tied: Merged, monkeypatch: pytest.MonkeyPatch, bears: Bits, stored: str
) -> None:
    """Rounded, these bear four bits."""

    def evaluated(_self: Any, weights: list[Weight], query: str, need: float) -> dict[str, Any]:
        few = any(weight.width in ("int2", "int3") and weight.used_by({query}) for weight in weights)
        return {"ratio": 0.0 if few else 1.0, "norms": None, "learnt": False}

    monkeypatch.setattr(search_module._Search, "_judged", evaluated)
    monkeypatch.setattr(search_module._Search, "_wide", lambda *_: 1.0)
    _Taught(monkeypatch, lambda own: {q: 1.0 if list(BIT_WIDTHS).index(w) >= list(BIT_WIDTHS).index(bears) else 0.5
                                      for q, w in own.items()})  # fmt: skip
    found = fit_widths(ctx, tied, "int2", dict.fromkeys(ctx.queries, 0.95), StepCache(), Budget(ctx.flops))
    assert {own[LAST] for own in found["storage"]["widths"].values()} == {stored}
    assert (set(found["states"]) == set(ctx.queries)) == (stored != "int4")
    assert found["rows"][-1]["stored_bytes"] == found["stored_bytes"] and not found["rows"][-1]["in_the_way"]
    assert [row["width"] for row in found["rows"]] == ["int2"] * len(found["rows"])
    tries = sum("trained" in row for row in found["rows"])
    assert tries == {"int2": 1, "int3": 2, "int4": 3}[stored], "each told once"


def test_what_bears_no_rounding_bears_training_and_ships_as_it_was_judged(
    ctx: MergeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluated(_self: Any, weights: list[Weight], query: str, need: float) -> dict[str, Any]:
        few = any(weight.width in ("int2", "int3") and weight.used_by({query}) for weight in weights)
        return {"ratio": 0.0 if few else 1.0, "norms": None, "learnt": False}

    monkeypatch.setattr(search_module._Search, "_judged", evaluated)
    monkeypatch.setattr(training_module, "FOR_BITS", replace(SHORT, rate=3e-3, epochs=6, frames_per_epoch=320))
    originals = Merged(SharingPlan(), {query: snapshot(model) for query, model in ctx.originals.items()})
    found = fit_widths(ctx, originals, "int2", dict.fromkeys(ctx.queries, 0.9), StepCache(), Budget(ctx.flops))
    assert found["states"] and any("trained" in row for row in found["rows"])
    widths = found["storage"]["widths"]
    last = {query: ratio for row in found["rows"] for query, ratio in row["ratios"].items()}
    models = tied_models(ctx, Merged(originals.plan, {**originals.states, **found["states"]}), ctx.queries)
    store(models, Storage(**found["storage"]))
    for query in found["states"]:
        assert widths[query][LAST] in ("int2", "int3")
        assert 0.9 <= last[query] == pytest.approx(ctx.ratio(query, models[query]))


def test_a_search_that_is_killed_in_the_midst_of_a_training_goes_on_there(
    ctx: MergeContext, tied: Merged, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(training_module, "FOR_BITS", SHORT)
    need = dict.fromkeys(ctx.queries, 0.0)

    def run(journal: StepCache) -> dict[str, Any]:
        for_bits = ForBits(ctx, tied, list(need), need, journal, Budget(ctx.flops))
        return journal.step("bits", lambda: for_bits.run(weights_of(ctx, tied, "int3")))

    wanted, step, stopped = run(StepCache()), Training._take_step, Checkpoint(tmp_path / "flops", {}, False)

    def stops(self: Training) -> None:
        if self.step == 5:
            stopped.write()
            raise KeyboardInterrupt
        step(self)

    with monkeypatch.context() as patched:
        patched.setattr(Training, "_take_step", stops)
        with pytest.raises(KeyboardInterrupt):
            run(stopped)
    taken = []
    monkeypatch.setattr(Training, "_take_step", lambda self: taken.append(self.step) or step(self))
    again = run(Checkpoint(tmp_path / "flops", {}, True))
    assert taken[0] == 5, "where it stood"
    for query, state in wanted["states"].items():
        assert all(torch.equal(tensor, again["states"][query][name]) for name, tensor in state.items())
