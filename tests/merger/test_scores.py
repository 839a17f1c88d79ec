"""Matching a detector's scores with its original's: as many detections count, by its heads' biases alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gemel.merger.checkpoint import StepCache, snapshot
from gemel.merger.context import MergeContext
from gemel.merger.evaluate import evaluate_queries
from gemel.merger.scores import CONFIG, match_scores, scores_of
from gemel.models.detector import Detector
from tests.merger.detector_workload import classifier, detector, write
from tests.parameters import every

FAMILIES = {
    "ssdlite320_mobilenet_v2": 96, "ssd320_squeezenet1_0": 96, "fasterrcnn_resnet50_fpn": 96,
}  # fmt: skip
WANTED = 30


@pytest.mark.parametrize("name", every(FAMILIES, ["ssdlite320_mobilenet_v2", "ssd320_squeezenet1_0"]))
def test_matched_scores_reach_the_threshold_as_often(name: str, tmp_path: Path) -> None:
    ctx = MergeContext(write(tmp_path, [detector("q", name, FAMILIES[name])]))
    query, data, original = ctx.queries["q"], ctx.train["q"], ctx.originals["q"]
    assert isinstance(original, Detector)
    scores = scores_of(original, query, data)
    threshold = float(scores[WANTED - 1 : WANTED + 1].mean())
    model = ctx.models(["q"])["q"]
    assert isinstance(model, Detector)
    before = snapshot(model)
    looked = min(CONFIG.frames, len(data))
    assert match_scores(model, query, data, threshold, WANTED) == ({}, looked)  # as sure as it was
    other = float(scores[2 * WANTED - 1 : 2 * WANTED + 1].mean())
    moved, passes = match_scores(model, query, data, other, WANTED)  # by another score it would count twice as often
    assert passes >= looked + 3 * min(CONFIG.slope_frames, len(data))
    counted = int((scores_of(model, query, data) >= other).sum())
    assert abs(counted - WANTED) <= 0.1 * WANTED
    after = model.state_dict()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == set(moved) and all(key.endswith(".bias") for key in changed)
    heads = {f"{layer.path}.bias" for layer in ctx.layers if layer.head}
    assert changed and changed <= heads


def test_matching_without_detections_changes_nothing(tmp_path: Path) -> None:
    workload = write(tmp_path, [classifier("kind", "resnet18", 64), detector("boxes", "ssd_resnet18", 64)])
    ctx = MergeContext(workload)
    models = ctx.models(ctx.queries)
    assert ctx.match_scores("kind", models["kind"]) == {}
    boxes = models["boxes"]
    assert isinstance(boxes, Detector)
    assert match_scores(boxes, ctx.queries["boxes"], ctx.train["boxes"], 0.5, 0) == ({}, 0)


def test_evaluation_keeps_the_matched_biases(tmp_path: Path) -> None:
    ctx = MergeContext(write(tmp_path, [detector("q", "ssdlite320_mobilenet_v2", 96)]))
    model = ctx.models(["q"])["q"]
    bias = next(name for name, _ in model.named_parameters() if "classification_head" in name and name.endswith("bias"))
    ctx.match_scores = lambda query, model: {bias: model.get_parameter(bias).detach() + 1}
    before = model.get_parameter(bias).detach().clone()
    assert evaluate_queries(ctx, StepCache(), "original", {"q": model}) == {"q": 1.0}
    assert torch.equal(model.get_parameter(bias), before)
    next(model.parameters()).data *= 1.01
    evaluate_queries(ctx, StepCache(), "evaluated", {"q": model})
    assert torch.equal(model.get_parameter(bias), before + 1)
