"""From two ONNX files to one bundle, onto the engines and back to ONNX files, by the commands."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

import gemel
from gemel.cli import main
from gemel.edge_runtime.engines.mapped import open_sessions
from gemel.edge_runtime.engines.torch_engine import TorchEngine
from gemel.models.bundle import open_bundle
from tests.models.graph.onnx_files import SIDE, write_classifier

CLASSES, QUERIES, SPLITS = ("car", "bus", "truck"), ("gate", "yard"), ("train", "val", "test")
FRAMES = 24
"""Of each of two answers in each split, as evidence needs them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two fine-tuned copies of one file, a folder of pictures, and the workloads of two files and of one twice."""
    root = tmp_path_factory.mktemp("road")
    rng = np.random.default_rng(0)
    pictures = [
        (rng.integers(0, 255, 3) + rng.integers(-60, 60, (SIDE, SIDE, 3))).clip(0, 255).astype(np.uint8)
        for _ in range(8 * len(SPLITS) * FRAMES)
    ]
    for seed, name in enumerate(QUERIES):
        write_classifier(root / f"{name}.onnx", seed, scales=0.02)
    model = gemel.load_model(root / "gate.onnx")
    with torch.no_grad():
        logits = model(torch.cat([model.preprocess(picture) for picture in pictures])).numpy()  # type: ignore[operator]
    for name in QUERIES:
        move_bias(root / f"{name}.onnx", -np.median(logits, axis=0))
    kept: Counter[str] = Counter()
    for picture, label in zip(pictures, (logits - np.median(logits, axis=0)).argmax(1)):
        name = CLASSES[label]
        if kept[name] < len(SPLITS) * FRAMES:
            path = root / "data" / SPLITS[kept[name] % len(SPLITS)] / name / f"{kept[name]}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(path), picture[..., ::-1])
            kept[name] += 1
    for workload, files in {"two": QUERIES, "same": ("gate", "gate")}.items():
        queries = [
            {"id": query, "camera": query, "model": f"{file}.onnx", "data": "data", "sla_ms": 500}
            for query, file in zip(QUERIES, files)
        ]
        cameras = {query: {"source": f"{query}.mp4", "fps": 5} for query in QUERIES}
        (root / f"{workload}.yaml").write_text(json.dumps({"name": workload, "cameras": cameras, "queries": queries}))
    return root


def move_bias(path: Path, change: np.ndarray) -> None:
    """Add to the biases of the classes, so that all are answers."""
    model = onnx.load(path)
    (bias,) = (one for one in model.graph.initializer if one.name == "fc.bias")
    moved = numpy_helper.to_array(bias) + change.astype(np.float32)
    bias.CopyFrom(numpy_helper.from_array(moved, bias.name))
    onnx.save(model, path)


def merge(folder: Path, workload: str, method: str, capsys: Any) -> dict[str, Any]:
    """The JSON of a merge, whose bundle is sound."""
    out = folder / f"{workload}-{method}.safetensors"
    assert main(["merge", str(folder / f"{workload}.yaml"), "-o", str(out), "--method", method, "--json"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert main(["bundle", "verify", str(out)]) == 0
    return found


@pytest.mark.parametrize("method", ["none", "ceiling"])
def test_files_become_a_bundle_and_files_again(folder, method, capsys):
    found = merge(folder, "two", method, capsys)
    bundle = open_bundle(found["bundle"])
    if method == "ceiling":
        weights = [query.tensors["network.body.weight"] for query in bundle.queries]
        scales = [query.tensors["network.body_affine.weight"] for query in bundle.queries]
        assert weights[0] == weights[1] and scales[0] != scales[1]
    out = folder / f"onnx-{method}"
    assert main(["bundle", "export", found["bundle"], "-o", str(out)]) == 0
    sessions = {query: one for group in open_sessions(bundle, QUERIES) for query, one in group.items()}
    rng = np.random.default_rng(1)
    frame = rng.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
    for query in QUERIES:
        model = bundle.build(query)
        batch = model.preprocess(frame)  # type: ignore[operator]
        session = onnxruntime.InferenceSession(str(out / f"{query}.onnx"))
        (scores,) = session.run(["scores"], {"frames": batch.contiguous().numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(scores), model(batch), atol=1e-4, rtol=1e-4)
        engine = TorchEngine(bundle, query)
        engine.bind(bundle.tensor)
        assert engine.run([frame]) == [model.predict(frame)]  # type: ignore[operator]
        with torch.no_grad():
            expected = model(batch).numpy()
        np.testing.assert_allclose(sessions[query].outputs([frame]), expected, atol=1e-4, rtol=1e-4)
    assert len({id(one.opened) for one in sessions.values()}) == 1


def test_one_file_on_two_cameras_takes_half_of_the_bytes_and_changes_no_answer(folder, capsys):
    found = merge(folder, "same", "top-down", capsys)
    assert found["bytes_after"] * 2 == found["bytes_before"]
    assert all(query["original"] == query["merged"] for query in found["queries"])
