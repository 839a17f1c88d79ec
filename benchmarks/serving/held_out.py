"""Tracks and events on clips that were never tuned on, whose people and vehicles a person boxed and followed.

Usage: pip install trackeval; python -m benchmarks.serving.held_out FOLDER [-o RECORD.json]

FOLDER/NAME/gt.txt has the person's boxes, as MOTChallenge 2015 and KITTI's labels for tracking have them. Where there
is a det.txt, as MOTChallenge gives it (ACF, "Fast feature pyramids for object detection"), tracks are also made of its
boxes. The cameras of all stand still. Rows as in `benchmarks.serving.tracking` and `benchmarks.serving.events`, with
one zone in the middle of the picture and a line across it, at about 5 frames a second and at the clip's own rate.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import machine
from benchmarks.serving.events import BOUND, MACHINE, PERSON, compare_events, detected_share
from benchmarks.serving.footage import Clip
from benchmarks.serving.tracking import follow, make_own

FORMS: dict[str, tuple[tuple[int, int], float]] = {
    "TUD-Campus": ((640, 480), 25.0), "TUD-Stadtmitte": ((640, 480), 25.0), "Venice-2": ((1920, 1080), 30.0),
    "KITTI-12": ((1242, 375), 10.0), "KITTI-16": ((1242, 375), 10.0), "KITTI-17": ((1242, 375), 10.0),
}  # fmt: skip
"""Size and frames a second."""
KITTI_CLASSES = {"Car": "car", "Van": "car", "Truck": "truck", "Pedestrian": "person", "Cyclist": "bicycle"}
FPS = 5.0
MEASURED = Path(__file__).resolve().parents[1] / "measured" / "serving" / "held_out.json"
Boxes = dict[int, list[dict[str, Any]]]


def read_motchallenge(path: Path) -> Boxes:
    """By frame, from 0 on, the boxes of a file of MOTChallenge 2015."""
    found: Boxes = defaultdict(list)
    for line in path.read_text().splitlines() if path.exists() else ():
        frame, track, left, top, width, height, score, *_ = map(float, line.split(","))
        box = [left, top, left + width, top + height]
        row = {"class": "person", "score": score, "box": box, "track": int(track)}
        found[int(frame) - 1].append(row)
    return found


def read_kitti(path: Path) -> Boxes:
    """By frame the boxes of KITTI's labels for tracking."""
    found: Boxes = defaultdict(list)
    for line in path.read_text().splitlines():
        frame, track, name, _, _, _, *rest = line.split()
        if name in KITTI_CLASSES:
            box = [float(side) for side in rest[:4]]
            found[int(frame)].append({"class": KITTI_CLASSES[name], "score": 1.0, "box": box, "track": int(track)})
    return found


def read_clips(folder: Path) -> list[Clip]:
    """Those of FORMS that the folder has."""
    clips = []
    for name, (size, fps) in FORMS.items():
        path = folder / name
        if path.is_dir():
            labels = (read_kitti if name.startswith("KITTI") else read_motchallenge)(path / "gt.txt")
            clips.append(Clip(path, size, fps, 1 + max(labels), 1, read_motchallenge(path / "det.txt"), labels))
    return clips


def measure_identity(clip: Clip, boxes: Boxes, step: int) -> dict[str, Any]:
    """IDF1, identity switches and milliseconds a frame of the box's tracker with these boxes."""
    with contextlib.redirect_stdout(io.StringIO()):
        from trackeval.metrics import CLEAR, Identity  # pyright: ignore[reportMissingImports]

        settings = {"THRESHOLD": 0.5, "PRINT_CONFIG": False}
        identity, clear = Identity(settings), CLEAR(settings)
    data, times = follow(replace(clip, detections=boxes), make_own(clip.fps / step), step)
    found = {**identity.eval_sequence(data), **clear.eval_sequence(data)}
    return {"idf1": round(float(found["IDF1"]), 3), "switches": int(found["IDSW"]), "ids": data["num_gt_ids"],
            "ms": round(float(np.median(times)), 3)}  # fmt: skip


def measure(clips: Sequence[Clip]) -> list[dict[str, Any]]:
    """A row for each clip, source of boxes and rate."""
    rows = []
    for clip in clips:
        for step in sorted({1, round(clip.fps / FPS)}, reverse=True):
            for source, boxes in ((PERSON, clip.labels), (MACHINE, clip.detections), (BOUND, clip.detections)):
                if boxes:
                    row = compare_events([clip], source, "near", step, 1.0)
                    del row["clips"], row["zone"]
                    more = {} if source == BOUND else measure_identity(clip, boxes, step)
                    rows.append({"clip": clip.path.name, **row, **more, "detected": detected_share([replace(
                        clip, detections=boxes)])})  # fmt: skip
    return rows


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--out", type=Path, default=MEASURED)
    given = parser.parse_args()
    begun = time.monotonic()
    rows = measure(read_clips(given.folder))
    for row in rows:
        print(json.dumps({key: value for key, value in row.items() if key != "kinds"}))
    for fps in ("5", "own"):
        for source in (PERSON, MACHINE, BOUND):
            own = [one for one in rows if one["boxes"] == source and (one["fps"] == FPS) is (fps == "5")]
            events, found, matched = (sum(one.get(key, 0) for one in own) for key in ("events", "found", "matched"))
            print(fps, source, events, f"precision {matched / max(1, found):.3f} recall {matched / max(1, events):.3f}")
    given.out.write_text(json.dumps({
        "command": "python -m benchmarks.serving.held_out FOLDER", "date": date.today().isoformat(),
        "machine": machine(), "seconds": round(time.monotonic() - begun), "rows": rows,
    }, indent=1) + "\n", encoding="utf-8")  # fmt: skip


if __name__ == "__main__":
    main()
