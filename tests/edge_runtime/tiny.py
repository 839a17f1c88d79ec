"""Tiny real models and bundles: three queries on two cameras, a shared convolution."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
import yaml
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import nn

from gemel.edge_runtime.frames.samples import KEYWORD
from gemel.edge_runtime.sinks.base import ResultMessage
from gemel.models.bundle import Bundle, BundleQuery, Made, open_bundle, write_bundle
from gemel.models.export.export_document import export_documents
from gemel.models.preprocess import Preprocess

FACTORY = "tests.edge_runtime.tiny:net"
SIZE = 16
LOOPED = {"left": {"source": "left.mp4", "loop": True}, "right": {"source": "right", "fps": 12, "loop": True}}
"""The cameras of `write_box` without an end."""


def net(num_classes: int, input_size: int = SIZE, width: int = 12) -> nn.Module:
    """Two convolutions with batch norms (buffers included), and a head."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, 4 * width, 3), nn.BatchNorm2d(4 * width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, num_classes),
    )  # fmt: skip


def trained_looking(seed: int, num_classes: int = 3) -> nn.Sequential:
    """A net whose every parameter and buffer has values of its own."""
    generator = torch.Generator().manual_seed(seed)
    model = net(num_classes)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) - 0.2)
            else:
                tensor.fill_(seed)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_var.add_(0.5)  # type: ignore[union-attr]
    assert isinstance(model, nn.Sequential)
    return model.eval()


def query(query_id: str, camera: str, **keys) -> BundleQuery:
    defaults = {
        "task": "classification", "classes": ("a", "b", "c"), "model": FACTORY, "model_args": {}, "input_size": SIZE,
        "preprocess": Preprocess((SIZE, SIZE)), "fps": None, "sla_ms": 20_000.0, "accuracy_target": 0.95,
    }  # fmt: skip
    return BundleQuery(id=query_id, camera=camera, **{**defaults, **keys})


def tiny_bundle(path: Path, documents: bool = False) -> Bundle:
    """`gate` and `yard` share their second convolution; `road` shares nothing."""
    models = {name: trained_looking(seed) for seed, name in enumerate(("gate", "yard", "road"), 1)}
    with torch.no_grad():
        models["yard"][3].weight.copy_(models["gate"][3].weight)  # type: ignore[union-attr,operator]
    queries = [query("gate", "left"), query("yard", "right", roi=(4, 2, 40, 30)), query("road", "left", fps=6.0)]
    graphs = export_documents(models, queries) if documents else {}
    write_bundle(path, models, queries, Made("tiny", "wide", 0), documents=graphs)
    return open_bundle(path, [FACTORY])


class RecordKeeper:
    """Keeps the records of the messages that it is offered."""

    def __init__(self) -> None:
        self.records: list[Mapping[str, Any]] = []

    def __call__(self, message: ResultMessage) -> None:
        self.records.append(message.record)


def picture(seed: int, width: int = 48, height: int = 32) -> np.ndarray:
    """A smooth RGB picture that survives compression and differs by seed."""
    small = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), np.uint8)
    return cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC)


def write_clip(
    path: Path, count: int, fps: float = 12.0, codec: str = "mp4v", size: tuple[int, int] = (48, 32)
) -> Path:
    """A video of `count` pictures."""
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*codec), fps, size)
    for seed in range(count):
        writer.write(cv2.cvtColor(picture(seed, *size), cv2.COLOR_RGB2BGR))
    writer.release()
    return path


def write_folder(path: Path, count: int) -> Path:
    """A folder of `count` png pictures."""
    path.mkdir()
    for seed in range(count):
        cv2.imwrite(str(path / f"{seed:03}.png"), cv2.cvtColor(picture(100 + seed), cv2.COLOR_RGB2BGR))
    return path


def write_box(folder: Path) -> Path:
    """A folder with the bundle, a clip of 12 frames and a folder of 10 pictures, one second each."""
    torch.set_num_threads(1)
    tiny_bundle(folder / "tiny.safetensors")
    write_clip(folder / "left.mp4", 12)
    write_folder(folder / "right", 10)
    return folder


def change_head(sample: bytes, old: str, new: str) -> bytes:
    """A sample with another text: every `old` in it replaced."""
    with Image.open(io.BytesIO(sample)) as opened:
        text, out = PngInfo(), io.BytesIO()
        text.add_text(KEYWORD, opened.info[KEYWORD].replace(old, new))
        opened.save(out, "PNG", pnginfo=text)
    return out.getvalue()


def write_config(folder: Path, **keys) -> Path:
    """A box config beside tiny.safetensors; a key given as None is left out."""
    document = {
        "bundle": "tiny.safetensors", "budget": "64MiB", "device": "cpu", "engine": "torch", "factories": [FACTORY],
        "cameras": {"left": {"source": "left.mp4"}, "right": {"source": "right", "fps": 12}},
        "sinks": [{"kind": "jsonl", "path": "results.jsonl"}],
    } | keys  # fmt: skip
    path = folder / "box.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in document.items() if value is not None}))
    return path
