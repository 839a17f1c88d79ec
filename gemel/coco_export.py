"""Test frames, labels and predictions of the detection queries as COCO files, for other tools (`gemel eval --coco`).

A folder for each query: `data/` with its frames, `labels.json` (COCO annotations), `original.json` and `merged.json`
(COCO results).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from gemel.models.data import Split
from gemel.models.errors import InputError, join_names
from gemel.models.io import describe_problem
from gemel.models.notes import add_note
from gemel.models.predictions import BoxLabels
from gemel.report.document import MERGED, ORIGINALS
from gemel.stream_eval import QueryTest

COCO_KEY = "--coco"
JPEG_QUALITY = 95


def check_export_folder(folder: Path | None) -> None:
    """Refuse a folder that holds files or cannot be made, before the evaluation begins."""
    if folder is None:
        return
    if not folder.parent.is_dir():
        problem = f"there is no directory {folder.parent}"
        raise InputError(folder, problem, "create it, or choose another folder", COCO_KEY)
    with describe_problem(folder, COCO_KEY):
        is_new = not folder.exists()
        folder.mkdir(exist_ok=True)
        if any(folder.iterdir()):
            raise InputError(folder, "holds other files", "choose a new or empty folder", COCO_KEY)
        if is_new:
            folder.rmdir()


def export_coco(tests: Sequence[tuple[QueryTest, Split]], folder: Path) -> None:
    """Fill the folder; on failure it is left as it was. Raises InputError without detection queries."""
    detections = [(test, split) for test, split in tests if test.query.task == "detection"]
    if not detections:
        raise InputError(COCO_KEY, "the workload has no detection query", "leave the option out")
    if others := [test.query.id for test, _ in tests if test.query.task != "detection"]:
        text = f"queries without boxes are left out: {join_names(others, 5)}"
        add_note(folder, text, "COCO holds boxes")
    is_new = not folder.exists()
    try:
        with describe_problem(folder, COCO_KEY):
            for test, split in detections:
                _write_query(test, split, folder / test.query.id)
    except BaseException:
        for test, _ in detections:
            shutil.rmtree(folder / test.query.id, ignore_errors=True)
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _write_query(test: QueryTest, split: Split, folder: Path) -> None:
    (folder / "data").mkdir(parents=True)
    images = []
    for index, frame in enumerate(split.frames):
        name = f"{index:06}.jpg"
        _, data = cv2.imencode(".jpg", cv2.cvtColor(frame, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
        (folder / "data" / name).write_bytes(np.asarray(data).tobytes())
        images.append({
            "id": index + 1, "file_name": name, "width": frame.shape[1], "height": frame.shape[0],
            "unit": split.units[index], "time_s": split.times_s[index],
        })  # fmt: skip
    classes = list(test.query.classes)
    crowds = [one.crowds or BoxLabels() for one in test.labels]
    boxes = [(0, row) for row in _coco_boxes(classes, test.labels)] + [(1, row) for row in _coco_boxes(classes, crowds)]
    labels = [
        {
            "id": index, "image_id": image, "category_id": category, "bbox": box, "area": box[2] * box[3],
            "iscrowd": is_crowd,
        }
        for index, (is_crowd, (image, category, box, _)) in enumerate(boxes, start=1)
    ]  # fmt: skip
    files: dict[str, Any] = {
        "labels": {
            "info": {"description": f"test split of {test.query.id}"},
            "images": images,
            "categories": [{"id": number, "name": name} for number, name in enumerate(classes, start=1)],
            "annotations": labels,
        }
    }
    for name, arm in (("original", ORIGINALS), ("merged", MERGED)):
        files[name] = [
            {"image_id": image, "category_id": category, "bbox": box, "score": score}
            for image, category, box, score in _coco_boxes(classes, test.predictions[arm])
        ]
    for name, document in files.items():
        (folder / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")


def _coco_boxes(classes: Sequence[str], frames: Sequence[Any]) -> list[tuple[int, int, list[float], float]]:
    """Image, category, COCO box (x, y, width, height) and score (1 for a label) of every box."""
    return [
        (image, classes.index(name) + 1, [x0, y0, x1 - x0, y1 - y0], score)
        for image, boxes in enumerate(frames, start=1)
        for name, (x0, y0, x1, y1), score in zip(
            boxes.classes, boxes.boxes, getattr(boxes, "scores", (1.0,) * len(boxes.boxes)), strict=True
        )
    ]
