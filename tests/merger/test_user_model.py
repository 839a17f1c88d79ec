"""A user's own module, given as module:factory in a file beside the workload: merged, shipped and evaluated."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from gemel.evaluation import EvalOptions, evaluate
from gemel.merger import MergeOptions, Recipe, merge
from gemel.models.bundle import open_bundle, verify_bundle
from gemel.models.errors import BundleError
from gemel.models.files.weights import save_weights
from gemel.models.workload import load_workload
from gemel.models.zoo import build_query
from tests.merger.options import ANY_EVIDENCE
from tests.merger.tiny import SIZE, write_workload

FACTORY = "models:small_net"
SOURCE = """
from torch import nn


class SmallNet(nn.Module):
    def __init__(self, num_classes, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(),
        )
        self.head = nn.Linear(2 * width, num_classes)

    def forward(self, x):
        return self.head(self.body(x).amax((2, 3)))


def small_net(num_classes, width=8):
    return SmallNet(num_classes, width)
"""


@pytest.fixture
def own_workload(tmp_path: Path) -> Path:
    """Two queries on a network of the user's own, in a models.py beside the workload, with untrained weights."""
    (tmp_path / "models.py").write_text(SOURCE)
    path = write_workload(tmp_path, frames=24, model=FACTORY, model_args={"width": 8})
    for index, query in enumerate(load_workload(path).queries):
        torch.manual_seed(index)
        assert isinstance(query.weights, Path)
        query.weights.parent.mkdir(exist_ok=True)
        save_weights(query.weights, build_query(query).state_dict())
    return path


@pytest.mark.parametrize("method", ["ceiling", "gemel"])
def test_user_module_is_merged_and_evaluated(own_workload: Path, tmp_path: Path, method: str) -> None:
    workload = load_workload(own_workload)
    options = MergeOptions(
        Recipe(rate=1e-3, epochs=1, batch=16, frames_per_epoch=32), evidence=ANY_EVIDENCE, accept_unproven=True
    )
    report = merge(workload, tmp_path / "own.gemel", method, options=options)
    assert verify_bundle(report.bundle) == [] == verify_bundle(report.bundle, [FACTORY], tmp_path)
    bundle = open_bundle(report.bundle, [FACTORY], tmp_path)
    assert {query.model for query in bundle.queries} == {FACTORY}
    models = {query.id: bundle.build(query.id) for query in bundle.queries}
    for query in workload.queries:
        assert type(models[query.id]).__name__ == "SmallNet"
        assert models[query.id](torch.rand(1, 3, SIZE, SIZE)).shape == (1, 2)
    if method == "ceiling":
        assert report.saved_fraction >= report.ceiling_fraction > 0.4
        assert len({bundle.query(q.id).tensors["body.3.weight"] for q in workload.queries}) == 1
        assert len({bundle.query(q.id).tensors["head.weight"] for q in workload.queries}) == 2
    evaluated = evaluate(report.bundle, own_workload, tmp_path / "report", EvalOptions(seeds=1))
    assert evaluated.queries == ["q0", "q1"]
    merged = {result.id: result.merged for result in report.queries}
    for row in evaluated.offline:
        assert row.model == FACTORY and row.merged == pytest.approx(merged[row.query])


def test_bundle_of_a_user_module_imports_only_listed_factories(own_workload: Path, tmp_path: Path) -> None:
    options = MergeOptions(
        Recipe(rate=1e-3, epochs=1, batch=16, frames_per_epoch=32), evidence=ANY_EVIDENCE, accept_unproven=True
    )
    report = merge(load_workload(own_workload), tmp_path / "own.gemel", "none", options=options)
    (tmp_path / "models.py").write_text("raise SystemExit('imported')")
    before = set(sys.modules)
    with pytest.raises(BundleError, match="'models:small_net' is not in the zoo; list it under `factories`"):
        open_bundle(report.bundle, folder=tmp_path).build("q0")
    assert set(sys.modules) == before
