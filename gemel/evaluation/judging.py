"""Both models of a query over its test split: how good they are, what errors they make, what they answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from gemel.evaluation.arms import MERGED, ORIGINALS, Tested
from gemel.evaluation.streaming import Footage, frame_interval_s
from gemel.report.frames import examples
from models.bundle import Bundle
from models.data import PreparedFrames, Split, load_split
from models.errors import InputError
from models.evaluation import Evidence, compare, load_labels, predict
from models.metrics import average_precision, error_types, overlaps_of
from models.predictions import Boxes
from models.sharing.layers import state_bytes
from models.tasks import task_of
from models.weights import load_weights
from models.workload import Query
from models.zoo import build_query


@dataclass(frozen=True)
class Judged:
    """One query looked at offline; `extra` is what its task can say beside the evidence, in plain values.

    `examples` are the frames that merging cost most, with a photo each (`gemel.report.frames`).
    """

    tested: Tested
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


def judge(query: Query, bundle: Bundle) -> Judged:
    """Judge a query of the bundle against its original.

    Raises InputError where weights or test frames are missing, or the test split is nothing to judge by.
    """
    task, device = task_of(query.task), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    original = build_query(query)
    load_weights(query, original)
    original_bytes = state_bytes(original)
    split = load_split(query, "test")
    prepared = PreparedFrames(query, split).load()
    if split.truths is not None and query.task == "detection":
        check_boxes(query, split.truths, prepared.sizes(range(len(split))))  # type: ignore[arg-type]
    before = predict(original.to(device), query, prepared)
    after = predict(bundle.build(query.id, device), query, prepared)
    threshold = bundle.query(query.id).threshold
    if threshold is None:
        val = load_split(query, "val")
        chosen = val.truths is not None
        threshold = task.choose_threshold(predict(original, query, val), val.truths) if chosen else query.min_score  # type: ignore[arg-type]
    return scored(query, split, {ORIGINALS: before, MERGED: after}, threshold, original_bytes)


def scored(
    query: Query, split: Split, sides: Mapping[str, Sequence[Any]], threshold: float, original_bytes: int
) -> Judged:
    """Judge the answers of both models (by arm) to the frames of a split."""
    before, after = sides[ORIGINALS], sides[MERGED]
    truths = load_labels(query, split, before, threshold)
    told = _boxes_told if query.task == "detection" else _classes_told
    return Judged(
        Tested(query, Footage(split.units, split.times_s, query.fps), truths, threshold, sides),
        compare(query, split, before, after, threshold),
        told(query, sides, truths, threshold),
        split,
        original_bytes,
        *examples(query, split, truths, before, after, threshold),
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
