"""Engines with inputs that are no squares, letterboxed, of other scales and channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from gemel.edge_runtime.engines.torch_engine import TorchEngine
from gemel.models.detector import BoxTarget, OneStage
from gemel.models.export.cost import workspace_bytes
from gemel.models.predictions import DetectionPrediction
from gemel.models.preprocess import Preprocess
from tests.edge_runtime.engines.sample_bundles import bind, build_model, make_query, write_and_open
from tests.edge_runtime.tiny import picture

SIZE = (64, 96)
ASKED = {
    "letterbox": Preprocess(SIZE, "letterbox", 1.0, 114, 255, (103.5, 116.3, 123.7), (57.4, 57.1, 58.4), "bgr"),
    "center-crop": Preprocess(SIZE, "center-crop", 0.875, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)),
}  # fmt: skip


@pytest.mark.parametrize("mode", ASKED)
def test_engines_prepare_frames_as_the_bundle_says(tmp_path, mode: str) -> None:
    model = build_model("ssd_resnet18", SIZE)
    query = make_query("gate", "ssd_resnet18", SIZE, preprocess=ASKED[mode])
    bundle = write_and_open(tmp_path / "b.safetensors", {"gate": model}, [query])
    assert bundle.query("gate").preprocess == ASKED[mode]
    frame = picture(3, width=120, height=90)
    with torch.inference_mode():
        wanted = model(torch.from_numpy(ASKED[mode](frame)))
    engine = TorchEngine(bundle, "gate")
    assert engine.workspace_of(2) == workspace_bytes(bundle.build("gate", "meta"), SIZE, 2)
    bind(engine, bundle)
    torch.testing.assert_close(engine.outputs([frame]), wanted)


class Fixed(OneStage):
    """A detector that finds one object wherever it looks, with weights enough to be stored."""

    nms_iou = 0.5

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        """(N, 3, H, W) -> (N, 4)."""
        return (self.conv(x).mean(dim=(2, 3)) * 0 + torch.tensor([0.25, 0.5, 0.75, 0.9], device=x.device),)

    def decode(self, outputs: tuple[Tensor]) -> tuple[Tensor, Tensor]:
        return outputs[0][:, None], torch.full((len(outputs[0]), 1, 1), 0.9)

    def loss(self, outputs: tuple[Tensor], targets: Sequence[BoxTarget]) -> Tensor:
        raise NotImplementedError

    def distill(self, outputs: tuple[Tensor], teacher: tuple[Tensor]) -> Tensor:
        raise NotImplementedError


FIXED = "tests.edge_runtime.engines.test_preprocessing:Fixed"


@pytest.mark.parametrize(
    ("mode", "part", "roi", "frame_size", "expected"),
    [  # part of 120 x 90 pixels -> input of 96 x 64: letterbox by 64 / 90 from x = 5, within 0.875 of the input by
        # 56 / 90 from 10, 4; center-crop 109 x 81 from -6, -8
        ("letterbox", 1.0, None, None, (19 * 90 / 64, 45, 67 * 90 / 64, 81)),
        ("letterbox", 1.0, (30, 10, 150, 100), None, (30 + 19 * 90 / 64, 55, 30 + 67 * 90 / 64, 91)),
        ("letterbox", 1.0, (15, 5, 75, 50), (100, 80), (30 + 19 * 90 / 64, 55, 30 + 67 * 90 / 64, 91)),
        ("letterbox", 0.875, None, None, (14 * 90 / 56, 45, 62 * 90 / 56, 53.6 * 90 / 56)),
        ("center-crop", 0.875, None, None, (30 * 120 / 109, 40 * 90 / 81, 78 * 120 / 109, 65.6 * 90 / 81)),
    ],
)
def test_boxes_come_back_in_pixels_of_the_frame(tmp_path, mode, part, roi, frame_size, expected) -> None:
    preprocess = Preprocess(SIZE, mode, part)
    query = make_query("gate", FIXED, SIZE, task="detection", classes=("a",), preprocess=preprocess)
    query = replace(query, roi=roi, frame_size=frame_size)
    bundle = write_and_open(tmp_path / "b.safetensors", {"gate": Fixed(2)}, [query])
    engine = TorchEngine(bundle, "gate")
    bind(engine, bundle)
    frame = picture(3, width=120, height=90) if roi is None else picture(3, width=200, height=160)
    (answer,) = engine.run([frame])
    assert isinstance(answer, DetectionPrediction)
    assert answer.boxes[0] == pytest.approx(expected, abs=1e-3)
