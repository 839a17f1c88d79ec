"""Keypoints: OKS as pycocotools has it, labels from COCO, preprocessing and back, Keypoint R-CNN."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import nn
from torchvision.models.detection.roi_heads import heatmaps_to_keypoints

from gemel.merger.objectives.boxes import KeypointObjective
from gemel.models import zoo
from gemel.models.data import load_split
from gemel.models.detector import PoseTarget
from gemel.models.errors import InputError
from gemel.models.measures.metrics import average_precision, pose_overlaps_of
from gemel.models.notes import collect_notes
from gemel.models.objects.candidates import SuppressedReader
from gemel.models.predictions import PoseLabels, PosePrediction
from gemel.models.preprocess import Preprocess
from gemel.models.tasks import task_of
from tests.models.queries import make_query

TASK: Any = task_of("keypoints")
CLASSES = ("person",)


def draw_poses(random: np.random.Generator, frames: int) -> tuple[list[PoseLabels], list[PosePrediction]]:
    """Labelled people of 17 points, and predictions near them."""
    labels, predictions = [], []
    for _ in range(frames):
        count = int(random.integers(1, 4))
        starts, sides = random.uniform(0, 200, (count, 2)), random.uniform(30, 120, (count, 2))
        boxes = tuple(tuple(map(float, (*start, *(start + side)))) for start, side in zip(starts, sides, strict=True))
        seen = random.integers(0, 3, (count, 17))
        seen[:, 0] = 2
        truth = starts[:, None] + random.uniform(0, 1, (count, 17, 2)) * sides[:, None]
        found = truth + random.normal(0, 4, truth.shape)
        scores = random.uniform(0.05, 1, count)
        areas = tuple(float(width * height * 0.6) for width, height in sides)
        points = np.concatenate([truth * (seen[..., None] > 0), seen[..., None]], axis=2).tolist()
        own = np.concatenate([found, np.ones((count, 17, 1))], axis=2).tolist()
        people = ("person",) * count
        labels.append(PoseLabels(people, boxes, None, points, areas))  # type: ignore[arg-type]
        predictions.append(PosePrediction(people, tuple(scores.tolist()), boxes, own))  # type: ignore[arg-type]
    return labels, predictions


def test_average_precision_by_oks_equals_that_of_pycocotools(capsys):
    labels, predictions = draw_poses(np.random.default_rng(5), 30)
    truth, found = [], []
    for image, (label, prediction) in enumerate(zip(labels, predictions, strict=True), 1):
        for box, points, area in zip(label.boxes, label.points, label.areas or (), strict=True):
            truth.append({
                "id": len(truth) + 1, "image_id": image, "category_id": 1, "iscrowd": 0, "area": area,
                "bbox": [box[0], box[1], box[2] - box[0], box[3] - box[1]],
                "keypoints": np.ravel(points).tolist(), "num_keypoints": sum(one[2] > 0 for one in points),
            })  # fmt: skip
        for points, score in zip(prediction.points, prediction.scores, strict=True):
            keypoints = np.ravel(points).tolist()
            found.append({"image_id": image, "category_id": 1, "keypoints": keypoints, "score": score})
    theirs = COCO()
    images = [{"id": image} for image in range(1, len(labels) + 1)]
    theirs.dataset = {"images": images, "annotations": truth, "categories": [{"id": 1}]}  # type: ignore[assignment]
    theirs.createIndex()
    evaluation = COCOeval(theirs, theirs.loadRes(found), "keypoints")  # type: ignore[arg-type]
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    capsys.readouterr()
    ours = average_precision(pose_overlaps_of(predictions, labels), CLASSES)
    assert ours["map"] == pytest.approx(evaluation.stats[0], abs=1e-9)
    assert ours["map50"] == pytest.approx(evaluation.stats[1], abs=1e-9)
    assert 0.1 < ours["map"] < 0.95


def test_metric_is_f1_at_oks(capsys):
    labels, predictions = draw_poses(np.random.default_rng(1), 4)
    own = [TASK.labels_of(one, 0.0) for one in predictions]
    assert TASK.metric_of(TASK.tallies(predictions, own, CLASSES).sum(axis=0)) == 1
    assert TASK.metric_of(TASK.tallies([None] * 4, labels, CLASSES).sum(axis=0)) == 0
    other = [PoseLabels(("person",), ((0, 0, 9, 9),), None, (((1, 1, 2), (2, 2, 2)),))]
    with pytest.raises(InputError, match="2 and 17 points"):
        TASK.tallies(predictions[:1], other, CLASSES)


@pytest.mark.parametrize("resize", ["stretch", "letterbox", "center-crop"])
def test_points_come_back_to_the_pixels_of_the_frame(resize):
    preprocess, size = Preprocess((96, 128), resize), (640, 360)
    label = PoseLabels(
        ("person",), ((250.0, 100.0, 400.0, 300.0),), None, (((260.0, 120.0, 2.0), (390.0, 280.0, 1.0)),)
    )
    (target,) = KeypointObjective().targets([label], [size], CLASSES, preprocess)
    assert target.points[0, :, 2].tolist() == [2, 1]
    outputs = [part.numpy()[None] for part in (target.boxes, torch.ones(1), target.labels, target.points)]
    (found,) = TASK.predictions(SuppressedReader(0.5), outputs, [size], CLASSES, preprocess=preprocess)
    moved = found.in_frame(5, 7, (1000, 1000)).to_record()["detections"][0]
    assert np.allclose(moved["box"], [255, 107, 405, 307], atol=0.01)
    assert np.allclose(moved["points"], [[265, 127, 2], [395, 287, 1]], atol=0.01)


def write_coco(folder: Path, annotations: list[dict]) -> Path:
    (folder / "train" / "images").mkdir(parents=True)
    cv2.imwrite(str(folder / "train" / "images" / "a.png"), np.zeros((40, 60, 3), np.uint8))
    document = {
        "images": [{"id": 1, "file_name": "a.png", "width": 120, "height": 80}],
        "categories": [{"id": 1, "name": "person"}],
        "annotations": [{"id": at, "image_id": 1, "category_id": 1, **one} for at, one in enumerate(annotations)],
    }
    (folder / "train" / "annotations.json").write_text(json.dumps(document))
    return folder


def test_coco_keypoints_are_read_in_pixels_of_the_picture(tmp_path):
    data = write_coco(tmp_path, [
        {"bbox": [20, 20, 40, 40], "area": 400, "keypoints": [20, 20, 2, 60, 60, 1]},
        {"bbox": [80, 20, 20, 20], "keypoints": [0, 0, 0, 0, 0, 0]},
    ])  # fmt: skip
    with collect_notes() as notes:
        split = load_split(make_query(task="keypoints", classes=CLASSES, data=data), "train")
    assert split.labels is not None
    (label,) = split.labels
    assert isinstance(label, PoseLabels)
    assert label.boxes == ((10, 10, 30, 30),) and label.points == (((10, 10, 2), (30, 30, 1)),)
    assert label.areas == (100,) and label.crowds is not None and len(label.crowds.boxes) == 1
    assert any("no labelled point" in str(note) for note in notes)


@pytest.mark.parametrize(("annotations", "text"), [
    ([{"bbox": [20, 20, 40, 40]}], "has no keypoints"),
    ([{"bbox": [1, 1, 9, 9], "keypoints": [1, 1, 2]}, {"bbox": [1, 1, 8, 8], "keypoints": [1, 1, 2] * 2}], "1 and 2"),
])  # fmt: skip
def test_labels_without_points_are_refused(tmp_path, annotations, text):
    data = write_coco(tmp_path, annotations)
    with pytest.raises(InputError, match=text):
        load_split(make_query(task="keypoints", classes=CLASSES, data=data), "train")


def test_keypoint_rcnn_finds_places_as_torchvision_does():
    model: Any = zoo.build("keypointrcnn_resnet50_fpn", CLASSES, {"num_keypoints": 3}, 256, "keypoints", "meta")
    grid = torch.stack(torch.meshgrid(torch.arange(56.0), torch.arange(56.0), indexing="xy"), dim=-1)
    peaks = torch.tensor([[10.3, 40.1], [30.0, 20.6], [50.4, 5.2]])
    maps = 12 - ((grid - peaks[:, None, None]) ** 2).sum(dim=-1)[None] / 8
    boxes = torch.tensor([[30.0, 40.0, 130.0, 200.0]])
    wanted, _ = heatmaps_to_keypoints(maps, boxes)
    model._maps = lambda features, rois: maps
    found = model._find_points((), boxes[None] / 256, torch.ones(1, 1))
    assert (found[0, 0, :, :2] * 256 - wanted[0, :, :2]).abs().max() < 1.5
    assert found[0, 0, :, 2].min() > 0.99


@pytest.mark.parametrize("task", ["keypoints", "detection"])
def test_module_that_is_no_detector_is_refused(task):
    with pytest.raises(InputError, match="no detector"):
        zoo.build("tests.merger.tiny:tiny_net", CLASSES, {}, 24, task)


def test_labels_of_another_number_of_points_are_refused():
    from gemel.models.zoo.detectors.keypoint_rcnn import KeypointRcnn

    model = KeypointRcnn.__new__(KeypointRcnn)
    nn.Module.__init__(model)
    model.num_keypoints = 17
    with pytest.raises(InputError, match="the labels have 3 points, the model has 17"):
        model.loss(None, [PoseTarget(torch.zeros(1, 4), torch.zeros(1), torch.zeros(1, 3, 3))])  # type: ignore[arg-type]
