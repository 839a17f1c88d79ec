"""F1 and mAP against pycocotools, on random cases with crowds, ties, false names and frames without an answer."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import pytest

from models.metrics import f1_of, match_frames, mean_average_precision
from models.predictions import BoxLabels, DetectionPrediction

CASES = 200
CLASSES = ("car", "bus", "person")
EQUAL = 1e-6

coco = pytest.importorskip("pycocotools.coco", reason="pycocotools is not installed: nothing to compare with")
cocoeval = pytest.importorskip("pycocotools.cocoeval")


def _boxes(random: np.random.Generator, count: int, whole: bool) -> np.ndarray:
    corners, sides = random.uniform(0, 60, (count, 2)), random.uniform(2, 40, (count, 2))
    boxes = np.hstack([corners, corners + sides])
    return np.round(boxes) if whole else boxes


def _case(seed: int) -> tuple[list[DetectionPrediction | None], list[BoxLabels], float]:
    """Frames, and a score threshold: every second case on whole pixels and coarse scores, where much is equal."""
    random, whole = np.random.default_rng(seed), seed % 2 == 0
    answers: list[DetectionPrediction | None] = []
    truths: list[BoxLabels] = []
    classes = CLASSES[: random.integers(1, 4)]
    for _ in range(random.integers(1, 8)):
        objects = _boxes(random, int(random.integers(0, 9)), whole)
        names = tuple(random.choice(classes, len(objects)))
        truths.append(BoxLabels(names, tuple(map(tuple, objects.tolist()))))
        if random.uniform() < 0.1:
            answers.append(None)
            continue
        near = objects[random.uniform(size=len(objects)) < 0.8] + random.normal(0, 2, (1, 4))
        near = np.vstack([near, near[: random.integers(0, 3)]])
        boxes = np.vstack([np.round(near) if whole else near, _boxes(random, int(random.integers(0, 4)), whole)])
        boxes[:, 2:] = np.maximum(boxes[:, 2:], boxes[:, :2])
        scores = random.choice([0.1, 0.3, 0.5, 0.8], len(boxes)) if whole else random.uniform(size=len(boxes))
        said = tuple(random.choice(classes, len(boxes)))
        answers.append(DetectionPrediction(said, tuple(scores.tolist()), tuple(map(tuple, boxes.tolist()))))
    return answers, truths, float(random.choice([0.0, 0.3, 0.55]))


def _theirs(answers: list[DetectionPrediction | None], truths: list[BoxLabels], threshold: float = 0.0) -> Any:
    """Pycocotools' evaluation of the detections from `threshold` on; None where there is nothing to evaluate."""
    numbers = {name: index for index, name in enumerate(CLASSES, start=1)}

    def rows(listed: Any) -> list[dict[str, Any]]:
        return [
            {"image_id": image, "category_id": numbers[name], "bbox": [x0, y0, x1 - x0, y1 - y0], "place": place}
            for image, one in enumerate(listed, start=1)
            if one is not None
            for place, (name, (x0, y0, x1, y1)) in enumerate(zip(one.classes, one.boxes, strict=True))
        ]

    objects = [
        {**row, "id": index, "area": row["bbox"][2] * row["bbox"][3], "iscrowd": 0}
        for index, row in enumerate(rows(truths), start=1)
    ]
    found = [
        {**row, "score": score}
        for row in rows(answers)
        if (score := answers[row["image_id"] - 1].scores[row["place"]]) >= threshold  # type: ignore[union-attr]
    ]
    if not objects or not found:
        return None
    with contextlib.redirect_stdout(io.StringIO()):
        truth: Any = coco.COCO()
        truth.dataset = {
            "info": {}, "images": [{"id": image} for image in range(1, len(truths) + 1)], "annotations": objects,
            "categories": [{"id": number, "name": name} for name, number in numbers.items()],
        }  # fmt: skip
        truth.createIndex()
        return cocoeval.COCOeval(truth, truth.loadRes(found), "bbox")


def _map_of(evaluation: Any) -> list[float]:
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats[:2].tolist()


def _f1_of(evaluation: Any) -> float:
    """From what was matched at IoU 0.5, whatever the area, over all classes and frames."""
    evaluation.params.areaRng, evaluation.params.iouThrs = evaluation.params.areaRng[:1], np.array([0.5])
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation.evaluate()
    kept = [one for one in evaluation.evalImgs if one is not None]
    hits = sum(np.count_nonzero(one["dtMatches"][0]) for one in kept)
    return 2 * hits / sum(len(one["dtIds"]) + len(one["gtIds"]) for one in kept)


def test_map_is_that_of_pycocotools() -> None:
    compared = 0
    for seed in range(CASES):
        answers, truths, _ = _case(seed)
        theirs = _theirs(answers, truths)
        if theirs is not None:
            ours = mean_average_precision(answers, truths, CLASSES)
            assert [ours["map"], ours["map50"]] == pytest.approx(_map_of(theirs), abs=EQUAL), f"case {seed}"
            compared += 1
    assert compared > 0.9 * CASES


def test_f1_is_that_of_pycocotools_matches() -> None:
    compared = 0
    for seed in range(CASES):
        answers, truths, threshold = _case(seed)
        theirs = _theirs(answers, truths, threshold)
        if theirs is not None:
            ours = f1_of(match_frames(answers, truths).counts(threshold))
            assert ours == pytest.approx(_f1_of(theirs), abs=EQUAL), f"case {seed}"
            compared += 1
    assert compared > 0.9 * CASES
