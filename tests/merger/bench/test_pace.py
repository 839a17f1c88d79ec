"""What is bounded in time is planned in work, by the speed that was measured."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import merger.bench.bounds as bounds_module
from merger.bench.bounds import Bounds
from merger.bench.pace import STEPS, fitting_node, halved, training_speed
from merger.bench.standing import training_flops
from merger.bench.workbench import Workbench
from merger.methods.sprints import Sprints
from merger.training.loop import Recipe, Training, Work
from models.errors import InputError


def test_the_work_left_is_what_there_is_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds_module, "time", SimpleNamespace(monotonic=lambda: 100.0))
    work = Work()
    bounds = Bounds(work, most_work=1000.0, ends=110.0)
    assert bounds.work_left == 1000, "nobody knows how fast it goes"
    assert replace(bounds, speed=30.0).work_left == 300
    assert replace(bounds, speed=30.0).part(0.5).work_left == 150
    assert replace(bounds, speed=300.0).work_left == 1000
    assert replace(bounds, ends=90.0).work_left == 0 and Bounds(work, speed=5.0).work_left == math.inf


def test_speed_is_measured_once_training_is_warm(bench: Workbench) -> None:
    now = iter([0.0, 50.0, 51.0, 52.0])
    before = bench.work.total
    speed = training_speed(bench, ["q0", "q2"], Recipe(), clock=lambda: next(now))
    spent = bench.work.total - before
    assert spent > 0 and speed == pytest.approx(spent * (STEPS - 1) / STEPS / 2)


def test_a_sprint_has_the_epochs_that_there_is_time_for(
    bench: Workbench, sprints: Sprints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds_module, "time", SimpleNamespace(monotonic=lambda: 100.0))
    one = training_flops(bench, list(bench.queries), Recipe(epochs=1))
    bounded = replace(sprints, bounds=Bounds(bench.work, ends=110.0, speed=one / 4 + 1))
    assert bounded._epochs(16, ()) == 2 and sprints._epochs(16, ()) == 16
    assert bounded.may_begin and not replace(sprints, bounds=Bounds(bench.work, ends=99.0)).may_begin


def test_a_node_is_halved_until_a_step_fits_and_one_line_says_so(
    bench: Workbench, sprints: Sprints, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    told: list[str] = []

    def epoch(training: Training) -> None:
        tried.append(training.recipe.node)
        if training.recipe.node > 4:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(Training, "epoch", epoch)
    bench.progress = lambda event, **fields: told.append(fields["text"])
    assert fitting_node(bench, sprints.plan, Recipe()) == 16 and not tried, "on a processor nothing is tried"
    bench.originals, bench.device = dict(bench.originals), torch.device("meta")
    assert fitting_node(bench, sprints.plan, Recipe()) == 4 and tried == [16, 8, 4]
    assert told == ["a step of 16 frames at once does not fit: 4 at once instead"]
    assert fitting_node(bench, sprints.plan, Recipe(batch=4)) == 16, "a smaller batch is a smaller node already"


def test_where_nothing_fits_it_is_said_what_to_do() -> None:
    with pytest.raises(InputError, match="the card: is full with 3 frames at once; merge fewer"):
        halved(12, lambda node: False)
