"""What a bundle is worth: accuracy offline and over time, against the originals.

How a bundle is to be judged.

A bundle and the workload that it was made of.

Both models of a query over its test split: how good they are, what errors they make, what they answered.

What an evaluation ran with.

What a reader of the report must know before believing its figures.

What a bundle is worth: offline and streaming accuracy against the originals, bytes, and where frames went.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edge_runtime.policies import DEFAULT_POLICY
from edge_runtime.scheduler.costs import Costs, memory_bytes, memory_settings
from gemel.bundle_summary import byte_counts, measure_resident_bytes, shared_tensors
from gemel.coco_export import check_export_folder, export_coco
from gemel.conditions import DEFAULT_DEVICE
from gemel.cost_model import CostModel, load_cost_model
from gemel.realtime import evaluate_realtime
from gemel.report.document import REPORT_FORMAT, REPORT_JSON
from gemel.report.examples import worst_examples
from gemel.report.page import render_report
from gemel.stream_eval import (
    MERGED,
    ORIGINALS,
    Footage,
    QueryTest,
    StreamResults,
    build_streams,
    evaluate_streams,
    frame_interval_s,
)
from gemel.text import size
from merger.events import Progress, Stages, silent
from models.bundle import Bundle, open_bundle
from models.data import PreparedFrames, Split, load_split
from models.errors import InputError
from models.evaluation import BOOTSTRAP_ROUNDS, Evidence, compare, load_labels, predict
from models.io import check_apart, finite, locked, open_atomic
from models.metrics import average_precision, error_types, overlaps_of
from models.predictions import Boxes
from models.sharing.layers import state_bytes
from models.tasks import task_of
from models.weights import load_weights
from models.workload import Query, Workload, inputs_of, load_workload
from models.zoo import build_query

MIN_MEMORY = "min"


@dataclass(frozen=True)
class EvalOptions:
    """What an evaluation is asked for.

    `device` names a profile of the virtual clock, or is `measured`: the costs in BUNDLE.profile.json. `memory`, a
    setting or a size, is what the box is to have: what the report says first holds for it. With `wall_s` the merged
    queries run on this machine, too, for so many seconds. `fiftyone` is a folder to be filled with the test frames and
    both models' answers, for other tools.
    """

    device: str = DEFAULT_DEVICE
    seeds: int = 3
    memory: str = MIN_MEMORY
    wall_s: float = 0.0
    fiftyone: Path | None = None

    def words(self) -> list[str]:
        """The options of `gemel eval` that say the same."""
        said = ["--device", self.device, "--memory", self.memory, "--seeds", str(self.seeds)]
        said += ["--wall", f"{self.wall_s:g}"] if self.wall_s else []
        return said + (["--fiftyone", str(self.fiftyone)] if self.fiftyone is not None else [])


def open_matching_bundle(bundle: str | Path, load: Workload) -> Bundle:
    """The bundle, opened; InputError unless both hold the same queries with the same models."""
    opened = open_bundle(bundle, factories=[query.model for query in load.queries], folder=load.path.parent)
    shipped = {query.id: query for query in opened.queries}
    if set(shipped) != {query.id for query in load.queries}:
        odd = sorted(set(shipped) ^ {query.id for query in load.queries})
        raise InputError(bundle, f"does not hold the queries of {load.path.name} ({odd[0]})", "give its own workload")
    for query in load.queries:
        for key in ("task", "model", "input_size", "classes"):
            if getattr(shipped[query.id], key) != getattr(query, key):
                raise InputError(bundle, f"query {query.id} differs from {load.path.name}", "merge it again", key)
    return opened


@dataclass(frozen=True)
class QueryEvaluation:
    """One query looked at offline; `extra` is what its task can say beside the evidence, in plain values.

    `examples` are the frames that merging cost most, with a photo each (`gemel.report.examples`).
    """

    tested: QueryTest
    evidence: Evidence
    extra: dict[str, Any]
    split: Split
    original_bytes: int
    examples: list[dict[str, Any]]
    photos: list[str]

    def row(self) -> dict[str, Any]:
        """Its row of `offline`, in plain values."""
        query = self.tested.query
        return {
            "query": query.id,
            "camera": query.camera,
            "task": query.task,
            "model": query.model,
            **self.evidence.to_json(),
            **self.extra,
            "target": query.accuracy_target,
            "sla_ms": query.sla_ms,
            "threshold": self.tested.threshold,
            "label_interval_s": frame_interval_s(self.tested.footage),
        }


def evaluate_query(query: Query, bundle: Bundle) -> QueryEvaluation:
    """Judge a query of the bundle against its original.

    Raises InputError where weights or test frames are missing, or the test split is nothing to judge by.
    """
    task, device = task_of(query.task), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    original = build_query(query)
    load_weights(query, original)
    original_bytes = state_bytes(original)
    split = load_split(query, "test")
    prepared = PreparedFrames(query, split).load()
    if split.labels is not None and query.task == "detection":
        check_boxes(query, split.labels, prepared.sizes(range(len(split))))  # type: ignore[arg-type]
    before = predict(original.to(device), query, prepared)
    after = predict(bundle.build(query.id, device), query, prepared)
    threshold = bundle.query(query.id).threshold
    if threshold is None:
        val = load_split(query, "val")
        chosen = val.labels is not None
        threshold = task.choose_threshold(predict(original, query, val), val.labels) if chosen else query.min_score  # type: ignore[arg-type]
    return score_query(query, split, {ORIGINALS: before, MERGED: after}, threshold, original_bytes)


def score_query(
    query: Query, split: Split, sides: Mapping[str, Sequence[Any]], threshold: float, original_bytes: int
) -> QueryEvaluation:
    """Judge the answers of both models (by arm) to the frames of a split."""
    before, after = sides[ORIGINALS], sides[MERGED]
    truths = load_labels(query, split, before, threshold)
    told = _boxes_told if query.task == "detection" else _classes_told
    return QueryEvaluation(
        QueryTest(query, Footage(split.units, split.times_s, query.fps), truths, threshold, sides),
        compare(query, split, before, after, threshold),
        told(query, sides, truths, threshold),
        split,
        original_bytes,
        *worst_examples(query, split, truths, before, after, threshold),
    )  # fmt: skip


def check_boxes(query: Query, truths: Sequence[Boxes], sizes: Sequence[tuple[int, int]]) -> None:
    """Refuse labels by which nothing can be judged: none at all, a box without an area, one outside its frame.

    `sizes` are (width, height) of the frames. Raises InputError, which names the box.
    """
    where = f"{query.data}/test" if query.data else query.id
    if not any(truth.boxes for truth in truths):
        fault = f"no frame of the test split shows {' or '.join(query.classes)} (query {query.id}): nothing to score"
        raise InputError(where, fault, "add labelled frames that do", "data")
    for frame, (truth, (width, height)) in enumerate(zip(truths, sizes, strict=True)):
        for label, (x0, y0, x1, y1) in zip(truth.classes, truth.boxes, strict=True):
            box = f"the box {[x0, y0, x1 - x0, y1 - y0]} of '{label}' in frame {frame} of the test split"
            if x1 <= x0 or y1 <= y0:
                raise InputError(where, f"{box} (query {query.id}) has no area", "correct it or take it out", "bbox")
            if x0 >= width or y0 >= height or x1 <= 0 or y1 <= 0:
                fault = f"{box} (query {query.id}) lies outside its {width} x {height} pixels"
                raise InputError(where, fault, "correct it or take it out", "bbox")


def _boxes_told(
    query: Query, sides: Mapping[str, Sequence[Any]], truths: Sequence[Any], threshold: float
) -> dict[str, Any]:
    """COCO's mean average precision, and the kinds of errors at the threshold, of both models."""
    told: dict[str, Any] = {"errors": {}}
    for name, answers in (("original", sides[ORIGINALS]), ("merged", sides[MERGED])):
        found = overlaps_of(answers, truths)
        told |= {f"{key}_{name}": value for key, value in average_precision(found, query.classes).items()}
        told["errors"][name] = {kind: asdict(one) for kind, one in error_types(found, threshold).items()}
    return told


def _classes_told(
    query: Query, sides: Mapping[str, Sequence[Any]], truths: Sequence[Any], threshold: float
) -> dict[str, Any]:
    """The recall of each class that occurs, by the original and merged."""
    tallies = [
        task_of(query.task).tallies(side, truths, query.classes, threshold).sum(axis=0) for side in sides.values()
    ]
    recalls = [np.divide(right, frames, out=np.zeros(len(right)), where=frames > 0) for right, frames in tallies]
    frames = tallies[0][1].tolist()
    return {
        "classes": [
            {"class": name, "frames": frames[place], "original": float(recalls[0][place]),
             "merged": float(recalls[1][place])}
            for place, name in enumerate(query.classes) if frames[place]
        ]
    }  # fmt: skip


PACKAGES = ("gemel", "torch", "torchvision", "numpy", "opencv-python-headless")


def package_versions() -> dict[str, str]:
    """Python, the system, and the packages that figures depend on; what is not installed as a package is left out."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


MIN_UNITS = 5
ENOUGH = 0.99


def caveats(
    offline: Sequence[Mapping[str, Any]],
    swapping: Sequence[Mapping[str, Any]],
    device: Mapping[str, Any],
    unlabelled: Sequence[str],
    seeds: int,
) -> list[str]:
    """One sentence or two each: no evidence, few clips, no pressure, modelled device, what streams leave out."""
    lines = []
    weak = [row for row in offline if not row["worth"]]
    for row in weak:
        bar = "an F1 below 0.5" if row["metric"] == "f1" else "less than 10 points above chance"
        lines.append(
            f"{row['query']}: no evidence. Its original reaches {row['original']:.2f} on test, {bar}, so keeping "
            "that accuracy proves nothing."
        )
    few = [f"{row['query']} ({row['units']})" for row in offline if row["units"] < MIN_UNITS]
    if few:
        lines.append(
            f"The test footage of {', '.join(few)} has fewer than {MIN_UNITS} clips or tracks; an interval over so few "
            "says little."
        )
    unsure = [row["query"] for row in offline if row["met"] and not row["certain"] and row["worth"]]
    if unsure:
        lines.append(
            f"{', '.join(unsure)}: the target is met, but the lower end of the 95 % interval lies below it; another "
            "day's footage could miss it."
        )
    if unlabelled:
        lines.append(
            f"{', '.join(unlabelled)}: no human labels; the reference is the original's own output, so the figures "
            "are agreement with the original, not accuracy."
        )
    if all(row["processed"] >= ENOUGH * row["received"] for row in swapping):
        lines.append(
            f"No pressure: {device['title']} keeps up with these streams even without merging, whatever the memory, so "
            "streaming accuracy says nothing about merging here. A slower device, more queries or higher rates would."
        )
    modelled = (
        f"{device['title']} is modelled from published bandwidths and rates ({'; '.join(device['sources'])}), "
        "it was not measured"
        if device["modelled"]
        else f"{device['title']} was measured"
    )
    lines.append(
        f"Times come from a {device['clock']}: the box's own schedule, loads and runs as long as the profile says. "
        f"{modelled}. Differences between arms carry further than the figures themselves."
    )
    lines.append(
        "On the stream a query's labelled test clips or tracks are played back to back, so each begins without an "
        "answer, and that first frame is always wrong, for both arms. Only labelled frames are played, so an answer is "
        f"never fresher than their spacing ({_spacing(offline)}). "
        f"Mean of {seeds} seed{'s' if seeds != 1 else ''} for order and phase; bands run from the least to "
        "the largest."
    )
    return lines


def _spacing(offline: Sequence[Mapping[str, Any]]) -> str:
    spacings = sorted({round(row["label_interval_s"], 2) for row in offline})
    return f"{spacings[0]:g} s" if len(spacings) == 1 else f"{spacings[0]:g} to {spacings[-1]:g} s"


MEMORY_SETTINGS = (MIN_MEMORY, "50%", "75%")
JUDGING, STREAMING, PLAYING, HANDING, WRITING = (
    "judging each query on test", "playing the streams", "playing them on this machine", "handing over the frames",
    "writing the report",
)  # fmt: skip
REPORT_HTML = "report.html"
STANDARD = EvalOptions()


def evaluate(
    bundle: str | Path,
    workload: str | Path,
    out_dir: str | Path,
    asked: EvalOptions = STANDARD,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Judge a bundle against the originals of its workload; write `report.json` and `report.html` into `out_dir`.

    Returns the document that report.json holds: DESIGN's keys `offline`, `streaming`, `ledger` and what the page needs
    beside them. Raises InputError, with nothing written, when bundle and workload do not belong together, weights or
    test data are missing or nothing to judge by, or the largest query does not fit the memory.
    """
    out_dir = Path(out_dir)
    load = load_workload(workload)
    opened = open_matching_bundle(bundle, load)
    written = [("--out", out_dir / name) for name in (REPORT_JSON, REPORT_HTML)]
    check_apart(written, [("the bundle", opened.path), *inputs_of(load)])
    _writable(out_dir)
    check_export_folder(asked.fiftyone)
    clock = load_cost_model(asked.device, opened)
    budgets = _budgets(asked.memory, clock.costs[ORIGINALS])
    with locked(out_dir / REPORT_JSON):
        stages = Stages(progress)
        beside = [(PLAYING, asked.wall_s), (HANDING, asked.fiftyone)]
        stages.announce([JUDGING, STREAMING, *(name for name, wanted in beside if wanted), WRITING])
        stages.begin(JUDGING, len(load.queries))
        judged = []
        for query in load.queries:
            progress("evaluate", query=query.id)
            judged.append(evaluate_query(query, opened))
            progress("test", query=query.id, ratio=judged[-1].evidence.ratio, target=query.accuracy_target)
            stages.add()
        command = ["gemel", "eval", str(bundle), str(workload), "-o", str(out_dir), *asked.words()]
        document, page = build_report(opened, judged, clock, budgets, asked, shlex.join(command), progress)
        _write(out_dir, json.dumps(document, indent=1, allow_nan=False), page)
        return document


def build_report(
    bundle: Bundle, judged: Sequence[QueryEvaluation], clock: CostModel, budgets: Mapping[str, int], asked: EvalOptions, command: str,
    progress: Progress = silent,
) -> tuple[dict[str, Any], str]:  # fmt: skip
    """The document and its page, of queries that are scored: the streams are played, frames handed over if asked for.

    `budgets` are the memory settings in bytes, `command` is what was asked in words.
    """
    stages = Stages(progress)
    stages.begin(STREAMING)
    tested, seeds = [one.tested for one in judged], range(asked.seeds)
    streamed = evaluate_streams(tested, clock.costs, budgets, seeds, progress)
    wall = None
    if asked.wall_s:
        stages.begin(PLAYING)
        wall = _on_the_wall(bundle, judged, budgets[asked.memory], asked.wall_s)
    if asked.fiftyone is not None:
        stages.begin(HANDING)
        export_coco(judged, asked.fiftyone)
    stages.begin(WRITING)
    document = finite({
        **_document(bundle, judged, streamed, clock, asked.seeds),
        "asked": {"memory": asked.memory, "memory_bytes": budgets[asked.memory]},
        "wall": wall,
        "commands": [command],
    })  # fmt: skip
    return document, render_report(document, [photo for one in judged for photo in one.photos])


def _on_the_wall(bundle: Bundle, judged: Sequence[QueryEvaluation], budget: int, seconds: float) -> dict[str, Any]:
    tested = [one.tested for one in judged]
    streams = build_streams({one.query.id: one.footage for one in tested}, seed=0)
    return evaluate_realtime(
        bundle, tested, {one.tested.query.id: one.split.frames for one in judged}, streams, budget, seconds
    )


def _write(out_dir: Path, document: str, page: str) -> None:
    """Both files, or neither where there is no room; a name that is no UTF-8 stands there by its escape."""
    with (
        open_atomic(out_dir / REPORT_JSON, overwrite=True) as first,
        open_atomic(out_dir / REPORT_HTML, overwrite=True) as second,
    ):
        for file, text in ((first, document), (second, page)):
            file.write(text.encode("utf-8", "backslashreplace"))
            file.flush()


def _budgets(memory: str, apart: Costs) -> dict[str, int]:
    """The memory settings that are compared, and the one asked for among them, in bytes from small to large."""
    settings = memory_settings(apart)
    budgets = {name: settings[name] for name in MEMORY_SETTINGS} | {memory: memory_bytes(memory, apart, "--memory")}
    if budgets[memory] < settings[MIN_MEMORY]:
        least = f"the largest query alone does not fit; give at least {size(settings[MIN_MEMORY])}"
        raise InputError("--memory", f"{memory} is too little", least)
    return dict(sorted(budgets.items(), key=lambda item: item[1]))


def _writable(out_dir: Path) -> None:
    """Refuse an output folder that cannot be made, before the long part begins."""
    if os.path.lexists(out_dir) and not out_dir.is_dir():  # links in a circle too, which lead to no path
        raise InputError(out_dir, "exists and is no folder", "give a folder", "--out")
    nearest = next(one for one in (out_dir, *out_dir.resolve().parents) if os.path.lexists(one))
    if not nearest.is_dir():
        raise InputError(nearest, "exists and is no folder", "give a folder", "--out")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise InputError(out_dir, f"{nearest} cannot be written", "choose another folder", "--out")


def _document(
    bundle: Bundle, judged: Sequence[QueryEvaluation], streamed: StreamResults, clock: CostModel, seeds: int
) -> dict[str, Any]:
    """The contents of report.json that do not depend on how it was asked for, in plain values."""
    offline, device = [one.row() for one in judged], dict(clock.told)
    unlabelled = [one.tested.query.id for one in judged if one.split.labels is None]
    return {
        "format": REPORT_FORMAT,
        "workload": bundle.manifest.workload,
        "method": bundle.manifest.method,
        "bundle": {"file": bundle.path.name, "digest": bundle.digest},
        "created_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": device,
        "seeds": list(range(seeds)),
        "settings": {"policy": DEFAULT_POLICY, "bootstrap_rounds": BOOTSTRAP_ROUNDS, "bootstrap_seed": 0},
        "versions": package_versions(),
        "costs": clock.rows(),
        "bytes": {
            **byte_counts(bundle),
            "resident_before": sum(one.original_bytes for one in judged),
            "resident_after": measure_resident_bytes(bundle),
        },
        "shared": shared_tensors(bundle),
        "offline": offline,
        "streaming": streamed.streaming,
        "side_by_side": _side_by_side(offline, streamed.streaming),
        "ledger": streamed.ledger,
        "swapping": streamed.swapping,
        "timeline": streamed.timeline,
        "examples": [example for one in judged for example in one.examples],
        "caveats": caveats(offline, streamed.swapping, device, unlabelled, seeds),
    }


def _side_by_side(offline: Sequence[Mapping[str, Any]], streaming: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each query in each memory: merged offline, merged streaming, originals streaming."""
    merged = {row["query"]: row["merged"] for row in offline}
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in streaming:
        one = found.setdefault(
            (row["query"], row["memory"]),
            {key: row[key] for key in ("query", "metric", "memory", "memory_bytes")}
            | {"merged_offline": merged[row["query"]]},
        )
        one[f"{row['arm']}_streaming"] = row["accuracy"]
    return list(found.values())
