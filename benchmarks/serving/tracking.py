"""Trackers on real footage that a person labelled: IDF1, identity switches, time of a frame.

The tracker of the box against ByteTrack and OC-SORT of the package `trackers`. All
get the same detections of a machine, and keep a lost object equally long. Metrics are those of `trackeval` at IoU 0.5.
Times are CPU time of the thread.

Usage: pip install trackers trackeval; python -m benchmarks.serving.tracking [-o RECORD.json]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import time
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import machine
from benchmarks.serving.footage import FPS, LABELLED, Clip, data_folder, overlaps, read_clip
from gemel.edge_runtime.events.tracking import DEFAULT_TRACKING, ObjectTracker

STEPS = (1, 5)
"""Every frame, and every fifth: 25 and 5 frames a second."""
MEASURED = Path(__file__).resolve().parents[1] / "measured" / "serving" / "tracking.json"
Update = Callable[[Sequence[dict[str, Any]], float], list[int | None]]


def make_own(fps: float) -> Update:
    """The tracker of the box."""
    return ObjectTracker(fps).update


def make_rival(name: str, fps: float) -> Update:
    """A tracker of the package `trackers` with the same patience and overlap, and numbers from the second frame on."""
    import trackers  # pyright: ignore[reportMissingImports]
    from supervision import Detections  # pyright: ignore[reportMissingImports]

    own = {"track_activation_threshold": 0.0} if name == "ByteTrackTracker" else {}
    tracker = getattr(trackers, name)(
        lost_track_buffer=round(30 * DEFAULT_TRACKING.lost_after_s(fps)), frame_rate=fps, high_conf_det_threshold=0.0,
        minimum_consecutive_frames=2, minimum_iou_threshold=DEFAULT_TRACKING.min_iou, **own,
    )  # fmt: skip

    def update(rows: Sequence[dict[str, Any]], now: float) -> list[int | None]:
        boxes = np.array([one["box"] for one in rows], np.float32).reshape(-1, 4)
        scores = np.array([one["score"] for one in rows], np.float32)
        found = tracker.update(Detections(boxes, confidence=scores, class_id=np.arange(len(rows))), timestamp=now)
        numbers: list[int | None] = [None] * len(rows)
        for row, number in zip(found.class_id, found.tracker_id, strict=True):  # type: ignore[arg-type]
            numbers[int(row)] = int(number) if number >= 0 else None
        return numbers

    return update


TRACKERS: dict[str, Callable[[float], Update]] = {
    "the box": make_own,
    "ByteTrack of trackers": partial(make_rival, "ByteTrackTracker"),
    "OC-SORT of trackers": partial(make_rival, "OCSORTTracker"),
}


def follow(clip: Clip, update: Update, step: int) -> tuple[dict[str, Any], list[float]]:
    """What trackeval takes of a clip, and the milliseconds of each frame."""
    true_ids: dict[int, int] = {}
    own_ids: dict[int, int] = {}
    rows: dict[str, list[np.ndarray]] = {"gt_ids": [], "tracker_ids": [], "similarity_scores": []}
    times = []
    for frame in range(0, clip.length, step):
        seen, labels = clip.detections.get(frame, []), clip.labels.get(frame, [])
        start = time.thread_time()
        numbers = update(seen, 100 + frame / clip.fps)
        times.append(1000 * (time.thread_time() - start))
        tracked = [(number, one["box"]) for number, one in zip(numbers, seen, strict=True) if number is not None]
        rows["gt_ids"].append(np.array([true_ids.setdefault(one["track"], len(true_ids)) for one in labels], int))
        rows["tracker_ids"].append(np.array([own_ids.setdefault(one, len(own_ids)) for one, _ in tracked], int))
        true_boxes = np.array([one["box"] for one in labels], float).reshape(-1, 4)
        rows["similarity_scores"].append(overlaps(true_boxes, np.array([box for _, box in tracked]).reshape(-1, 4)))
    counts = {
        key: sum(map(len, rows[ids])) for key, ids in (("num_gt_dets", "gt_ids"), ("num_tracker_dets", "tracker_ids"))
    }
    known = {"num_gt_ids": len(true_ids), "num_tracker_ids": len(own_ids), "num_timesteps": len(times)}
    return {**rows, **counts, **known}, times


def measure(clips: Sequence[Clip]) -> list[dict[str, Any]]:
    """A row for each tracker and rate, over all clips."""
    with contextlib.redirect_stdout(io.StringIO()):
        from trackeval.metrics import CLEAR, Identity  # pyright: ignore[reportMissingImports]

        settings = {"THRESHOLD": 0.5, "PRINT_CONFIG": False}
        identity, clear = Identity(settings), CLEAR(settings)
    found = []
    for step in STEPS:
        for name, make in TRACKERS.items():
            runs = [follow(clip, make(FPS / step), step) for clip in clips]
            parts = {str(number): data for number, (data, _) in enumerate(runs)}
            ids = identity.combine_sequences({key: identity.eval_sequence(data) for key, data in parts.items()})
            hits = clear.combine_sequences({key: clear.eval_sequence(data) for key, data in parts.items()})
            times = [one for _, own in runs for one in own]
            found.append({
                "tracker": name, "fps": FPS / step, "idf1": round(float(ids["IDF1"]), 4),
                "switches": int(hits["IDSW"]), "mota": round(float(hits["MOTA"]), 4),
                "ms_median": round(float(np.median(times)), 3), "ms_p95": round(float(np.percentile(times, 95)), 3),
            })  # fmt: skip
    return found


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", type=Path, default=MEASURED)
    out = parser.parse_args().out
    rows = measure([read_clip(name, data_folder()) for name in LABELLED])
    for row in rows:
        print(json.dumps(row))
    record = {
        "command": "python -m benchmarks.serving.tracking",
        "date": date.today().isoformat(),
        "machine": machine(),
        "clips": LABELLED,
        "rows": rows,
    }
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
