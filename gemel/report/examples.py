"""Example frames of the report: those that merging cost most, with the labels and what both models predicted."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import cv2
import numpy as np

from gemel.edge_runtime.frames.drawing import draw_on
from gemel.models.data import Split
from gemel.models.measures.metrics import MATCH_IOU, UNMATCHED, overlaps_of
from gemel.models.predictions import BoxLabels, ClassPrediction, DetectionPrediction
from gemel.models.tasks import task_of
from gemel.models.workload import Query
from gemel.report.document import (
    MODELS,
    ClassificationExample,
    DetectionExample,
    Example,
    PictureExample,
    PredictedBox,
    PredictedClass,
    TrueBox,
)

DETECTION_FRAMES, CLASSIFICATION_FRAMES = 3, 6
DETECTION_PX, CLASSIFICATION_PX, PANELS_PX = 640, 320, 960
"""Widths of a frame in the page."""
NO_CLASS = "none"
MAX_ASPECT = 2
"""Height over width above which a frame is squeezed."""
JPEG_QUALITY = 80


def worst_examples(
    query: Query, split: Split, labels: Sequence[Any], predictions: Mapping[str, Sequence[Any]], threshold: float
) -> tuple[list[Example], list[str]]:
    """The frames that merging cost most, worst first, and the photo of each (base64 JPEG).

    `predictions` are those of both models by name, frame by frame. `lost` is the original's score of the frame alone
    minus the merged model's (F1 of the frame, or 1 for the right class). Boxes of the models are those from the
    threshold on.
    """
    task, detects = task_of(query), query.task == "detection"
    before, after = (
        [task.metric_of(one) for one in task.tallies(predictions[model], labels, query.classes, threshold)]
        for model in MODELS
    )
    scores = [(one - other, other) for one, other in zip(before, after, strict=True)]
    examples: list[Example] = []
    photos = []
    for index in pick_worst(scores, split.units, DETECTION_FRAMES if detects else CLASSIFICATION_FRAMES):
        frame = split.frames[index]
        shown = {model: predictions[model][index] for model in MODELS}
        about: dict[str, Any] = {
            "query": query.id, "unit": split.units[index], "time_s": split.times_s[index], "lost": scores[index][0],
            "width": frame.shape[1], "height": frame.shape[0],
        }  # fmt: skip
        if query.task not in ("detection", "classification"):
            panels = _panels(query, frame, labels[index], list(shown.values()))
            count = panels.shape[1] // frame.shape[1]
            examples.append(PictureExample(**about, task=query.task, panels=count))  # type: ignore[arg-type]
            photos.append(encode_photo(panels, PANELS_PX))
            continue
        if detects:
            examples.append(DetectionExample(**about, **_mark_boxes(labels[index], shown, threshold)))
        else:
            own = {model: _as_class(query, one, threshold) for model, one in shown.items()}
            shows = task.answers(labels[index], query.classes)
            truth = " + ".join(name for name in query.classes if name in shows) or NO_CLASS
            examples.append(ClassificationExample(**about, truth=truth, **_mark_classes(truth, own)))
        photos.append(encode_photo(frame, DETECTION_PX if detects else CLASSIFICATION_PX))
    return examples, photos


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


def _as_class(query: Query, predicted: Any, threshold: float) -> ClassPrediction:
    """A prediction of one class, or of several as one text with the least of their scores."""
    if isinstance(predicted, ClassPrediction):
        return predicted
    kept = task_of(query).labels_of(predicted, threshold).classes
    text = " + ".join(name for name in query.classes if name in kept) or NO_CLASS
    return ClassPrediction(text, min(predicted.scores[: len(kept)], default=1.0), ())


def _panels(query: Query, frame: np.ndarray, label: Any, predicted: Sequence[Any]) -> np.ndarray:
    """The frame side by side with its labels, and with what each model predicted, as far as these can be drawn."""
    if query.task in ("embedding", "tensor"):
        return frame
    size, name = (frame.shape[1], frame.shape[0]), query.id
    drawn = task_of(query).as_prediction(label, size, query.classes)
    records = [{**one.to_record(), "query": name} for one in (drawn, *predicted) if one is not None]
    return np.hstack([draw_on(frame, [record]) for record in records])


def _mark_classes(label: str, predicted: Mapping[str, ClassPrediction]) -> dict[str, Any]:
    return {
        model: PredictedClass.model_validate({"class": one.label, "score": one.score, "right": one.label == label})
        for model, one in predicted.items()
    }


def _mark_boxes(label: BoxLabels, predicted: Mapping[str, DetectionPrediction], threshold: float) -> dict[str, Any]:
    """Both models' boxes from the threshold on, best first, and the objects with the models that found them."""
    found: list[list[str]] = [[] for _ in label.boxes]
    marked: dict[str, list[PredictedBox]] = {}
    for model, one in predicted.items():
        outlines = one.outlines or ((),) * len(one.boxes)
        rows = sorted(zip(one.scores, one.classes, one.boxes, outlines, strict=True), key=lambda row: -row[0])
        rows = [row for row in rows if row[0] >= threshold]
        scores, classes, boxes, outlines = zip(*rows, strict=True) if rows else ((), (), (), ())
        shown = DetectionPrediction(classes, scores, boxes, outlines=outlines if one.outlines else ())
        hits = overlaps_of([shown], [label]).match([MATCH_IOU])[0].tolist()
        for hit in hits:
            if hit >= 0:
                found[hit].append(model)
        records = shown.to_record()["detections"]
        marked[model] = [
            PredictedBox.model_validate({**record, "right": hit != UNMATCHED})
            for record, hit in zip(records, hits, strict=True)
        ]
    own = task_of("detection").as_prediction(label, (0, 0), ()).to_record()["detections"]
    objects = [
        TrueBox.model_validate({**{key: record[key] for key in record if key != "score"}, "found": models})
        for record, models in zip(own, found, strict=True)
    ]
    return {"truth": objects, **marked}
