"""Exported files answer as torch does and keep every weight under its name; what can't be exported is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from gemel.models import zoo
from gemel.models.detector import Detector
from gemel.models.errors import InputError
from gemel.models.export.trace import OPSET, export_onnx
from gemel.models.zoo.registry import ENTRIES
from tests.parameters import every

CLASSES = ("car", "bus", "truck")
FEW = {"cifar_resnet20": 64, "ssd_resnet18": 64}
"""The lightest models of two kinds and their input size; all models take nine minutes."""
SIDES = {
    "mobilenet_v3_small": 64, "squeezenet1_1": 64, "alexnet": 128, "vit_b_16": 64,
    "ssd300_vgg16": 300, "ssdlite320_mobilenet_v3_large": 320,
}  # fmt: skip
TWO_STAGE = {
    "fasterrcnn_mobilenet_v3_large_320_fpn": ["boxes", "scores", "labels"],
    "keypointrcnn_resnet50_fpn": ["boxes", "scores", "labels", "points"],
}
"""Outputs of a detector with regions, and of one with points."""
ONE_STAGE = sorted(name for name in zoo.names() if "rcnn" not in name)


class Small(nn.Module):
    """A convolution, a norm and a linear layer with equal biases, as in a fresh model."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.fc = nn.Linear(width, 2)
        for layer in (self.conv, self.fc):
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.conv(x)).relu().mean((2, 3)))


class Branching(Small):
    """Its path depends on the frame's values, which no graph expresses."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


class OneByOne(Small):
    """A Python loop over the frames: the batch is part of the graph."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super(OneByOne, self).forward(frame[None]) for frame in x])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def settle(module: nn.Module, side: int) -> nn.Module:
    """Eval mode, with running statistics of random frames, so that signals neither vanish nor explode.

    Norms add 1: a deep random network with signals around 0 amplifies rounding to 4e-4 (torch against itself in
    float64), which depends on the CPU; with 1 it stays near 1e-5.
    """
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.reset_running_stats()
            part.momentum = None
            nn.init.ones_(part.bias)
    for parameter in module.parameters():
        if parameter.ndim > 1 and not parameter.any():  # torchvision's fresh ViT answers 0
            nn.init.normal_(parameter, std=0.02)
    with torch.no_grad():
        module.train()(torch.randn(8 if side < 128 else 2, 3, side, side))
    return module.eval().requires_grad_(False)


def run(path: Path, batch: Tensor) -> dict[str, Tensor]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, map(torch.from_numpy, session.run(None, {"frames": batch.numpy()})), strict=True))


def check_equal(path: Path, module: nn.Module, batch: Tensor) -> None:
    """Outputs within 1e-4 of their scale, and every tensor of the state dict under its name."""
    with torch.no_grad():
        outputs = module.export_outputs(batch) if isinstance(module, Detector) else (module(batch),)
    found = run(path, batch)
    assert list(found) == (["boxes", "scores"] if isinstance(module, Detector) else ["logits"])
    for ours, theirs in zip(found.values(), outputs, strict=True):
        scale = float(theirs.abs().max())
        assert ours.shape == theirs.shape and float((ours - theirs).abs().max()) <= 1e-4 * scale
    stored = {one.name: numpy_helper.to_array(one) for one in onnx.load(path).graph.initializer}
    for key, tensor in module.state_dict().items():
        if not key.endswith("num_batches_tracked"):
            assert np.array_equal(stored[key], tensor.numpy()), key


@pytest.mark.slow
@pytest.mark.parametrize("name", every(ONE_STAGE, list(FEW)))
def test_zoo_model_answers_in_onnx_runtime_as_in_torch(name: str, tmp_path: Path) -> None:
    side = SIDES.get(name, FEW.get(name, 224))
    module = settle(zoo.build(name, CLASSES, {}, side, ENTRIES[name].task), side)
    export_onnx(module, tmp_path / "any.onnx", side)
    for batch in (1, 4):
        check_equal(tmp_path / "any.onnx", module, torch.randn(batch, 3, side, side))


@pytest.mark.slow
@pytest.mark.parametrize("name", every(list(TWO_STAGE), ["fasterrcnn_mobilenet_v3_large_320_fpn"]))
def test_two_stage_detector_is_exported_for_a_fixed_batch(name: str, tmp_path: Path) -> None:
    module = zoo.build(name, CLASSES[:1], {}, 64, ENTRIES[name].task).eval()
    with pytest.raises(InputError, match="needs a fixed batch"):
        export_onnx(module, tmp_path / "any.onnx", 64, "dynamic")
    written = export_onnx(module, tmp_path / "one.onnx", 64)
    found = run(written.path, torch.randn(1, 3, 64, 64))
    assert list(found) == TWO_STAGE[name] and written.batch == 1
    assert not run(written.path, torch.full((1, 3, 64, 64), torch.nan))["scores"].any()


def test_export_describes_the_file_and_keeps_norms(tmp_path: Path) -> None:
    written = export_onnx(Small().eval(), tmp_path / "small.onnx", 16, metadata={"gemel.task": '"classification"'})
    assert written.inputs == {"frames": ("batch", 3, 16, 16)} and written.outputs == {"logits": ("batch", 2)}
    model = onnx.load(written.path)
    assert [one.version for one in model.opset_import] == [OPSET] == [written.opset]
    assert {one.key: one.value for one in model.metadata_props} == {"gemel.task": '"classification"'}
    assert written.nbytes == written.path.stat().st_size
    assert str(Path(__file__).parent).encode() not in written.path.read_bytes()
    assert "BatchNormalization" in {node.op_type for node in model.graph.node}


def test_export_of_a_branching_model_is_refused_in_one_line(tmp_path: Path, capfd) -> None:
    with pytest.raises(InputError, match=r"bad\.onnx: the model cannot be exported: .*; its forward") as caught:
        export_onnx(Branching(), tmp_path / "bad.onnx", 16)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "") and not list(tmp_path.iterdir())


def test_export_of_a_fixed_batch_model_needs_that_batch(tmp_path: Path) -> None:
    module = settle(OneByOne(), 16)
    with pytest.raises(InputError, match="give a fixed batch"):
        export_onnx(module, tmp_path / "any.onnx", 16)
    written = export_onnx(module, tmp_path / "three.onnx", 16, 3)
    check_equal(written.path, module, torch.randn(3, 3, 16, 16))


def test_export_refuses_bad_input_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there.onnx").touch()
    monkeypatch.setattr("gemel.models.export.onnx_file.MAX_FILE_BYTES", 100)
    for name, batch, problem in (("there.onnx", None, "exists already"), ("no/small.onnx", None, "no directory"),
                                 ("small.onnx", 0, "holds nothing"), ("small.onnx", None, "do not fit")):  # fmt: skip
        with pytest.raises(InputError, match=problem):
            export_onnx(Small(), tmp_path / name, 16, batch)
