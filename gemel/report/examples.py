"""Example frames for the report: those that merging cost most, with the truth and what both models answered."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np

from models.data import Split
from models.metrics import MATCH_IOU, NOBODY, overlaps_of
from models.predictions import DetectionPrediction
from models.tasks import task_of
from models.workload import Query

DETECTION_FRAMES, CLASSIFICATION_FRAMES = 3, 6
DETECTION_PX, CLASSIFICATION_PX = 640, 320
"""Widths of a frame in the page."""
MAX_TALL = 2
"""A frame that is taller than so many times its width is shown squeezed."""
JPEG_QUALITY = 80
ARMS = ("original", "merged")


def worst_examples(
    query: Query,
    split: Split,
    truths: Sequence[Any],
    original: Sequence[Any],
    merged: Sequence[Any],
    threshold: float,
) -> tuple[list[dict[str, Any]], list[str]]:
    """What is to be said of the frames that merging cost most, in plain values, and each one's picture (`photo`).

    Worst first; `lost` says how much of a frame's own score went (below 0: it gained), which is the F1 of the frame
    alone, or 1 for the right class. Boxes are in pixels of the
    frame, those of the models from the threshold on; `right`: it found an object, or is the right class; of an object
    in the truth, `found` says by whom.
    """
    task = task_of(query.task)
    before, after = (
        [task.metric_of(one) for one in task.tallies(side, truths, query.classes, threshold)]
        for side in (original, merged)
    )
    lost = [one - other for one, other in zip(before, after, strict=True)]
    detects = query.task == "detection"
    rows, photos = [], []
    for index in worst(
        list(zip(lost, after, strict=True)), split.units, DETECTION_FRAMES if detects else CLASSIFICATION_FRAMES
    ):
        frame = split.frames[index]
        said = {name: side[index] for name, side in zip(ARMS, (original, merged), strict=True)}
        rows.append({
            "query": query.id, "task": query.task, "unit": split.units[index], "time_s": split.times_s[index],
            "lost": lost[index], "width": frame.shape[1], "height": frame.shape[0],
            **(_boxes(truths[index], said, threshold) if detects else _labels(truths[index], said)),
        })  # fmt: skip
        photos.append(encode_photo(frame, DETECTION_PX if detects else CLASSIFICATION_PX))
    return rows, photos


def worst(scores: Sequence[tuple[float, float]], units: Sequence[str], count: int) -> list[int]:
    """So many frames of those with these scores (lost, the merged model's own), the worst first.

    That of each clip or track, as neighbours look alike, before any gives two.
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
    height = max(1, min(MAX_TALL * width, round(frame.shape[0] * width / frame.shape[1])))
    shown = cv2.cvtColor(cv2.resize(frame, (width, height), interpolation=cv2.INTER_AREA), cv2.COLOR_RGB2BGR)
    _, data = cv2.imencode(".jpg", shown, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
    return base64.b64encode(data.tobytes()).decode("ascii")


def _labels(truth: str, said: dict[str, Any]) -> dict[str, Any]:
    answers = {
        name: {"class": answer.label, "score": answer.score, "right": answer.label == truth}
        for name, answer in said.items()
    }
    return {"truth": truth, **answers}


def _boxes(truth: Any, said: dict[str, Any], threshold: float) -> dict[str, Any]:
    found: list[list[str]] = [[] for _ in truth.boxes]
    answers: dict[str, list[dict[str, Any]]] = {}
    for name, answer in said.items():
        kept = _kept(answer, threshold)
        hits = overlaps_of([kept], [truth]).matched([MATCH_IOU])[0].tolist()
        for hit in hits:
            if hit != NOBODY:
                found[hit].append(name)
        answers[name] = [
            {"class": label, "score": score, "box": list(box), "right": hit != NOBODY}
            for label, score, box, hit in zip(kept.classes, kept.scores, kept.boxes, hits, strict=True)
        ]
    objects = [
        {"class": label, "box": list(box), "found": names}
        for label, box, names in zip(truth.classes, truth.boxes, found, strict=True)
    ]
    return {"truth": objects, **answers}


def _kept(answer: DetectionPrediction, threshold: float) -> DetectionPrediction:
    """What scores enough, the best first."""
    kept = [index for index, score in enumerate(answer.scores) if score >= threshold]
    kept.sort(key=lambda index: -answer.scores[index])
    classes = tuple(answer.classes[index] for index in kept)
    scores = tuple(answer.scores[index] for index in kept)
    return DetectionPrediction(classes, scores, tuple(answer.boxes[index] for index in kept))
