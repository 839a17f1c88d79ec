"""Faster R-CNN: torchvision's keys, answers and losses; distillation; that it learns; what it does with nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor

from gemel.models import zoo
from gemel.models.detector import BoxTarget
from gemel.models.zoo.registry import ENTRIES
from tests.models.zoo.detectors.against_torchvision import (
    SIZE,
    as_torchvision,
    detector,
    frames,
    squares,
    torchvisions,
)

SMALL = "fasterrcnn_mobilenet_v3_large_320_fpn"
NAMES = tuple(name for name in zoo.names("detection") if name.startswith("fasterrcnn"))
PUBLISHED = tuple(name for name in NAMES if ENTRIES[name].published)
EMPTY = BoxTarget(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))


def lively(name: str) -> Any:
    """A detector whose proposals and classes differ from place to place."""
    model = detector(name)
    with torch.no_grad():
        for parameter in (*model.rpn.head.parameters(), *model.roi_heads.box_predictor.parameters()):
            parameter.mul_(5)
    return model


@pytest.fixture(scope="module")
def trained_detector() -> Any:
    return lively(SMALL)


@pytest.fixture
def small(trained_detector: Any) -> Any:
    """A copy of the smallest of them, since even a forward in train mode changes the norms."""
    return copy.deepcopy(trained_detector)


@pytest.mark.parametrize("name", [SMALL, "fasterrcnn_resnet50_fpn"])
def test_detections_are_torchvisions(name):
    model = lively(name)
    theirs = torchvisions(model, name)
    with torch.inference_mode():
        boxes, scores, labels = model(frames())
        expected = theirs(list(frames()))
    assert boxes.shape == (2, 100, 4) and scores.shape == labels.shape == (2, 100)
    for frame, them in enumerate(expected):
        found = int((scores[frame] > 0).sum())
        assert found == len(them["scores"]) > 10
        ours = rows(boxes[frame, :found], scores[frame, :found], labels[frame, :found])
        wanted = rows(them["boxes"] / SIZE, them["scores"], them["labels"] - 1)
        # Equal scores may stand in either order.
        nearest = torch.cdist(ours, wanted, p=float("inf"))
        assert nearest.amin(dim=0).max() < 1e-4 and nearest.amin(dim=1).max() < 1e-4
        torch.testing.assert_close(scores[frame, :found], them["scores"], atol=1e-4, rtol=0)


def rows(boxes: Tensor, scores: Tensor, labels: Tensor) -> Tensor:
    return torch.cat([boxes, scores[:, None], labels[:, None]], dim=1)


@pytest.mark.parametrize("targets", ["objects", "one frame empty"])
def test_loss_is_torchvisions(small, targets):
    theirs = torchvisions(small, SMALL).train()
    images, wanted = squares()
    if targets == "one frame empty":
        wanted = [EMPTY, wanted[1]]
    with torch.no_grad():
        torch.manual_seed(7)
        expected = sum(theirs(list(images), as_torchvision(wanted)).values())
        torch.manual_seed(7)
        ours = small.train().loss(small(images), wanted)
    small.eval()
    assert float(ours) == pytest.approx(float(expected), rel=1e-4)


def test_distill_is_weighted_by_the_teachers_scores(small):
    images, targets = squares()
    boxes, labels = torch.zeros(2, 100, 4), torch.zeros(2, 100)  # labels as floats: training turns all outputs so
    boxes[:, 0] = torch.cat([target.boxes for target in targets])
    labels[:, 0] = torch.cat([target.labels for target in targets])
    with torch.no_grad():
        outputs = small.train()(images)
    small.eval()

    def distil_loss(score: float) -> float:
        scores = torch.zeros(2, 100)
        scores[:, 0] = score
        torch.manual_seed(7)
        with torch.no_grad():
            return float(small.distill(outputs, (boxes, scores, labels)))

    torch.manual_seed(7)
    labelled = float(small.loss(outputs, targets).detach())
    assert distil_loss(1.0) == pytest.approx(labelled, rel=1e-5)
    half, none = distil_loss(0.5), distil_loss(1e-6)
    assert half == pytest.approx((distil_loss(1.0) + none) / 2, rel=1e-3)


@pytest.mark.parametrize("name", ["fasterrcnn_resnet50_c5", "fasterrcnn_resnet101_fpn"])
def test_classifier_weights_fit_under_the_body(name):
    with torch.device("meta"):
        pretrained = torchvision.models.get_model(name.split("_")[1], weights=None).state_dict()
    own = zoo.build(name, ("car",), {}, SIZE, "detection", device="meta").state_dict()
    features = {key: value for key, value in pretrained.items() if not key.startswith("fc.")}
    assert all(own[f"backbone.body.{key}"].shape == value.shape for key, value in features.items())
