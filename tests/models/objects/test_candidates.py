"""Candidates: the best of a frame, and suppression as torchvision has it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.ops.boxes import _batched_nms_vanilla, batched_nms

from gemel.models.objects.candidates import (
    COMPARED_AT_ONCE,
    MAX_DETECTIONS,
    Candidates,
    DecodedReader,
    SuppressedReader,
    choose_best,
    suppress,
)


def draw_candidates(seed: int, count: int, digits: int | None, classes: int = 3) -> Candidates:
    """Boxes of which many overlap; few digits make equal scores, equal boxes and boxes without an area."""
    random = np.random.default_rng(seed)
    centres, sides = random.random((count, 2)), 0.4 * random.random((count, 2))
    boxes, scores = np.concatenate([centres - sides / 2, centres + sides / 2], axis=1), random.random(count)
    if digits is not None:
        boxes, scores = boxes.round(digits), scores.round(digits)
    labels = random.integers(0, classes, count)
    return Candidates(boxes.astype(np.float32), scores.astype(np.float32), labels)


def rows_of(found: Candidates) -> list[tuple[float, ...]]:
    return np.column_stack([found.scores, found.labels, found.boxes]).tolist()


@given(
    seed=st.integers(0, 2**16),
    count=st.sampled_from([0, 1, 2, 40, COMPARED_AT_ONCE, COMPARED_AT_ONCE + 1, 400]),
    digits=st.sampled_from([None, 1, 2]),
    overlap=st.sampled_from([0.1, 0.45, 0.5, 0.6, 0.7]),
)
def test_suppression_keeps_what_torchvision_keeps(seed: int, count: int, digits: int | None, overlap: float) -> None:
    found = draw_candidates(seed, count, digits)
    boxes, scores, labels = (torch.from_numpy(part) for part in found[:3])
    kept = _batched_nms_vanilla(boxes, scores, labels, overlap)  # the exact one: the other moves each class's boxes
    wanted = rows_of(found.take(kept.numpy()))
    mine = rows_of(suppress(found, overlap))
    if len(wanted) <= MAX_DETECTIONS:
        assert sorted(mine) == sorted(wanted)
    assert [row[0] for row in mine] == [row[0] for row in wanted][:MAX_DETECTIONS]


def test_suppression_of_distinct_boxes_is_that_of_batched_nms() -> None:
    for seed in range(20):
        found = draw_candidates(seed, 200, None)
        boxes, scores, labels = (torch.from_numpy(part) for part in found[:3])
        kept = batched_nms(boxes, scores, labels, 0.45)[:MAX_DETECTIONS]
        assert rows_of(suppress(found, 0.45)) == rows_of(found.take(kept.numpy()))


def test_of_equal_scores_the_first_wins_and_points_stay_with_their_boxes() -> None:
    boxes = np.array([[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1]], np.float32)
    points = np.arange(3, dtype=np.float32).reshape(3, 1, 1).repeat(3, axis=2)
    found = Candidates(boxes, np.array([0.5, 0.7, 0.7], np.float32), np.array([0, 0, 0]), points)
    best = suppress(found, 0.5)
    assert best.scores.tolist() == [pytest.approx(0.7)] and best.points is not None
    assert best.points.tolist() == [[[1, 1, 1]]]
    unsuppressed = suppress(found, None)
    assert unsuppressed.points is not None and unsuppressed.points[:, 0, 0].tolist() == [1, 2, 0]


def test_best_candidates_are_bounded_and_within_the_input() -> None:
    boxes = np.array([[-1, 0, 0.5, 2], [0, 0, 1, 1]], np.float32)
    scores = np.array([[0.9, 0.2, 0.5], [0.4, 0.3, 0.8]], np.float32)
    found = choose_best(boxes, scores, min_score=0.3, max_candidates=3)
    labels = dict(zip(found.scores.tolist(), found.labels.tolist(), strict=True))
    assert labels == {scores[0, 0]: 0, scores[0, 2]: 2, scores[1, 2]: 2}
    assert found.boxes.min() == 0 and found.boxes.max() == 1
    assert len(choose_best(boxes, scores, min_score=0.95, max_candidates=3).scores) == 0


def test_readers_take_what_networks_give() -> None:
    boxes = np.zeros((2, 4, 4), np.float32)
    scores = np.array([[0.9, 0.0, 0.4, 0.0], [0.0] * 4], np.float32)
    points = np.zeros((2, 4, 5, 3), np.float32)
    first, second = SuppressedReader().candidates((boxes, scores, np.ones((2, 4), np.int64), points), 0.0)
    assert first.scores.tolist() == scores[0, [0, 2]].tolist() and len(second.scores) == 0
    assert first.points is not None and first.points.shape == (2, 5, 3)
    first, _ = DecodedReader(0.5, 1).candidates((boxes, scores[..., None], points), 0.1)
    assert first.scores.tolist() == [scores[0, 0]] and first.points is not None
