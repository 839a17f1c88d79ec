"""F1, average precision and types of errors: by hand, on drawn cases, and compared with pycocotools."""

from __future__ import annotations

import contextlib
import io
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemel.models.measures.metrics import (
    BACKGROUND,
    BOTH,
    CLASS,
    DUPLICATE,
    KINDS,
    LOCATION,
    MISSED,
    average_precision,
    best_threshold,
    error_types,
    f1_of,
    match_frames,
    overlaps_of,
)
from gemel.models.predictions import BoxLabels, DetectionPrediction

Box = tuple[float, float, float, float]
OBJECT = (0.0, 0.0, 10.0, 10.0)
CLOSE = (0.0, 0.0, 10.0, 8.0)  # IoU 0.8 with OBJECT
HALF = (0.0, 0.0, 10.0, 5.0)  # IoU 0.5
BELOW_HALF = (0.0, 0.0, 10.0, 4.9)
BESIDE = (5.0, 0.0, 15.0, 10.0)  # IoU 1/3
DISTANT = (50.0, 50.0, 60.0, 60.0)
CAR = BoxLabels(("car",), (OBJECT,))


def detect(*rows: tuple[str, float, Box]) -> DetectionPrediction:
    return DetectionPrediction(*zip(*rows, strict=True)) if rows else DetectionPrediction()


@pytest.mark.parametrize(
    ("predictions", "labels", "expected"),
    [
        ([detect(("car", 0.9, CLOSE))], [CAR], 1.0),
        ([detect(("car", 0.9, HALF))], [CAR], 1.0),
        ([detect(("car", 0.9, BELOW_HALF))], [CAR], 0.0),
        ([detect(("bus", 0.9, OBJECT))], [CAR], 0.0),
        ([detect(("car", 0.9, CLOSE), ("car", 0.8, OBJECT))], [CAR], 2 / 3),
        ([None], [BoxLabels(("car", "car"), (OBJECT, DISTANT))], 0.0),
        ([detect()], [BoxLabels()], 1.0),
        ([detect(("car", 0.9, OBJECT))], [BoxLabels()], 0.0),
        (
            [detect(("car", 0.9, OBJECT), ("bus", 0.8, DISTANT)), detect(("bus", 0.3, OBJECT))],
            [BoxLabels(("car", "bus"), (OBJECT, OBJECT)), BoxLabels(("bus",), (OBJECT,))],
            4 / 6,
        ),
    ],
    ids=["close", "IoU of one half", "IoU below one half", "another class", "a second box on one object",
         "no prediction", "no object, no detection", "no object, a detection", "micro over classes and frames"],
)  # fmt: skip
def test_f1_equals_the_value_counted_by_hand(predictions, labels, expected):
    assert f1_of(match_frames(predictions, labels).counts()) == pytest.approx(expected)


boxes = st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(4, 20), st.integers(4, 20)).map(
    lambda b: (float(b[0]), float(b[1]), float(b[0] + b[2]), float(b[1] + b[3]))
)
names = st.sampled_from(["car", "bus"])
scores = st.sampled_from([0.1, 0.2, 0.35, 0.5, 0.5, 0.8])
detections = st.lists(st.tuples(names, scores, boxes), max_size=8).map(lambda rows: detect(*rows))
objects = st.lists(st.tuples(names, boxes), max_size=6).map(
    lambda rows: BoxLabels(tuple(name for name, _ in rows), tuple(box for _, box in rows))
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(detections, objects), min_size=1, max_size=4))
def test_best_threshold_has_the_largest_f1_and_counts_add_over_frames(frames):
    predictions, labels = zip(*frames, strict=True)
    matches = match_frames(predictions, labels)
    best = f1_of(matches.counts(best_threshold(matches)))
    for threshold in (0.05, 0.15, 0.3, 0.4, 0.6):
        alone = [match_frames([found], [label]).counts(threshold)[0] for found, label in frames]
        assert f1_of(matches.counts(threshold)) == pytest.approx(f1_of(np.array(alone)))
        if matches.hits.any():
            assert f1_of(matches.counts(threshold)) <= best + 1e-12


@pytest.mark.parametrize(
    ("rows", "counts", "costs"),
    [
        ([("car", 0.9, CLOSE)], {}, {}),
        ([("bus", 0.9, CLOSE)], {CLASS: 1}, {CLASS: 1.0}),  # corrected, it becomes the hit
        ([("car", 0.9, BESIDE)], {LOCATION: 1}, {LOCATION: 1.0}),
        ([("bus", 0.9, BESIDE)], {BOTH: 1, MISSED: 1}, {}),
        ([("car", 0.9, CLOSE), ("car", 0.5, OBJECT)], {DUPLICATE: 1}, {DUPLICATE: 1 / 3}),
        ([("car", 0.9, CLOSE), ("car", 0.5, DISTANT)], {BACKGROUND: 1}, {BACKGROUND: 1 / 3}),
        ([("car", 0.9, DISTANT)], {BACKGROUND: 1, MISSED: 1}, {MISSED: 0.0}),  # the false alarm is still there
        ([], {MISSED: 1}, {MISSED: 1.0}),
        ([("car", 0.9, CLOSE), ("bus", 0.8, CLOSE)], {CLASS: 1}, {CLASS: 1 / 3}),  # its object has a hit: it goes
        ([("car", 0.9, CLOSE), ("bus", 0.8, CLOSE), ("car", 0.7, BESIDE)], {CLASS: 1, LOCATION: 1}, {}),
        ([("car", 0.9, BESIDE), ("car", 0.8, BESIDE)], {LOCATION: 2}, {LOCATION: 1.0}),
    ],
)
def test_error_types_count_each_error_once_with_its_cost(rows, counts, costs):
    found = error_types(overlaps_of([detect(*rows)], [CAR]), 0.0)
    assert {kind: one.count for kind, one in found.items()} == {**dict.fromkeys(KINDS, 0), **counts}
    assert {kind: found[kind].cost for kind in costs} == pytest.approx(costs)


CROWD = BoxLabels(("car",), ((40.0, 40.0, 80.0, 80.0),))
CARS = BoxLabels(("car",), (OBJECT,), CROWD)


@pytest.mark.parametrize(
    ("rows", "f1", "errors"),
    [
        ([("car", 0.9, OBJECT), ("car", 0.8, DISTANT), ("car", 0.7, DISTANT)], 1.0, {}),
        ([("car", 0.9, OBJECT), ("bus", 0.8, DISTANT)], 2 / 3, {BACKGROUND: 1}),  # a crowd of another class
        ([("car", 0.9, OBJECT), ("car", 0.8, (70.0, 50.0, 90.0, 60.0))], 1.0, {}),  # half of it is inside
        ([("car", 0.9, OBJECT), ("car", 0.8, (71.0, 50.0, 91.0, 60.0))], 2 / 3, {BACKGROUND: 1}),
        ([("car", 0.9, OBJECT), ("car", 0.8, (0.0, 0.0, 100.0, 100.0))], 2 / 3, {BACKGROUND: 1}),  # a sixth is
        ([("car", 0.9, DISTANT)], 0.0, {MISSED: 1}),
    ],
)
def test_detections_in_a_crowd_count_for_nothing(rows, f1: float, errors: dict[str, int]) -> None:
    matches, overlaps = match_frames([detect(*rows)], [CARS]), overlaps_of([detect(*rows)], [CARS])
    assert f1_of(matches.counts()) == pytest.approx(f1)
    assert {kind: one.count for kind, one in error_types(overlaps, 0.0).items() if one.count} == errors
    assert f1_of(match_frames([detect()], [BoxLabels(crowds=CROWD)]).counts()) == 1.0


CASES = 200
CLASSES = ("car", "bus", "person")
TOLERANCE = 1e-6


def draw_boxes(random: np.random.Generator, count: int, whole: bool) -> np.ndarray:
    corners, sides = random.uniform(0, 60, (count, 2)), random.uniform(2, 40, (count, 2))
    found = np.hstack([corners, corners + sides])
    return np.round(found) if whole else found


def draw_case(seed: int) -> tuple[list[DetectionPrediction | None], list[BoxLabels], float]:
    """Frames, and a score threshold: every second case on whole pixels and coarse scores, where many are equal."""
    random, whole = np.random.default_rng(seed), seed % 2 == 0
    predictions: list[DetectionPrediction | None] = []
    labels: list[BoxLabels] = []
    classes = CLASSES[: random.integers(1, 4)]
    for _ in range(random.integers(1, 8)):
        objects = draw_boxes(random, int(random.integers(0, 9)), whole)
        regions = draw_boxes(random, int(random.choice([0, 0, 1, 2])), whole)
        crowds = BoxLabels(tuple(random.choice(classes, len(regions))), tuple(map(tuple, regions.tolist())))
        names = tuple(random.choice(classes, len(objects)))
        labels.append(BoxLabels(names, tuple(map(tuple, objects.tolist())), crowds if len(regions) else None))
        if random.uniform() < 0.1:
            predictions.append(None)
            continue
        near = objects[random.uniform(size=len(objects)) < 0.8] + random.normal(0, 2, (1, 4))
        near = np.vstack([near, near[: random.integers(0, 3)]])
        found = np.vstack([np.round(near) if whole else near, draw_boxes(random, int(random.integers(0, 4)), whole)])
        found[:, 2:] = np.maximum(found[:, 2:], found[:, :2])
        scores = random.choice([0.1, 0.3, 0.5, 0.8], len(found)) if whole else random.uniform(size=len(found))
        rows = zip(random.choice(classes, len(found)), scores.tolist(), map(tuple, found.tolist()), strict=True)
        predictions.append(detect(*rows))  # type: ignore[arg-type]
    return predictions, labels, float(random.choice([0.0, 0.3, 0.55]))


def evaluate_by_pycocotools(
    predictions: list[DetectionPrediction | None], labels: list[BoxLabels], threshold: float = 0.0
) -> Any:
    """The evaluation of the detections from `threshold` on; None where there is nothing to evaluate."""
    coco, cocoeval = pytest.importorskip("pycocotools.coco"), pytest.importorskip("pycocotools.cocoeval")
    numbers = {name: index for index, name in enumerate(CLASSES, start=1)}

    def rows(listed: Any) -> list[dict[str, Any]]:
        return [
            {"image_id": image, "category_id": numbers[name], "bbox": [x0, y0, x1 - x0, y1 - y0], "place": place}
            for image, one in enumerate(listed, start=1)
            if one is not None
            for place, (name, (x0, y0, x1, y1)) in enumerate(zip(one.classes, one.boxes, strict=True))
        ]

    marked = [(0, row) for row in rows(labels)] + [(1, row) for row in rows([one.crowds for one in labels])]
    objects = [
        {**row, "id": index, "area": row["bbox"][2] * row["bbox"][3], "iscrowd": is_crowd}
        for index, (is_crowd, row) in enumerate(marked, start=1)
    ]
    found = [
        {**row, "score": score}
        for row in rows(predictions)
        if (score := predictions[row["image_id"] - 1].scores[row["place"]]) >= threshold  # type: ignore[union-attr]
    ]
    if not objects or not found:
        return None
    with contextlib.redirect_stdout(io.StringIO()):
        dataset: Any = coco.COCO()
        dataset.dataset = {
            "info": {}, "images": [{"id": image} for image in range(1, len(labels) + 1)], "annotations": objects,
            "categories": [{"id": number, "name": name} for name, number in numbers.items()],
        }  # fmt: skip
        dataset.createIndex()
        return cocoeval.COCOeval(dataset, dataset.loadRes(found), "bbox")


def average_precision_by_pycocotools(evaluation: Any) -> list[float]:
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats[:2].tolist()


def f1_by_pycocotools(evaluation: Any) -> float:
    """From the matches at IoU 0.5, of any area, over all classes and frames."""
    evaluation.params.areaRng, evaluation.params.iouThrs = evaluation.params.areaRng[:1], np.array([0.5])
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation.evaluate()
    kept = [one for one in evaluation.evalImgs if one is not None]
    counted = [~one["dtIgnore"][0] for one in kept]
    hits = sum(np.count_nonzero(one["dtMatches"][0][own]) for one, own in zip(kept, counted, strict=True))
    detections = sum(np.count_nonzero(own) for own in counted)
    objects = sum(np.count_nonzero(np.equal(one["gtIgnore"], 0)) for one in kept)
    return 2 * hits / (detections + objects) if detections + objects else 1.0


def test_average_precision_and_f1_equal_those_of_pycocotools() -> None:
    compared = 0
    for seed in range(CASES):
        predictions, labels, threshold = draw_case(seed)
        if theirs := evaluate_by_pycocotools(predictions, labels):
            ours = average_precision(overlaps_of(predictions, labels), CLASSES)
            expected = [math.nan if one < 0 else one for one in average_precision_by_pycocotools(theirs)]
            assert [ours["map"], ours["map50"]] == pytest.approx(expected, abs=TOLERANCE, nan_ok=True), f"case {seed}"
            compared += 1
        if theirs := evaluate_by_pycocotools(predictions, labels, threshold):
            ours = f1_of(match_frames(predictions, labels).counts(threshold))
            assert ours == pytest.approx(f1_by_pycocotools(theirs), abs=TOLERANCE), f"case {seed}"
            compared += 1
    assert compared > 1.8 * CASES
