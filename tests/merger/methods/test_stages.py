"""Stages: every method, and the training of originals, begins what it announced, and says how much of it is done."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from merger import TrainOptions, merge, train_originals
from models.workload import Workload, load_workload
from tests.merger.options import QUICK
from tests.merger.tiny import write_workload

Events = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Events:
    """What is told of stages, however soon one after the other."""
    monkeypatch.setattr("merger.events.INTERVAL_S", 0.0)
    return []


def _listens(told: Events) -> Any:
    return lambda event, **fields: told.append((event, fields))


def _check(told: Events) -> list[list[str]]:
    """Of each announcement the stages that began; they did in order, and what is done of each grows up to all of it."""
    announced: list[list[str]] = []
    begun: list[str] = []
    done = 0.0
    for event, fields in told:
        if event == "stages":
            announced.append(fields["names"])
        elif event == "stage":
            begun.append(fields["name"])
            done = 0.0
        elif event == "part":
            assert begun and done <= fields["done"] <= 1
            done = fields["done"]
    found = [[name for name in begun if name in names] for names in announced]
    assert found == [[name for name in names if name in begun] for names in announced]
    return found


@pytest.mark.parametrize(("method", "stages"), [("top-down", 3), ("gemel", 2), ("mainstream", 2), ("joint", 2)])
def test_a_method_begins_the_stages_that_it_announced(
    workload: Workload, tmp_path: Path, told: Events, method: str, stages: int
) -> None:
    options = replace(QUICK, recipe=replace(QUICK.recipe, epochs=2), choose_rate=True)
    merge(workload, tmp_path / "b.safetensors", method, options=options, progress=_listens(told))
    assert stages in map(len, _check(told)) and any(event == "part" for event, _ in told)


def test_training_of_originals_is_a_stage_each(tmp_path: Path, told: Events) -> None:
    workload = load_workload(write_workload(tmp_path, queries=2, frames=24))
    options = TrainOptions(rate=3e-3, passes=48, max_cycles=2)
    train_originals(workload, progress=_listens(told), options=options)
    assert _check(told) == [["training the model of q0", "training the model of q1"]]
    assert any(event == "part" for event, _ in told)
