"""Sessions with an execution provider: answers as torch's, weights that are held, a line where it is not there."""

from __future__ import annotations

import gc
import json

import numpy as np
import onnxruntime
import pytest

from benchmarks.gpu.bundles import bundle_of
from gemel.cli import main
from gemel.edge_runtime.engines import setup
from gemel.edge_runtime.engines.base import FrameEngine
from gemel.edge_runtime.engines.prepared import prepared_folder
from gemel.edge_runtime.engines.provider_session import ProviderEngine, open_provider_sessions
from gemel.edge_runtime.engines.providers import CPU, PROVIDERS, unavailable_reason
from gemel.edge_runtime.engines.setup import EngineRequest, are_paged, engines_for, held_bytes
from gemel.edge_runtime.life.box import cost_box, load_box
from gemel.edge_runtime.life.config import load_config
from gemel.edge_runtime.life.daemon import run
from gemel.models.bundle import Bundle
from gemel.models.errors import InputError
from tests.edge_runtime.engines.sample_bundles import reference
from tests.edge_runtime.tiny import picture, tiny_bundle, write_box, write_config

QUERIES = ("gate", "yard", "road")
USABLE = [provider for provider in PROVIDERS if unavailable_reason(provider) is None]
ABSENT = [provider for provider in PROVIDERS if provider not in USABLE]


@pytest.fixture(autouse=True)
def use_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def tiny(tmp_path) -> Bundle:
    return tiny_bundle(tmp_path / "networks.gemel", documents=True)


@pytest.mark.parametrize("provider", USABLE)
def test_provider_sessions_answer_as_torch_and_hold_their_weights(tiny, provider):
    engines: dict[str, ProviderEngine] = {}
    for opened in open_provider_sessions(tiny, QUERIES, provider):
        engines |= opened
    for name, engine in engines.items():
        answer = engine.outputs([picture(1), picture(2)])
        expected = np.concatenate([reference(tiny, name, seed).numpy() for seed in (1, 2)])
        np.testing.assert_allclose(answer, expected, rtol=1e-4, atol=1e-4)
    assert {engine.name for engine in engines.values()} == {f"onnx-{provider}"}
    weights = sum(map(tiny.nbytes, {weight for name in QUERIES for weight in tiny.names_in_order(name)}))
    assert are_paged(engines.values()) and held_bytes(engines.values()) >= 0.9 * weights
    (folder,) = [path for path in prepared_folder().iterdir() if path.is_dir()]
    del engines, engine, opened
    gc.collect()
    assert not folder.exists(), "the files go with the last engine"


def test_provider_sessions_of_equal_weights_read_one_copy_and_answer_alike(tmp_path):
    bundle = bundle_of(tmp_path / "alike", QUERIES, "cifar_resnet20", small=True, has_documents=True)
    held, answers = list[int](), list[list[np.ndarray]]()
    for shares_weights in (False, True):
        engines: dict[str, FrameEngine] = {}
        for opened in open_provider_sessions(bundle, QUERIES, CPU, shares_weights=shares_weights):
            engines |= opened
        gc.collect()
        held.append(held_bytes(engines.values()))
        answers.append([engine.outputs([picture(1)]) for engine in engines.values()])
    assert held[1] < 0.5 * held[0], "all but norms and heads once"
    for own, shared in zip(*answers, strict=True):
        np.testing.assert_allclose(own, shared, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("provider", ABSENT)
def test_a_box_with_an_absent_provider_is_refused_in_one_line(tmp_path, capsys, provider):
    write_box(tmp_path)
    config = write_config(tmp_path, engine="onnx", provider=provider)
    assert main(["run", str(config), "--check"]) == 2
    line = capsys.readouterr().err.strip()
    name, package = PROVIDERS[provider]
    assert "\n" not in line and f"provider: this onnxruntime has no {name} (install {package}" in line


@pytest.fixture
def hold_weights(monkeypatch) -> None:
    """The provider cpu by the sessions of the others."""

    def sessions(bundle, request, queries):
        return open_provider_sessions(bundle, queries, CPU, request.max_workspace_bytes)

    monkeypatch.setattr(setup, "_sessions", sessions)


def test_a_box_whose_sessions_hold_all_weights_serves(tmp_path, tiny, hold_weights):
    write_box(tmp_path)
    summary = run(write_config(tmp_path, bundle=tiny.path.name, engine="onnx", budget="64MiB"))
    assert set(summary["engines"].values()) == {"onnx-cpu"} and summary["balanced"] and summary["fits"]
    assert summary["swaps"] == summary["bytes_moved"] == 0 and summary["max_used_bytes"] > 0
    records = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {record["query"] for record in records} == set(QUERIES)


def test_weights_that_sessions_hold_count_in_the_budget(tmp_path, tiny, hold_weights):
    write_box(tmp_path)
    costed = cost_box(
        load_box(load_config(write_config(tmp_path, bundle=tiny.path.name, engine="onnx", budget="64MiB")))
    )
    held = costed.held_bytes
    assert held > 0 and costed.arena_budget_bytes == (64 << 20) - held
    with pytest.raises(InputError, match="alone needs"):
        cost_box(load_box(load_config(write_config(tmp_path, bundle=tiny.path.name, engine="onnx", budget=held))))


def test_engines_for_auto_on_a_gpu_is_onnx_where_torch_is_absent(tiny, monkeypatch):
    assert not EngineRequest("cuda").prefers_onnx and EngineRequest("cuda", {"provider": "tensorrt"}).prefers_onnx
    monkeypatch.setattr(setup, "is_installed", lambda _: False)
    assert EngineRequest("cuda").prefers_onnx and EngineRequest("cuda").chosen_provider == "cuda"
    if "cuda" in ABSENT:
        with pytest.raises(InputError, match=r"query gate cannot run: this onnxruntime has no CUDAExecutionProvider"):
            engines_for(tiny, "auto", EngineRequest("cuda"))


def test_a_provider_that_cannot_be_started_leaves_its_queries_to_torch(tiny, monkeypatch, caplog):
    monkeypatch.setattr(onnxruntime.InferenceSession, "get_providers", lambda _: [])
    monkeypatch.setattr(setup, "_sessions", lambda *given: open_provider_sessions(tiny, QUERIES, CPU))
    engines = engines_for(tiny, "onnx")
    assert {engine.name for engine in engines.values()} == {"torch"}
    assert "ONNX Runtime cannot start CPUExecutionProvider here" in caplog.text
