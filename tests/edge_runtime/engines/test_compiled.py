"""Networks compiled without their weights: equal outputs, one package per architecture, nothing of a query inside."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from edge_runtime.daemon import run
from edge_runtime.engines import compiled, package_cache
from edge_runtime.engines.base import EngineError
from edge_runtime.engines.compiled import BatchRange, CompiledEngine
from edge_runtime.engines.registry import make_engine
from edge_runtime.engines.setup import engines_for
from edge_runtime.memory.store import Store, channels_last_layouts
from models.device import is_out_of_memory
from models.predictions import DetectionPrediction
from tests.edge_runtime.engines.sample_bundles import bind, build_model, make_query, write_and_open
from tests.edge_runtime.tiny import picture, tiny_bundle, write_clip, write_config, write_folder

pytestmark = pytest.mark.skipif(compiled.find_compiler() is None, reason="there is no C++ compiler here")
PICTURES = [picture(seed) for seed in range(3)]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Packages of these tests, in a folder of their own."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder / "gemel" / "engines"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    torch.set_num_threads(1)
    return tiny_bundle(tmp_path_factory.mktemp("bundle") / "tiny.safetensors")


def channels_last(bundle):
    return channels_last_layouts(Store.of_bundle(bundle).kinds)


def forbidden(*_args):
    raise AssertionError("compiled once more")


def fake_compiler(monkeypatch) -> list[str]:
    """Packages of a few bytes instead of compiled ones; the queries that one is made for from now on."""
    made: list[str] = []

    def compile_apart(_bundle, query, _device, batches, path, _folder):
        made.append(f"{query.id} {batches.value}")
        path.write_bytes(b"code")
        return {"workspace": {"1": 7} if batches.takes(1) else {"2": 9}, "constants": {}}

    monkeypatch.setattr(compiled, "compile_apart", compile_apart)
    return made


@pytest.mark.exhaustive
def test_compiled_two_queries_of_one_architecture_share_a_package_and_match_eager(bundle, monkeypatch):
    for query in ("gate", "road"):
        engine, eager = (make_engine(name, bundle, query) for name in ("compiled", "torch"))
        engine.prepare()
        bind(eager, bundle, bind(engine, bundle, layouts=channels_last(bundle)))
        for count in (1, 2, 3):
            frames = PICTURES[:count]
            assert torch.allclose(engine.outputs(frames), eager.outputs(frames), rtol=1e-3, atol=1e-3)
            found: list[Any] = [*engine.run(frames)]
            expected: list[Any] = [*eager.run(frames)]
            assert [one.label for one in found] == [one.label for one in expected]
        assert engine.workspace_of(1) < engine.workspace_of(3) <= engine.workspace_of(4) < engine.workspace_of(16)
        monkeypatch.setattr(compiled, "compile_apart", forbidden)


def test_compiled_damaged_package_is_compiled_again(bundle, tmp_path, monkeypatch):
    made = fake_compiler(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    make_engine("compiled", bundle, "gate").prepare()
    again = make_engine("compiled", bundle, "gate")
    again.prepare()
    assert again.workspace_bytes == 7 and made == ["gate any"]
    (package,) = (tmp_path / "gemel" / "engines").glob("*.pt2")
    package.write_bytes(b"cod")
    make_engine("compiled", bundle, "gate").prepare()
    assert package.read_bytes() == b"code" and made == ["gate any"] * 2


def test_compiled_on_gpu_has_a_package_for_one_frame_and_one_for_several(bundle, tmp_path, monkeypatch):
    made, bound = fake_compiler(monkeypatch), []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(CompiledEngine, "missing", classmethod(lambda cls, device: None))
    monkeypatch.setattr(package_cache, "machine_key", lambda device: {})
    engine = CompiledEngine(bundle, "gate", "cuda")
    engine.prepare()
    assert sorted(made) == ["gate many", "gate one"] and (engine.workspace_of(1), engine.workspace_of(2)) == (7, 9)

    class Package:
        def __init__(self, path):
            self.path = path

        def get_constant_fqns(self):
            return [f"network.{key}" for key in bundle.query("gate").tensors]

        def load_constants(self, constants, **_options):
            bound.append(len(constants))

        def __call__(self, batch):
            return [torch.full((len(batch), 1), float(str(engine._files[BatchRange.MANY].path) == self.path))]

    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path, **_: Package(path))
    bind(engine, bundle)
    monkeypatch.setattr(compiled, "report_out_of_memory", lambda device: nullcontext())
    assert bound == [len(bundle.query("gate").tensors)] * 2
    assert engine.forward(torch.zeros(1, 3)).tolist() == [[0.0]]
    assert engine.forward(torch.zeros(2, 3)).tolist() == [[1.0], [1.0]]


def test_compile_apart_that_crashes_is_an_engine_error(bundle, tmp_path, monkeypatch):
    crash = "import faulthandler; faulthandler.enable(); faulthandler._sigsegv()"
    monkeypatch.setattr(compiled, "COMPILE", crash)
    query, device = bundle.query("gate"), torch.device("cpu")
    with pytest.raises(EngineError, match=r"ended with -11: Fatal Python error: Segmentation fault"):
        compiled.compile_apart(bundle, query, device, BatchRange.ANY, tmp_path / "made.pt2", tmp_path)


def test_compiled_reads_every_tensor_from_the_arena(bundle):
    """Vectors of a few values (a head's bias) could be written into the code, and weights folded: none may be."""
    engine, eager = (make_engine(name, bundle, "gate") for name in ("compiled", "torch"))
    arena = bind(engine, bundle, layouts=channels_last(bundle))
    arena.change(bundle.names_in_order("gate"), bundle.names_in_order("road"))
    bind(eager, bundle, bind(engine, bundle, arena))
    assert torch.allclose(engine.outputs(PICTURES), eager.outputs(PICTURES), rtol=1e-3, atol=1e-3)
    before = engine.outputs(PICTURES[:1]).clone()
    for path, name in bundle.query("gate").tensors.items():
        tensor = arena.tensor(name)
        if tensor.is_floating_point():
            kept = tensor.clone()
            tensor.mul_(1.5).add_(0.1)
            assert not torch.equal(engine.outputs(PICTURES[:1]), before), path
            tensor.copy_(kept)
            assert torch.equal(engine.outputs(PICTURES[:1]), before), path
    engine.unbind()
    with pytest.raises(RuntimeError, match="bind comes before"):
        engine.outputs(PICTURES[:1])


def test_compiled_check_compiles_nothing_and_a_failed_compilation_falls_back(bundle, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "gemel.run")
    tiny_bundle(tmp_path / "tiny.safetensors")
    write_clip(tmp_path / "left.mp4", 4)
    write_folder(tmp_path / "right", 4)
    monkeypatch.setattr(compiled, "compile_apart", forbidden)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    for engine in ("compiled", "auto"):
        assert run(write_config(tmp_path, engine=engine), check=True)["engine"] == engine
    assert not (tmp_path / "none").exists()

    def refuse(*_args):
        raise EngineError("it cannot be compiled: no reason")

    monkeypatch.setattr(compiled, "compile_apart", refuse)
    summary = run(write_config(tmp_path, engine="compiled"))
    assert summary["balanced"] and set(summary["engines"].values()) == {"torch"}
    warnings = [record.message for record in caplog.records if "cannot run" in record.message]
    assert warnings == [
        "engine compiled cannot run tests.edge_runtime.tiny:net: it cannot be compiled: no reason; engine torch does"
    ]


def test_compiled_without_a_compiler_falls_back_to_torch(bundle, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "/no/such/compiler")
    engines = engines_for(bundle, "compiled")
    assert {engine.name for engine in engines.values()} == {"torch"}
    assert caplog.text.count("no C++ compiler") == 1


def open_detector(tmp_path, model: str):
    return write_and_open(tmp_path / "d.safetensors", {"only": build_model(model, 96)}, [make_query("only", model, 96)])


def test_compiled_two_stage_detector_is_refused(tmp_path):
    engine = make_engine("compiled", open_detector(tmp_path, "fasterrcnn_mobilenet_v3_large_320_fpn"), "only")
    with pytest.raises(EngineError, match="second stage depends"):
        engine.prepare()


@pytest.mark.exhaustive
def test_compiled_detector_matches_eager(tmp_path):
    bundle = open_detector(tmp_path, "fastestdet")
    engine, eager = (make_engine(name, bundle, "only") for name in ("compiled", "torch"))
    bind(eager, bundle, bind(engine, bundle, layouts=channels_last(bundle)))
    frame = picture(3, width=120, height=100)
    found, wanted = engine.run([frame])[0], eager.run([frame])[0]
    assert isinstance(found, DetectionPrediction) and isinstance(wanted, DetectionPrediction)
    assert wanted.boxes and found.classes == wanted.classes
    assert found.scores == pytest.approx(wanted.scores, abs=1e-3)
    for box, other in zip(found.boxes, wanted.boxes, strict=True):
        assert box == pytest.approx(other, abs=0.1)


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


@pytest.mark.parametrize("refused", [0, 1])
def test_out_of_memory_in_compiled_code_is_recognised(monkeypatch, refused):
    counts = iter([3, 3 + refused])
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _device: {"num_ooms": next(counts)})
    with pytest.raises(RuntimeError) as raised, compiled.report_out_of_memory(torch.device("cuda")):
        raise RuntimeError("run_func_( ... ) API call failed at model_container_runner.cpp, line 144")
    assert is_out_of_memory(raised.value) == bool(refused)
