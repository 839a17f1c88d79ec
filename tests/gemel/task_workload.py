"""Workloads of the tasks besides classification and detection: drawn frames, networks that train in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from gemel.merger import MergeOptions, Recipe, TrainOptions
from gemel.models.detector import OneStage

SIZE, FRAME = 32, (64, 48)
COUNTS = {"train": 48, "val": 24, "test": 24}
TRAIN = TrainOptions(rate=3e-3, batch=8, passes=1200, max_cycles=1)
MERGE = MergeOptions(Recipe(rate=1e-3, epochs=2, batch=8, frames_per_epoch=64), precision="fp32", margin=0.5)


class Trunk(nn.Module):
    """Three convolutions with norms at a quarter of the resolution."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem, self.body, self.last = _block(3, width, 2), _block(width, width, 2), _block(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self.stem(x)))


def _block(channels: int, out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU())


class Masks(nn.Module):
    """x -> logits (N, C, H / 4, W / 4)."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.trunk, self.head = Trunk(), nn.Conv2d(16, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


class Vectors(nn.Module):
    """x -> vectors (N, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = Trunk(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x).mean(dim=(2, 3)))


class Maps(nn.Module):
    """x -> maps (N, 1, H / 4, W / 4) and rows (N, 4, 5), as a network for depth and text might."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.depth, self.text = Trunk(), nn.Conv2d(16, 1, 1), nn.Linear(16, 20)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.trunk(x)
        return self.depth(found), self.text(found.mean(dim=(2, 3))).view(-1, 4, 5)


CELLS, POINTS = SIZE // 4, 2


class Poses(OneStage):
    """x -> for each of 8 x 8 cells (N, 64, 1 + 4 + 4): the odds of an object, its sides and its two points."""

    has_points = True

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.wide = Trunk(), _block(16, 32, 1)
        self.head = nn.Conv2d(32, 1 + 4 + 2 * POINTS, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.head(self.wide(self.trunk(x))).flatten(2).transpose(1, 2),)

    def decode(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:  # type: ignore[override]
        odds, sides, offsets = outputs[0].float().split((1, 4, 2 * POINTS), dim=-1)
        centres = _centres(odds.device)
        low, high = centres - sides[..., :2].sigmoid(), centres + sides[..., 2:].sigmoid()
        places = centres[:, None] + offsets.tanh().unflatten(-1, (POINTS, 2))
        points = torch.cat([places, odds.sigmoid()[..., None].expand(*places.shape[:-1], 1)], dim=-1)
        return torch.cat([low, high], dim=-1), odds.sigmoid(), points

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        boxes, _, points = self.decode(outputs)
        wanted, places = torch.zeros_like(outputs[0][..., 0]), torch.zeros(())
        for frame, target in enumerate(targets):
            for box, own in zip(target.boxes, target.points, strict=True):
                column, row = ((box[:2] + box[2:]) / 2 * CELLS).long().clamp(0, CELLS - 1).tolist()
                cell = row * CELLS + column
                wanted[frame, cell] = 1
                places = places + (boxes[frame, cell] - box).abs().sum()
                places = places + ((points[frame, cell, :, :2] - own[:, :2]).abs() * (own[:, 2:] > 0)).sum()
        found = F.binary_cross_entropy_with_logits(outputs[0][..., 0], wanted, reduction="sum")
        return (found + 5 * places) / len(targets)

    def distill(self, outputs: Any, teacher: Any) -> Tensor:
        odds, other = outputs[0][..., 0], teacher[0][..., 0].sigmoid()
        apart = ((outputs[0][..., 1:] - teacher[0][..., 1:]).abs() * other[..., None]).sum()
        return (F.binary_cross_entropy_with_logits(odds, other, reduction="sum") + apart) / len(odds)


def _centres(device: torch.device) -> Tensor:
    at = (torch.arange(CELLS, device=device) + 0.5) / CELLS
    return torch.stack(torch.meshgrid(at, at, indexing="xy"), dim=-1).reshape(-1, 2)


def draw_frame(
    random: np.random.Generator, colour: tuple[int, int, int] = (70, 200, 220)
) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
    """A frame (H, W, 3) with a bright square, its mask, and the square's corner."""
    width, height = FRAME
    frame = random.normal(60, 12, (height, width, 3))
    x, y = int(random.integers(2, width - 26)), int(random.integers(2, height - 26))
    mask = np.zeros((height, width), np.uint8)
    mask[y : y + 24, x : x + 24] = 1
    frame[mask == 1] = colour
    return np.clip(frame, 0, 255).astype(np.uint8), mask, (x, y)


def write_clip(path: Path, frames: int = 10) -> None:
    """A clip of drawn frames."""
    random = np.random.default_rng(7)
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), 10, FRAME)
    for _ in range(frames):
        writer.write(draw_frame(random)[0])
    writer.release()


def write_workload(folder: Path, queries: list[dict[str, Any]], **keys: Any) -> Path:
    """The workload of these queries and its camera's clip."""
    write_clip(folder / "gate.mp4")
    defaults = {"camera": "gate", "input_size": SIZE, "accuracy_target": 0.9, "sla_ms": 20_000}
    document = {
        "name": "tasks", "cameras": {"gate": {"source": "gate.mp4", "fps": 10}},
        "queries": [{**defaults, "weights": f"weights/{one['id']}.safetensors", **one} for one in queries], **keys,
    }  # fmt: skip
    path = folder / "workload.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def write_box(folder: Path, factories: list[str]) -> Path:
    """The box that runs `box.safetensors` over the clip."""
    document = {
        "bundle": "box.safetensors", "budget": "64MiB", "device": "cpu", "engine": "torch", "factories": factories,
        "cameras": {"gate": {"source": "gate.mp4", "fps": 10}},
        "sinks": [{"kind": "jsonl", "path": "results.jsonl"}],
        "spool": {"path": "spool", "max_bytes": "16MiB", "every_s": 0.01},
    }  # fmt: skip
    path = folder / "box.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def name_frame(split: str, index: int) -> str:
    """The stem of a frame: one of four clips, and its time."""
    return f"{split}{index % 4}__{index * 100:06d}"


def seed_of(query: str, split: str) -> int:
    """Another seed for each split of each query."""
    return int.from_bytes(f"{query}{split}".encode(), "big") % 2**32


def build_masks(num_classes: int) -> nn.Module:
    """The factory of `Masks`."""
    return Masks(num_classes)


def build_vectors(num_classes: int = 0) -> nn.Module:
    """The factory of `Vectors`."""
    return Vectors()


def build_poses(num_classes: int) -> nn.Module:
    """The factory of `Poses`."""
    return Poses()


def build_labels(num_classes: int) -> nn.Module:
    """A classifier."""
    network = Vectors()
    network.head = nn.Linear(16, num_classes)
    return network


def build_maps(num_classes: int = 0) -> nn.Module:
    """The factory of `Maps`."""
    return Maps()


torch.set_num_threads(1)
