"""Exported files answer as torch does and keep every weight under its name; what can't be exported is refused."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from models import zoo
from models.detector import Detector
from models.errors import InputError
from models.export import OPSET, export_onnx
from models.zoo.detectors import two_stage
from models.zoo.detectors.box_ops import FixedBoxes
from models.zoo.detectors.two_stage import TwoStage
from models.zoo.registry import ENTRIES
from models.zoo.user_models import answer_on_meta
from tests.exhaustive import every

CLASSES = ("car", "bus", "truck")
SIDES = (64, 96, 128, 224, 300, 320)
TOLERANCE = 1e-4
MATCHED = 0.95
SCALED = (nn.Conv2d, nn.Linear)
FEW = (
    *("cifar_resnet20", "mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1"),
    *("fastestdet", "yolov3_tiny"),
)
"""The lightest of most kinds; all 55 take nine minutes."""


@pytest.fixture(autouse=True)
def without_collection():
    """A traced network is many small objects that live to its end; collecting meanwhile takes a fifth of the time."""
    gc.disable()
    yield
    gc.enable()
    gc.collect()


def build(name: str) -> tuple[nn.Module, int]:
    """A model of the zoo for the smallest side it takes, with weights that make every layer matter."""
    task = ENTRIES[name].task
    for side in SIDES:
        try:
            if answer_on_meta(zoo.build(name, CLASSES, {}, side, task, "meta"), side) is not None:
                module = lively(zoo.build(name, CLASSES, {}, side, task), side)
                return untied(module, side) if isinstance(module, TwoStage) else module, side
        except InputError:
            continue
    raise AssertionError(f"{name} takes none of {SIDES}")


def lively(module: nn.Module, side: int) -> nn.Module:
    """Random weights, each layer's scaled to answer with deviation 1 (Mishkin and Matas 2016), and true statistics.

    So nothing dies out or saturates on the way, and the scores of a detector are spread: no ties. Norms' biases lie
    above 0, since a deep network whose signs are all even odds amplifies its own rounding: 1e-3 in resnet152, against
    float64.
    """
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim > 1:
                nn.init.kaiming_normal_(parameter.flatten(1))
            elif name.endswith("weight"):
                nn.init.uniform_(parameter, 0.5, 1.5)
            else:
                nn.init.normal_(parameter, std=0.2)
        norms = [part for part in module.modules() if isinstance(part, nn.BatchNorm2d)]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the plain mean over all batches
            norm.bias.add_(0.5)
        hooks = [part.register_forward_hook(_scale) for part in module.modules() if isinstance(part, SCALED)]
        module.train()(frames(8 if side < 224 else 1, side))
        for norm in norms:  # a channel that was silent here must not amplify rounding elsewhere
            norm.running_var.clamp_(min=0.2)  # type: ignore[union-attr]
        module.eval()(frames(1, side))  # the second stage of a two-stage detector runs in eval mode alone
    for hook in hooks:
        hook.remove()
    for part in module.modules():
        part.__dict__.pop("scaled", None)
    return module.requires_grad_(False)


def _scale(layer: nn.Module, _: object, output: Tensor) -> Tensor:
    if "scaled" in layer.__dict__:  # a head that serves several maps keeps the scale of the first
        return output
    layer.__dict__["scaled"] = True
    deviation = output.std().clamp(min=1e-3)
    for parameter in layer.parameters():
        parameter /= deviation
    return output / deviation


def untied(module: TwoStage, side: int) -> TwoStage:
    """Give it anchors of its own: inside the frame, all different, larger than a cell of the coarsest map.

    Published anchors reach over the edge of so small a frame. Cut off there, many become slivers that pool to the very
    same features, and which of two equal scores comes first is up to the runtime.
    """
    random = torch.Generator().manual_seed(2)
    sides = 0.4 + 0.4 * torch.rand(len(module.anchors), 2, generator=random)
    corners = (1 - sides) * torch.rand(len(module.anchors), 2, generator=random)
    module.anchors = FixedBoxes(torch.cat([corners, corners + sides], dim=1) * side)
    with torch.no_grad():
        for layer, factor in ((module.rpn.head.bbox_pred, 0.1), (module.roi_heads.box_predictor.cls_score, 0.3)):
            layer.weight *= factor  # proposals stay near their anchors, and no score rounds to 1
            layer.bias *= factor
    return module


def frames(count: int, side: int, seed: int = 1) -> Tensor:
    """Frames with large shapes as well as noise, so that deep networks tell them apart."""
    random = torch.Generator().manual_seed(seed)
    shapes = torch.randn(count, 3, 4, 4, generator=random)
    large = nn.functional.interpolate(shapes, (side, side), mode="bilinear")
    return large + 0.3 * torch.randn(count, 3, side, side, generator=random)


def run(path: Path, batch: Tensor) -> dict[str, Tensor]:
    """What ONNX Runtime answers, by the outputs' names."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, map(torch.from_numpy, session.run(None, {"frames": batch.numpy()})), strict=True))


def answer(module: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """What torch answers, by the names the file must use."""
    with torch.no_grad():
        outputs = module.export_outputs(batch) if isinstance(module, Detector) else (module(batch),)
    return dict(zip(("boxes", "scores", "labels") if isinstance(module, Detector) else ("logits",), outputs))


def assert_alike(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Equal within 1e-4 of the outputs' own scale: 1, or their largest value where that is more."""
    assert found.keys() == wanted.keys()
    for name, theirs in wanted.items():
        assert found[name].shape == theirs.shape and found[name].dtype == theirs.dtype, name
        scale = max(1.0, float(theirs.abs().max()))
        assert float((found[name] - theirs).abs().max()) <= TOLERANCE * scale, name


def assert_detections_alike(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """At least MATCHED of the detections of each have their equal in the other: label, and score and box within 1e-4.

    Not all, since an overlap may fall on the threshold of suppression in the last digit that runtimes share.
    """
    assert {name: one.shape for name, one in found.items()} == {name: one.shape for name, one in wanted.items()}
    near = (found["boxes"][:, :, None] - wanted["boxes"][:, None]).abs().amax(-1) <= TOLERANCE
    near &= (found["scores"][:, :, None] - wanted["scores"][:, None]).abs() <= TOLERANCE
    near &= found["labels"][:, :, None] == wanted["labels"][:, None]
    for matched, scores in ((near.any(2), found["scores"]), (near.any(1), wanted["scores"])):
        assert matched[scores > 0].float().mean() >= MATCHED


def assert_telling(outputs: dict[str, Tensor]) -> None:
    """No output is dead, saturated or alike for every frame: equality of such would say little."""
    for name, output in outputs.items():
        assert torch.isfinite(output).all() and output.float().std() > 0.01, name
        assert (output[0] - output[1]).abs().max() > 0.01 * output.abs().max(), name


def initialisers(path: Path) -> dict[str, np.ndarray]:
    return {one.name: numpy_helper.to_array(one) for one in onnx.load(path).graph.initializer}


def assert_keeps_weights(path: Path, module: nn.Module) -> None:
    """Every tensor of the state dict stands in the file as it is; norms count their batches for training alone."""
    held = initialisers(path)
    for key, tensor in module.state_dict().items():
        if not key.endswith("num_batches_tracked"):
            assert np.array_equal(held[key], tensor.numpy()), key


@pytest.mark.slow
@pytest.mark.parametrize("name", every(zoo.names(), FEW))
def test_every_model_of_the_zoo_answers_in_onnx_runtime_as_in_torch(name, tmp_path, monkeypatch):
    monkeypatch.setattr(two_stage, "CANONICAL_SIDE", 48)  # regions of a frame of 64 pixels fall on two levels as well
    module, side = build(name)
    whole = answer(module, frames(4, side))
    assert_telling(whole)
    fixed = isinstance(module, TwoStage)
    compare = assert_detections_alike if fixed else assert_alike
    for batch in (1, 4):
        path = tmp_path / f"{name}-{batch if fixed else 'any'}.onnx"
        if not path.exists():
            export_onnx(module, path, side, batch if fixed else None)
            assert_keeps_weights(path, module)
        compare(run(path, frames(4, side)[:batch]), {key: one[:batch] for key, one in whole.items()})
    if fixed:  # where nothing at all is proposed, nothing is found
        assert not run(path, torch.full((4, 3, side, side), torch.nan))["scores"].any()


class Small(nn.Module):
    """A convolution, a norm and a linear layer whose biases are equal, as those of a fresh model are."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.fc = nn.Linear(width, 2)
        for layer in (self.conv, self.fc):
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.conv(x)).relu().mean((2, 3)))


@pytest.fixture
def small():
    return lively(Small(), 16)


def test_equal_tensors_and_norms_keep_their_own_places(tmp_path):
    fresh = Small().eval()
    written = export_onnx(fresh, tmp_path / "fresh.onnx", 16)
    assert_keeps_weights(written.path, fresh)
    assert "BatchNormalization" in {node.op_type for node in onnx.load(written.path).graph.node}


def test_a_file_says_what_it_takes_and_gives_and_nothing_of_where_it_was_made(small, tmp_path):
    written = export_onnx(small, tmp_path / "small.onnx", 16, metadata={"gemel.task": '"classification"'})
    assert written.inputs == {"frames": ("batch", 3, 16, 16)} and written.outputs == {"logits": ("batch", 2)}
    model = onnx.load(written.path)
    assert [one.version for one in model.opset_import] == [OPSET] == [written.opset]
    assert {one.key: one.value for one in model.metadata_props} == {"gemel.task": '"classification"'}
    assert written.nbytes == written.path.stat().st_size
    assert str(Path(__file__).parent).encode() not in written.path.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["small.onnx"]


class Branching(Small):
    """Which way it goes depends on the frame's values: no graph says so."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


class OneByOne(Small):
    """A Python loop over the frames: the batch is a part of the graph."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super(OneByOne, self).forward(frame[None]) for frame in x])


def test_a_model_that_no_graph_can_hold_is_refused_in_one_line(tmp_path, capfd):
    with pytest.raises(InputError, match=r"bad\.onnx: the model cannot be exported: .*; its forward") as refused:
        export_onnx(Branching(), tmp_path / "bad.onnx", 16)
    assert "\n" not in str(refused.value)
    said = capfd.readouterr()
    assert said.out == said.err == "" and not list(tmp_path.iterdir())


def test_a_model_that_fixes_its_batch_is_exported_for_that_batch_alone(tmp_path):
    module = lively(OneByOne(), 16)
    with pytest.raises(InputError, match="give a fixed batch"):
        export_onnx(module, tmp_path / "any.onnx", 16)
    written = export_onnx(module, tmp_path / "three.onnx", 16, 3)
    assert written.inputs == {"frames": (3, 3, 16, 16)}
    assert_alike(run(written.path, frames(3, 16)), answer(module, frames(3, 16)))


def test_bad_input_is_refused_before_any_work(small, tmp_path, monkeypatch):
    (tmp_path / "there.onnx").touch()
    with pytest.raises(InputError, match="exists already"):
        export_onnx(small, tmp_path / "there.onnx", 16)
    with pytest.raises(InputError, match="there is no directory"):
        export_onnx(small, tmp_path / "nowhere" / "small.onnx", 16)
    with pytest.raises(InputError, match="batch: a batch of 0 holds nothing"):
        export_onnx(small, tmp_path / "small.onnx", 16, 0)
    monkeypatch.setattr("models.export.MAX_FILE_BYTES", 100)
    with pytest.raises(InputError, match="do not fit one ONNX file"):
        export_onnx(small, tmp_path / "small.onnx", 16)
    assert [path.name for path in tmp_path.iterdir()] == ["there.onnx"]
