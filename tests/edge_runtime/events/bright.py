"""A detector without training: the brightest spot of a frame is the object. And boxes that serve clips of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor, nn

from gemel.models.bundle import Made, write_bundle
from gemel.models.detector import BoxTarget, OneStage
from gemel.models.preprocess import Preprocess
from tests.edge_runtime.tiny import query, trained_looking, write_config

BRIGHT = f"{__name__}:Bright"
SIDE, SPOT = 32, 4
"""Side of the frames and of the spot in pixels."""
PARTS: dict[str, Any] = {"zones": {"right": [[0.5, 0], [1, 0], [1, 1], [0.5, 1]]}}


class Bright(OneStage):
    """The box around the pixels of most of the brightness; none in a dark frame."""

    def __init__(self, num_classes: int, input_size: int = SIDE) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """(N, 3, H, W) -> boxes (N, 1, 4) in fractions, scores (N, 1, 1)."""
        mean = x.mean(dim=1) + 0 * self.conv(x)[:, 0]
        lit = (mean > 0.5).float()
        n, height, width = lit.shape
        place = lit.flatten(1).argmax(dim=1)
        x0, y0 = (place % width).float(), (place // width).float()
        boxes = torch.stack([x0 / width, y0 / height, (x0 + SPOT) / width, (y0 + SPOT) / height], dim=1)
        return boxes[:, None], 0.9 * lit.flatten(1).amax(dim=1).reshape(n, 1, 1)

    def decode(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        return outputs[0], outputs[1]

    def loss(self, outputs: Any, targets: Sequence[BoxTarget]) -> Tensor:
        raise NotImplementedError

    def distill(self, outputs: Any, teacher: Any) -> Tensor:
        raise NotImplementedError


def draw_spot(x: int | None, y: int = 14) -> np.ndarray:
    """A dark frame with a bright spot at (x, y), or without one."""
    frame = np.full((SIDE, SIDE, 3), 20, np.uint8)
    if x is not None:
        frame[y : y + SPOT, x : x + SPOT] = 250
    return frame


def write_spots(folder: Path, places: Sequence[int | None], name: str = "clip") -> Path:
    """A folder of pictures of a spot at each of these places."""
    (folder / name).mkdir()
    for number, x in enumerate(places):
        cv2.imwrite(str(folder / name / f"{number:03}.png"), draw_spot(x))
    return folder / name


def write_spot_box(folder: Path, places: Sequence[int | None], rules: dict[str, Any], **keys: Any) -> Path:
    """A box that watches a spot move, with a query `spot` and one `kind` of classification."""
    torch.set_num_threads(1)
    write_spots(folder, places)
    fps = {"fps": None, "sla_ms": 20_000.0}
    spot = query(
        "spot", "left", task="detection", classes=("car",), model=BRIGHT, input_size=SIDE,
        preprocess=Preprocess((SIDE, SIDE), mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)), min_score=0.3, **fps,
    )  # fmt: skip
    models = {"spot": Bright(1).eval(), "kind": trained_looking(1)}
    write_bundle(folder / "spots.safetensors", models, [spot, query("kind", "left", **fps)], Made("spots", "none", 0))
    cameras = {"left": {"source": "clip", "fps": 20}}
    document = {"bundle": "spots.safetensors", "factories": [BRIGHT, "tests.edge_runtime.tiny:net"], "cameras": cameras}
    return write_config(folder, **{**document, "queries": rules, **keys})
