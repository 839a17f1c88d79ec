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
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.serving.footage import DAY, NIGHT, QUIET, Clip, data_folder, read_clip, read_frames
from edge_runtime.events.motion import DEFAULT_MOTION, MotionConfig
from gemel.gating import gate_frames, score_gating
from gemel.stream_eval import Footage
from models.predictions import BoxLabels, DetectionPrediction
from models.tasks.detection import Detection

RATE = 5.0
"""Frames a second of the query."""
THRESHOLDS = (6.0, 10.0, 16.0, 24.0)
MEASURED = Path(__file__).resolve().parents[1] / "measured" / "serving" / "motion_gating.json"


def measure_clip(clip: Clip, config: MotionConfig) -> dict[str, Any]:
    """Frames run and accuracy of a clip."""
    frames = list(read_frames(clip))
    length = min(clip.length, len(frames))
    footage = Footage(("clip",) * length, tuple(frame / clip.fps for frame in range(length)), RATE)
    pairs, task, classes = gate_frames(footage, frames, config=config), Detection(), ("vehicle",)
    answers = [_prediction(clip.detections.get(frame, [])) for frame in range(length)]
    own = [BoxLabels(answer.classes, answer.boxes) for answer in answers]
    found = score_gating(task, pairs, answers, own, classes, 0.0)
    row = {"frames": found.frames, "run": found.run, "f1_own": round(found.gated, 4)}
    if clip.labels:
        true = [_labels(clip.labels.get(frame, [])) for frame in range(length)]
        against = score_gating(task, pairs, answers, true, classes, 0.0)
        row |= {"f1_labels": round(against.ungated, 4), "f1_labels_gated": round(against.gated, 4)}
    return row


def measure(folder: Path) -> list[dict[str, Any]]:
    """A row for each clip and threshold."""
    rows = []
    for light, names in (("night", NIGHT), ("day", DAY), ("quiet", QUIET)):
        for name in names:
            clip = read_clip(name, folder)
            for threshold in THRESHOLDS:
                config = replace(DEFAULT_MOTION, threshold=threshold)
                rows.append({"light": light, "clip": name, "threshold": threshold, **measure_clip(clip, config)})
                print(json.dumps(rows[-1]), flush=True)
    return rows


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
        "command": "python -m benchmarks.serving.motion_gating", "machine": machine(), "fps": RATE,
        "default_threshold": DEFAULT_MOTION.threshold, "rows": rows,
    }  # fmt: skip
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
