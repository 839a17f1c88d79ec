"""The tasks besides classification and detection, from a workload to the results of a box."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from gemel.drift import check_drift
from gemel.edge_runtime.life.daemon import run
from gemel.evaluation import EvalOptions, evaluate
from gemel.merger import merge, train_originals
from gemel.models.bundle import verify_bundle
from gemel.models.errors import InputError
from gemel.models.files.weights import save_weights
from gemel.models.labels.rle import decode_rle
from gemel.models.predictions import unpack_float16
from gemel.models.workload import load_workload
from gemel.report.page import render_report
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


COLOURS = {"red": (40, 40, 230), "green": (50, 220, 60), "blue": (230, 80, 50), "white": (240, 240, 240)}


def write_identities(folder: Path, query: str) -> None:
    """Squares of one colour are of one identity."""
    for split, count in drawn.COUNTS.items():
        random = np.random.default_rng(drawn.seed_of(query, split))
        for index in range(count):
            name = list(COLOURS)[index // 4 % 4]
            frame = drawn.draw_frame(random, COLOURS[name])[0]
            path = folder / "data" / query / split / name / f"{drawn.name_frame(split, index)}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(path), frame)


def check_vectors(records: list[dict]) -> None:
    for record in records:
        vector = unpack_float16(record["embedding"], (-1,))
        assert vector.shape == (16,) and np.linalg.norm(vector) == pytest.approx(1, abs=1e-2)


def check_masks(records: list[dict]) -> None:
    for record in records:
        (segment,) = record["segments"]
        mask = decode_rle(segment["mask"]["counts"], tuple(segment["mask"]["size"]))
        assert mask.shape == drawn.FRAME[::-1] and segment["class"] == "square"
        assert 300 < segment["area"] == mask.sum() < 900


def write_poses(folder: Path, query: str) -> None:
    """Squares with two points, their first and last corner."""
    for split, count in drawn.COUNTS.items():
        random = np.random.default_rng(drawn.seed_of(query, split))
        path, (width, height) = folder / "data" / query / split, drawn.FRAME
        (path / "images").mkdir(parents=True)
        document: dict = {"images": [], "categories": [{"id": 1, "name": "square"}], "annotations": []}
        for index in range(count):
            frame, _, (x, y) = drawn.draw_frame(random)
            name = f"{drawn.name_frame(split, index)}.png"
            cv2.imwrite(str(path / "images" / name), frame)
            document["images"].append({"id": index, "file_name": name, "width": width, "height": height})
            document["annotations"].append({
                "id": index, "image_id": index, "category_id": 1, "bbox": [x, y, 24, 24], "area": 576,
                "keypoints": [x, y, 2, x + 24, y + 24, 2], "num_keypoints": 2,
            })  # fmt: skip
        (path / "annotations.json").write_text(json.dumps(document))


def check_poses(records: list[dict]) -> None:
    found = [one for record in records for one in record["detections"]]
    assert len(found) >= len(records) / 2
    assert all(one["class"] == "square" and 0 < score <= 1 for one in found for _, _, score in one["points"])
    sides = np.array([np.subtract(last[:2], first[:2]) for first, last in (one["points"] for one in found)])
    assert np.abs(np.median(sides, axis=0) - 24).max() < 6


def write_label_sets(folder: Path, query: str) -> None:
    """A table of frames with a red square, a green one, both or none."""
    lines = ["path,red,green,split"]
    for split, count in drawn.COUNTS.items():
        random = np.random.default_rng(drawn.seed_of(query, split))
        for index in range(2 * count):
            shown = {"red": index % 2, "green": index // 2 % 2}
            frame = random.normal(60, 12, (*drawn.FRAME[::-1], 3))
            for name, is_shown in shown.items():
                x, y = random.integers(0, 40, 2) // (1, 2)
                if is_shown:
                    frame[y : y + 20, x : x + 20] = COLOURS[name]
            path = folder / "data" / query / "frames" / f"{drawn.name_frame(split, index // 4)}{index % 4}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(path), np.clip(frame, 0, 255).astype(np.uint8))
            lines.append(f"frames/{path.name},{shown['red']},{shown['green']},{split}")
    (folder / "data" / query / "labels.csv").write_text("\n".join(lines))


def check_label_sets(records: list[dict]) -> None:
    names = [[one["class"] for one in record["labels"]] for record in records]
    assert all(set(own) <= {"red", "green"} for own in names)


TASKS = {
    "segmentation": (
        write_masks, check_masks, "miou", {"classes": ["background", "square"], "model": FACTORY.format("masks")},
    ),
    "classification": (
        write_label_sets, check_label_sets, "macro_f1",
        {"classes": ["red", "green"], "model": FACTORY.format("labels"), "multi_label": True},
    ),
    "keypoints": (write_poses, check_poses, "oks_f1", {"classes": ["square"], "model": FACTORY.format("poses")}),
    "embedding": (write_identities, check_vectors, "recall_at_1", {"model": FACTORY.format("vectors")}),
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


def test_outputs_of_any_kind_are_compared_with_the_originals(tmp_path):
    model = FACTORY.format("maps")
    queries = [
        {
            "id": name,
            "task": "tensor",
            "agreement": "relative-error",
            "data": "frames",
            "model": model,
            "accuracy_target": 0.99,
        }
        for name in ("left", "right")
    ]
    workload = load_workload(drawn.write_workload(tmp_path, queries))
    random = np.random.default_rng(0)
    (tmp_path / "frames").mkdir()
    for index in range(120):
        blue, green, red = random.integers(0, 255, 3).tolist()
        cv2.imwrite(str(tmp_path / "frames" / f"{index:03}.png"), drawn.draw_frame(random, (blue, green, red))[0])
    network = drawn.build_maps()
    for query in workload.queries:
        assert isinstance(query.weights, Path)
        query.weights.parent.mkdir(exist_ok=True)
        save_weights(query.weights, network.state_dict())
    bundle = tmp_path / "box.safetensors"
    merged = merge(workload, bundle, options=drawn.MERGE)
    assert merged.bytes_after <= 0.51 * merged.bytes_before
    assert {(one.metric, one.met, one.evidence) for one in merged.queries} == {
        ("relative_error_agreement", True, "original")
    }
    report = evaluate(bundle, workload.path, tmp_path / "report", EvalOptions("jetson-nano", seeds=1))
    page = (tmp_path / "report" / "report.html").read_text()
    assert "relative error agreement" in page and report.offline[0].merged == 1
    run(drawn.write_box(tmp_path, [model]))
    records = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [one["shape"] for one in records[0]["outputs"]] == [[1, 8, 8], [4, 5]]
    assert unpack_float16(records[0]["outputs"][0]["float16"], (1, 8, 8)).any()
    drift = check_drift(tmp_path / "spool", workload.path, bundle=bundle)
    assert drift.left_out["unusable"] == 0 and all(
        one.ratio is None or one.ratio > 0.99 for one in drift.report.queries
    )
    with pytest.raises(InputError, match="no labels"):
        train_originals(workload, ["left"])
