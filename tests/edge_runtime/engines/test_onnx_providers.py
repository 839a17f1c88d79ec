"""Sessions of ONNX Runtime: which provider runs a graph, and who takes its place."""

from __future__ import annotations

import logging

import pytest
import torch

from edge_runtime.engines import onnx as onnx_session
from edge_runtime.engines.base import EngineError
from edge_runtime.engines.onnx import CPU, CUDA, TENSORRT, OnnxEngine, TensorrtEngine, providers_from, session_for
from edge_runtime.engines.package_cache import EngineCache
from edge_runtime.engines.registry import engine_class
from edge_runtime.engines.setup import choose_engines
from models.bundle import Bundle
from tests.edge_runtime.tiny import tiny_bundle


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> EngineCache:
    return EngineCache(tmp_path_factory.mktemp("cache") / "engines")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Bundle:
    return tiny_bundle(tmp_path_factory.mktemp("bundle") / "tiny.safetensors")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_onnx_failed_provider_falls_back_with_one_warning(tiny, cache, caplog):
    engine = OnnxEngine(tiny, "gate", cache=cache)
    engine.prepare()
    assert engine._file is not None
    onnx_session._warn_once.cache_clear()  # another test may have heard it
    with caplog.at_level(logging.WARNING, "gemel.run"):
        sessions = [session_for(engine._file.path, CUDA, torch.device("cuda", index)) for index in range(2)]
    assert [session.device.type for session in sessions] == ["cpu", "cpu"]
    (line,) = [record.getMessage() for record in caplog.records if record.name == "gemel.run"]
    assert "CUDAExecutionProvider" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_tensorrt_falls_back_to_cuda_then_cpu(tiny, cache):
    engine = OnnxEngine(tiny, "gate", cache=cache)
    engine.prepare()
    assert engine._file is not None and engine._session is not None
    session = session_for(engine._file.path, TENSORRT, torch.device("cuda", 0))
    assert session.device.type == "cpu" and session.runtime.get_providers() == [CPU]
    assert session.inputs == engine._session.inputs


def test_tensorrt_caches_in_the_private_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_session, "_stream_options", lambda device: {"device_id": str(device.index)})
    (first, own), (second, _), last = providers_from(TENSORRT, tmp_path / "graph.onnx", torch.device("cuda", 1))
    assert (first, second, last) == (TENSORRT, CUDA, CPU) and own["device_id"] == "1"
    assert own["trt_engine_cache_enable"] == "1" and own["trt_engine_cache_path"] == str(tmp_path)
    assert all(isinstance(value, str) for value in own.values())


def test_tensorrt_on_cpu_is_refused_and_never_chosen(tiny, cache, monkeypatch):
    assert engine_class("tensorrt") is TensorrtEngine and TensorrtEngine.missing("cpu") == "it does not run on cpu"
    with pytest.raises(EngineError, match="does not run on cpu"):
        TensorrtEngine(tiny, "gate", cache=cache).prepare()
    monkeypatch.setattr(TensorrtEngine, "missing", classmethod(lambda cls, device: None))
    for name in ("compiled", "onnx"):
        monkeypatch.setattr(engine_class(name), "missing", classmethod(lambda cls, device: "left out"))
    assert set(choose_engines(tiny).values()) == {"torch"}
