"""The tasks besides classification and detection, from a workload to the results of a box."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from edge_runtime.daemon import run
from gemel.drift import check_drift
from gemel.evaluation import EvalOptions, evaluate
from gemel.report.page import render_report
from merger import merge, train_originals
from models.bundle import verify_bundle
from models.rle import decode_rle
from models.workload import load_workload
from tests.gemel import task_workload as drawn

FACTORY = "tests.gemel.task_workload:build_{}"


def write_masks(folder: Path, query: str) -> None:
    for split, count in drawn.COUNTS.items():
        random = np.random.default_rng(drawn.seed_of(query, split))
        for index in range(count):
            frame, mask, _ = drawn.draw_frame(random)
            for part, picture in (("images", frame), ("masks", mask)):
                path = folder / "data" / query / split / part / f"{drawn.name_frame(split, index)}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                cv2.imwrite(str(path), picture)


def check_masks(records: list[dict]) -> None:
    for record in records:
        (segment,) = record["segments"]
        mask = decode_rle(segment["mask"]["counts"], tuple(segment["mask"]["size"]))
        assert mask.shape == drawn.FRAME[::-1] and segment["class"] == "square"
        assert 300 < segment["area"] == mask.sum() < 900


TASKS = {
    "segmentation": (
        write_masks, check_masks, "miou", {"classes": ["background", "square"], "model": FACTORY.format("masks")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("task", TASKS)
def test_task_goes_from_a_workload_to_results(task, tmp_path):
    write, check, metric, keys = TASKS[task]
    queries = [{"id": name, "task": task, "data": f"data/{name}", **keys} for name in ("left", "right")]
    for query in queries:
        write(tmp_path, query["id"])
    workload = load_workload(drawn.write_workload(tmp_path, queries))
    for trained in train_originals(workload, options=drawn.TRAIN):
        assert trained.metric == metric and trained.test > 0.8
    bundle = tmp_path / "box.safetensors"
    merged = merge(workload, bundle, options=drawn.MERGE)
    assert merged.bytes_after < merged.bytes_before and verify_bundle(bundle) == []
    assert all(one.met and one.metric == metric for one in merged.queries)
    report = evaluate(bundle, workload.path, tmp_path / "report", EvalOptions("jetson-nano", seeds=1))
    assert {row.metric for row in report.offline} == {row.metric for row in report.streaming} == {metric}
    assert all(row.evidence == "labels" and row.merged > 0.8 for row in report.offline)
    assert report.examples and render_report(report, [""] * len(report.examples))
    run(drawn.write_box(tmp_path, [keys["model"]]))
    records = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {record["query"] for record in records} == {"left", "right"}
    check(records)
    drift = check_drift(tmp_path / "spool", workload.path, bundle=bundle)
    assert drift.left_out["unusable"] == 0 and all(one.frames for one in drift.report.queries)
