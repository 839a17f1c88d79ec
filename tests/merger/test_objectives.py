"""Objectives: targets, augmentation, losses and distillation of each task."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemel.merger.objectives import objective_of
from gemel.merger.objectives.augmentation import MAX_SHIFT
from gemel.models.detector import BoxTarget, PoseTarget
from gemel.models.objects.masks import IGNORED
from gemel.models.predictions import BoxLabels
from tests.models.queries import make_query

CLASSIFICATION, DETECTION, SEGMENTATION = (
    objective_of(make_query(task=task)) for task in ("classification", "detection", "segmentation")
)
CLASSES = ("car", "bus")
NONE = nn.Identity()


def test_targets_leave_out_crowds():
    label = BoxLabels(("car",), ((5.0, 5.0, 60.0, 60.0),), BoxLabels(("bus",), ((0.0, 0.0, 90.0, 90.0),)))
    assert DETECTION.targets([label], [(100, 100)], CLASSES)[0].labels.tolist() == [CLASSES.index("car")]


def test_augment_boxes_moves_boxes_with_their_objects():
    images = torch.zeros(24, 3, 128, 128, dtype=torch.uint8)
    images[:, :, 40:72, 24:64] = 220
    box = torch.tensor([[24 / 128, 40 / 128, 64 / 128, 72 / 128]])
    targets = [BoxTarget(box, torch.tensor([0]))] * 24
    changed, moved = DETECTION.augment(images, targets, torch.Generator().manual_seed(3))
    assert changed.dtype == torch.uint8 and changed.shape == images.shape
    assert moved is not None
    for image, target in zip(changed, moved, strict=True):
        bright = (image.float().mean(dim=0) > image.float().amax() / 2).nonzero().float()
        (top, left), (bottom, right) = bright.amin(dim=0).tolist(), bright.amax(dim=0).tolist()
        seen = torch.tensor([left, top, right + 1, bottom + 1]) / 128
        torch.testing.assert_close(target.boxes[0], seen, atol=0.02, rtol=0)
    assert len({tuple(target.boxes[0].tolist()) for target in moved}) == 24


@pytest.mark.parametrize("task", ["detection", "segmentation", "keypoints"])
def test_frames_of_places_are_augmented_alike_without_labels(task: str) -> None:
    images = torch.randint(0, 256, (4, 3, 32, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    nothing: dict[str, Any] = {
        "detection": BoxTarget(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long)),
        "segmentation": torch.zeros(32, 40, dtype=torch.uint8),
        "keypoints": PoseTarget(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long), torch.zeros(0, 2, 3)),
    }
    objective = objective_of(make_query(task=task))
    changed, none = objective.augment(images, None, torch.Generator().manual_seed(3))
    labelled, _ = objective.augment(images, [nothing[task]] * 4, torch.Generator().manual_seed(3))
    assert none is None and torch.equal(changed, labelled) and not torch.equal(changed, images)


def augment_each(images: Tensor, generator: torch.Generator) -> Tensor:
    size = images.shape[-1]
    reach = max(1, round(size * MAX_SHIFT))
    padded = F.pad(images.float(), (reach,) * 4, mode="replicate")
    offsets = torch.randint(0, 2 * reach + 1, (len(images), 2), generator=generator).tolist()
    gains = torch.empty(len(images)).uniform_(0.8, 1.2, generator=generator).tolist()
    rows = zip(padded, offsets, gains, strict=True)
    return torch.stack([image[:, y : y + size, x : x + size] * gain for image, (y, x), gain in rows]).clamp_(0, 255)


def test_classification_augments_a_batch_as_it_would_each_frame() -> None:
    images = torch.randint(0, 256, (9, 3, 25, 25), dtype=torch.uint8)
    expected = augment_each(images, torch.Generator().manual_seed(3)).to(torch.uint8)
    changed, _ = CLASSIFICATION.augment(images, [0] * 9, torch.Generator().manual_seed(3))
    assert torch.equal(changed, expected) and not torch.equal(changed, images)


def test_augmentation_moves_points_with_their_boxes():
    points = torch.tensor([[[0.3, 0.3, 2.0], [0.6, 0.6, 2.0], [0.01, 0.5, 2.0]]])
    target = PoseTarget(torch.tensor([[0.3, 0.3, 0.6, 0.6]]), torch.tensor([0]), points)
    images = torch.zeros(8, 3, 32, 32, dtype=torch.uint8)
    _, moved = objective_of(make_query(task="keypoints")).augment(
        images, [target] * 8, torch.Generator().manual_seed(0)
    )
    assert moved is not None
    for one in moved:
        assert torch.allclose(one.points[0, :2, :2].flatten(), one.boxes[0], atol=1e-5)
    assert any(one.points[0, 2].tolist() == [0, 0, 0] for one in moved), "a point outside is not visible"


def test_training_lowers_loss_and_distillation():
    torch.manual_seed(0)
    logits = torch.zeros(1, 2, 4, 4, requires_grad=True)
    target = torch.tensor([[0, 1, 1, IGNORED]] * 4, dtype=torch.uint8)
    right = torch.nn.functional.one_hot(target.clamp(max=1).long(), 2).permute(2, 0, 1)[None] * 8.0
    assert SEGMENTATION.loss(NONE, right, [target]) < 0.01 < SEGMENTATION.loss(NONE, logits, [target])
    assert SEGMENTATION.distill(NONE, right, right) == pytest.approx(0, abs=1e-6)
    SEGMENTATION.distill(NONE, logits, right).backward()
    assert logits.grad is not None and logits.grad.abs().sum() > 0


def test_augmentation_moves_masks_with_their_pictures():
    images = torch.zeros(4, 3, 32, 32, dtype=torch.uint8)
    images[:, :, 8:24, 4:20] = 200
    masks = [(image[0] > 100).to(torch.uint8) for image in images]
    changed, moved = SEGMENTATION.augment(images, masks, torch.Generator().manual_seed(3))
    assert moved is not None
    for image, mask in zip(changed, moved, strict=True):
        bright = image.float().mean(dim=0) > image.float().mean()
        assert (bright == mask.bool()).float().mean() > 0.95 and mask.sum() > 0


def test_losses_of_several_labels_are_least_at_the_labels_and_the_original():
    objective = objective_of(make_query(multi_label=True))
    logits = torch.tensor([[4.0, -4.0]])
    assert objective.loss(NONE, logits, [[1.0, 0.0]]) < 0.1 < objective.loss(NONE, -logits, [[1.0, 0.0]])
    assert objective.distill(NONE, logits, logits) == pytest.approx(0, abs=1e-6)


def test_losses_of_embeddings_pull_alike_vectors_together():
    objective = objective_of(make_query(task="embedding"))
    alike, apart = (
        torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]]),
        torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.1]]),
    )
    assert objective.loss(NONE, alike, [0, 0, 1]) < objective.loss(NONE, apart, [0, 0, 1])
    assert objective.distill(NONE, alike, 5 * alike) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("by", ["argmax", "cosine", "relative-error"])
def test_distillation_is_zero_only_at_the_original(by):
    objective, theirs = objective_of(make_query(task="tensor", agreement=by)), torch.randn(2, 4, 5)
    assert objective.distill(NONE, theirs, theirs) == pytest.approx(0, abs=1e-6)
    assert objective.distill(NONE, torch.randn(2, 4, 5), theirs) > 0.01


def test_boxes_of_a_rectangle_move_with_their_objects() -> None:
    height, width = 96, 160
    images = torch.zeros(16, 3, height, width, dtype=torch.uint8)
    images[:, :, 30:54, 60:100] = 220
    box = torch.tensor([[60 / width, 30 / height, 100 / width, 54 / height]])
    _, moved = DETECTION.augment(images, [BoxTarget(box, torch.tensor([0]))] * 16, torch.Generator().manual_seed(3))
    changed, _ = DETECTION.augment(images, [BoxTarget(box, torch.tensor([0]))] * 16, torch.Generator().manual_seed(3))
    assert moved is not None
    for image, target in zip(changed, moved, strict=True):
        bright = (image.float().mean(dim=0) > image.float().amax() / 2).nonzero().float()
        (top, left), (bottom, right) = bright.amin(dim=0).tolist(), bright.amax(dim=0).tolist()
        seen = torch.tensor([left / width, top / height, (right + 1) / width, (bottom + 1) / height])
        torch.testing.assert_close(target.boxes[0], seen, atol=0.025, rtol=0)


def test_classification_shifts_a_rectangle_by_a_part_of_each_side() -> None:
    images = torch.arange(50).repeat(4, 3, 25, 1).to(torch.uint8)
    changed, _ = CLASSIFICATION.augment(images, [0] * 4, torch.Generator().manual_seed(1))
    assert changed.shape == images.shape
    steps = changed[:, 0, 0, 10:40].float().diff(dim=1)
    assert (steps >= 0).all()
