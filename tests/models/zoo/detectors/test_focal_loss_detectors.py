"""RetinaNet and FCOS: torchvision's keys, answers and losses; distillation; that they learn."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from gemel.models.candidates import suppress
from gemel.models.detector import BoxTarget
from gemel.models.tensors import as_arrays
from tests.models.zoo.detectors.against_torchvision import (
    SIZE,
    as_torchvision,
    detector,
    frames,
    squares,
    torchvisions,
)

NAMES = ("retinanet_resnet50_fpn", "retinanet_resnet50_fpn_v2", "fcos_resnet50_fpn")
CANDIDATES = 200
EMPTY = BoxTarget(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))


@pytest.fixture(scope="module", params=NAMES)
def scored_detector(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """A detector with scores that differ, a first column as good as never used, and its name."""
    model = detector(request.param)
    last = model.head.classification_head.cls_logits
    with torch.no_grad():
        last.bias.zero_()
        last.weight.mul_(2 / model(frames())[0].std())
        last.weight.unflatten(0, (-1, 3))[:, 0] = 0
        last.bias.unflatten(0, (-1, 3))[:, 0] = -30
    return request.param, model


@pytest.fixture
def detector_and_name(scored_detector: tuple[str, Any]) -> tuple[str, Any]:
    """A copy, since even a forward in train mode changes the norms."""
    return copy.deepcopy(scored_detector)


def test_detections_are_torchvisions(detector_and_name):
    name, model = detector_and_name
    theirs = torchvisions(model, name)
    with torch.inference_mode():
        outputs = model(frames())
        best = model.decode(outputs)[1].flatten(1).topk(CANDIDATES + 1).values
        least = float(best[:, -2:].mean(dim=1).amax())
        found = model.reader.candidates(as_arrays(model.decode(outputs)), least)
        theirs.score_thresh, theirs.detections_per_img = least, 100
        expected = theirs(list(frames()))
    for ours, them in zip(found, expected):
        best = suppress(ours, model.nms_iou)
        assert len(best.scores) == len(them["scores"]) > 10
        torch.testing.assert_close(torch.from_numpy(best.scores), them["scores"], atol=1e-4, rtol=0)
        mine = torch.from_numpy(np.column_stack([best.boxes, best.scores, best.labels + 1]))
        other = torch.cat([them["boxes"] / SIZE, them["scores"][:, None], them["labels"][:, None]], dim=1)
        apart = (mine[:, None] - other).abs().amax(dim=2)  # scores that differ by rounding alone have no order
        assert apart.amin(dim=0).amax() < 1e-4 and apart.amin(dim=1).amax() < 1e-4


def test_focal_loss_is_torchvisions(detector_and_name):
    name, model = detector_and_name
    theirs = torchvisions(model, name).train()
    images, targets = squares()
    targets = [targets[0], EMPTY]
    with torch.no_grad():
        expected = sum(theirs(list(images), as_torchvision(targets)).values())
        ours = model.train().loss(model(images), targets)
    model.eval()
    assert float(ours) == pytest.approx(float(expected), rel=1e-4)


def test_focal_distill_is_zero_at_the_teacher(detector_and_name):
    _, model = detector_and_name
    with torch.no_grad():
        logits, *others = model(frames())
    quiet = torch.full_like(logits, -7.0)
    loud = quiet.clone()
    loud[0, 50, 1] = 3.0
    assert float(model.distill((loud, *others), (loud, *others))) == pytest.approx(0, abs=1e-6)
    assert model.distill((quiet, *others), (loud, *others)) > 0.5
    assert model.distill((loud, *others), (quiet, *others)) > 0.5
    deltas = others[0]
    here, elsewhere = deltas.clone(), deltas.clone()
    here[0, 50] += 2.0
    elsewhere[0, 60] += 2.0
    off, beside = (model.distill((loud, moved, *others[1:]), (loud, *others)) for moved in (here, elsewhere))
    assert off > 100 * beside
