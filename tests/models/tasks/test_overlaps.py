"""Pairs of detections and objects: whose, how much, and who found what."""

from __future__ import annotations

import numpy as np
import pytest

from models import metrics as overlaps
from models.metrics import NOBODY, overlaps_of
from models.predictions import Boxes, DetectionPrediction

HERE = (0.0, 0.0, 10.0, 10.0)
NEAR = (0.0, 0.0, 10.0, 8.0)  # IoU 0.8 with HERE
HALF = (0.0, 0.0, 10.0, 5.0)  # IoU 0.5 with HERE, 5 / 8 with NEAR
FAR = (50.0, 50.0, 60.0, 60.0)
FLAT = (3.0, 3.0, 3.0, 9.0)


def answer(*rows):
    return DetectionPrediction(*zip(*rows)) if rows else DetectionPrediction()


def test_pairs_are_of_one_frame_and_of_any_class_best_score_first():
    answers = [answer(("car", 0.2, NEAR), ("bus", 0.9, HALF)), None, answer(("car", 0.5, HERE))]
    found = overlaps_of(answers, [Boxes(("car", "car"), (HERE, FAR)), Boxes(("car",), (HERE,)), Boxes()])
    assert (found.scores.tolist(), found.frames.tolist()) == ([0.9, 0.2, 0.5], [0, 0, 2])
    assert list(zip(found.detection, found.object)) == [(0, 0), (1, 0)]
    np.testing.assert_allclose(found.iou, [0.5, 0.8])
    assert found.same().tolist() == [False, True]
    assert found.objects_per_frame().tolist() == [2, 1, 0]


def test_a_box_without_an_area_overlaps_nothing():
    found = overlaps_of([answer(("car", 0.9, FLAT))], [Boxes(("car", "car"), (FLAT, HERE))])
    assert not len(found.iou)


@pytest.mark.parametrize(
    ("rows", "objects", "expected"),
    [
        ([("car", 0.9, NEAR)], (HERE,), [[0], [NOBODY]]),
        ([("car", 0.9, NEAR), ("car", 0.8, HERE)], (HERE,), [[0, NOBODY], [NOBODY, 0]]),
        ([("car", 0.9, NEAR)], (HERE, NEAR, NEAR), [[2], [2]]),  # of equal ones the last
        ([("car", 0.9, HALF), ("car", 0.8, HALF)], (HERE, NEAR), [[1, 0], [NOBODY, NOBODY]]),
        ([("bus", 0.9, HERE)], (HERE,), [[NOBODY], [NOBODY]]),
    ],
)
def test_each_threshold_has_its_own_matching(rows, objects, expected):
    found = overlaps_of([answer(*rows)], [Boxes(("car",) * len(objects), objects)])
    assert found.matched([0.5, 0.9]).tolist() == expected


def test_nothing_at_all_is_no_fault():
    found = overlaps_of([], [])
    assert found.matched([0.5]).shape == (1, 0) and found.objects_per_frame().tolist() == []


def test_many_frames_are_looked_at_in_parts_and_found_alike(monkeypatch):
    random = np.random.default_rng(0)

    def crowd():
        corners = random.uniform(0, 30, (random.integers(0, 6), 2))
        return tuple(map(tuple, np.hstack([corners, corners + 12]).tolist()))

    truths = [Boxes(("car",) * len(one), one) for one in (crowd() for _ in range(20))]
    answers = [DetectionPrediction(("car",) * len(one), (0.5,) * len(one), one) for one in (crowd() for _ in range(20))]
    whole = overlaps_of(answers, truths)
    monkeypatch.setattr(overlaps, "PAIRS_AT_ONCE", 7)
    parts = overlaps_of(answers, truths)
    assert len(whole.iou) > 20
    for name in ("detection", "object", "iou"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(parts, name))
