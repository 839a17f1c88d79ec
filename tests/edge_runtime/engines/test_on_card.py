"""What engines do otherwise on a card, as far as it can be seen without one."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from edge_runtime.engines import base, compiled, setup
from edge_runtime.engines import base as workspace
from edge_runtime.engines import onnx as onnx_engine
from edge_runtime.engines import onnx as onnx_session
from edge_runtime.engines.base import EngineError, measure_workspace
from edge_runtime.engines.compiled import BatchRange, CompiledEngine
from edge_runtime.engines.registry import ENGINES
from edge_runtime.engines.setup import common_format, engines_for
from edge_runtime.engines.torch_engine import TorchEngine
from edge_runtime.memory.memory_format import WeightFormat
from models import preprocess
from models.bundle import Bundle
from models.device import disable_tf32
from models.errors import InputError
from models.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from tests.edge_runtime.tiny import picture, tiny_bundle


@pytest.fixture
def bundle(tmp_path, monkeypatch) -> Bundle:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tiny_bundle(tmp_path / "tiny.safetensors")


def test_frames_are_on_their_way_before_anything_else_is_copied_and_before_anything_is_computed(bundle):
    happened = []

    class Watched(TorchEngine):
        def _upload(self, batch):
            happened.append("upload")
            return super()._upload(batch)

        def forward(self, batch):
            happened.append("forward")
            return super().forward(batch)

    class Queued(Watched):
        queues_whole_runs = True

    engine = Watched(bundle, "gate")
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


def test_mean_and_deviation_stay_on_a_card(monkeypatch):
    made = []
    plain = preprocess._constants
    monkeypatch.setattr(preprocess, "_constants", lambda *what: made.append(what) or plain(*what))
    preprocess._kept.cache_clear()
    frames, prepare = torch.randint(0, 256, (1, 3, 4, 4), dtype=torch.uint8), Preprocess(4)
    expected = prepare.normalise(frames)
    on_card = SimpleNamespace(is_cuda=True, device=frames.device, to=frames.to)
    for _ in range(3):
        assert torch.equal(prepare.normalise(on_card), expected)  # type: ignore[arg-type]
    assert made == [(IMAGENET_MEAN, IMAGENET_STD, frames.device)] * 2, "once on the CPU, once for the card"
    preprocess._kept.cache_clear()


def test_onnx_runtime_is_given_a_stream_of_ours_and_its_pool_is_emptied_after_each_run(monkeypatch):
    monkeypatch.setattr(onnx_session, "compute_stream", lambda device: SimpleNamespace(cuda_stream=4711 + device.index))
    (_, options), _ = onnx_session.providers_from(onnx_session.CUDA, None, torch.device("cuda", 1))  # type: ignore[arg-type]
    assert options["user_compute_stream"] == "4712" and options["device_id"] == "1" and options["use_tf32"] == "1"
    with disable_tf32():
        (_, options), _ = onnx_session.providers_from(onnx_session.CUDA, None, torch.device("cuda", 1))  # type: ignore[arg-type]
    assert options["use_tf32"] == "0", "as torch computes"
    run = onnx_session._run_options(torch.device("cuda", 1))
    assert run.get_run_config_entry("memory.enable_memory_arena_shrinkage") == "gpu:1"
    with pytest.raises(Exception, match=r"shrinkage|not found|exist"):
        onnx_session._run_options(torch.device("cpu")).get_run_config_entry("memory.enable_memory_arena_shrinkage")


def test_onnx_takes_its_frames_on_the_stream_it_runs_on(bundle, monkeypatch):
    happened = []

    @contextmanager
    def computing(device):
        happened.append(f"on {device}")
        yield
        happened.append("off")

    class Recorded(torch.Tensor):
        def contiguous(self, *args, **kwargs):
            happened.append("contiguous")
            return torch.Tensor.contiguous(self.as_subclass(torch.Tensor))

    monkeypatch.setattr(onnx_engine, "on_compute_stream", computing)
    engine = onnx_engine.OnnxEngine(bundle, "gate")
    arena = setup.resident_arena(bundle, {"gate": engine})
    size = engine.query.input_size
    engine.forward(torch.zeros(1, 3, size, size).as_subclass(Recorded))
    assert happened == ["on cpu", "contiguous", "off"]
    arena.close()


def test_packages_are_compared_with_products_computed_in_full(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)

    class Package:
        def get_constant_fqns(self):
            return []

        def load_constants(self, *_args, **_options):
            seen.append((torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32))

        def __call__(self, frames):
            raise ValueError("whatever happens")

    with pytest.raises(ValueError, match="whatever"):
        compiled.verify_package(compiled._FlatOutputs(nn.Identity()), Package(), torch.zeros(2, 3, 4, 4), (1,), {})
    assert seen == [(False, False)] and torch.backends.cudnn.allow_tf32


def test_compiled_code_for_a_card_needs_the_headers_of_cuda(monkeypatch):
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None if name == "nvcc" else f"/usr/bin/{name}")
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(compiled.os.path, "exists", lambda path: False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    assert "CUDA_HOME is not set" in str(CompiledEngine.missing("cuda")) and CompiledEngine.missing("cpu") is None
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda")
    assert CompiledEngine.missing("cuda") is None


def test_compiled_code_that_fails_as_it_is_tried_is_no_engine_and_no_fault_of_the_box(bundle, monkeypatch, tmp_path):
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
    assert common_format([engine], stays=False) == WeightFormat.STORED and not request.allows("gate", "fussy")
    monkeypatch.setattr(setup, "arrives_reordered", lambda _: True)
    assert common_format([engine], stays=False) == WeightFormat.CHANNELS_LAST and request.allows("gate", "fussy")


def test_a_cards_workspace_is_what_its_allocator_saw_where_that_is_more(bundle, monkeypatch):
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


def test_what_onnx_runtime_takes_on_a_card_is_counted_no_less_than_what_torch_does(bundle, monkeypatch):
    engine = onnx_engine.OnnxEngine(bundle, "gate", "cuda")
    engine._file = SimpleNamespace(notes={"workspace": {"1": 2**20, "4": 2**22}})  # type: ignore[assignment]
    monkeypatch.setattr(base, "measure_workspace", lambda *_: 2**21)
    assert (engine.workspace_of(1), engine.workspace_of(4)) == (2**21, 2**22)
    engine.device = torch.device("cpu")
    assert engine.workspace_of(1) == 2**20
    base._WORKSPACES.clear()


def test_where_there_is_no_memory_to_try_the_workspace_stays_what_it_is_on_paper():
    class Vast(nn.Module):
        def forward(self, frames):
            raise torch.OutOfMemoryError("CUDA out of memory")

    assert measure_workspace(Vast(), 8, 1, torch.device("cpu")) == 0


def test_a_workspace_is_tried_as_frames_and_weights_lie_and_not_beside_a_box_that_serves_within_a_limit(monkeypatch):
    seen = []

    class Watched(nn.Conv2d):
        def forward(self, frames):
            seen.append((frames, self.weight))
            return super().forward(frames)

    network = nn.Sequential(Watched(3, 4, 3, device="meta"), Watched(4, 4, 3, device="meta"))
    assert measure_workspace(network, 8, 2, torch.device("cpu"))
    assert seen and all(one.is_contiguous(memory_format=torch.channels_last) for pair in seen for one in pair)
    asked, tried = [], []
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: asked.append(device) or 0.5)
    monkeypatch.setattr(workspace, "on_compute_stream", lambda _device: tried.append("tried"))
    assert measure_workspace(network, 8, 2, torch.device("cuda", 1)) == 0 and asked == [1] and not tried
