"""What is bounded in time is planned in work, by the speed that was measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import merger.core.budget as bounds_module
import merger.core.method as method_module
from merger import METHODS, MergeOptions
from merger.checkpoint import Checkpoint, StepCache
from merger.core.budget import Budget
from merger.core.context import MergeContext
from merger.core.pace import STEPS, begins, laid_out, training_speed
from merger.core.snapshot import training_flops
from merger.methods.sprints import Sprints
from merger.training.loop import Training
from merger.training.precision import Precisions
from merger.training.recipe import Flops, Recipe
from merger.training.step_config import MemoryPlan, first_that_fits, layouts
from models.data import PreparedFrames
from models.errors import InputError
from tests.exhaustive import every
from tests.merger.options import QUICK

CHOOSING, CPU = replace(QUICK, choose_rate=True), torch.device("cpu")


def test_the_work_left_is_what_there_is_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds_module, "time", SimpleNamespace(monotonic=lambda: 100.0))
    flops = Flops()
    budget = Budget(flops, max_flops=1000.0, ends=110.0)
    assert budget.flops_left == 1000, "nobody knows how fast it goes"
    assert replace(budget, speed=30.0).flops_left == 300
    assert replace(budget, speed=30.0).part(0.5).flops_left == 150
    assert replace(budget, speed=300.0).flops_left == 1000
    assert replace(budget, ends=90.0).flops_left == 0 and Budget(flops, speed=5.0).flops_left == math.inf


def test_speed_is_measured_once_training_is_warm(ctx: MergeContext, sprints: Sprints) -> None:
    now = iter([0.0, 50.0, 51.0, 52.0])
    before = ctx.flops.total
    speed = training_speed(ctx, sprints.plan, Recipe(), clock=lambda: next(now))
    spent = ctx.flops.total - before
    assert spent > 0 and speed == pytest.approx(spent * (STEPS - 1) / STEPS / 2)


def test_a_sprint_has_the_epochs_that_there_is_time_for(
    ctx: MergeContext, sprints: Sprints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds_module, "time", SimpleNamespace(monotonic=lambda: 100.0))
    one = training_flops(ctx, list(ctx.queries), Recipe(epochs=1))
    bounded = replace(sprints, budget=Budget(ctx.flops, ends=110.0, speed=one / 4 + 1))
    assert bounded._epochs(16, ()) == 2 and sprints._epochs(16, ()) == 16
    assert bounded.may_begin and not replace(sprints, budget=Budget(ctx.flops, ends=99.0)).may_begin


class _Card:
    """In place of a card: steps that keep more than it has room for raise, and so do frames for which none is left."""

    def __init__(self, ctx: MergeContext, monkeypatch: pytest.MonkeyPatch, fits: Callable[[Recipe], bool]) -> None:
        self.tried: list[tuple[int, bool]] = []
        self.told: list[dict[str, Any]] = []
        self.placed: list[str] = []
        self.room = True

        def epoch(training: Training) -> None:
            self.tried.append((training.recipe.node, training.recipe.recompute))
            assert training.steps == 2, "moments are there from the second step on"
            if not fits(training.recipe):
                raise torch.OutOfMemoryError

        def keep_on(prepared: PreparedFrames, where: torch.device) -> bool:
            self.placed.append(where.type)
            return self.room or where.type == "cpu"

        monkeypatch.setattr(Training, "epoch", epoch)
        monkeypatch.setattr(PreparedFrames, "keep_on", keep_on)
        ctx.progress = lambda event, **fields: self.told.append({"event": event, **fields})
        ctx.originals, ctx.device = dict(ctx.originals), torch.device("meta")


def test_on_a_processor_nothing_is_tried_or_changed(
    ctx: MergeContext, sprints: Sprints, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, card = StepCache(), _Card(ctx, monkeypatch, lambda recipe: False)
    ctx.device = torch.device("cpu")
    assert laid_out(ctx, begins(sprints.plan), Recipe(), journal) == Recipe() and not card.tried


@pytest.mark.parametrize(
    ("node", "again", "room", "tried", "last"),
    [
        (16, False, True, [(16, False)], "meta"),
        (16, False, False, [(16, False)], "cpu"),
        (16, True, True, [(16, False), (16, False), (16, True)], "cpu"),
        (4, True, True, [(16, False), (16, False), (16, True), (8, True), (4, True)], "cpu"),
    ],
)
def test_what_fits_is_tried_the_fastest_first_and_one_line_says_what_and_why(
    ctx: MergeContext, sprints: Sprints, monkeypatch: pytest.MonkeyPatch,
    node: int, again: bool, room: bool, tried: list[tuple[int, bool]], last: str,
) -> None:  # fmt: skip
    journal, card = (
        StepCache(),
        _Card(ctx, monkeypatch, lambda recipe: recipe.node <= node and (recipe.recompute or not again)),
    )
    card.room = room
    ctx.precisions = Precisions("fp32", {})
    found = laid_out(ctx, begins(sprints.plan), Recipe(), journal)
    assert found == Recipe(node=node, recompute=again) and card.tried == tried and card.placed[-1] == last
    (line,) = (one for one in card.told if one["event"] == "layout")
    assert f"{node} frames at once" in line["chosen"] and set(line["precisions"].values()) == {"fp32"}
    assert len(line["full"]) == len(tried) - 1 + (not room)
    assert laid_out(ctx, begins(sprints.plan), Recipe(), journal) == found and card.tried == tried, "it is tried once"
    assert card.placed[-1] == last, "who goes on puts the frames there again"


class _Begun(Exception):
    """A method's own training has begun."""


@pytest.mark.parametrize(
    ("method", "options", "several"),
    every(
        [
            ("joint", QUICK, 3), ("joint", CHOOSING, 3), ("gemel", CHOOSING, 3), ("earliest", CHOOSING, 3),
            ("mainstream", CHOOSING, 2), ("mainstream", QUICK, 1),
        ],
        [("joint", QUICK, 3), ("gemel", CHOOSING, 3), ("mainstream", QUICK, 1)],
    ),
)  # fmt: skip
def test_every_method_that_trains_is_laid_out_before_it_begins_and_when_it_goes_on(
    ctx: MergeContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, options: MergeOptions, several: int
) -> None:
    _Card(ctx, monkeypatch, lambda recipe: recipe.recompute)
    trial, tried, begun, told = Training.epoch, list[int](), list[Recipe](), list[dict[str, Any]]()

    def epoch(training: Training) -> None:
        if ctx.device == CPU:
            begun.append(training.recipe)
            raise _Begun
        tried.append(len(training.models))
        trial(training)

    def tell(event: str, **fields: Any) -> None:
        told.extend([fields] if event == "layout" else [])

    def and_then_computed(*given: Any) -> Recipe:
        laid_out(*given)
        ctx.device = CPU  # what follows is computed
        return given[2]

    monkeypatch.setattr(Training, "epoch", epoch)
    monkeypatch.setattr(method_module, "laid_out", and_then_computed)
    ctx.progress = tell
    for resume in (False, True):
        checkpoint = Checkpoint(tmp_path / "flops", {}, resume)
        ctx.fitting, ctx.device = MemoryPlan(checkpoint.state("fitting")), torch.device("meta")
        with pytest.raises(_Begun):
            METHODS[method](ctx, options, checkpoint)
        checkpoint.write()
    (line,) = told
    assert "16 frames at once" in line["chosen"] and len(line["full"]) == 2
    assert tried == [several] * 3 and begun[0] == begun[1] and begun[0].recompute, "it is tried once"


def test_a_smaller_node_leaves_the_batch_as_it_is_and_a_smaller_batch_is_a_smaller_node() -> None:
    assert layouts(Recipe(batch=32))[-1].recipe(Recipe(batch=32)) == Recipe(batch=32, node=1, recompute=True)
    assert [one.node for one in layouts(Recipe(batch=12))] == [12, 12, 12, 6, 3]


def test_where_nothing_fits_it_is_said_what_to_do() -> None:
    with pytest.raises(InputError, match=r"the card: is full with 3 frames at once, .*; give smaller inputs"):
        first_that_fits(layouts(Recipe(batch=12)), lambda layout: False)
