"""A real box whose frames come by HTTP: a detector and a classifier on one camera, a classifier of a recorded one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gemel.models.bundle import Made, write_bundle
from gemel.models.detector import Detector
from gemel.models.preprocess import Preprocess
from tests.edge_runtime.local_box import LocalBox
from tests.edge_runtime.tiny import FACTORY, query, trained_looking, write_clip, write_config

TOKEN = "a-token-of-32-characters-or-more"
CLASSES = ("car", "person")
SPOTTER = "tests.edge_runtime.http.push_box:spotter"
PLAIN = Preprocess((16, 16), mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
"""Values from 0 to 1."""
GO = threading.Event()
"""Detectors wait for it."""
GO.set()


class LightSpotter(Detector):
    """Finds a sure person and an unsure car in frames that are brighter than grey; fails on dark grey ones."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        GO.wait(60)
        return (self.conv(x),)

    def finish_outputs(self, outputs: Any) -> tuple[Tensor, ...]:
        brightness = outputs[0].mean(dim=(1, 2, 3))
        if ((brightness > 0.1) & (brightness < 0.3)).any():
            raise ValueError("a dark frame")
        frames = len(brightness)
        boxes = torch.tensor([[0.0, 0.25, 0.5, 0.75], [0.5, 0.5, 1.0, 1.0]]).expand(frames, -1, -1)
        scores = torch.tensor([0.35, 0.9]) * (brightness > 0.5)[:, None]
        return boxes, scores, torch.tensor([0, 1]).expand(frames, -1)

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        return outputs[0].mean()

    def distill(self, outputs: Any, teacher: Any) -> Tensor:
        return outputs[0].mean()


def spotter(num_classes: int) -> nn.Module:
    """The factory that the bundle names."""
    return LightSpotter()


def write_push_box(folder: Path, **keys: Any) -> Path:
    """The config of a box with the queries `spots` and `kind` of the camera `door`, and `gate` of `left`."""
    torch.set_num_threads(1)
    detector = LightSpotter()
    with torch.no_grad():
        detector.conv.weight.fill_(1 / 3)
        detector.conv.bias.zero_()  # type: ignore[union-attr]
    models = {"spots": detector, "kind": trained_looking(1), "gate": trained_looking(2)}
    queries = [
        query("spots", "door", task="detection", classes=CLASSES, model=SPOTTER, preprocess=PLAIN, threshold=0.1),
        query("kind", "door", roi=(4, 2, 40, 30)),
        query("gate", "left"),
    ]
    write_bundle(folder / "tiny.safetensors", models, queries, Made("tiny", "none", 0))
    write_clip(folder / "left.mp4", 12)
    (folder / "token").write_text(TOKEN)
    given = {
        "factories": [FACTORY, SPOTTER], "http": {"bind": "127.0.0.1:0", "token_file": "token"},
        "cameras": {"door": {"source": "push", "timeout_s": 60}, "left": {"source": "left.mp4", "loop": True}},
    }  # fmt: skip
    return write_config(folder, **(given | keys))


def address_of(box: LocalBox) -> str:
    """HOST:PORT of a box that is warmed up."""
    http = box.service._http
    assert http is not None
    box.until(lambda: box.service._inference.started is not None)
    return f"127.0.0.1:{http.port}"
