"""A loss that is not a number costs the group at work, not the merge."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gemel.merger import MergeOptions, merge
from gemel.merger.objectives.classes import ClassificationObjective
from gemel.merger.training.recipe import Recipe
from gemel.models.bundle import open_bundle
from gemel.models.workload import Workload
from tests.merger.guarantees import must_train
from tests.merger.options import QUICK

DEMANDING = replace(QUICK, margin=0.9)


def _inject(monkeypatch: pytest.MonkeyPatch, bad: Any) -> list[bool]:
    """Replace the loss by NaN at those calls for which `bad(number)` holds; returns what was done at each."""
    loss, calls = ClassificationObjective.loss, []

    def inject(self, model, outputs, targets):
        calls.append(bad(len(calls)))
        return loss(self, model, outputs, targets) * (float("nan") if calls[-1] else 1.0)

    monkeypatch.setattr(ClassificationObjective, "loss", inject)
    return calls


def test_group_that_diverges_is_refused_alone(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    must_train(monkeypatch)
    calls = _inject(monkeypatch, lambda number: number == 1)
    report = merge(workload, tmp_path / "b.safetensors", "gemel", options=DEMANDING)
    rows = [json.loads(line) for line in (tmp_path / "b.safetensors.log.jsonl").read_text().splitlines()]
    assert calls.count(True) == 1
    rows = [row for row in rows if "diverged" in row]  # the attempts; what became of each set follows them
    diverged = [index for index, row in enumerate(rows) if row["diverged"]]
    (index,) = diverged
    # whose weights held as they were put together may stay so; that differs by rounding
    assert rows[index]["kept"] != rows[index]["members"]
    assert rows[-1]["group"] != rows[index]["group"] and rows[-1]["kept"]
    assert report.saved_fraction > 0 and all(query.ratio >= 0.9 for query in report.queries)
    _all_finite(report.bundle)


@pytest.mark.parametrize("method", ["top-down", "gemel", "joint"])
def test_merge_whose_trainings_diverge_keeps_what_held(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    assert _inject(monkeypatch, lambda number: True) == []
    report = merge(workload, tmp_path / "b.safetensors", method, options=DEMANDING)
    assert all(query.ratio >= 0.9 for query in report.queries)
    assert method != "joint" or any("diverged at q0" in text for text in report.notes)
    _all_finite(report.bundle)


@pytest.mark.parametrize("method", ["top-down", "gemel"])
def test_recipe_is_in_log_and_report(workload: Workload, tmp_path: Path, method: str) -> None:
    options = MergeOptions(Recipe(epochs=1, frames_per_epoch=16), margin=1.0, precision="fp32", accept_unproven=True)
    report = merge(workload, tmp_path / "b.safetensors", method, options=options)
    rows = [json.loads(line) for line in (tmp_path / "b.safetensors.log.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if "recipe" in row]
    assert report.recipe is not None and report.recipe == row["recipe"]
    assert report.flops > 0
    assert method == "gemel" or report.recipe["features"] == 1
    assert report.to_json()["recipe"]["rate"] == report.recipe["rate"]


def _all_finite(bundle: str) -> None:
    opened = open_bundle(bundle, ["tests.merger.tiny:tiny_net"])
    for query in opened.queries:
        assert all(torch.isfinite(tensor).all() for tensor in opened.build(query.id).state_dict().values())
