"""Motion gating on real footage by night and by day: frames that need no run, and what their answers cost.

The answers are a machine's detections of every frame, at the query's rate. A skipped frame gets the answer of the last
frame that ran. The cost is F1 at IoU 0.5 against the answers of every frame, and on the labelled clips also against a
person's boxes. Thresholds beside the default one show what it trades.

Usage: python -m benchmarks.serving.motion_gating [-o RECORD.json]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.serving.footage import DAY, NIGHT, OBJECTS, QUIET, VEHICLES, Clip, data_folder, read_clip, read_frames
from gemel.edge_runtime.events.motion import DEFAULT_MOTION, MotionConfig
from gemel.edge_runtime.events.zones import foot_point
from gemel.gating import gate_frames, score_gating
from gemel.models.predictions import BoxLabels, DetectionPrediction
from gemel.models.preprocess import Region, Roi
from gemel.models.tasks.detection import Detection
from gemel.stream_eval import Footage

CLASSES = ("vehicle",)
RATE = 5.0
"""Frames a second of the query."""
THRESHOLDS = (6.0, 10.0, 16.0, 24.0)
MEASURED = Path(__file__).resolve().parents[1] / "measured" / "serving" / "motion_gating.json"


WHOLE, CARRIAGEWAY = (0.0, 0.0, 1.0, 1.0), (0.0, 0.35, 0.42, 1.0)
"""All of a frame, and the part of the night clips of the A13 in which cars drive away from the camera."""
CASES = (
    *(("night", name, WHOLE) for name in NIGHT),
    *(("night, one carriageway", name, CARRIAGEWAY) for name in NIGHT[1:]),
    *(("day", name, WHOLE) for name in DAY),
    *(("quiet", name, WHOLE) for name in QUIET),
)


def measure_clip(clip: Clip, roi: Roi, config: MotionConfig) -> dict[str, Any]:
    """Frames run and accuracy of a part of a clip, over the frames that the machine looked at, about RATE a second."""
    step = clip.step * max(1, round(clip.fps / RATE / clip.step))
    pictures = list(read_frames(clip))
    numbers = range(0, min(clip.length, len(pictures)), step)
    footage = Footage(("clip",) * len(numbers), tuple(number / clip.fps for number in numbers), None)
    pairs = gate_frames(footage, [pictures[number] for number in numbers], Region(roi), config)
    answers = [_prediction(_within(clip, clip.detections.get(number, []), roi)) for number in numbers]
    own = [BoxLabels(answer.classes, answer.boxes) for answer in answers]
    found = score_gating(Detection(), pairs, answers, own, CLASSES, 0.0)
    objects = sum(len(answer.boxes) for answer in answers)
    row = {"frames": found.frames, "run": found.run, "objects": objects, "f1_own": round(found.gated, 4)}
    if clip.labels:
        true = [_labels(_within(clip, clip.labels.get(number, []), roi)) for number in numbers]
        against = score_gating(Detection(), pairs, answers, true, CLASSES, 0.0)
        row |= {"f1_labels": round(against.ungated, 4), "f1_labels_gated": round(against.gated, 4)}
    return row


def measure(folder: Path) -> list[dict[str, Any]]:
    """A row for each case and threshold."""
    rows = []
    for light, name, roi in CASES:
        clip = read_clip(name, folder, OBJECTS if light == "quiet" else VEHICLES)
        for threshold in THRESHOLDS:
            found = measure_clip(clip, roi, replace(DEFAULT_MOTION, threshold=threshold))
            rows.append({"light": light, "clip": name, "threshold": threshold, **found})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def _within(clip: Clip, rows: Sequence[dict[str, Any]], roi: Roi) -> list[dict[str, Any]]:
    x0, y0, x1, y1 = roi
    points = [foot_point(one["box"], clip.size) for one in rows]
    return [one for one, (x, y) in zip(rows, points, strict=True) if x0 <= x < x1 and y0 <= y < y1]


def _prediction(rows: Sequence[dict[str, Any]]) -> DetectionPrediction:
    boxes = tuple(tuple(map(float, one["box"])) for one in rows)
    return DetectionPrediction(("vehicle",) * len(rows), tuple(one["score"] for one in rows), boxes)  # type: ignore[arg-type]


def _labels(rows: Sequence[dict[str, Any]]) -> BoxLabels:
    boxes = tuple(tuple(map(float, one["box"])) for one in rows)
    return BoxLabels(("vehicle",) * len(rows), boxes)  # type: ignore[arg-type]


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", type=Path, default=MEASURED)
    out = parser.parse_args().out
    rows = measure(data_folder())
    record = {
        "command": "python -m benchmarks.serving.motion_gating", "date": date.today().isoformat(),
        "machine": machine(), "fps": RATE,
        "default_threshold": DEFAULT_MOTION.threshold, "rows": rows,
    }  # fmt: skip
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
