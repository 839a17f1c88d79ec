"""COCO's mean average precision, by pycocotools."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

from models.tasks.base import Boxes, DetectionAnswer


def mean_average_precision(
    answers: Sequence[DetectionAnswer | None], truths: Sequence[Boxes], classes: Sequence[str]
) -> dict[str, float]:
    """`map` over IoU 0.5 to 0.95 and `map50` at 0.5, 0..1; NaN where there are no objects at all.

    Sources: cocodataset.org/#detection-eval. None is a frame without an answer.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    numbers = {name: index for index, name in enumerate(classes, start=1)}
    objects = [
        {"image_id": image, "category_id": numbers[name], "bbox": _xywh(box)}
        for image, truth in enumerate(truths, start=1)
        for name, box in zip(truth.classes, truth.boxes, strict=True)
        if name in numbers
    ]
    for index, item in enumerate(objects, start=1):
        item |= {"id": index, "area": item["bbox"][2] * item["bbox"][3], "iscrowd": 0}
    found = [
        {"image_id": image, "category_id": numbers[name], "bbox": _xywh(box), "score": score}
        for image, answer in enumerate(answers, start=1)
        if answer is not None
        for name, box, score in zip(answer.classes, answer.boxes, answer.scores, strict=True)
    ]
    if not objects:
        return {"map": float("nan"), "map50": float("nan")}
    if not found:
        return {"map": 0.0, "map50": 0.0}
    with contextlib.redirect_stdout(io.StringIO()):
        coco: Any = COCO()
        coco.dataset = {
            "info": {},
            "images": [{"id": image} for image in range(1, len(truths) + 1)],
            "annotations": objects,
            "categories": [{"id": number, "name": name} for name, number in numbers.items()],
        }
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(found), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {"map": float(evaluation.stats[0]), "map50": float(evaluation.stats[1])}


def _xywh(box: tuple[float, float, float, float]) -> list[float]:
    x0, y0, x1, y1 = box
    return [x0, y0, x1 - x0, y1 - y0]
