"""Engines with inputs that are no squares, letterboxed, of other scales and channels."""

from __future__ import annotations

import pytest
import torch

from edge_runtime.engines.onnx import OnnxEngine
from edge_runtime.engines.package_cache import EngineCache
from edge_runtime.engines.torch_engine import TorchEngine
from models.cost import workspace_bytes
from models.preprocess import Preprocess
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
        wanted = model(ASKED[mode](frame))
    engine = TorchEngine(bundle, "gate")
    assert engine.workspace_of(2) == workspace_bytes(bundle.build("gate", "meta"), SIZE, 2)
    bind(engine, bundle)
    torch.testing.assert_close(engine.outputs([frame]), wanted)

    onnx = OnnxEngine(bundle, "gate", cache=EngineCache(tmp_path / "cache"))
    bind(onnx, bundle)
    boxes, scores = onnx.outputs([frame])
    expected = model.decode(wanted)
    torch.testing.assert_close((boxes, scores), expected, atol=1e-3, rtol=1e-3)
