"""A small valid file of every kind that a command reads, made once; hostile cases damage them.

The folder holds `workload.yaml` (queries `a` and `b`: cifar_resnet20; `d`: SSD on SqueezeNet), its `data/`, `weights/`
(a.safetensors, b.pt, d.safetensors) and the clip `gate.mp4`; the bundle `b.safetensors` with `.log.jsonl` and
`.profile.json`; `box.yaml`, which runs the bundle, and the `trace.jsonl` of such a run; `merge.yaml` (a and b),
`one.yaml` (a), `detector.yaml` (d); `graph.yaml` and `program.yaml` (`graph.onnx`, `program.pt2`);
`old.safetensors` (a alone, signed with `box-key`), which `b.update` turns into `b.safetensors`; `spool/` with one
sample of a box that runs `old.safetensors`; `report/`, the evaluation of `old.safetensors`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import cv2
import numpy as np
import torch
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from gemel.edge_runtime.frames.queues import Frame
from gemel.edge_runtime.frames.results import RunIdentity, result_record
from gemel.edge_runtime.frames.samples import sample_bytes
from gemel.edge_runtime.life.daemon import run
from gemel.evaluation import EvalOptions, evaluate
from gemel.merger import MergeOptions, Recipe, merge
from gemel.models.bundle import open_bundle
from gemel.models.bundle.delta import write_update
from gemel.models.bundle.signing import sign_bundle
from gemel.models.files.weights import save_weights
from gemel.models.measures.evaluation import EvidenceConfig
from gemel.models.predictions import ClassPrediction
from gemel.models.workload import load_workload
from gemel.models.zoo import build
from gemel.profiler import profile_bundle

CLASSES = ["empty", "busy"]
CLASSIFIER = {"task": "classification", "classes": CLASSES, "model": "cifar_resnet20", "input_size": 32}
DETECTOR = {"task": "detection", "classes": ["car"], "model": "ssd320_squeezenet1_0", "input_size": 64}
DETECTED = [{"id": "d", **DETECTOR, "weights": "weights/d.safetensors", "data": "data/d"}]
CLASSIFIED = [
    {"id": "a", **CLASSIFIER, "weights": "weights/a.safetensors", "data": "data/a"},
    {"id": "b", **CLASSIFIER, "weights": "weights/b.pt", "data": "data/b"},
]
BUNDLE = "b.safetensors"
OLD, UPDATE = "old.safetensors", "b.update"
SAMPLE, REPORT = "spool/samples/1.png", "report"
OPTIONS = MergeOptions(
    Recipe(epochs=1, frames_per_epoch=4, batch=2, rate=1e-3),
    precision="fp32",
    evidence=EvidenceConfig(1, 1, 1, False, False),
    accept_unproven=True,
    weights="fp32",
)
FRAMES = 4


def write_house(folder: Path) -> None:
    """All of it, in an empty folder."""
    _write_data(folder)
    _write_clip(folder / "gate.mp4")
    _write_workload(folder / "workload.yaml", [*CLASSIFIED, *DETECTED])
    _write_workload(folder / "merge.yaml", CLASSIFIED)
    _write_workload(folder / "one.yaml", CLASSIFIED[:1])
    _write_workload(folder / "detector.yaml", DETECTED)
    _write_weights(folder)
    _write_graphs(folder)
    _write_box(folder)
    merge(load_workload(folder / "workload.yaml"), folder / BUNDLE, options=OPTIONS)
    _write_update(folder)
    _write_spool(folder)
    evaluate(folder / OLD, folder / "one.yaml", folder / REPORT, EvalOptions("jetson-nano", seeds=1))
    profile_bundle(folder / BUNDLE, "cpu", rounds=1, engine="torch")
    run(folder / "box.yaml")
    (folder / "results.jsonl").unlink()


def copy_house(house: Path, folder: Path) -> None:
    """A copy of its own for a case to damage."""
    shutil.copytree(
        house,
        folder,
        dirs_exist_ok=True,
    )


def _write_update(folder: Path) -> None:
    """From a bundle that holds `a` alone, and the keys that a bundle is signed with."""
    merge(load_workload(folder / "one.yaml"), folder / OLD, "none", options=OPTIONS)
    (folder / f"{OLD}.log.jsonl").unlink()
    key = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32))
    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    text = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain)
    (folder / "box-key").write_bytes(text)
    public = key.public_key().public_bytes(encoding, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / "box-key.pub").write_bytes(public)
    sign_bundle(folder / OLD, folder / "box-key")
    write_update(folder / OLD, folder / BUNDLE, folder / UPDATE)


def _write_spool(folder: Path) -> None:
    bundle = open_bundle(folder / OLD)
    answer = ClassPrediction("busy", 0.75, (0.25, 0.75))
    identity = RunIdentity(bundle.digest, "0011")
    image = cv2.resize(np.random.default_rng(2).integers(0, 256, (4, 6, 3), np.uint8), (48, 32))
    record = result_record(bundle.query("a"), Frame(1, 0.0, 1.7e9, image), answer, 0.01, identity)
    (folder / SAMPLE).parent.mkdir(parents=True)
    (folder / SAMPLE).write_bytes(sample_bytes(record, image, bundle.query("a")))
    (folder / "spool" / "ledger.json").write_text(json.dumps({"bundle": str(bundle.path), "digest": bundle.digest}))


def _write_box(folder: Path) -> None:
    (folder / "box.yaml").write_text(yaml.safe_dump({
        "bundle": BUNDLE, "budget": "64MiB", "device": "cpu", "engine": "torch", "trace": "trace.jsonl",
        "cameras": {"gate": {"source": "gate.mp4", "fps": 5}}, "sinks": [{"kind": "jsonl", "path": "results.jsonl"}],
    }, sort_keys=False))  # fmt: skip


def _write_graphs(folder: Path) -> None:
    """A classifier as an ONNX file and as a .pt2 file, and a workload of each."""
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(), torch.nn.Linear(4, len(CLASSES)),
    ).eval()  # fmt: skip
    frames = torch.rand(1, 3, 32, 32)
    torch.onnx.export(network, (frames,), folder / "graph.onnx", dynamo=False, opset_version=17)
    torch.export.save(torch.export.export(network, (frames,)), folder / "program.pt2")
    plain = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
    for name, model in (("graph", "graph.onnx"), ("program", "program.pt2")):
        query = {"id": "g", "task": "classification", "classes": CLASSES, "model": model, "preprocess": plain}
        _write_workload(folder / f"{name}.yaml", [{**query, "data": "data/a"}])


def _write_workload(path: Path, queries: list[dict[str, object]]) -> None:
    cameras = {"gate": {"source": "gate.mp4", "fps": 5}}
    queries = [{**query, "camera": "gate", "accuracy_target": 0.1, "sla_ms": 10_000} for query in queries]
    path.write_text(yaml.safe_dump({"name": "house", "cameras": cameras, "queries": queries}, sort_keys=False))


def _write_data(folder: Path) -> None:
    random = np.random.default_rng(0)
    for split in ("train", "val", "test"):
        for query in "ab":
            for label in CLASSES:
                for index in range(FRAMES):
                    _write_image(folder / "data" / query / split / label / f"u{index}__{index}{label}.png", random)
        root = folder / "data" / "d" / split
        for index in range(FRAMES):
            _write_image(root / "images" / f"u{index}__{index}.jpg", random)
        (root / "annotations.json").write_text(json.dumps({
            "images": [{"id": i, "file_name": f"u{i}__{i}.jpg", "width": 48, "height": 32} for i in range(FRAMES)],
            "annotations": [
                {"id": i, "image_id": i, "category_id": 1, "bbox": [4, 4, 20, 16], "area": 320, "iscrowd": 0}
                for i in range(FRAMES)
            ],
            "categories": [{"id": 1, "name": "car"}],
        }))  # fmt: skip


def _write_image(path: Path, random: np.random.Generator) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), cv2.resize(random.integers(0, 256, (4, 6, 3), np.uint8), (48, 32)))


def _write_clip(path: Path) -> None:
    random, writer = (
        np.random.default_rng(1),
        cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), 5.0, (48, 32)),
    )
    for _ in range(5):
        writer.write(cv2.resize(random.integers(0, 256, (4, 6, 3), np.uint8), (48, 32)))
    writer.release()


def _write_weights(folder: Path) -> None:
    (folder / "weights").mkdir()
    for seed, query in enumerate((*CLASSIFIED, *DETECTED)):
        torch.manual_seed(seed)
        state = build(query["model"], query["classes"], {}, query["input_size"], query["task"]).state_dict()
        path = folder / str(query["weights"])
        torch.save(state, path) if path.suffix == ".pt" else save_weights(path, state)
