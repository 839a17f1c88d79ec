"""Tiny networks as ONNX files: a YOLOX of three levels, and a classifier."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import onnx
import torch
from torch import Tensor, nn

SIDE = 96


class TinyYolox(nn.Module):
    """(N, 3, 96, 96) -> (N, 189, 5 + C), the grid outside; with `order` the classes are moved after their layer."""

    def __init__(self, classes: int, order: Sequence[int] | None = None) -> None:
        super().__init__()
        self.order = order
        self.stages = nn.ModuleList([nn.Conv2d(3, 16, 8, 8), nn.Conv2d(16, 16, 2, 2), nn.Conv2d(16, 16, 2, 2)])
        self.boxes, self.objects, self.classes = (
            nn.ModuleList(nn.Conv2d(16, width, 1) for _ in self.stages) for width in (4, 1, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = []
        for stage, box, found, kind in zip(self.stages, self.boxes, self.objects, self.classes, strict=True):
            x = stage(x)
            x = x * x.sigmoid()
            scores = kind(x).sigmoid()
            scores = scores if self.order is None else scores[:, self.order]
            rows.append(torch.cat([box(x), found(x).sigmoid(), scores], dim=1).flatten(2))
        return torch.cat(rows, dim=2).permute(0, 2, 1)


class TinyClassifier(nn.Module):
    """(N, 3, 96, 96) -> probabilities (N, C)."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 8, 8), nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x).relu().mean(dim=(2, 3))).softmax(dim=1)


def export(path: Path, module: nn.Module, **metadata: str) -> Path:
    """Write a module as an ONNX file that says this about itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frames, free = torch.zeros(1, 3, SIDE, SIDE), {"x": {0: "batch"}}
        names = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": free}
        torch.onnx.export(module.eval(), (frames,), str(path), dynamo=False, opset_version=17, **names)
    model = onnx.load(path)
    onnx.helper.set_model_props(model, metadata)
    onnx.save(model, path)
    return path
