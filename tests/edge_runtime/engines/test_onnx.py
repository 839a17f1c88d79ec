"""ONNX Runtime as an engine: it answers as torch does, over tensors of the arena that it never copies."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from edge_runtime.engines.base import EngineError
from edge_runtime.engines.onnx import OnnxEngine
from edge_runtime.engines.package_cache import EngineCache
from edge_runtime.engines.torch_engine import TorchEngine
from edge_runtime.memory.arena import Arena
from edge_runtime.memory.store import Store
from models import zoo
from models.bundle import Bundle, BundleQuery, Made, open_bundle, write_bundle
from models.predictions import DetectionPrediction
from models.preprocess import Preprocess
from models.quantization import PackedWeight, pack
from tests.edge_runtime.engines.lively_models import build_lively, soft_frames, untied
from tests.edge_runtime.tiny import FACTORY, picture, tiny_bundle, trained_looking
from tests.edge_runtime.tiny import SIZE as TINY_SIZE

HERE = "tests.edge_runtime.engines.test_onnx"
SIZE = 32
NAMES: list[str] = ["boxes", "scores", "labels"]
TWO_STAGE = "fasterrcnn_mobilenet_v3_large_320_fpn"
TOLERANCE = 1e-3
MATCHED = 0.95
"""Of two runtimes' detections: they may break ties differently."""
FRAMES = [picture(1), picture(2), picture(3, width=60, height=80)]


@pytest.fixture(scope="module", autouse=True)
def without_collection():
    """A traced network is many small objects that live to its end; collecting meanwhile takes a fifth of the time."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> EngineCache:
    return EngineCache(tmp_path_factory.mktemp("cache") / "engines")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Bundle:
    return tiny_bundle(tmp_path_factory.mktemp("bundle") / "tiny.safetensors")


class Attending(nn.Module):
    """Attention with packed projections, a layer norm."""

    def __init__(self, num_classes: int, input_size: int = SIZE) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, stride=8)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.mlp = nn.Linear(16, 16)
        self.head = nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = self.norm(tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0])
        return self.head(torch.relu(self.mlp(tokens)).mean(1))


class OneByOne(nn.Module):
    """A Python loop over the frames: the batch is a part of the graph."""

    def __init__(self, num_classes: int, input_size: int = SIZE) -> None:
        super().__init__()
        self.head = nn.Linear(3, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.head(frame[None].mean((2, 3))) for frame in x])


class Branching(OneByOne):
    """Which way it goes depends on the frame's values: no graph says so."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta and x.sum() > 0:
            return -self.head(x.mean((2, 3)))
        return self.head(x.mean((2, 3)))


def record(model: str, size: int = SIZE, query_id: str = "one", **keys) -> BundleQuery:
    defaults = {
        "task": "classification",
        "classes": ("car", "bus", "truck"),
        "model_args": {},
        "fps": None,
        "sla_ms": 100.0,
        "accuracy_target": 0.9,
    }
    return BundleQuery(
        id=query_id, camera="c", model=model, input_size=size, preprocess=Preprocess(size), **{**defaults, **keys}
    )


def bundled(
    path: Path,
    modules: dict[str, nn.Module],
    queries: list[BundleQuery],
    stored: dict[str, dict[str, PackedWeight]] | None = None,
) -> Bundle:
    write_bundle(
        path,
        {name: module.eval() for name, module in modules.items()},
        queries,
        Made("w", "none", 0),
        packed=stored,
    )
    return open_bundle(path, [query.model for query in queries if ":" in query.model])


def lively(module: nn.Module, seed: int = 0) -> nn.Module:
    """Weights and statistics that make every layer matter, biases included."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if tensor.is_floating_point() and tensor.ndim == 1:
                low = 0.6 if name.endswith(("var", "weight")) else -0.3
                tensor.copy_(torch.rand(tensor.shape, generator=random) * 0.8 + low)
    return module.eval()


def bind(engine, bundle: Bundle, arena: Arena | None = None) -> Arena:
    """Bind an engine to an arena in which all its tensors are resident."""
    names = bundle.names_in_order(engine.query.id)
    arena = arena or Arena(Store.of_bundle(bundle), 512 * 2**20)
    arena.change((), names)
    arena.bind(engine, names)
    return arena


def assert_detections_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """At least MATCHED of the detections of each have an equal in the other; runtimes may break ties differently."""
    assert {name: one.shape for name, one in found.items()} == {name: one.shape for name, one in wanted.items()}
    close = (found["boxes"][:, :, None] - wanted["boxes"][:, None]).abs().amax(-1) <= 1e-4
    close &= (found["scores"][:, :, None] - wanted["scores"][:, None]).abs() <= 1e-4
    close &= found["labels"][:, :, None] == wanted["labels"][:, None]
    for matched, scores in ((close.any(2), found["scores"]), (close.any(1), wanted["scores"])):
        assert matched[scores > 0].float().mean() >= MATCHED


def assert_answers_as_torch(bundle: Bundle, cache: EngineCache, query_id: str = "one") -> OnnxEngine:
    """Raw outputs within the tolerance for a classifier; for a detector the same detections."""
    ours, eager = OnnxEngine(bundle, query_id, cache=cache), TorchEngine(bundle, query_id)
    bind(eager, bundle, bind(ours, bundle))
    if ours.query.task == "classification":
        wanted = eager.outputs(FRAMES)
        assert torch.allclose(ours.outputs(FRAMES), wanted, rtol=TOLERANCE, atol=TOLERANCE)
        assert float((wanted[0] - wanted[1]).abs().max()) > 10 * TOLERANCE
        return ours
    got, wanted = ours.run(FRAMES), eager.run(FRAMES)
    assert wanted[0] != wanted[1]
    for one, other in zip(got, wanted, strict=True):
        assert isinstance(one, DetectionPrediction) and isinstance(other, DetectionPrediction)
        assert one.classes == other.classes and len(other.classes) > 3
        assert np.allclose(one.scores, other.scores, atol=TOLERANCE)
        assert np.allclose(one.boxes, other.boxes, atol=0.1)
    return ours


def test_onnx_classifier_matches_torch(tiny, cache):
    for query in tiny.queries:
        assert_answers_as_torch(tiny, cache, query.id)


def test_onnx_attention_matches_torch(tmp_path, cache):
    torch.manual_seed(0)
    module = lively(Attending(3))
    query = record(f"{HERE}:Attending")
    assert_answers_as_torch(bundled(tmp_path / "a.safetensors", {"one": module}, [query]), cache)


def bundled_detector(path: Path, name: str, factory: str = "") -> Bundle:
    module, side = build_lively(name)
    query = record(factory or name, side, task="detection", min_score=0.2)
    return bundled(path, {"one": module}, [query])


def two_stage(num_classes: int, input_size: int) -> nn.Module:
    """The anchors that `build_lively` gives it: with those published, scores tie in so small a frame."""
    module = zoo.build(TWO_STAGE, [str(index) for index in range(1, num_classes)], {}, input_size, "detection", "meta")
    with torch.device("cpu"):
        return untied(module, input_size)  # type: ignore[arg-type]


def test_onnx_one_stage_detector_matches_torch(tmp_path, cache):
    assert_answers_as_torch(bundled_detector(tmp_path / "d.safetensors", "ssd_resnet18"), cache)


@pytest.mark.exhaustive
def test_onnx_two_stage_detector_matches_torch_frame_by_frame(tmp_path, cache):
    bundle = bundled_detector(tmp_path / "d.safetensors", TWO_STAGE, f"{HERE}:two_stage")
    ours, eager = OnnxEngine(bundle, "one", cache=cache), TorchEngine(bundle, "one")
    bind(eager, bundle, bind(ours, bundle))
    batch = soft_frames(3, ours.query.input_size)
    with torch.inference_mode():
        got, wanted = (dict(zip(NAMES, one.forward(batch))) for one in (ours, eager))
    assert (wanted["scores"] > 0).sum() > 3
    assert_detections_close(got, wanted)
    assert all(isinstance(answer, DetectionPrediction) and answer.classes for answer in ours.run(FRAMES))
    assert ours._file is not None and ours._file.notes["batch"] == 1


@pytest.mark.parametrize("weights", ["int8", "fp16"])
def test_onnx_packed_weights_stay_packed(tmp_path, cache, weights):
    module, query = trained_looking(1), record(FACTORY, TINY_SIZE)
    stored = {key: pack(tensor, weights) for key, tensor in module.state_dict().items() if tensor.ndim == 4}  # type: ignore[arg-type]
    bundle = bundled(tmp_path / "n.safetensors", {"one": module}, [query], {"one": stored})
    engine = assert_answers_as_torch(bundle, cache)
    dtypes = {str(engine._bound[key][1].dtype) for key in stored}
    assert dtypes == {"torch.int8" if weights == "int8" else "torch.float16"}


@pytest.mark.exhaustive
def test_onnx_norms_are_not_folded_and_weights_are_shared(tmp_path, cache):
    """Changing a tensor of ResNet-50 in place changes both queries; changing one's norm changes that query alone."""
    torch.manual_seed(0)
    classes = ("car", "bus", "truck")
    models = {name: lively(zoo.build("resnet50", classes, {}, SIZE), seed) for seed, name in enumerate(("a", "b"))}
    tied = {key: tensor for key, tensor in models["a"].state_dict().items() if tensor.ndim == 4}
    models["b"].load_state_dict(tied, strict=False)
    bundle = bundled(tmp_path / "r.safetensors", models, [record("resnet50", query_id=name) for name in models])
    engines = {name: OnnxEngine(bundle, name, cache=cache) for name in models}
    arena = Arena(Store.of_bundle(bundle), 256 * 2**20)
    for engine in engines.values():
        bind(engine, bundle, arena)

    def outputs() -> dict[str, Tensor]:
        return {name: engine.outputs(FRAMES[:1]).clone() for name, engine in engines.items()}

    before, state = outputs(), {name: bundle.query(name).tensors for name in models}
    for key in tied:
        assert state["a"][key] == state["b"][key]
        weight = arena.tensor(state["a"][key])
        kept = weight.clone()
        weight.mul_(1.5)
        after = outputs()
        assert not torch.equal(after["a"], before["a"]) and not torch.equal(after["b"], before["b"]), key
        weight.copy_(kept)
    arena.tensor(state["a"]["layer2.0.bn1.weight"]).mul_(1.5)
    after = outputs()
    assert not torch.equal(after["a"], before["a"]) and torch.equal(after["b"], before["b"])


def test_onnx_queries_share_one_graph_without_weights(tiny, cache):
    engines = {name: OnnxEngine(tiny, name, cache=cache) for name in ("gate", "road", "yard")}
    for engine in engines.values():
        bind(engine, tiny)
    gate, road, yard = (engines[name]._session for name in ("gate", "road", "yard"))
    assert gate is road is yard
    file = engines["yard"]._file
    assert file is not None
    graph = onnx.load(str(file.path)).graph
    state = tiny.query("yard").tensors
    assert not state.keys() & {one.name for one in graph.initializer}
    assert sum(len(one.raw_data) for one in graph.initializer) < 1000  # shapes and axes
    left_out = {f"{norm}.num_batches_tracked" for norm in (1, 4)}
    assert {one.name for one in graph.input} == {"frames", *state} - left_out


def test_onnx_equal_tensors_are_separate_inputs(tmp_path, cache):
    """In the first bundle all biases are zeros, so one tensor; the second one's differ."""
    torch.manual_seed(0)
    for name, module in (("fresh", Attending(3)), ("used", lively(Attending(3)))):
        bundle = bundled(tmp_path / f"{name}.safetensors", {"one": module}, [record(f"{HERE}:Attending")])
        state = bundle.query("one").tensors
        assert (state["norm.bias"] == state["attention.out_proj.bias"]) == (name == "fresh")
        ours, eager = OnnxEngine(bundle, "one", cache=cache), TorchEngine(bundle, "one")
        bind(eager, bundle, bind(ours, bundle))
        assert torch.allclose(ours.outputs(FRAMES), eager.outputs(FRAMES), atol=TOLERANCE)


def test_onnx_bind_rebinds_moved_tensors_only(tiny, cache, monkeypatch):
    engine, eager = OnnxEngine(tiny, "gate", cache=cache), TorchEngine(tiny, "gate")
    arena = bind(engine, tiny)
    bind(eager, tiny, arena)
    wanted = eager.outputs(FRAMES)
    handed_over = []
    plain = OnnxEngine._bind_input
    monkeypatch.setattr(
        OnnxEngine, "_bind_input", lambda self, *args: (handed_over.append(args[0]), plain(self, *args))
    )
    engine.bind(arena.tensor)
    assert not handed_over
    arena.change(tiny.names_in_order("gate"), tiny.names_in_order("road"))
    arena.change((), tiny.names_in_order("gate"))
    arena.bind(engine, tiny.names_in_order("gate"))
    assert handed_over
    assert torch.allclose(engine.outputs(FRAMES), wanted, rtol=TOLERANCE, atol=TOLERANCE)


def test_onnx_graph_is_exported_once(tiny, cache, monkeypatch):
    OnnxEngine(tiny, "gate", cache=cache).prepare()
    monkeypatch.setattr("edge_runtime.engines.onnx.write_graph", None)
    again = OnnxEngine(tiny, "gate", cache=EngineCache(cache.folder))
    again.prepare()
    assert again._file is not None and again._file.notes["batch"] == "dynamic"


def test_onnx_workspace_grows_with_the_batch(tmp_path, cache):
    torch.manual_seed(0)
    module = zoo.build("resnet50", ("car", "bus", "truck"), {}, SIZE)
    bundle = bundled(tmp_path / "r.safetensors", {"one": module}, [record("resnet50")])
    engine = OnnxEngine(bundle, "one", cache=cache)
    estimated = engine.workspace_of(1)
    engine.prepare()
    assert engine._file is not None and [int(batch) for batch in engine._file.notes["workspace"]] == [1, 4]
    assert engine.workspace_of(1) > estimated / 2
    assert engine.workspace_of(1) <= engine.workspace_of(4) <= engine.workspace_of(8)


def test_onnx_model_with_fixed_batch_runs_frame_by_frame(tmp_path, cache):
    torch.manual_seed(0)
    bundle = bundled(tmp_path / "o.safetensors", {"one": OneByOne(3)}, [record(f"{HERE}:OneByOne")])
    engine = assert_answers_as_torch(bundle, cache)
    assert engine._file is not None and engine._file.notes["batch"] == 1


def test_onnx_model_without_a_graph_is_refused(tmp_path, cache):
    bundle = bundled(tmp_path / "b.safetensors", {"one": Branching(3)}, [record(f"{HERE}:Branching")])
    with pytest.raises(EngineError, match="it cannot be exported") as refused:
        OnnxEngine(bundle, "one", cache=cache).prepare()
    assert "\n" not in str(refused.value)
