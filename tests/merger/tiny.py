"""Small networks and made-up frames on which real merges take seconds."""

from __future__ import annotations

import os
from pathlib import Path

import cv2
import numpy as np
import torch
import yaml
from torch import Tensor, nn

from gemel.models.workload import Workload

SIZE = 24
SEED = int(os.environ.get("GEMEL_TESTS_SEED", "0"))
"""Seed of the originals; other seeds give what other CPUs train."""
JUDGED_FRAMES = 40
"""Frames of val and of test: enough to tell an original from chance, and too few to prove a merge."""
CLASSES = (("east", "west"), ("left", "right"), ("high", "low"))
"""What queries call a square on the left and one on the right: each asks a question of its own."""


class TinyNet(nn.Module):
    """Three convolutions with norms and a head; `extra` puts one more convolution before the last."""

    def __init__(self, num_classes: int, width: int = 16, extra: bool = False) -> None:
        super().__init__()
        self.stem = _block(3, width, 2)
        self.body = _block(width, 2 * width, 2)
        self.extra = _block(2 * width, 2 * width, 1) if extra else nn.Identity()
        self.last = _block(2 * width, 4 * width, 2)
        self.head = nn.Linear(4 * width * (SIZE // 8) ** 2, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, S, S) -> (N, C)."""
        x = self.last(self.extra(self.body(self.stem(x))))
        return self.head(x.flatten(1))


def _block(channels: int, out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU())


def tiny_net(num_classes: int, **model_args) -> nn.Module:
    """The factory that workloads of the tests name."""
    return TinyNet(num_classes, **model_args)


def write_workload(folder: Path, queries: int = 2, frames: int = 60, seed: int = 0, **keys) -> Path:
    """A workload of classification queries (bright square left or right, each on its own background)."""
    random, judged = np.random.default_rng(seed), JUDGED_FRAMES if frames else 0
    documents = []
    for index in range(queries):
        query = f"q{index}"
        background, classes = random.integers(0, 120, 3), CLASSES[index % len(CLASSES)]
        for split, count in (("train", frames), ("val", judged), ("test", judged)):
            for label in classes:
                for frame in range(count // 2):
                    path = folder / "data" / query / split / label / f"clip{frame % 6}__{frame * 200:06d}{label}.png"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    cv2.imwrite(str(path), _frame(random, background, far=label == classes[1]))
        documents.append({
            "id": query, "camera": "c", "task": "classification", "classes": list(classes),
            "model": "tests.merger.tiny:tiny_net", "model_args": {"extra": index % 2 == 1}, "input_size": SIZE,
            "data": f"data/{query}", "weights": f"weights/{query}.safetensors", **keys,
        })  # fmt: skip
    path = folder / "workload.yaml"
    workload = {"name": "tiny", "cameras": {"c": {"source": "none.mp4", "fps": 5}}, "queries": documents}
    path.write_text(yaml.safe_dump(workload))
    return path


def _frame(random: np.random.Generator, background: np.ndarray, far: bool) -> np.ndarray:
    image = np.clip(background + random.normal(0, 12, (32, 32, 3)), 0, 255)
    y, x = random.integers(4, 20), random.integers(1, 7) + (16 if far else 0)
    image[y : y + 8, x : x + 8] = random.integers(160, 255, 3)
    return image.astype(np.uint8)


def write_random_weights(path: Path) -> None:
    """Weights for every query of a workload without training: for tests that need files, not answers."""
    from gemel.models.files.weights import save_weights
    from gemel.models.workload import load_workload
    from gemel.models.zoo import build, input_size_of

    for index, query in enumerate(load_workload(path).queries):
        torch.manual_seed(index)
        model = build(query.model, query.classes, query.model_args, input_size_of(query), query.task)
        assert isinstance(query.weights, Path)
        query.weights.parent.mkdir(parents=True, exist_ok=True)
        save_weights(query.weights, model.state_dict())


def weights_of(workload: Workload, query: str) -> Path:
    """Where a query's weights lie."""
    path = workload.query(query).weights
    assert isinstance(path, Path)
    return path


def data_of(workload: Workload, query: str) -> Path:
    """Where a query's frames lie."""
    path = workload.query(query).data
    assert isinstance(path, Path)
    return path
