"""Events out of detections and tracks against those that the same rules give on a person's boxes and tracks.

Labels go through the same filter, zones and hysteresis; only boxes and numbers of objects come from a person.
Two events are one where kind and zone are the same, their starts are at most MAX_SHIFT_S apart, and the boxes of their
objects at the start overlap (a count has no object). `machine, tracked by a person` is the bound of any tracker: of the
machine's boxes those that show a labelled object, with the person's number. `person, of what the machine found` has
the person's boxes of the same objects, and `person, dropped at random` has `detected` of all: both are tracked by the
box, and show what missing boxes cost. `detected` is the share of labelled objects
(of the rules' least area) that the machine has a box for, at IoU 0.5. Boxes have the classes that the example of the
docs asks for: car, bus and truck. The machine is a fusion of three published networks; `YOLOX-nano` is one of them
alone, as its authors publish it, whose boxes of one object in several classes are all given to the box, with `one_box`
as it is by default and without; its boxes below a score of 0.3 continue tracks and begin none. Also the box's own work
for a frame, in CPU time of the thread, with tracking, zones and events.

Usage: python -m benchmarks.serving.events [-o RECORD.json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from benchmarks.machine import machine
from benchmarks.models.decoders import FAMILIES, MIN_SCORE, Rival
from benchmarks.serving.footage import FPS, LABELLED, Clip, data_folder, overlaps, read_clip, read_frames
from gemel.edge_runtime.events.machine import EndReason, EventMachine, Moment, Notice
from gemel.edge_runtime.events.motion import MotionGate
from gemel.edge_runtime.events.rules import QueryKeys, QueryRules
from gemel.edge_runtime.events.stage import QueryEvents
from gemel.edge_runtime.events.tracking import DEFAULT_TRACKING
from gemel.models.bundle import BundleQuery
from gemel.models.preprocess import Preprocess

PERSON, MACHINE, BOUND = "person", "machine", "machine, tracked by a person"
FOUND, THINNED = "person, of what the machine found", "person, dropped at random"
"""Whose boxes a tracker gets."""
NETWORK, DOUBLED, NETWORK_BOUND = "YOLOX-nano", "YOLOX-nano, one_box: false", "YOLOX-nano, tracked by a person"
NUMBERED = (BOUND, NETWORK_BOUND)
NETWORK_FILE, NETWORK_CLASSES = "yolox_nano_416", {2: "car", 5: "bus", 7: "truck"}
MAX_SHIFT_S, MIN_OVERLAP, MIN_AREA = 1.0, 0.3, 0.003
MEASURED = Path(__file__).resolve().parents[1] / "measured" / "serving" / "events.json"
ZONES = {
    LABELLED[0]: {
        "near": [[0.3, 0.4], [0.6, 0.4], [1.0, 0.6], [1.0, 1.0], [0.1, 1.0]],
        "far": [[0.3, 0.15], [0.8, 0.15], [0.8, 0.4], [0.3, 0.4]],
    },
    LABELLED[1]: {
        "near": [[0.35, 0.3], [0.75, 0.3], [1.0, 0.6], [1.0, 1.0], [0.4, 1.0]],
        "far": [[0.3, 0.05], [0.9, 0.05], [0.75, 0.3], [0.3, 0.3]],
    },
    LABELLED[2]: {
        "near": [[0.45, 0.5], [0.8, 0.5], [1.0, 0.7], [1.0, 1.0], [0.45, 1.0]],
        "far": [[0.45, 0.3], [0.75, 0.3], [0.8, 0.5], [0.45, 0.5]],
    },
}
"""Two zones of the road in each clip: near the camera, and behind."""
LINES = {
    LABELLED[0]: {"near": [[0.2, 0.6], [1.0, 0.6]], "far": [[0.3, 0.3], [0.8, 0.3]]},
    LABELLED[1]: {"near": [[0.35, 0.5], [0.95, 0.5]], "far": [[0.3, 0.2], [0.85, 0.2]]},
    LABELLED[2]: {"near": [[0.45, 0.65], [1.0, 0.65]], "far": [[0.45, 0.4], [0.8, 0.4]]},
}
"""A line across each zone."""
MIDDLE = {"near": [[0.25, 0.2], [0.75, 0.2], [0.75, 1.0], [0.25, 1.0]]}, {"near": [[0.5, 0.2], [0.5, 1.0]]}
"""The zone and line of other clips, set before any was looked at."""


def make_rules(clip: str, zone: str, one_box: bool) -> QueryRules:
    """The rules of a clip: what a person would ask of a road."""
    zones, lines = (ZONES[clip], LINES[clip]) if clip in ZONES else MIDDLE
    events = [
        {"kind": "enter", "zone": zone},
        {"kind": "leave", "zone": zone},
        {"kind": "dwell", "zone": zone, "seconds": 2},
        {"kind": "count", "zone": zone, "at_least": 3},
        {"kind": "cross", "line": zone},
    ]
    keys = {
        "tracking": True, "one_box": one_box, "zones": {zone: zones[zone]}, "lines": {zone: lines[zone]},
        "min_area": MIN_AREA, "events": events,
    }  # fmt: skip
    return QueryKeys.model_validate(keys).to_rules()


def make_query() -> BundleQuery:
    """A query of vehicles."""
    return BundleQuery(
        "q",
        "c",
        "detection",
        tuple(NETWORK_CLASSES.values()),
        "none",
        {},
        320,
        Preprocess((320, 320)),
        FPS,
        1000.0,
        0.95,
    )


class LabelNumbers:
    """The numbers that a person gave to objects, in place of a tracker."""

    def update(
        self, detections: Sequence[dict[str, Any]], now: float, weak: Sequence[dict[str, Any]] = ()
    ) -> list[int | None]:
        """The number of each object."""
        return [one["track"] for one in (*detections, *weak)]

    def reset(self) -> None:
        """Nothing is remembered."""


def play(
    clip: Clip,
    boxes: dict[int, list[dict[str, Any]]],
    zone: str,
    step: int = 1,
    is_numbered: bool = False,
    one_box: bool = True,
) -> tuple[list[Notice], list[float]]:
    """The starts of the events of every `step`-th frame of a clip, and the milliseconds of each frame.

    `is_numbered`: the boxes have a person's numbers, which replace the tracker.
    """
    fps, ids = clip.fps / step, itertools.count(1)
    rules = make_rules("/".join(clip.path.parts[-2:]), zone, one_box and not is_numbered)
    at_rate = [rule.at_rate(fps) for rule in rules.events]
    events = EventMachine(at_rate, DEFAULT_TRACKING.lost_after_s(fps), fps, {}, lambda: str(next(ids)))
    own, notices, times = QueryEvents(make_query(), rules, events, fps), list[Notice](), list[float]()
    if is_numbered:
        own.tracker = LabelNumbers()  # type: ignore[assignment]
    for frame in range(0, clip.length, step):
        strong, weak = (
            [one for one in boxes.get(frame, []) if one.get("is_weak", False) is low] for low in (False, True)
        )
        record = {"query": "q", "frame": frame, "detections": strong}
        start = time.thread_time()
        _, found = own.apply(Moment(frame, 100 + frame / clip.fps, frame / clip.fps, clip.size), record, weak)
        times.append(1000 * (time.thread_time() - start))
        notices += found
    notices += own.end(EndReason.STOPPED)
    return [one for one in notices if not one.is_end], times


def count_matches(found: Sequence[Notice], wanted: Sequence[Notice]) -> int:
    """How many events are the same, one to one."""
    if not found or not wanted:
        return 0
    same = np.zeros((len(found), len(wanted)))
    for (row, one), (column, other) in itertools.product(enumerate(found), enumerate(wanted)):
        is_near = abs(one.after["start_time"] - other.after["start_time"]) <= MAX_SHIFT_S
        boxes = [np.array([event.after["box"]]) for event in (one, other)]
        has_object = one.after["track"] is not None
        is_one_way = one.after.get("direction") == other.after.get("direction")
        if one.rule.name == other.rule.name and is_near and is_one_way:
            same[row, column] = not has_object or overlaps(*boxes)[0, 0] >= MIN_OVERLAP
    rows, columns = linear_sum_assignment(same, maximize=True)
    return int(same[rows, columns].sum())


def match_labels(found: Sequence[dict[str, Any]], labels: Sequence[dict[str, Any]], least: float) -> dict[int, int]:
    """By place in `found` the place in `labels` of the same object, one to one, from this IoU on."""
    if not found or not labels:
        return {}
    shared = overlaps(*(np.array([one["box"] for one in side]) for side in (found, labels)))
    pairs = zip(*linear_sum_assignment(shared, maximize=True), strict=True)
    return {int(row): int(column) for row, column in pairs if shared[row, column] >= least}


def number_detections(clip: Clip) -> dict[int, list[dict[str, Any]]]:
    """By frame the machine's boxes of labelled objects, with the person's numbers."""
    numbered = {}
    for frame, seen in clip.detections.items():
        labels = clip.labels.get(frame, [])
        same = match_labels(seen, labels, MIN_OVERLAP)
        numbered[frame] = [{**seen[row], "track": labels[column]["track"]} for row, column in same.items()]
    return numbered


def detected_share(clips: Sequence[Clip]) -> float:
    """The share of labelled objects, from MIN_AREA of the frame on, that the machine has a box for."""
    total = hits = 0
    for clip in clips:
        least = MIN_AREA * clip.size[0] * clip.size[1]
        for frame, labels in clip.labels.items():
            large = [one for one in labels if np.prod(np.array(one["box"][2:]) - one["box"][:2]) >= least]
            total += len(large)
            seen = [one for one in clip.detections.get(frame, []) if not one.get("is_weak")]
            hits += len(match_labels(seen, large, 0.5))
    return round(hits / total, 3)


def gate_times(clip: Clip) -> list[float]:
    """The milliseconds of motion gating for each frame."""
    gate, times = MotionGate(), []
    for frame, image in enumerate(read_frames(clip)):
        start = time.thread_time()
        if not gate.is_still(frame, frame / FPS, image):
            gate.confirm(frame)
        times.append(1000 * (time.thread_time() - start))
    return times


def select_boxes(clip: Clip, source: str, detected: float) -> dict[int, list[dict[str, Any]]]:
    """By frame the boxes of a source."""
    if source in NUMBERED:
        return number_detections(clip)
    if source == FOUND:
        return {
            frame: [
                labels[column] for column in match_labels(clip.detections.get(frame, []), labels, MIN_OVERLAP).values()
            ]
            for frame, labels in clip.labels.items()
        }
    if source == THINNED:
        draw = np.random.default_rng(0).random
        return {frame: [one for one in labels if draw() < detected] for frame, labels in clip.labels.items()}
    return clip.labels if source == PERSON else clip.detections


def compare_events(clips: Sequence[Clip], source: str, zone: str, step: int, detected: float) -> dict[str, Any]:
    """Precision and recall over all kinds, and by kind (events of the labels, found, matched)."""
    kinds: dict[str, Counter[str]] = {}
    by_clip = []
    for clip in clips:
        boxes = select_boxes(clip, source, detected)
        own, _ = play(clip, boxes, zone, step, source in NUMBERED, source != DOUBLED)
        true, _ = play(clip, clip.labels, zone, step, is_numbered=True)
        sums = Counter[str]()
        for kind in {str(one.rule.kind) for one in (*own, *true)}:
            found, wanted = ([one for one in side if one.rule.kind == kind] for side in (own, true))
            counts = {"events": len(wanted), "found": len(found), "matched": count_matches(found, wanted)}
            kinds.setdefault(kind, Counter()).update(counts)
            sums.update(counts)
        by_clip.append([round(sums["matched"] / max(1, sums[side]), 3) for side in ("found", "events")])
    total = sum(kinds.values(), Counter())
    return {
        "boxes": source, "zone": zone, "fps": round(clips[0].fps / step, 1), **total,
        "precision": round(total["matched"] / total["found"], 3),
        "recall": round(total["matched"] / total["events"], 3),
        "clips": by_clip, "kinds": {kind: dict(counts) for kind, counts in sorted(kinds.items())},
    }  # fmt: skip


def detect(clip: Clip, network: Rival) -> Clip:
    """The clip with what a published network finds, in place of the machine's boxes."""
    detections = {}
    for frame, image in enumerate(read_frames(clip)):
        found = network.detect(image, least_score=DEFAULT_TRACKING.weak_score)
        boxes, scores, labels = (part.tolist() for part in found)
        detections[frame] = [
            {"class": NETWORK_CLASSES[label], "score": score, "box": box, "is_weak": score < MIN_SCORE}
            for box, score, label in zip(boxes, scores, labels, strict=True)
            if label in NETWORK_CLASSES
        ]
    return replace(clip, detections=detections)


def compare_all(clips: Sequence[Clip], sources: Sequence[str], detected: float) -> list[dict[str, Any]]:
    """A row for each source of boxes, zone and rate."""
    return [
        compare_events(clips, source, zone, step, detected)
        for source in sources
        for zone in ("near", "far")
        for step in (5, 1)
    ]


def measure(clips: Sequence[Clip], network: Rival) -> dict[str, Any]:
    """Rows of precision and recall, and the times of a frame with tracking, one zone and four rules."""
    detected = detected_share(clips)
    rows = compare_all(clips, (PERSON, FOUND, THINNED, MACHINE, BOUND), detected)
    seen = [detect(clip, network) for clip in clips]
    shares = {"detected": detected, "detected_by_network": detected_share(seen)}
    rows += compare_all(seen, (NETWORK, DOUBLED, NETWORK_BOUND), detected)

    def describe(values: list[float]) -> dict[str, float]:
        median, p95 = np.percentile(values, [50, 95]).round(3).tolist()
        return {"mean": round(float(np.mean(values)), 3), "median": median, "p95": p95}

    own = [one for clip in clips for one in play(clip, clip.detections, "near")[1]]
    gating = [one for clip in clips for one in gate_times(clip)]
    objects = sum(len(seen) for clip in clips for seen in clip.detections.values()) / sum(one.length for one in clips)
    return {
        "rows": rows,
        **shares,
        "objects_a_frame": round(objects, 1),
        "own_ms": describe(own),
        "gate_ms": describe(gating),
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", type=Path, default=MEASURED)
    given = parser.parse_args()
    network = Rival(data_folder() / "models" / f"{NETWORK_FILE}.onnx", FAMILIES[NETWORK_FILE])
    found = measure([read_clip(name, data_folder(), by_class=True) for name in LABELLED], network)
    for row in found["rows"]:
        print(json.dumps(row))
    print(json.dumps({key: value for key, value in found.items() if key != "rows"}))
    record = {
        "command": "python -m benchmarks.serving.events",
        "date": date.today().isoformat(),
        "machine": machine(),
        "clips": LABELLED,
        **found,
    }
    given.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
