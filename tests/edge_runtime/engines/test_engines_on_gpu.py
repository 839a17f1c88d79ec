"""What engines do otherwise on a GPU, as far as it can be seen without one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from edge_runtime.engines import base, compiled, onnx, setup
from edge_runtime.engines.base import EngineError, measure_workspace
from edge_runtime.engines.compiled import BatchRange, CompiledEngine
from edge_runtime.engines.registry import ENGINES
from edge_runtime.engines.setup import common_format, engines_for
from edge_runtime.engines.torch_engine import TorchEngine
from edge_runtime.memory.store import WeightFormat
from models.bundle import Bundle
from models.device import disable_tf32
from models.errors import InputError
from tests.edge_runtime.tiny import picture, tiny_bundle


@pytest.fixture
def bundle(tmp_path, monkeypatch) -> Bundle:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tiny_bundle(tmp_path / "tiny.safetensors")


def test_run_uploads_frames_before_work_beside_it(bundle):
    happened = []

    class RecordingEngine(TorchEngine):
        def _upload(self, batch):
            happened.append("upload")
            return super()._upload(batch)

        def forward(self, batch):
            happened.append("forward")
            return super().forward(batch)

    class Queued(RecordingEngine):
        @property
        def queues_whole_runs(self):
            return True

    engine = RecordingEngine(bundle, "gate")
    arena = setup.resident_arena(bundle, {"gate": engine})
    assert engine.run([picture(0)], lambda: happened.append("prefetch"))
    assert happened == ["upload", "prefetch", "forward"]
    happened.clear()
    arena.unbind(engine)
    queued = Queued(bundle, "gate")
    queued.bind(arena.tensor)
    assert queued.run([picture(0)], lambda: happened.append("prefetch"))
    assert happened == ["upload", "forward", "prefetch"], "host work beside a queued run does not delay it"
    arena.close()


def test_onnx_cuda_gets_the_compute_stream_and_frees_its_pool(monkeypatch, tmp_path):
    monkeypatch.setattr(onnx, "compute_stream", lambda device: SimpleNamespace(cuda_stream=4711 + device.index))
    gpu = torch.device("cuda", 1)
    options = onnx.provider_options(onnx.CUDA, tmp_path, gpu)
    assert (options["user_compute_stream"], options["device_id"], options["use_tf32"]) == ("4712", "1", "1")
    with disable_tf32():
        assert onnx.provider_options(onnx.CUDA, tmp_path, gpu)["use_tf32"] == "0", "as torch computes"
    options = onnx.provider_options(onnx.TENSORRT, tmp_path / "graph.onnx", gpu)
    assert options["trt_engine_cache_path"] == str(tmp_path) and options["user_compute_stream"] == "4712"
    run = onnx.run_options(gpu)
    assert run.get_run_config_entry("memory.enable_memory_arena_shrinkage") == "gpu:1"


def test_compiled_on_gpu_needs_cuda_headers(monkeypatch):
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None if name == "nvcc" else f"/usr/bin/{name}")
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(compiled.os.path, "exists", lambda path: False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    assert "CUDA_HOME is not set" in str(CompiledEngine.missing("cuda")) and CompiledEngine.missing("cpu") is None
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda")
    assert CompiledEngine.missing("cuda") is None


def test_compile_package_that_fails_to_run_is_an_engine_error(bundle, monkeypatch, tmp_path):
    def verify(*_):
        raise RuntimeError("run_func_( ... ) API call failed")

    signature = SimpleNamespace(inputs_to_parameters={}, inputs_to_buffers={})
    program = SimpleNamespace(constants={}, state_dict={}, graph_signature=signature, graph=SimpleNamespace(nodes=[]))
    monkeypatch.setattr(torch.export, "export", lambda *_, **__: program)
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", lambda *_, **__: None)
    package = SimpleNamespace(get_constant_fqns=list)
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda *_, **__: package)
    monkeypatch.setattr(compiled, "verify_package", verify)
    with pytest.raises(EngineError, match="API call failed"):
        compiled.compile_package(
            bundle, bundle.query("gate"), torch.device("cpu"), BatchRange.ANY, tmp_path / "made.pt2"
        )


class Hungry(TorchEngine):
    name = "hungry"
    formats = frozenset({WeightFormat.STORED})

    def forward(self, batch):
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.fixture
def engines(monkeypatch):
    """Registers engines by name in place of the real ones."""

    def register(**kinds):
        for name in list(ENGINES):
            monkeypatch.delitem(ENGINES, name)
        for name, kind in kinds.items():
            monkeypatch.setitem(ENGINES, name, (kind.__module__, kind.__qualname__))

    return register


def test_measure_engines_without_memory_for_one_leaves_it_out(bundle, engines, caplog):
    caplog.set_level("INFO", "gemel.run")
    engines(torch=TorchEngine, hungry=Hungry)
    assert set(setup.measure_engines(bundle, "gate", "cpu", ["torch", "hungry"])) == {"torch"}
    assert set(setup.choose_engines(bundle).values()) == {"torch"}
    assert "engine hungry cannot run" in caplog.text


def test_measure_engines_without_memory_for_torch_is_refused(bundle, engines):
    engines(torch=Hungry, quick=TorchEngine)
    with pytest.raises(InputError, match="could not be measured"):
        setup.choose_engines(bundle)


def test_engines_for_without_memory_to_prepare_falls_back_to_torch(bundle, engines, monkeypatch, caplog):
    def prepare(_self):
        raise torch.OutOfMemoryError("CUDA out of memory")

    engines(torch=TorchEngine, hungry=Hungry)
    monkeypatch.setattr(Hungry, "prepare", prepare)
    assert {engine.name for engine in engines_for(bundle, "hungry").values()} == {"torch"}
    assert "CUDA out of memory; engine torch does" in caplog.text


class OnCard(TorchEngine):
    formats = frozenset({WeightFormat.STORED, WeightFormat.CHANNELS_LAST})


class Fussy(OnCard):
    formats = frozenset({WeightFormat.CHANNELS_LAST})


def test_common_format_where_weights_arrive_reordered_is_channels_last(bundle, engines, monkeypatch):
    engine, request = OnCard(bundle, "gate"), setup.EngineRequest(stays=False)
    engines(torch=OnCard, fussy=Fussy)
    assert common_format([engine], stays=False) == WeightFormat.STORED and not request.loads_fast("fussy")
    monkeypatch.setattr(setup, "arrives_reordered", lambda _: True)
    assert common_format([engine], stays=False) == WeightFormat.CHANNELS_LAST and request.loads_fast("fussy")


def test_workspace_on_gpu_is_at_least_what_was_measured(bundle, monkeypatch):
    engine = TorchEngine(bundle, "gate")
    on_paper, size = engine.workspace_of(2), engine.query.input_size
    seen = measure_workspace(engine.model, size, 2, torch.device("cpu"))
    assert on_paper / 2 < seen < 3 * on_paper, "the architecture alone was run, with no weight of the bundle"
    asked = []
    monkeypatch.setattr(base, "measure_workspace", lambda *what: asked.append(what[1:]) or on_paper + 4096)
    engine.device = torch.device("cuda")
    assert engine.workspace_of(2) == engine.workspace_of(2) == on_paper + 4096
    assert asked == [(size, 2, torch.device("cuda"))]
    base._WORKSPACES.clear()


def test_measure_workspace_is_channels_last_and_skipped_within_a_limit(monkeypatch):
    seen = []

    class RecordingConv(nn.Conv2d):
        def forward(self, frames):
            seen.append((frames, self.weight))
            return super().forward(frames)

    network = nn.Sequential(RecordingConv(3, 4, 3, device="meta"), RecordingConv(4, 4, 3, device="meta"))
    assert measure_workspace(network, 8, 2, torch.device("cpu"))
    assert seen and all(one.is_contiguous(memory_format=torch.channels_last) for pair in seen for one in pair)
    asked, tried = [], []
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: asked.append(device) or 0.5)
    monkeypatch.setattr(base, "on_compute_stream", lambda _device: tried.append("tried"))
    assert measure_workspace(network, 8, 2, torch.device("cuda", 1)) == 0 and asked == [1] and not tried
