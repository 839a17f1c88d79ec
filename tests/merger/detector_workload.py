"""A workload with detectors: frames with one bright rectangle each, and originals whose every number is its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
import yaml
from torch import nn

from gemel.models.batchnorm import batchnorms_of, recalibrate_batchnorm
from gemel.models.files.weights import save_weights
from gemel.models.workload import Query, Workload, load_workload
from gemel.models.zoo import build_query, preprocess_of

CLASSES = ["car", "bus"]
SIDE = 96
FRAMES = {"train": 16, "val": 6, "test": 6}


def detector(query: str, model: str, size: int, **keys: Any) -> dict[str, Any]:
    """A query for rectangles: a car is wider than high."""
    return _query(query, "detection", model, size, **keys)


def classifier(query: str, model: str, size: int, **keys: Any) -> dict[str, Any]:
    """A query for what the one rectangle is."""
    return _query(query, "classification", model, size, **keys)


def _query(query: str, task: str, model: str, size: int, **keys: Any) -> dict[str, Any]:
    return {
        "id": query, "camera": "c", "task": task, "classes": CLASSES, "model": model, "input_size": size,
        "data": f"data/{task}", "weights": f"weights/{query}.safetensors", **keys,
    }  # fmt: skip


def write(folder: Path, queries: list[dict[str, Any]]) -> Workload:
    """The workload with its frames, and random weights."""
    for task in {query["task"] for query in queries}:
        for split, count in FRAMES.items():
            _frames(folder / "data" / task / split, task, count)
    document = {"name": "seen", "cameras": {"c": {"source": "none.mp4", "fps": 5}}, "queries": queries}
    path = folder / "workload.yaml"
    path.write_text(yaml.safe_dump(document))
    workload = load_workload(path)
    (folder / "weights").mkdir()
    for seed, query in enumerate(workload.queries):
        assert isinstance(query.weights, Path)
        save_weights(query.weights, original(query, seed).state_dict())
    return workload


def original(query: Query, seed: int) -> nn.Module:
    """A model whose norms are no two alike and fit its frames, so that nothing is equal in two by chance."""
    torch.manual_seed(seed)
    model = build_query(query)
    with torch.no_grad():
        for norm in batchnorms_of(model):
            norm.weight.copy_(1 + 0.1 * torch.randn_like(norm.weight))
            norm.bias.copy_(0.1 * torch.randn_like(norm.bias))
    recalibrate_batchnorm(model, [torch.randn(4, 3, *preprocess_of(query).size)])
    return model


def _frames(folder: Path, task: str, count: int) -> None:
    random = np.random.default_rng(len(f"{task} {folder.name}"))
    images, annotations = [], []
    for index in range(count):
        label = index % 2
        wide, high = (44, 26) if label == 0 else (26, 44)
        x, y = random.integers(4, SIDE - 48, 2)
        frame = random.integers(0, 60, (SIDE, SIDE, 3), dtype=np.uint8)
        frame[y : y + high, x : x + wide] = random.integers(180, 255, 3)
        name = f"clip{index % 3}__{index * 200:06d}.png"
        place = folder / ("images" if task == "detection" else CLASSES[label]) / name
        place.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(place), frame)
        images.append({"id": index, "file_name": name, "width": SIDE, "height": SIDE})
        box = [int(x), int(y), wide, high]
        annotations.append({"id": index, "image_id": index, "category_id": label, "bbox": box})
    if task == "detection":
        categories = [{"id": index, "name": name} for index, name in enumerate(CLASSES)]
        document = {"images": images, "annotations": annotations, "categories": categories}
        (folder / "annotations.json").write_text(json.dumps(document))
