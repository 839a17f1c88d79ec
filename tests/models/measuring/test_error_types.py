"""Kinds of errors, counted by hand after the paper's figure 2."""

from __future__ import annotations

import pytest

from models.metrics import BACKGROUND, BOTH, CLASS, DUPLICATE, KINDS, LOCATION, MISSED, error_types, overlaps_of
from models.predictions import BoxLabels, DetectionPrediction

HERE = (0.0, 0.0, 10.0, 10.0)
NEAR = (0.0, 0.0, 10.0, 8.0)  # IoU 0.8 with HERE
BESIDE = (5.0, 0.0, 15.0, 10.0)  # IoU 1/3 with HERE
FAR = (50.0, 50.0, 60.0, 60.0)
CAR = BoxLabels(("car",), (HERE,))


def count_errors(rows, truth=CAR, threshold=0.0):
    answer = DetectionPrediction(*zip(*rows)) if rows else DetectionPrediction()
    return error_types(overlaps_of([answer], [truth]), threshold)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([("car", 0.9, NEAR)], {}),
        ([("bus", 0.9, NEAR)], {CLASS: 1}),
        ([("car", 0.9, BESIDE)], {LOCATION: 1}),
        ([("bus", 0.9, BESIDE)], {BOTH: 1, MISSED: 1}),
        ([("car", 0.9, NEAR), ("car", 0.5, HERE)], {DUPLICATE: 1}),
        ([("car", 0.9, FAR)], {BACKGROUND: 1, MISSED: 1}),
        ([], {MISSED: 1}),
        ([("car", 0.9, NEAR), ("bus", 0.8, NEAR), ("car", 0.7, BESIDE)], {CLASS: 1, LOCATION: 1}),
        ([("car", 0.9, BESIDE), ("car", 0.8, BESIDE)], {LOCATION: 2}),
    ],
)
def test_each_error_is_of_one_kind(rows, expected):
    assert {kind: one.count for kind, one in count_errors(rows).items()} == {**dict.fromkeys(KINDS, 0), **expected}


@pytest.mark.parametrize(
    ("rows", "kind", "f1", "mended"),
    [
        ([("bus", 0.9, NEAR)], CLASS, 0.0, 1.0),  # it becomes the hit
        ([("car", 0.9, BESIDE)], LOCATION, 0.0, 1.0),
        ([("car", 0.9, BESIDE), ("car", 0.8, BESIDE)], LOCATION, 0.0, 1.0),  # one becomes the hit, the other goes
        ([("car", 0.9, NEAR), ("bus", 0.8, NEAR)], CLASS, 2 / 3, 1.0),  # its object has one: it goes
        ([("car", 0.9, NEAR), ("car", 0.5, HERE)], DUPLICATE, 2 / 3, 1.0),
        ([("car", 0.9, NEAR), ("car", 0.5, FAR)], BACKGROUND, 2 / 3, 1.0),
        ([("car", 0.9, FAR)], MISSED, 0.0, 0.0),  # the false alarm is still there
        ([], MISSED, 0.0, 1.0),
    ],
)
def test_the_cost_of_a_kind_is_what_mending_it_alone_would_bring(rows, kind, f1, mended):
    assert count_errors(rows)[kind].cost == pytest.approx(mended - f1)
