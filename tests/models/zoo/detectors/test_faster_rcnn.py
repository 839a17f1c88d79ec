"""Faster R-CNN: torchvision's keys, answers and losses; distillation; that it learns; what it does with nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode
from torchvision.ops import box_iou

from models import zoo
from models.cost import flops
from models.detector import BoxTarget
from models.zoo.registry import ENTRIES
from tests.models.zoo.detectors.against_torchvision import (
    CLASSES,
    SIZE,
    as_torchvision,
    descend,
    detector,
    frames,
    squares,
    torchvisions,
)

SMALL = "fasterrcnn_mobilenet_v3_large_320_fpn"
NAMES = tuple(name for name in zoo.names("detection") if name.startswith("fasterrcnn"))
PUBLISHED = tuple(name for name in NAMES if ENTRIES[name].published)
EMPTY = BoxTarget(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))


def quick(**model_args: Any) -> Any:
    """The smallest detector, learning from an eighth of the regions it would."""
    model = detector(SMALL, **model_args)
    model.roi_heads.fg_bg_sampler.batch_size_per_image = 64
    return model


def lively(name: str) -> Any:
    """A detector whose proposals and classes differ from place to place."""
    model = detector(name)
    with torch.no_grad():
        for parameter in (*model.rpn.head.parameters(), *model.roi_heads.box_predictor.parameters()):
            parameter.mul_(5)
    return model


@pytest.fixture(scope="module")
def made() -> Any:
    return lively(SMALL)


@pytest.fixture
def small(made: Any) -> Any:
    """A copy of the smallest of them, since even a forward in train mode changes the norms."""
    return copy.deepcopy(made)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_state_dict_is_torchvisions(name):
    with torch.device("meta"):
        theirs = getattr(torchvision.models.detection, name)(weights=None, weights_backbone=None, num_classes=91)
    ours = zoo.build(name, [str(index) for index in range(90)], {}, 320, "detection", device="meta")
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    assert all(parameter.requires_grad for parameter in ours.parameters())


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
def test_the_loss_is_torchvisions(small, targets):
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


def test_a_sure_original_teaches_what_labels_teach_and_an_unsure_one_less(small):
    images, targets = squares()
    boxes, labels = torch.zeros(2, 100, 4), torch.zeros(2, 100)  # labels as floats: training turns all outputs so
    boxes[:, 0] = torch.cat([target.boxes for target in targets])
    labels[:, 0] = torch.cat([target.labels for target in targets])
    with torch.no_grad():
        outputs = small.train()(images)
    small.eval()

    def distilled(score: float) -> float:
        scores = torch.zeros(2, 100)
        scores[:, 0] = score
        torch.manual_seed(7)
        with torch.no_grad():
            return float(small.distill(outputs, (boxes, scores, labels)))

    torch.manual_seed(7)
    labelled = float(small.loss(outputs, targets).detach())
    assert distilled(1.0) == pytest.approx(labelled, rel=1e-5)
    half, none = distilled(0.5), distilled(1e-6)
    assert half == pytest.approx((distilled(1.0) + none) / 2, rel=1e-3)


def test_rows_beyond_what_was_found_are_zero_and_are_no_candidates():
    model = lively(SMALL)
    with torch.inference_mode():
        outputs = model(frames())
        some = model.candidates(outputs, float(outputs[1][0, 10]))
        model.roi_heads.score_thresh = 1.0
        boxes, scores, labels = model(frames())
        model.rpn.score_thresh = 1.1
        without_proposals = model(frames())
    assert len(some[0].scores) >= 11 and (some[0].scores >= outputs[1][0, 10]).all()
    assert some[0].boxes.min() >= 0 and some[0].boxes.max() <= 1
    assert not boxes.any() and not scores.any() and not labels.any() and labels.dtype == torch.int64
    assert [len(found.scores) for found in model.candidates((boxes, scores, labels), 0.0)] == [0, 0]
    assert [part.shape for part in without_proposals] == [part.shape for part in outputs]
    assert not without_proposals[1].any()


@pytest.mark.exhaustive
def test_it_finds_the_object_of_each_frame_after_a_few_steps():
    model = quick(anchor_scale=0.5)
    images, targets = squares()
    losses = descend(model, images, lambda outputs: model.loss(outputs, targets), steps=18)
    assert losses[-1] < 0.5 * losses[0]
    with torch.inference_mode():
        found = model.candidates(model(images), 0.0)
    for frame, target in zip(found, targets):
        best = int(frame.scores.argmax())
        assert frame.labels[best] == target.labels[0]
        assert float(box_iou(frame.boxes[best : best + 1], target.boxes)) > 0.5


def test_a_few_steps_of_distillation_come_nearer_to_the_original(small):
    model = quick()
    images = frames()
    with torch.inference_mode():
        wanted = small(images)
    wanted = tuple(part.float().clone() for part in wanted)
    losses = descend(model, images, lambda outputs: model.distill(outputs, wanted), steps=6)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(("dilated", "cells"), [(False, 4), (True, 8)])
def test_the_single_map_lies_at_stride_32_or_dilated_at_16(dilated, cells):
    model: Any = zoo.build("fasterrcnn_resnet50_c5", ("car",), {"dilated": dilated}, SIZE, "detection", device="meta")
    maps = model.backbone(torch.empty(1, 3, SIZE, SIZE, device="meta"))
    assert [one.shape for one in maps.values()] == [(1, 2048, cells, cells)]
    assert len(model.anchors) == 15 * cells**2 and model.strides == [SIZE // cells]


@pytest.mark.parametrize("name", ["fasterrcnn_resnet50_c5", "fasterrcnn_resnet101_fpn"])
def test_a_classifiers_weights_fit_under_the_backbone(name):
    with torch.device("meta"):
        pretrained = torchvision.models.get_model(name.split("_")[1], weights=None).state_dict()
    own = zoo.build(name, ("car",), {}, SIZE, "detection", device="meta").state_dict()
    features = {key: value for key, value in pretrained.items() if not key.startswith("fc.")}
    assert all(own[f"backbone.body.{key}"].shape == value.shape for key, value in features.items())


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_on_the_meta_device_with_its_anchors_kept_out_of_the_weights(name):
    model: Any = zoo.build(name, ("car",), {}, 160, "detection", device="meta").eval()
    boxes, scores, labels = model(torch.empty(2, 3, 160, 160, device="meta"))
    assert boxes.shape == (2, 100, 4) and scores.shape == labels.shape == (2, 100)
    assert not any("anchor" in key for key in model.state_dict())


def test_on_the_meta_device_it_costs_as_much_as_on_the_busiest_frame(small, monkeypatch):
    def counted(least_objectness: float, overlap: float) -> int:
        monkeypatch.setattr(small.rpn, "score_thresh", least_objectness)
        monkeypatch.setattr(small.rpn, "nms_thresh", overlap)
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            small(frames(count=1))
        return counter.get_total_flops()

    most = flops(zoo.build(SMALL, CLASSES, {}, SIZE, "detection", device="meta"), SIZE)
    none, some, every = counted(1.1, 0.7), counted(0.05, 0.7), counted(0.0, 1.0)
    assert none < some < every <= most < 1.2 * every  # a few boxes lie outside the frame and are none


@pytest.mark.parametrize("training", [True, False])
def test_it_runs_in_bfloat16_and_its_losses_in_float32(small, training):
    images, targets = squares()
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            outputs = small.train(training)(images)
        wanted = tree_map(lambda value: value.float(), outputs)
        if training:
            assert torch.isfinite(small.loss(wanted, targets))
        else:
            assert all(torch.isfinite(value).all() for value in wanted) and outputs[0].dtype == torch.float32
    small.eval()
