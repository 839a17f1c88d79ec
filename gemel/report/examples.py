"""Example frames of the report: those that merging cost most, with the labels and what both models predicted."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np

from models.data import Split
from models.metrics import MATCH_IOU, UNMATCHED, overlaps_of
from models.predictions import DetectionPrediction
from models.tasks import task_of
from models.workload import Query

DETECTION_FRAMES, CLASSIFICATION_FRAMES = 3, 6
DETECTION_PX, CLASSIFICATION_PX = 640, 320
"""Widths of a frame in the page."""
MAX_ASPECT = 2
"""Height over width above which a frame is squeezed."""
JPEG_QUALITY = 80
MODELS = ("original", "merged")


def worst_examples(
    query: Query,
    split: Split,
    labels: Sequence[Any],
    original: Sequence[Any],
    merged: Sequence[Any],
    threshold: float,
) -> tuple[list[dict[str, Any]], list[str]]:
    """The frames that merging cost most, worst first, as plain values, and the photo of each (base64 JPEG).

    `lost` is the original's score of the frame alone minus the merged model's (F1 of the frame, or 1 for the right
    class). Boxes are in pixels of the frame, those of the models from the threshold on; `right`: the box matches an
    object, or the class is right; `found` of an object: which models found it.
    """
    task = task_of(query.task)
    before, after = (
        [task.metric_of(one) for one in task.tallies(side, labels, query.classes, threshold)]
        for side in (original, merged)
    )
    lost = [one - other for one, other in zip(before, after, strict=True)]
    detects = query.task == "detection"
    count = DETECTION_FRAMES if detects else CLASSIFICATION_FRAMES
    rows, photos = [], []
    for index in pick_worst(list(zip(lost, after, strict=True)), split.units, count):
        frame = split.frames[index]
        predicted = {name: side[index] for name, side in zip(MODELS, (original, merged), strict=True)}
        rows.append({
            "query": query.id, "task": query.task, "unit": split.units[index], "time_s": split.times_s[index],
            "lost": lost[index], "width": frame.shape[1], "height": frame.shape[0],
            **(_boxes(labels[index], predicted, threshold) if detects else _classes(labels[index], predicted)),
        })  # fmt: skip
        photos.append(encode_photo(frame, DETECTION_PX if detects else CLASSIFICATION_PX))
    return rows, photos


def pick_worst(scores: Sequence[tuple[float, float]], units: Sequence[str], count: int) -> list[int]:
    """Indices of `count` frames with the worst scores (lost, the merged model's own), worst first.

    Neighbouring frames look alike: each clip or track gives one frame before any gives two.
    """
    order = sorted(range(len(scores)), key=lambda index: (-scores[index][0], scores[index][1], index))
    seen: Counter[str] = Counter()
    turn = {}
    for index in order:
        turn[index] = seen[units[index]]
        seen[units[index]] += 1
    chosen = sorted(order, key=lambda index: turn[index])[:count]
    return sorted(chosen, key=order.index)


def encode_photo(frame: np.ndarray, width: int) -> str:
    """Base64 of a frame, uint8 RGB (H, W, 3), as a JPEG of this width."""
    height = max(1, min(MAX_ASPECT * width, round(frame.shape[0] * width / frame.shape[1])))
    resized = cv2.cvtColor(cv2.resize(frame, (width, height), interpolation=cv2.INTER_AREA), cv2.COLOR_RGB2BGR)
    _, data = cv2.imencode(".jpg", resized, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
    return base64.b64encode(data.tobytes()).decode("ascii")


def _classes(label: str, predicted: dict[str, Any]) -> dict[str, Any]:
    return {"truth": label} | {
        name: {"class": one.label, "score": one.score, "right": one.label == label} for name, one in predicted.items()
    }


def _boxes(label: Any, predicted: dict[str, Any], threshold: float) -> dict[str, Any]:
    found: list[list[str]] = [[] for _ in label.boxes]
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, one in predicted.items():
        boxes = _above(one, threshold)
        hits = overlaps_of([boxes], [label]).match([MATCH_IOU])[0].tolist()
        for hit in hits:
            if hit != UNMATCHED:
                found[hit].append(name)
        rows[name] = [
            {"class": each, "score": score, "box": list(box), "right": hit != UNMATCHED}
            for each, score, box, hit in zip(boxes.classes, boxes.scores, boxes.boxes, hits, strict=True)
        ]
    objects = [
        {"class": each, "box": list(box), "found": names}
        for each, box, names in zip(label.classes, label.boxes, found, strict=True)
    ]
    return {"truth": objects, **rows}


def _above(prediction: DetectionPrediction, threshold: float) -> DetectionPrediction:
    """The boxes from the threshold on, best first."""
    above = [index for index, score in enumerate(prediction.scores) if score >= threshold]
    above.sort(key=lambda index: -prediction.scores[index])
    return DetectionPrediction(
        tuple(prediction.classes[index] for index in above),
        tuple(prediction.scores[index] for index in above),
        tuple(prediction.boxes[index] for index in above),
    )
