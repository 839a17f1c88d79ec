"""ONNX Runtime as an engine: it answers as torch does, over tensors of the arena that it never copies."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx as onnx_format
import pytest
import torch
from torch import Tensor, nn

from edge_runtime.engines import onnx
from edge_runtime.engines.base import EngineError
from edge_runtime.engines.onnx import CUDA, OnnxEngine, TensorrtEngine, session_for
from edge_runtime.engines.package_cache import EngineCache
from edge_runtime.engines.session import open_sessions
from edge_runtime.engines.torch_engine import TorchEngine
from models.bundle import Bundle
from models.device import disable_tf32
from models.predictions import DetectionPrediction
from tests.edge_runtime.engines.sample_bundles import (
    ATTENDING,
    bind,
    build_model,
    make_query,
    pack_weights,
    write_and_open,
)
from tests.edge_runtime.tiny import FACTORY, SIZE, picture, tiny_bundle, trained_looking

HERE = "tests.edge_runtime.engines.test_onnx"
TOLERANCE = 1e-3
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


class OneByOne(nn.Module):
    """A Python loop over the frames: the batch is a part of the graph."""

    def __init__(self, num_classes: int, input_size: int = SIZE) -> None:
        super().__init__()
        self.head = nn.Linear(3, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.head(frame[None].mean((2, 3))) for frame in x])


class Branching(OneByOne):
    """Its path depends on the frame's values, which no graph expresses."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta and x.sum() > 0:
            return -self.head(x.mean((2, 3)))
        return self.head(x.mean((2, 3)))


def write_one(path: Path, model: str, module: nn.Module, size: int = SIZE, packed=None, **keys) -> Bundle:
    return write_and_open(path / "b.safetensors", {"one": module}, [make_query("one", model, size, **keys)], packed)


def bind_both(bundle: Bundle, cache: EngineCache, query: str = "one") -> tuple[OnnxEngine, TorchEngine]:
    engine, eager = OnnxEngine(bundle, query, cache=cache), TorchEngine(bundle, query)
    bind(eager, bundle, bind(engine, bundle))
    return engine, eager


def assert_answers_as_torch(bundle: Bundle, cache: EngineCache, query: str = "one") -> OnnxEngine:
    """Raw outputs within the tolerance for a classifier; for a detector the same detections. So does a session."""
    engine, eager = bind_both(bundle, cache, query)
    (session,) = open_sessions(bundle, [query], cache=cache)
    for one in (engine, session[query]):
        if engine.query.task == "classification":
            expected = eager.outputs(FRAMES)
            assert torch.allclose(one.outputs(FRAMES), expected, rtol=TOLERANCE, atol=TOLERANCE)
            assert float((expected[0] - expected[1]).abs().max()) > 10 * TOLERANCE
            continue
        for found, expected in zip(one.run(FRAMES), eager.run(FRAMES), strict=True):
            assert isinstance(found, DetectionPrediction) and isinstance(expected, DetectionPrediction)
            assert found.classes == expected.classes and len(expected.classes) > 3
            assert np.allclose(found.scores, expected.scores, atol=TOLERANCE)
            assert np.allclose(found.boxes, expected.boxes, atol=0.1)
    return engine


def test_onnx_classifier_matches_torch(tiny, cache):
    for query in tiny.queries:
        assert_answers_as_torch(tiny, cache, query.id)


def test_onnx_attention_matches_torch_where_equal_tensors_are_separate_inputs(tmp_path, cache):
    """In a fresh model all biases are zeros, so one tensor, which a graph of another model must not assume."""
    torch.manual_seed(0)
    model = build_model(ATTENDING, SIZE)
    with torch.no_grad():
        for bias in (model.get_parameter("norm.bias"), model.get_parameter("attention.out_proj.bias")):
            bias.zero_()
    for each in (model, build_model(ATTENDING, SIZE, seed=1)):
        (folder := tmp_path / str(len(list(tmp_path.iterdir())))).mkdir()
        bundle = write_one(folder, ATTENDING, each)
        tensors = bundle.query("one").tensors
        assert (tensors["norm.bias"] == tensors["attention.out_proj.bias"]) == (each is model)
        assert_answers_as_torch(bundle, cache)


def test_onnx_one_stage_detector_matches_torch(tmp_path, cache):
    bundle = write_one(tmp_path, "ssd_resnet18", build_model("ssd_resnet18", 64), 64, min_score=0.2)
    assert_answers_as_torch(bundle, cache)


@pytest.mark.exhaustive
def test_onnx_two_stage_detector_runs_frame_by_frame(tmp_path, cache):
    """Its boxes are compared in benchmarks/engines/onnx_zoo.py: of random weights many scores tie."""
    name = "fasterrcnn_mobilenet_v3_large_320_fpn"
    engine = OnnxEngine(write_one(tmp_path, name, build_model(name, 64), 64), "one", cache=cache)
    bind(engine, engine._bundle)
    assert len(engine.run(FRAMES)) == 3 and engine._file is not None and engine._file.notes["batch"] == 1


@pytest.mark.parametrize("weights", ["int8", "fp16"])
def test_onnx_packed_weights_stay_packed(tmp_path, cache, weights):
    module = trained_looking(1)
    packed = {key: one for key, one in pack_weights(module, weights, least=True).items() if key.endswith("weight")}
    engine = assert_answers_as_torch(write_one(tmp_path, FACTORY, module, packed={"one": packed}), cache)
    dtypes = {str(engine._bound[key].dtype) for key in packed}
    assert dtypes == {"torch.int8" if weights == "int8" else "torch.float16"}


@pytest.mark.exhaustive
def test_onnx_norms_are_not_folded_and_weights_are_shared(tmp_path, cache):
    """Changing a tensor of ResNet-50 in place changes both queries; changing one's norm changes that query alone."""
    models = {name: build_model("resnet50", 32, seed) for seed, name in enumerate(("a", "b"))}
    shared = {key: tensor for key, tensor in models["a"].state_dict().items() if tensor.ndim == 4}
    models["b"].load_state_dict(shared, strict=False)
    bundle = write_and_open(tmp_path / "r", models, [make_query(name, "resnet50", 32) for name in models])
    engines = {name: OnnxEngine(bundle, name, cache=cache) for name in models}
    arena = None
    for engine in engines.values():
        arena = bind(engine, bundle, arena)
    assert arena is not None

    def find_changed() -> set[str]:
        return {name for name, one in engines.items() if not torch.equal(one.outputs(FRAMES[:1]), before[name])}

    before = {name: engine.outputs(FRAMES[:1]).clone() for name, engine in engines.items()}
    tensors = bundle.query("a").tensors
    for key in shared:
        weight = arena.tensor(tensors[key])
        original = weight.clone()
        weight.mul_(1.5)
        assert find_changed() == {"a", "b"}, key
        weight.copy_(original)
    arena.tensor(tensors["layer2.0.bn1.weight"]).mul_(1.5)
    assert find_changed() == {"a"}


def test_onnx_queries_share_one_graph_without_weights(tiny, cache, monkeypatch):
    engines = {name: OnnxEngine(tiny, name, cache=cache) for name in ("gate", "road", "yard")}
    for engine in engines.values():
        bind(engine, tiny)
        monkeypatch.setattr(onnx, "write_graph", None)  # it is exported once
    gate, road, yard = engines.values()
    assert gate._session is road._session is yard._session
    assert gate._file is not None and gate._file.notes["batch"] == "dynamic"
    graph = onnx_format.load(str(gate._file.path)).graph
    state = tiny.query("gate").tensors
    assert not state.keys() & {one.name for one in graph.initializer}
    assert sum(len(one.raw_data) for one in graph.initializer) < 1000  # shapes and axes
    counters = {f"{norm}.num_batches_tracked" for norm in (1, 4)}
    assert {one.name for one in graph.input} == {"frames", *state} - counters


def test_onnx_bind_rebinds_moved_tensors_only(tiny, cache, monkeypatch):
    engine, eager = bind_both(tiny, cache, "gate")
    expected, gate, road = eager.outputs(FRAMES), tiny.names_in_order("gate"), tiny.names_in_order("road")
    arena = bind(engine, tiny)
    rebound, plain = [], OnnxEngine._bind_input
    monkeypatch.setattr(OnnxEngine, "_bind_input", lambda self, *args: (rebound.append(args[0]), plain(self, *args)))
    engine.bind(arena.tensor)
    assert not rebound
    arena.change(gate, road)
    arena.change((), gate)
    arena.bind(engine, gate)
    assert rebound and torch.allclose(engine.outputs(FRAMES), expected, rtol=TOLERANCE, atol=TOLERANCE)
    engine.unbind()
    with pytest.raises(RuntimeError, match="bind comes before"):
        engine.outputs(FRAMES)


def test_onnx_workspace_grows_with_the_batch(tmp_path, cache):
    engine = OnnxEngine(write_one(tmp_path, "resnet50", build_model("resnet50", 32), 32), "one", cache=cache)
    estimated = engine.workspace_of(1)
    engine.prepare()
    assert engine._file is not None and [int(batch) for batch in engine._file.notes["workspace"]] == [1, 4]
    assert estimated / 2 < engine.workspace_of(1) <= engine.workspace_of(4) <= engine.workspace_of(8)


def test_onnx_model_with_fixed_batch_runs_frame_by_frame(tmp_path, cache):
    engine = assert_answers_as_torch(write_one(tmp_path, f"{HERE}:OneByOne", OneByOne(3)), cache)
    assert engine._file is not None and engine._file.notes["batch"] == 1


def test_onnx_model_without_a_graph_is_refused(tmp_path, cache):
    bundle = write_one(tmp_path, f"{HERE}:Branching", Branching(3))
    with pytest.raises(EngineError, match="it cannot be exported") as refused:
        OnnxEngine(bundle, "one", cache=cache).prepare()
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_onnx_without_its_provider_is_an_engine_error(tiny, cache, tmp_path, monkeypatch):
    engine, gpu = OnnxEngine(tiny, "gate", cache=cache), torch.device("cuda", 0)
    engine.prepare()
    assert engine._file is not None
    with pytest.raises(EngineError, match=r"cannot use CUDAExecutionProvider: this onnxruntime has no"):
        session_for(engine._file.path, CUDA, gpu)
    with pytest.raises(EngineError, match="does not run on cpu"):
        TensorrtEngine(tiny, "gate").prepare()
    monkeypatch.setattr(onnx, "unavailable_reason", lambda provider: None)
    monkeypatch.setattr(onnx, "provider_options", lambda *_: {})
    with pytest.raises(EngineError, match="its libraries did not load"), pytest.warns(UserWarning, match="not in"):
        session_for(engine._file.path, CUDA, gpu)
    (tmp_path / "no.onnx").write_bytes(b"no graph")
    with pytest.raises(EngineError, match="cannot use CPUExecutionProvider"):
        session_for(tmp_path / "no.onnx", onnx.CPU, torch.device("cpu"))


def test_onnx_on_gpu_gets_the_compute_stream_and_frees_its_pool(monkeypatch, tmp_path):
    monkeypatch.setattr(onnx, "compute_stream", lambda device: SimpleNamespace(cuda_stream=4711 + device.index))
    gpu = torch.device("cuda", 1)
    options = onnx.provider_options(CUDA, tmp_path, gpu)
    assert (options["user_compute_stream"], options["device_id"], options["use_tf32"]) == ("4712", "1", "1")
    with disable_tf32():
        assert onnx.provider_options(CUDA, tmp_path, gpu)["use_tf32"] == "0", "as torch computes"
    options = onnx.provider_options(onnx.TENSORRT, tmp_path / "graph.onnx", gpu)
    assert options["trt_engine_cache_path"] == str(tmp_path) and options["user_compute_stream"] == "4712"
    run = onnx.run_options(gpu)
    assert run.get_run_config_entry("memory.enable_memory_arena_shrinkage") == "gpu:1"
