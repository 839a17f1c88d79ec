"""A classifier with known weights that tells red from blue frames, and workloads whose preprocessing may be wrong."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import torch
import yaml
from torch import Tensor, nn

from gemel.models.files.weights import save_weights

CLASSES, SIZE = ("blue", "red"), 16
BRIGHT = 128


class ColourNet(nn.Module):
    """The logit of red grows with red - blue, where the brightest value is above `least`."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, num_classes, 1)
        self.norm = nn.BatchNorm2d(num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, S, S) -> (N, C)."""
        return self.norm(self.conv(x)).mean(dim=(2, 3))


def colour_net(num_classes: int) -> nn.Module:
    """The factory that workloads name."""
    return ColourNet(num_classes)


def write_colours(folder: Path, frames: int = 48, **keys) -> Path:
    """A workload of two queries on red and blue frames, whose weights take RGB from 0 to 1; `keys` of its queries."""
    random = np.random.default_rng(0)
    for split in ("train", "val", "test"):
        for label in CLASSES:
            for index in range(frames):
                frame = random.integers(0, 60, (20, 24, 3), np.uint8)
                frame[..., 2 if label == "red" else 0] += 60  # OpenCV's order
                path = folder / "data" / split / label / f"clip{index % 4}__{index:06d}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                cv2.imwrite(str(path), frame)
    torch.manual_seed(0)
    net = ColourNet(2)
    with torch.no_grad():
        net.conv.weight.copy_(torch.tensor([[-1.0, 0.0, 1.0], [1.0, 0.0, -1.0]]).view(2, 3, 1, 1))
        assert net.conv.bias is not None
        net.conv.bias.zero_()
    queries = []
    for name in ("a", "b"):
        save_weights(folder / f"{name}.safetensors", net.state_dict())
        queries.append({
            "id": name, "camera": "c", "task": "classification", "classes": list(CLASSES),
            "model": "tests.models.colours:colour_net", "input_size": SIZE, "data": "data",
            "weights": f"{name}.safetensors", **keys,
        })  # fmt: skip
        net.conv.bias.data += 1e-3
    path = folder / "workload.yaml"
    cameras = {"c": {"source": "none.mp4", "fps": 5}}
    path.write_text(yaml.safe_dump({"name": "colours", "cameras": cameras, "queries": queries}))
    return path
