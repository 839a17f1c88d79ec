"""How long `gemel eval` takes beside running the models: scoring frames of boxes, and the report once they are scored.

Usage: python -m benchmarks.reporting.speed [--frames N] [--queries N] [--rounds N] [--json FILE]

Nine detectors of one architecture on as many cameras, with random boxes: of each frame 0 to 12 objects, most of them
found by both models, some moved, doubled, misnamed or made up. `scoring`: F1 of both models, mean average precision,
the kinds of errors, and the worst frames chosen. `streams`: all frames played on the virtual clock in three memory
settings, by both arms, with three seeds, and scored there. `report`: report.json and the page, once all that is known.
One thread; the medians of the rounds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import yaml

from benchmarks.machine import machine
from gemel.edge_runtime.scheduler.costs import memory_settings
from gemel.evaluation import (
    MEMORY_SETTINGS,
    EvalOptions,
    QueryEvaluation,
    Stage,
    build_report,
    score_query,
)
from gemel.models.bundle import Bundle, BundleQuery, Made, open_bundle, write_bundle
from gemel.models.data import Frames, Split
from gemel.models.predictions import BoxLabels, DetectionPrediction
from gemel.models.sharing.groups import ceiling_bytes, groups
from gemel.models.sharing.layers import layers_of_all
from gemel.models.sharing.plan import SharingPlan, tie
from gemel.models.workload import Workload, load_workload
from gemel.models.zoo import build, input_size_of
from gemel.report.document import MERGED, ORIGINALS
from gemel.stream_eval import CostModel, load_cost_model

FRAMES, QUERIES, ROUNDS = 10_000, 9, 3
MODEL, INPUT_SIZE, CLASSES, FPS = "ssdlite320_mobilenet_v3_large", 320, ("car", "bus", "truck"), 5.0
DEVICE = "jetson-nano"
SIZE = (640, 360)
MAX_OBJECTS, UNITS = 12, 20
THRESHOLD = 0.3
HEADS = ("what", "asked", "measured")
SCORING, STREAMS, REPORT = "scoring", "streams", "report"
ASKED = {SCORING: "<= 5 s", STREAMS: "", REPORT: "<= 20 s"}


def write_inputs(folder: Path, queries: int) -> tuple[Bundle, Workload]:
    """A workload of so many detectors with random weights, and a bundle in which they share all they can."""
    cameras = {f"camera-{index}": {"source": "none.mp4", "fps": FPS} for index in range(queries)}
    asked = [
        {"id": f"query-{index}", "camera": camera, "task": "detection", "classes": list(CLASSES), "model": MODEL,
         "input_size": INPUT_SIZE, "sla_ms": 200}
        for index, camera in enumerate(cameras)
    ]  # fmt: skip
    path = folder / "workload.yaml"
    path.write_text(yaml.safe_dump({"name": "boxes", "accuracy_target": 0.95, "cameras": cameras, "queries": asked}))
    load = load_workload(path)
    models = {
        query.id: build(query.model, query.classes, {}, input_size_of(query), query.task) for query in load.queries
    }
    layers = layers_of_all(load.queries)
    tie(models, SharingPlan.of(groups(layers)))
    made = Made(load.name, "top-down", ceiling_bytes(layers))
    write_bundle(folder / "boxes.safetensors", models, [BundleQuery.of(query) for query in load.queries], made)
    return open_bundle(folder / "boxes.safetensors"), load


def draw_predictions(frames: int, seed: int) -> tuple[Split, dict[str, list[DetectionPrediction]]]:
    """A split of so many frames, and what both models answer."""
    random = np.random.default_rng(seed)
    truths, sides = [], {ORIGINALS: [], MERGED: []}
    for _ in range(frames):
        count = int(random.integers(MAX_OBJECTS + 1))
        corner = random.uniform(0, (SIZE[0] - 120, SIZE[1] - 120), (count, 2))
        boxes = np.concatenate([corner, corner + random.uniform(20, 120, (count, 2))], axis=1)
        names = [CLASSES[index] for index in random.integers(len(CLASSES), size=count)]
        truths.append(BoxLabels(tuple(names), tuple(map(tuple, boxes.tolist()))))
        for answers in sides.values():
            answers.append(_answer(random, names, boxes))
    times = [index % (frames // UNITS + 1) / FPS for index in range(frames)]
    units = [f"clip-{index // (frames // UNITS + 1):02}" for index in range(frames)]
    picture = np.full((SIZE[1], SIZE[0], 3), 90, np.uint8)
    shown = Frames([lambda: picture] * frames)
    return Split("test", shown, tuple(truths), tuple(units), tuple(times)), sides


def _answer(random: np.random.Generator, names: Sequence[str], boxes: np.ndarray) -> DetectionPrediction:
    """Nine objects of ten, each a little moved, some misnamed or doubled, and some that are not there."""
    kept = np.flatnonzero(random.random(len(names)) < 0.9)
    kept = np.concatenate([kept, kept[random.random(len(kept)) < 0.05]])
    found = boxes[kept] + random.normal(0, 4, (len(kept), 4))
    wrong = random.random(len(kept)) < 0.05
    said = [CLASSES[int(random.integers(len(CLASSES)))] if odd else names[int(one)] for one, odd in zip(kept, wrong)]
    false = int(random.integers(3))
    corner = random.uniform(0, (SIZE[0] - 60, SIZE[1] - 60), (false, 2))
    found = np.concatenate([found, np.concatenate([corner, corner + 50], axis=1)])
    said += [CLASSES[0]] * false
    scores = random.uniform(0.1, 1, len(said)).tolist()
    return DetectionPrediction(tuple(said), tuple(scores), tuple(map(tuple, found.tolist())))


def measure(frames: int, queries: int, rounds: int) -> dict[str, Any]:
    """Seconds of each part, round by round, and how large the report became."""
    torch.set_num_threads(1)
    took: dict[str, list[float]] = {part: [] for part in ASKED}
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="gemel-report-") as folder:
        bundle, load = write_inputs(Path(folder), queries)
        clock = load_cost_model(DEVICE, bundle)
        settings = memory_settings(clock.costs[ORIGINALS])
        budgets = {name: settings[name] for name in MEMORY_SETTINGS}
        parts = [draw_predictions(frames // queries, seed) for seed in range(queries)]
        for _ in range(rounds):
            began = time.perf_counter()
            judged = [
                score_query(query, split, sides, THRESHOLD, 1) for query, (split, sides) in zip(load.queries, parts)
            ]
            took[SCORING].append(round(time.perf_counter() - began, 3))
            sizes, seconds = _report(bundle, judged, clock, budgets)
            for part, value in seconds.items():
                took[part].append(value)
    return {"frames": frames, "queries": queries, "seconds": took, **sizes}


def _report(
    bundle: Bundle, judged: Sequence[QueryEvaluation], clock: CostModel, budgets: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, float]]:
    """How large the report became, and the seconds of its parts."""
    began = {}

    def note_start(event: str, **fields: Any) -> None:
        if event == "stage":
            began[fields["name"]] = time.perf_counter()

    report, page = build_report(bundle, judged, clock, budgets, EvalOptions(DEVICE), "gemel eval", note_start)
    text = json.dumps(report.to_json(), indent=1, allow_nan=False)
    ended = time.perf_counter()
    seconds = {
        STREAMS: began[Stage.REPORT.value] - began[Stage.STREAMS.value],
        REPORT: ended - began[Stage.REPORT.value],
    }
    played = sum(row.received for row in report.ledger)
    sizes = {"report_bytes": len(text), "page_bytes": len(page), "frames_played": played}
    return sizes, {part: round(value, 3) for part, value in seconds.items()}


def rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The table of what was measured."""
    took = found["seconds"]
    what = {
        SCORING: f"scoring {found['frames']:,} frames of boxes, both models, with mAP and kinds of errors",
        STREAMS: f"playing them on the virtual clock, {found['frames_played']:,} in all, and scoring the streams",
        REPORT: f"the report once that is scored, a page of {found['page_bytes'] / 1000:.0f} kB",
    }
    return [(said, ASKED[part], f"{median(took[part]):.1f} s") for part, said in what.items()]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=FRAMES)
    parser.add_argument("--queries", type=int, default=QUERIES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = measure(given.frames, given.queries, given.rounds)
    for row in rows(found):
        print(" | ".join(row))
    if given.json is not None:
        kept = {**found, "machine": machine(), "date": str(datetime.date.today())}
        given.json.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
