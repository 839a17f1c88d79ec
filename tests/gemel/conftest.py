"""Workloads, weights and bundles that tests of several commands use."""

import copy

import cv2
import numpy as np
import pytest
import torch

from gemel.models.bundle import BundleQuery, Made, write_bundle
from gemel.models.files.weights import save_weights
from gemel.models.measures.metrics import KINDS
from gemel.models.sharing.groups import ceiling_bytes, groups
from gemel.models.sharing.layers import layers_of_all
from gemel.models.sharing.plan import SharingPlan, tie
from gemel.models.workload import load_workload
from gemel.models.zoo import build, input_size_of

QUERIES = {"bridge-cars": 0.80, "gate-people": 0.70, "square-busy": 0.93}
MEMORY = {"min": 40_000_000, "50%": 60_000_000, "all": 70_000_000}
TASKS = {"bridge-cars": "detection", "gate-people": "detection", "square-busy": "classification"}
AGES = (50, 95, 99)
ERRORS = {
    side: {kind: {"count": count, "cost": count / 100} for kind, count in zip(KINDS, counts, strict=True)}
    for side, counts in {"original": (3, 5, 1, 0, 8, 13), "merged": (4, 2, 1, 1, 9, 12)}.items()
}
BOXED = {"errors": ERRORS, "map_original": 0.41, "map50_original": 0.71, "map_merged": 0.40, "map50_merged": 0.70}
RECALLS = [
    {"class": "empty", "frames": 70, "original": 0.95, "merged": 0.97},
    {"class": "busy", "frames": 50, "original": 0.91, "merged": 0.85},
]
EXTRAS = {"bridge-cars": BOXED, "gate-people": BOXED, "square-busy": {"classes": RECALLS}}
BOX, OTHER = [40.0, 30.0, 200.0, 120.0], [220.0, 60.0, 300.0, 150.0]
EXAMPLES = [
    {"query": "bridge-cars", "task": "detection", "unit": "clip-3", "time_s": 4.4, "lost": 0.5, "width": 320,
     "height": 180, "truth": [{"class": "car", "box": BOX, "found": ["original"]}],
     "original": [{"class": "car", "score": 0.9, "box": BOX, "right": True}],
     "merged": [{"class": "bus", "score": 0.6, "box": OTHER, "right": False}]},
    {"query": "square-busy", "task": "classification", "unit": "clip-1", "time_s": 0.4, "lost": 1.0, "width": 320,
     "height": 180, "truth": "busy", "original": {"class": "busy", "score": 0.8, "right": True},
     "merged": {"class": "empty", "score": 0.7, "right": False}},
]  # fmt: skip


def _document():
    """A small report document, complete in every key that `gemel eval` writes."""
    offline = [
        {
            "query": query, "camera": query.split("-")[0], "task": TASKS[query], "model": "resnet18",
            "metric": "balanced_accuracy" if query == "square-busy" else "f1", "split": "test", "samples": 120,
            "units": 6, "original": score, "merged": score * 0.98, "ratio": 0.98, "chance_corrected": 0.97,
            "target": 0.95, "met": True, "worth": True, "agreement": 0.9, "state": "not proven",
            "sla_ms": 100.0, "threshold": 0.3, "label_interval_s": 0.4, **EXTRAS[query],
        }
        for query, score in QUERIES.items()
    ]  # fmt: skip
    streaming, ledger, transfers = [], [], []
    for setting, (memory, nbytes) in enumerate(MEMORY.items()):
        for arm, lost, processed in (("merged", 0.10, 270), ("originals", 0.35 - 0.1 * setting, 120)):
            key = {"arm": arm, "memory": memory, "memory_bytes": nbytes}
            transfers.append({**key, "received": 300, "processed": processed, "bytes_moved": 10**9, "swaps": 25})
            for query, score in QUERIES.items():
                by_seed = [score - lost - 0.01, score - lost, score - lost + 0.02]
                streaming.append({
                    **key, "query": query, "metric": "f1", "accuracy": sum(by_seed) / 3, "by_seed": by_seed,
                    "spread": [min(by_seed), max(by_seed)], "answered": 0.9,
                    **{f"age_p{share}_ms": (8 if setting else 80) * share / 9.5 for share in AGES},
                })  # fmt: skip
                ledger.append({
                    **key, "query": query, "received": 100, "processed": 90, "late": 1, "failed": 0, "pending": 2,
                    "dropped": {"deadline": 5, "replaced": 3},
                })  # fmt: skip
    costs = [
        {"arm": arm, "query": query, "weights_bytes": 40_000_000, "load_ms": 60.0, "run_ms": 12.5,
         "workspace_bytes": 9_000_000}
        for arm in ("merged", "originals") for query in QUERIES
    ]  # fmt: skip
    counts = [
        {"query": query, "model": "resnet18", "before": 40_000_000, "shared_part": 12_000_000,
         "private": 2_000_000}
        for query in QUERIES
    ]  # fmt: skip
    after = sum(row["shared_part"] + row["private"] for row in counts)
    return {
        "format": 6, "workload": "junction", "method": "gemel", "created_at": "2026-01-02T03:04:05Z",
        "seeds": [0, 1, 2], "base_bytes": 140_000_000,
        "bundle": {"file": "junction.safetensors", "digest": "ab" * 32},
        "device": {"name": "orin-nano-8gb", "title": "Jetson Orin Nano 8 GB", "modelled": True,
                   "clock": "virtual clock", "sources": ["a data sheet"], "memory_bytes": 2**33},
        "bytes": {"before": 120_000_000, "after": after, "ceiling": 80_000_000, "saved_fraction": 1 - after / 120e6,
                  "ceiling_fraction": 80 / 120, "resident_before": 120_000_000, "resident_after": after,
                  "stored": {"fp32": after}, "queries": counts},
        "shared": [
            {"tensor": "0" * 64, "bytes": 9_000_000, "shape": [512, 512, 3, 3],
             "members": [[query, "layer4.0.conv1.weight"] for query in QUERIES]},
            {"tensor": "1" * 64, "bytes": 4_000_000, "shape": [256, 512, 3, 3],
             "members": [[query, "layer3.0.conv1.weight"] for query in list(QUERIES)[:2]]},
        ],
        "offline": offline, "streaming": streaming, "ledger": ledger,
        "transfers": transfers, "examples": EXAMPLES, "costs": costs,
        "settings": {"policy": "adaptive"},
        "versions": {"gemel": "0.2.0", "python": "3.11.7", "torch": "2.15.0"},
        "headline": {"memory": "min", "memory_bytes": MEMORY["min"]},
        "commands": ["gemel eval junction.safetensors junction.yaml -o report"],
        "limits": ["The device is modelled."],
    }  # fmt: skip


@pytest.fixture
def document():
    return copy.deepcopy(_document())


WORKLOAD = """
name: tiny
accuracy_target: 0.9
cameras: {gate: {source: gate.mp4, fps: 5}}
queries:
"""
QUERY = """
  - {{id: {id}, camera: gate, task: classification, classes: [empty, busy], model: mobilenet_v3_small,
     input_size: 32, sla_ms: 10000, weights: weights/{id}.safetensors, data: data}}
"""


def _frames(folder, rng):
    for label, level in (("empty", 40), ("busy", 200)):
        (folder / label).mkdir(parents=True)
        for index in range(8):
            frame = rng.integers(0, 50, (24, 32, 3), dtype=np.uint8) + np.uint8(level)
            name = f"clip{index % 2}{label[0]}__{index * 200:06d}.png"
            cv2.imwrite(str(folder / label / name), frame)


def _clip(path, rng, frames=15):
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), 5.0, (32, 24))
    for _ in range(frames):
        writer.write(rng.integers(0, 255, (24, 32, 3), dtype=np.uint8))
    writer.release()


@pytest.fixture(scope="session")
def write_tiny():
    """A function that writes footage and workload of two small classifiers into a folder; no weights yet."""

    def write(root, seed=0, footage=None, on_progress=None):
        for split in ("train", "val", "test"):
            _frames(root / "data" / split, np.random.default_rng(seed + len(split)))
        _clip(root / "gate.mp4", np.random.default_rng(seed))
        path = root / "workload.yaml"
        path.write_text(WORKLOAD + QUERY.format(id="a") + QUERY.format(id="b"))
        return path

    return write


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, write_tiny):
    """A workload of two small classifiers with random weights, and a bundle in which they share half of them."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("tiny")
    workload = load_workload(write_tiny(root))
    (root / "weights").mkdir()
    models = {}
    for query in workload.queries:
        model = build(query.model, query.classes, query.model_args, input_size_of(query), query.task)
        save_weights(root / "weights" / f"{query.id}.safetensors", model.state_dict())
        models[query.id] = model
    layers = layers_of_all(workload.queries)
    tie(models, SharingPlan.of(groups(layers)[:4]))
    records = [BundleQuery.of(query) for query in workload.queries]
    write_bundle(root / "tiny.safetensors", models, records, Made("tiny", "gemel", ceiling_bytes(layers)))
    return root
