"""Real footage with boxes: frames, human labels with tracks, and the detections of a machine, as the box has them."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LABELLED = (
    "tfl_03601/2019-06-28_03601.mp4",
    "tfl_06514/2019-06-28_06514.mp4",
    "tfl_03604/2019-06-29_03604.mp4",
)
"""Clips of 10 s at 25 frames a second whose vehicles a person boxed and followed."""
NIGHT = ("tfl_jc7/jc7.mp4", "tfl_a13_625/625_201709042122.mp4", "tfl_a13_625/625_201709042126.mp4")
DAY = ("tfl_a13_625/625_201709140917.mp4", "tfl_a13_625/625_201708101101.mp4", *LABELLED)
VEHICLES = frozenset({"car", "bus", "truck"})
OBJECTS = VEHICLES | {"person", "bicycle", "motorcycle"}
MIN_SCORE = 0.27
"""From which the machine's detections count, as the manifest of the footage says."""
MAX_OVERLAP = 0.55
"""The machine names one vehicle car and truck: of two boxes that overlap more, the better stays."""
QUIET = (
    "intel_pbc/person-bicycle-car-detection.mp4",
    "intel_car/car-detection.mp4",
    "intel_person/one-by-one-person-detection.mp4",
)
"""Two car parks and a room, with long times in which nothing happens."""
FPS = 25.0
"""Of the labelled clips."""


@dataclass(frozen=True)
class Clip:
    """A clip: size, rate and number of frames, and by frame the boxes of the machine and of a person, if any."""

    path: Path
    size: tuple[int, int]
    fps: float
    length: int
    step: int
    """The machine looked at frame of this distance."""
    detections: dict[int, list[dict[str, Any]]]
    labels: dict[int, list[dict[str, Any]]]


def data_folder() -> Path:
    """The folder of the footage: GEMEL_DATA, else ../shared/data."""
    return Path(os.environ.get("GEMEL_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")


def read_clip(name: str, folder: Path, classes: Collection[str] = VEHICLES, by_class: bool = False) -> Clip:
    """A clip with its boxes of these classes, all as the one class `vehicle` and one box for each; or, `by_class`, as
    a network gives them: each with its class, one object perhaps with boxes of several."""
    path = folder / "videos" / name
    known = json.loads((folder / "MANIFEST.json").read_text(encoding="utf-8"))["files"]
    row = next(one for one in known if one["file"] == f"videos/{name}")
    looked = next(one for one in known if one["file"] == f"videos/{name}.teacher.jsonl")
    machine = _read_boxes(path, ".teacher.jsonl", classes, by_class)
    if not by_class:
        machine = {frame: suppress(rows) for frame, rows in machine.items()}
    return Clip(
        path,
        (row["w"], row["h"]),
        row["fps"],
        row["frames"],
        looked["frame_step"],
        machine,
        _read_boxes(path, ".gt.jsonl", classes, by_class),
    )


def read_frames(clip: Clip) -> Iterator[np.ndarray]:
    """The frames of a clip, RGB uint8 (H, W, 3)."""
    import cv2

    capture = cv2.VideoCapture(str(clip.path))
    while True:
        is_read, frame = capture.read()
        if not is_read:
            return
        yield cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)


def suppress(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best of boxes that overlap."""
    kept: list[dict[str, Any]] = []
    for row in sorted(rows, key=lambda one: -one["score"]):
        boxes = np.array([one["box"] for one in kept]).reshape(-1, 4)
        if not len(kept) or overlaps(np.array([row["box"]]), boxes).max() < MAX_OVERLAP:
            kept.append(row)
    return kept


def overlaps(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """IoU of each pair of boxes, (N, 4) and (M, 4) -> (N, M)."""
    low = np.maximum(first[:, None, :2], second[None, :, :2])
    high = np.minimum(first[:, None, 2:], second[None, :, 2:])
    shared = np.clip(high - low, 0, None).prod(axis=2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(axis=1) for boxes in (first, second)]
    return shared / np.maximum(areas[0][:, None] + areas[1][None] - shared, 1e-9)


def _read_boxes(path: Path, ending: str, classes: Collection[str], by_class: bool) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    file = path.with_name(path.name + ending)
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        row = json.loads(line)
        if row["class"] in classes and row.get("score", 1.0) >= MIN_SCORE:
            label = row["class"] if by_class else "vehicle"
            found[row["frame"]].append({**row, "class": label, "score": row.get("score", 1.0)})
    return found
