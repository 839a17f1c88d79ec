"""A box to be measured: a clip that moves, a trivial network, a bundle and its config."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
import yaml
from torch import nn

from gemel.models.bundle import BundleQuery, Made, write_bundle
from gemel.models.preprocess import Preprocess

TRIVIAL = "benchmarks.serving.boxes:trivial"
SLA_MS = 20_000.0
RESULTS = "results.jsonl"


def trivial(num_classes: int, input_size: int = 16) -> nn.Module:
    """A network of two convolutions and one linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, stride=2, bias=False), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 48, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, num_classes),
    )  # fmt: skip


def write_clip(path: Path, count: int, fps: float, size: tuple[int, int]) -> None:
    """So many pictures (width, height) as H.264."""
    noise = np.random.default_rng(0)
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", Fraction(fps).limit_denominator(1000), options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for _ in range(count):
            small = noise.integers(0, 256, (9, 11, 3), np.uint8)
            image = np.kron(small, np.ones((size[1] // 9, size[0] // 11, 1), np.uint8))
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
            file.mux(stream.encode(frame.reformat(*size)))
        file.mux(stream.encode())


def write_box(folder: Path, model: str, made: Mapping[str, nn.Module], input_size: int, **keys: Any) -> Path:
    """A bundle of these models, one for each camera and called as that is, and the config of its box."""
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "task": "classification", "classes": ("a", "b"), "model": model, "model_args": {}, "input_size": input_size,
        "preprocess": Preprocess((input_size, input_size)), "fps": None, "sla_ms": SLA_MS, "accuracy_target": 0.95,
    }  # fmt: skip
    queries = [BundleQuery(id=name, camera=name, **given) for name in made]
    write_bundle(folder / "box.safetensors", dict(made), queries, Made("serving", "none", 0))
    document = {
        "bundle": "box.safetensors", "device": "cpu", "sinks": [{"kind": "jsonl", "path": RESULTS}], **keys,
    }  # fmt: skip
    path = folder / "box.yaml"
    path.write_text(yaml.safe_dump(document))
    return path
