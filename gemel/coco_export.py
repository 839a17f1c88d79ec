"""Test frames and both models' answers in files that other tools open: COCO, and FiftyOne's plain layouts.

A folder for each query: `data/` with its frames, `labels.json` with the truth, `original.json` and `merged.json` with
the answers. Detection: COCO annotations and COCO results (FiftyOne: `COCODetectionDataset`, then
`fiftyone.utils.coco.add_coco_labels`). Classification: FiftyOne's `FiftyOneImageClassificationDataset`, three times.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from gemel.stream_eval import MERGED, ORIGINALS
from models.errors import InputError
from models.io import describe_problem

if TYPE_CHECKING:
    from gemel.evaluation import QueryEvaluation


COCO_KEY = "--fiftyone"
JPEG_QUALITY = 95
ANSWERS = {"original": ORIGINALS, "merged": MERGED}


def check_export_folder(folder: Path | None) -> None:
    """Refuse a folder that holds anything, or that cannot be made, before any work is done."""
    if folder is None:
        return
    if not folder.parent.is_dir():
        raise InputError(
            folder, f"there is no directory {folder.parent}", "create it, or choose another folder", COCO_KEY
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(folder, "holds other files", "choose a new or empty folder", COCO_KEY)
    if not folder.exists():
        with describe_problem(folder, COCO_KEY):
            folder.mkdir()
            folder.rmdir()


def export_coco(judged: Sequence[QueryEvaluation], folder: Path) -> None:
    """Fill the folder; what was begun is removed where that fails."""
    new = not folder.exists()
    try:
        with describe_problem(folder, COCO_KEY):
            for one in judged:
                _query(one, folder / one.tested.query.id)
    except BaseException:
        for one in judged:
            shutil.rmtree(folder / one.tested.query.id, ignore_errors=True)
        if new:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _query(one: QueryEvaluation, folder: Path) -> None:
    (folder / "data").mkdir(parents=True)
    sizes = []
    for index, frame in enumerate(one.split.frames):
        sizes.append((frame.shape[1], frame.shape[0]))
        _, data = cv2.imencode(".jpg", cv2.cvtColor(frame, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
        (folder / "data" / _name(index)).write_bytes(np.asarray(data).tobytes())
    detects = one.tested.query.task == "detection"
    files: dict[str, Any] = {"labels": _coco(one, sizes) if detects else _labels(one, one.tested.truths)}
    for name, arm in ANSWERS.items():
        answers = one.tested.answers[arm]
        files[name] = _results(one, answers) if detects else _labels(one, [answer.label for answer in answers])
    for name, document in files.items():
        (folder / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")


def _name(index: int) -> str:
    return f"{index:06}.jpg"


def _labels(one: QueryEvaluation, labels: Sequence[str]) -> dict[str, Any]:
    classes = list(one.tested.query.classes)
    stems = (Path(_name(index)).stem for index in range(len(labels)))
    return {"classes": classes, "labels": {stem: classes.index(label) for stem, label in zip(stems, labels)}}


def _coco(one: QueryEvaluation, sizes: Sequence[tuple[int, int]]) -> dict[str, Any]:
    query, split = one.tested.query, one.split
    objects = [
        {"image_id": image, "category_id": number, "bbox": bbox, "area": bbox[2] * bbox[3], "iscrowd": 0}
        for image, number, bbox, _ in _flat(one, one.tested.truths)
    ]
    return {
        "info": {"description": f"test split of {query.id}"},
        "images": [
            {"id": index + 1, "file_name": _name(index), "width": width, "height": height,
             "unit": split.units[index], "time_s": split.times_s[index]}
            for index, (width, height) in enumerate(sizes)
        ],
        "categories": [{"id": number, "name": name} for number, name in enumerate(query.classes, start=1)],
        "annotations": [{"id": index, **row} for index, row in enumerate(objects, start=1)],
    }  # fmt: skip


def _results(one: QueryEvaluation, answers: Sequence[Any]) -> list[dict[str, Any]]:
    return [
        {"image_id": image, "category_id": number, "bbox": bbox, "score": score}
        for image, number, bbox, score in _flat(one, answers)
    ]


def _flat(one: QueryEvaluation, listed: Sequence[Any]) -> list[tuple[int, int, list[float], float]]:
    """Image, category, COCO box (x, y, width, height) and score (1 for a truth) of every box."""
    numbers = {name: number for number, name in enumerate(one.tested.query.classes, start=1)}
    return [
        (image, numbers[name], [x0, y0, x1 - x0, y1 - y0], score)
        for image, boxes in enumerate(listed, start=1)
        for name, (x0, y0, x1, y1), score in zip(
            boxes.classes, boxes.boxes, getattr(boxes, "scores", (1.0,) * len(boxes.boxes)), strict=True
        )
    ]
