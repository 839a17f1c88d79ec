"""Files that find masks and rotated boxes, from a workload to results, report and files again, by the commands."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import onnxruntime

import gemel
from gemel.cli import main
from gemel.report.document import DetectionExample
from gemel.report.drawing import draw_boxes
from tests.models.decoders.exporters import SIDE, export_cells

FORMS = {"masks": ("segment", {"masks": 8}), "turned": ("obb", {"angles": True})}
SIZE, FRAMES = (320, 240), 40


def test_masks_and_rotated_boxes_go_from_files_to_results(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    clip = cv2.VideoWriter(str(tmp_path / "gate.mp4"), cv2.VideoWriter.fourcc(*"mp4v"), 10, SIZE)
    for _ in range(FRAMES):
        small = random.integers(0, 255, (6, 8, 3), np.uint8)
        clip.write(cv2.resize(small, SIZE, interpolation=cv2.INTER_CUBIC))
    clip.release()
    for name, (task, options) in FORMS.items():
        export_cells(tmp_path / f"{name}.onnx", task, 2, **options)
    queries = [
        {"id": f"{name}-{place}", "camera": "gate", "model": f"{name}.onnx", "data": "gate.mp4", "labels": "none",
         "min_score": 0.9 if name == "masks" else 0.6}
        for name in FORMS for place in (1,)
    ]  # fmt: skip
    cameras = {"gate": {"source": "gate.mp4", "fps": 10}}
    (tmp_path / "workload.yaml").write_text(json.dumps({"name": "forms", "cameras": cameras, "queries": queries}))
    bundle, workload = tmp_path / "box.safetensors", str(tmp_path / "workload.yaml")
    assert main(["merge", workload, "-o", str(bundle), "--method", "none"]) in (0, 1)
    assert main(["eval", str(bundle), workload, "-o", str(tmp_path / "report")]) == 0
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert {row["metric"] for row in report["offline"]} == {"f1"}
    assert all(row["merged"] > 0.8 for row in report["offline"])
    assert any(box["polygons"] for one in report["examples"] for box in one["merged"])
    drawn = [draw_boxes(DetectionExample.model_validate(one), "merged", several=False) for one in report["examples"]]
    assert any('<path class="merged' in one for one in drawn)
    box = {
        "bundle": "box.safetensors", "budget": "256MiB", "cameras": cameras,
        "sinks": [{"kind": "jsonl", "path": "results.jsonl"}],
    }  # fmt: skip
    (tmp_path / "box.yaml").write_text(json.dumps(box))
    assert main(["run", str(tmp_path / "box.yaml")]) == 0
    records = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {record["query"] for record in records if record["detections"]} == {query["id"] for query in queries}
    for record in records:
        for one in record["detections"]:
            points = np.array([point for polygon in one["polygons"] for point in polygon]).reshape(-1, 2)
            edges = np.add(np.array(one["box"]).reshape(2, 2), [[-2], [2]])
            is_turned = record["query"].startswith("turned")
            assert [len(polygon) for polygon in one["polygons"]] == [4] or not is_turned
            assert is_turned or ((points >= edges[0]) & (points <= edges[1])).all()
    assert main(["bundle", "export", str(bundle), "-o", str(tmp_path / "onnx")]) == 0
    frame = random.random((1, 3, SIDE, SIDE), np.float32)
    for name in FORMS:
        files = [tmp_path / "onnx" / f"{name}-1.onnx", tmp_path / f"{name}.onnx"]
        for mine, theirs in zip(
            *(onnxruntime.InferenceSession(str(one)).run(None, {"images": frame}) for one in files)
        ):
            np.testing.assert_allclose(mine, theirs, atol=1e-3)
        names = [str(gemel.load_model(file).decoder) for file in files]
        assert names[0] == names[1]
