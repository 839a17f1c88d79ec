"""Detection: SSD's matching, loss and distillation, and predictions of its outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models.detection import ssdlite320_mobilenet_v3_large
from torchvision.models.detection._utils import SSDMatcher
from torchvision.ops import box_iou

from gemel.merger.objectives.boxes import DetectionObjective
from gemel.models import zoo
from gemel.models.detector import BoxTarget, read_outputs
from gemel.models.predictions import BoxLabels, DetectionPrediction
from gemel.models.tasks import task_of
from gemel.models.zoo.detectors.single_stage import MATCH_IOU, SingleStage, distill_loss, match

torch.set_num_threads(1)

TASK: Any = task_of("detection")
CLASSES = ("car", "bus")


class Grid(SingleStage):
    """A detector whose 16 default boxes tile the frame 4 x 4."""

    def __init__(self) -> None:
        low = torch.tensor([[x, y] for y in range(4) for x in range(4)]) / 4
        self.boxes = torch.cat([low, low + 0.25], dim=1)
        super().__init__(nn.Identity(), nn.Identity(), self.boxes)


def outputs_for(cells: dict[int, tuple[int, float]], frames: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that give a cell's column (0 the background) a certain margin over the background, and no deltas."""
    logits = torch.zeros(frames, 16, 3)
    logits[..., 0] = 6.0
    for cell, (label, margin) in cells.items():
        logits[:, cell, label] = 6.0 + margin
    return logits, torch.zeros(frames, 16, 4)


def test_match_equals_that_of_torchvision():
    generator = torch.Generator().manual_seed(1)
    anchors = Grid().boxes + torch.rand(16, 4, generator=generator) * 0.02
    low = torch.rand(2, 5, 2, generator=generator) * 0.6
    boxes = torch.cat([low, low + 0.1 + 0.3 * torch.rand(2, 5, 2, generator=generator)], dim=2)
    valid = torch.ones(2, 5, dtype=torch.bool)
    valid[1, 3:] = False
    ours = match(anchors, boxes, valid)
    for frame, count in ((0, 5), (1, 3)):
        theirs = SSDMatcher(MATCH_IOU)(box_iou(boxes[frame, :count], anchors))
        assert ours[frame].tolist() == theirs.tolist()


def test_ssd_loss_equals_that_of_torchvision():
    model: Any = zoo.build("ssdlite320_mobilenet_v3_large", CLASSES, {}, 96, "detection")
    theirs: Any = ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=3)
    anchors = model.default_boxes()
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, len(anchors), 3, generator=generator)
    deltas = torch.randn(2, len(anchors), 4, generator=generator)
    targets = [
        BoxTarget(torch.tensor([[0.1, 0.1, 0.5, 0.6], [0.4, 0.2, 0.9, 0.9]]), torch.tensor([0, 1])),
        BoxTarget(torch.tensor([[0.0, 0.5, 0.4, 1.0]]), torch.tensor([1])),
    ]
    matched = [theirs.proposal_matcher(box_iou(target.boxes, anchors)) for target in targets]
    expected = theirs.compute_loss(
        [{"boxes": target.boxes, "labels": target.labels + 1} for target in targets],
        {"cls_logits": logits, "bbox_regression": deltas},
        [anchors, anchors],
        matched,
    )
    ours = model.loss((logits, deltas), targets)
    assert float(ours) == pytest.approx(float(expected["classification"] + expected["bbox_regression"]), rel=1e-4)


def test_ssd_distillation_is_zero_at_the_teacher_only():
    teacher = outputs_for({5: (1, 4.0)})
    assert float(distill_loss(teacher, teacher)) == pytest.approx(0, abs=1e-6)
    missed = distill_loss(outputs_for({}), teacher)
    imagined = distill_loss(outputs_for({5: (1, 4.0), 9: (2, 4.0)}), teacher)
    assert missed > 0.5 and imagined > 0.5
    logits, deltas = teacher
    off = torch.zeros_like(deltas)
    off[0, 9] = 3.0
    where_nothing_is = distill_loss((logits, deltas + off), teacher)
    where_an_object_is = distill_loss((logits, deltas + off.roll(-4, dims=1)), teacher)
    assert where_an_object_is > 10 * where_nothing_is


def test_predictions_are_in_pixels_of_the_frame_best_first():
    outputs = outputs_for({5: (1, 2.0), 10: (2, 4.0)})
    found = read_outputs(TASK, Grid(), outputs, [(352, 288)], CLASSES, min_score=0.5)[0]
    assert found.classes == ("bus", "car")
    assert found.boxes == ((176.0, 144.0, 264.0, 216.0), (88.0, 72.0, 176.0, 144.0))
    assert found.scores[0] > found.scores[1] > 0.5


@pytest.mark.parametrize(("label", "count"), [(1, 1), (2, 2)], ids=["one class", "two classes"])
def test_predictions_suppress_overlaps_within_a_class_only(label: int, count: int):
    model = Grid()
    model.boxes[6] = model.boxes[5] + 0.01
    outputs = outputs_for({5: (1, 3.0), 6: (label, 2.0)})
    assert len(read_outputs(TASK, model, outputs, [(100, 100)], CLASSES, 0.5)[0].boxes) == count


def test_labels_survive_targets_and_perfect_outputs():
    labels = BoxLabels(("bus", "dog", "car"), ((10.0, 20.0, 60.0, 90.0), (0, 0, 9, 9), (200.0, 100.0, 260.0, 150.0)))
    target = DetectionObjective().targets([labels], [(300, 200)], CLASSES)[0]
    assert target.labels.tolist() == [1, 0]
    model = Grid()
    matched = match(model.boxes, target.boxes[None], torch.ones(1, 2, dtype=torch.bool))[0]
    logits, deltas = outputs_for({cell: (int(target.labels[i]) + 1, 5.0) for cell, i in enumerate(matched) if i >= 0})
    cells = (matched >= 0).nonzero().flatten()
    deltas[0, cells] = model.box_coder.encode_single(target.boxes[matched[cells]], model.boxes[cells])
    found = read_outputs(TASK, model, (logits, deltas), [(300, 200)], CLASSES, 0.5)[0]
    assert dict(zip(found.classes, found.boxes)) == {
        "bus": pytest.approx(labels.boxes[0], abs=0.01),
        "car": pytest.approx(labels.boxes[2], abs=0.01),
    }
    known = BoxLabels(("bus", "car"), (labels.boxes[0], labels.boxes[2]))
    assert TASK.metric_of(TASK.tallies([found], [known], CLASSES)[0]) == 1


def test_labels_of_a_prediction_leave_out_what_lies_in_a_crowd():
    crowds = BoxLabels(("car",), ((40.0, 40.0, 90.0, 90.0),))
    label = BoxLabels(("car",), ((50.0, 50.0, 60.0, 60.0),), crowds)
    found = DetectionPrediction(
        ("bus", "car", "car", "car"),
        (0.4, 0.9, 0.8, 0.2),
        ((42.0, 42.0, 48.0, 48.0), (70.0, 70.0, 80.0, 80.0), (50.0, 50.0, 60.0, 61.0), (0.0, 0.0, 9.0, 9.0)),
    )
    kept = BoxLabels(("bus", "car"), (found.boxes[0], found.boxes[2]), crowds)
    assert TASK.labels_of(found, 0.3, label) == kept
    assert TASK.labels_of(found, 0.5) == BoxLabels(("car", "car"), found.boxes[1:3])
