"""Merging detectors: two of one stage, and one of two stages with a classifier on the same backbone.

Originals are untrained and trainings short: what is proved is what is shared, what stays private, and that the bundle
runs, not accuracy.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from gemel.merger import MergeOptions, MergeReport, Recipe, merge
from gemel.merger.budget import Budget
from gemel.merger.context import MergeContext
from gemel.merger.events import Change, Event
from gemel.merger.training.distillation import REGION_PROPOSALS, record_inputs, watched_layers
from gemel.models.batchnorm import batchnorms_of
from gemel.models.bundle import Bundle, open_bundle, verify_bundle
from gemel.models.predictions import Prediction
from gemel.models.sharing.groups import ceiling_bytes
from gemel.models.sharing.layers import layers_of, layers_of_all
from gemel.models.workload import Workload
from gemel.models.zoo import build_query, preprocess_of
from tests.merger.detector_workload import classifier, detector, write
from tests.merger.options import ANY_EVIDENCE, LAYERS, NETWORKS
from tests.parameters import every

torch.set_num_threads(1)
RECIPE = Recipe(rate=1e-3, epochs=1, batch=2, frames_per_epoch=4)
OPTIONS = MergeOptions(
    RECIPE, precision="fp32", evidence=ANY_EVIDENCE, accept_unproven=True, top_down=LAYERS, weights="fp32"
)


@pytest.fixture(scope="module")
def one_stage(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """Two SSDLites."""
    queries = [detector(name, "ssdlite320_mobilenet_v3_large", size) for name, size in (("left", 64), ("right", 96))]
    return write(tmp_path_factory.mktemp("one"), queries)


@pytest.fixture(scope="module")
def two_stage(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """A Faster R-CNN on a MobileNetV3, and a MobileNetV3."""
    queries = [
        detector("boxes", "fasterrcnn_mobilenet_v3_large_320_fpn", 64),
        classifier("labels", "mobilenet_v3_large", 64),
    ]
    return write(tmp_path_factory.mktemp("two"), queries)


ONE_STAGE_FIRST = every(["one_stage", "two_stage"], ["one_stage"])
"""Where training goes on for long, the Faster R-CNN takes a minute; other tests here merge it in any case."""


def merge_and_check(
    workload: Workload, options: MergeOptions, out: Path, method: str
) -> tuple[MergeReport, Bundle, list[dict[str, Any]]]:
    """Merge, and check what holds for every bundle: sets share one weight, heads and norms stay private, it runs."""
    report = merge(workload, out, method, options=options)
    assert verify_bundle(out) == []
    bundle = open_bundle(out)
    log = [json.loads(line) for line in out.with_name(f"{out.name}.log.jsonl").read_text().splitlines()]
    sets = [row for row in log if "set" in row]
    for row in sets:
        assert len({bundle.query(query).tensors[f"{path}.weight"] for query, path in row["kept"]}) <= 1
    heads = {(layer.query, f"{layer.path}.weight") for layer in layers_of_all(workload.queries) if layer.head}
    places = [member for one in bundle.manifest.shared for member in one.members]
    assert heads and heads.isdisjoint(places)
    small = [one for one in bundle.manifest.shared if bundle.tensor(one.tensor).ndim < 2]
    by_chance = sum(bundle.nbytes(one.tensor) * (len(one.members) - 1) for one in small)
    assert report.bytes_before - report.bytes_after == sum(row["saved_bytes"] for row in sets) + by_chance
    for query in workload.queries:
        model = build_query(query)
        norms = {path for path, part in model.named_modules() if part in set(batchnorms_of(model))}
        keys = [key for name, key in places if name == query.id and key.rpartition(".")[0] in norms]
        assert norms and all(key.endswith("num_batches_tracked") for key in keys)
    frame = np.random.default_rng(0).integers(0, 255, (96, 96, 3), dtype=np.uint8)
    for query in bundle.queries:
        images = torch.from_numpy(query.preprocess(frame))
        with torch.no_grad():
            assert tree_leaves(bundle.build(query.id)(images))
    return report, bundle, sets


def hold_when_repaired(of: str) -> Callable[[MergeContext, str, nn.Module], float]:
    """A ratio on val by which one query holds only with frozen weights, and not at their first evaluation."""
    evaluated = Counter[str]()

    def ratio(ctx: MergeContext, query: str, model: nn.Module) -> float:
        evaluated[query] += any(not parameter.requires_grad for parameter in model.parameters())
        return 1.0 if query != of or evaluated[query] > 1 else 0.9

    return ratio


def hold_after_training(ctx: MergeContext, query: str, model: nn.Module) -> float:
    """A ratio on val by which a query does not hold as merged or recalibrated: its heads are its original's."""
    heads = [f"{layer.path}.weight" for layer in ctx.layers if layer.query == query and layer.head]
    original = ctx.originals[query]
    return 0.5 if all(torch.equal(model.get_parameter(one), original.get_parameter(one)) for one in heads) else 1.0


def hold_always(ctx: MergeContext, query: str, answers: Sequence[Prediction]) -> float:
    """A plain ratio on val by which every query is kept."""
    return 1.0


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["one_stage", "two_stage"])
def test_top_down_detectors_share_all_with_one_repaired(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    workload = request.getfixturevalue(kind)
    repaired = workload.queries[-1].id
    monkeypatch.setattr(MergeContext, "ratio", hold_when_repaired(repaired))
    monkeypatch.setattr(MergeContext, "plain_ratio", hold_always)
    options = replace(OPTIONS, top_down=replace(LAYERS, without=(*NETWORKS, Change.PRIVATE)))
    report, bundle, sets = merge_and_check(workload, options, tmp_path / "b.gemel", "top-down")
    assert sum(row["saved_bytes"] for row in sets) == ceiling_bytes(layers_of_all(workload.queries))
    assert {row["outcome"] for row in sets} == {"kept"}
    assert bundle.query(repaired).trained is not None and report.flops > 0


def end_with_first_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is over once an epoch is reported: one group is trained, and no other is begun."""
    epochs, report = list[Event](), MergeContext.report

    def note(self: MergeContext, event: Event, **fields: Any) -> None:
        epochs.extend([event] * (event is Event.EPOCH))
        report(self, event, **fields)

    monkeypatch.setattr(MergeContext, "report", note)
    monkeypatch.setattr(Budget, "of", lambda ctx, *_: Budget(ctx.flops, ends=1.0, clock=lambda: float(len(epochs))))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ONE_STAGE_FIRST)
def test_gemel_detectors_share_layers_after_training(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    workload = request.getfixturevalue(kind)
    monkeypatch.setattr(MergeContext, "ratio", hold_after_training)
    monkeypatch.setattr(MergeContext, "plain_ratio", hold_always)
    ctx = MergeContext(workload)
    ctx.open()
    end_with_first_epoch(monkeypatch)
    report, bundle, sets = merge_and_check(workload, OPTIONS, tmp_path / "b.gemel", "gemel")
    assert [row["outcome"] for row in sets] == ["kept"] + ["untried"] * (len(sets) - 1) and len(sets) > 10
    spent = report.flops - ctx.flops.total
    assert 0.9 * spent < sets[0]["flops"] < spent  # the proof comes after it
    assert report.bytes_before > report.bytes_after
    assert all(query.trained for query in bundle.queries)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["one_stage", "two_stage"])
def test_ceiling_of_detectors_shares_every_group(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    workload, out = request.getfixturevalue(kind), tmp_path / "b.gemel"
    report, bound = merge(workload, out, "ceiling", options=OPTIONS), ceiling_bytes(layers_of_all(workload.queries))
    assert verify_bundle(out) == []
    assert bound <= report.bytes_before - report.bytes_after <= 1.01 * bound  # small norms are equal by chance
    assert not any(query.trained for query in open_bundle(out).queries)


def test_watched_layers_of_detectors_are_their_heads(one_stage: Workload, two_stage: Workload) -> None:
    found = {}
    for query in (*one_stage.queries, *two_stage.queries):
        model = build_query(query).eval()
        paths = watched_layers(query, model)
        with record_inputs(model, paths) as seen, torch.no_grad():
            model(torch.randn(2, 3, *preprocess_of(query).size))
        assert seen and all(len(each) == 2 for each in seen)
        found[query.id] = paths
    assert found["boxes"] == [REGION_PROPOSALS] and found["labels"] == ["classifier.3"]
    heads = {layer.path for layer in layers_of(one_stage.queries[0]) if layer.head}
    assert set(found["left"]) == heads and len(heads) > 0
