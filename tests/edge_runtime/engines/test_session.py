"""Sessions: queries of one architecture over weights that are inside, folded and packed once."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from edge_runtime.engines import session
from edge_runtime.engines.base import EngineError
from edge_runtime.engines.openvino import supports_precision
from edge_runtime.engines.package_cache import EngineCache
from edge_runtime.engines.registry import open_sessions_by
from edge_runtime.engines.session import SessionEngine, open_sessions
from edge_runtime.engines.session_graph import query_groups
from edge_runtime.engines.setup import held_bytes
from edge_runtime.engines.torch_engine import TorchEngine
from models.bundle import Bundle
from tests.edge_runtime.engines.sample_bundles import bind, write_and_open
from tests.edge_runtime.tiny import picture, query, tiny_bundle, trained_looking

FRAMES = [picture(1), picture(2), picture(3, width=60, height=80)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> EngineCache:
    return EngineCache(tmp_path_factory.mktemp("cache") / "engines")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Bundle:
    return tiny_bundle(tmp_path_factory.mktemp("bundle") / "tiny.safetensors")


def engines_of(bundle: Bundle, cache: EngineCache, *names: str) -> dict[str, SessionEngine]:
    names = names or tuple(query.id for query in bundle.queries)
    return {name: one for group in open_sessions(bundle, names, cache=cache) for name, one in group.items()}


def assert_answers_as_torch(bundle: Bundle, engines: dict[str, SessionEngine]) -> None:
    for name, engine in engines.items():
        eager = TorchEngine(bundle, name)
        bind(eager, bundle)
        torch.testing.assert_close(engine.outputs(FRAMES), eager.outputs(FRAMES), rtol=1e-4, atol=1e-5)
        assert [one.label for one in engine.run(FRAMES)] == [one.label for one in eager.run(FRAMES)]  # type: ignore[union-attr]


def write_bundle(path: Path, models: Mapping[str, nn.Module]) -> Bundle:
    return write_and_open(path / "b.safetensors", models, [query(name, "left") for name in models])


def test_sessions_are_shared_where_most_weights_are_tied(tiny, cache):
    engines = engines_of(tiny, cache)
    assert engines["gate"].shared is engines["yard"].shared is not engines["road"].shared
    assert_answers_as_torch(tiny, engines)
    inputs = engines["gate"].shared.inputs
    assert set(inputs) == {"gate", "yard"} and not engines["road"].shared.inputs["road"]
    tied = 9 * 12 * 48 * 4
    private = sum(tensor.nbytes for tensor in inputs["gate"].values())
    assert 0 < private < tied / 2 and engines["gate"].shared.nbytes >= tied + 2 * private
    shared = engines["gate"].shared.nbytes, engines["road"].shared.nbytes
    assert held_bytes(engines.values()) == sum(shared), "what queries share is counted once"


def test_sessions_of_equal_weights_have_no_inputs(tmp_path, cache):
    """The same file on two cameras: everything is folded."""
    bundle = write_bundle(tmp_path, {"one": trained_looking(1), "two": trained_looking(1)})
    engines = engines_of(bundle, cache)
    assert engines["one"].shared is engines["two"].shared and not engines["one"].shared.inputs["one"]
    assert_answers_as_torch(bundle, engines)


def test_sessions_whose_scales_are_tied_keep_biases_private(tmp_path, cache):
    models = {"one": trained_looking(1), "two": trained_looking(1)}
    with torch.no_grad():
        for norm in (1, 4):
            models["two"][norm].bias.add_(0.5)  # type: ignore[union-attr,operator]
    bundle = write_bundle(tmp_path, models)
    engines = engines_of(bundle, cache)
    sizes = [tensor.numel() for tensor in engines["one"].shared.inputs["one"].values()]
    assert engines["one"].shared is engines["two"].shared and max(sizes) <= 48, "weights are constant"
    assert_answers_as_torch(bundle, engines)


def test_sessions_whose_optimised_graphs_differ_are_made_apart(tiny, cache, monkeypatch):
    plain = session.share_graph

    def refuse(models):
        found = list(models)
        if len(found) > 1:
            raise session.UnequalGraphs
        return plain(iter(found))

    monkeypatch.setattr(session, "share_graph", refuse)
    monkeypatch.setattr(session, "_known", {})
    engines = engines_of(tiny, cache)
    assert len({id(engine.shared) for engine in engines.values()}) == 3
    assert_answers_as_torch(tiny, engines)


def test_sessions_in_use_are_taken_again(tiny, cache, monkeypatch):
    engines = engines_of(tiny, cache, "gate", "yard")
    monkeypatch.setattr(session, "_make_shared", None)
    assert engines_of(tiny, cache, "gate", "yard")["gate"].shared is engines["gate"].shared


def test_query_groups_leave_out_queries_with_little_in_common(tmp_path):
    models = {name: trained_looking(seed) for seed, name in enumerate("abcd")}
    with torch.no_grad():
        models["c"][3].weight.copy_(models["a"][3].weight)  # type: ignore[union-attr,operator]
        models["d"][0].weight.copy_(models["a"][0].weight)  # type: ignore[union-attr,operator]
    bundle = write_bundle(tmp_path, models)
    assert query_groups(bundle, bundle.queries) == [["a", "c"], ["b"], ["d"]]


def test_session_workspace_grows_with_the_batch(tiny, cache):
    engine = engines_of(tiny, cache, "gate")["gate"]
    assert 0 < engine.workspace_of(1) <= engine.workspace_of(4) <= engine.workspace_of(8)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_openvino_session_answers_as_torch(tiny, cache, precision):
    pytest.importorskip("openvino", reason="the optional package openvino is not installed")
    if not supports_precision(precision):
        pytest.skip(f"this CPU does not compute in {precision}")
    groups = open_sessions_by("openvino", tiny, ["gate", "yard", "road"], cache=cache, precision=precision)
    engines = {name: one for group in groups for name, one in group.items()}
    assert {one.name for one in engines.values()} == {"openvino"}
    assert engines["gate"].shared is engines["yard"].shared is not engines["road"].shared
    tolerance = 1e-4 if precision == "fp32" else 0.05
    for name, engine in engines.items():
        eager = TorchEngine(tiny, name)
        bind(eager, tiny)
        torch.testing.assert_close(engine.outputs(FRAMES), eager.outputs(FRAMES), rtol=tolerance, atol=tolerance)
        assert engine.workspace_of(4) >= engine.workspace_of(1) > 0


def test_openvino_without_its_package_is_an_engine_error(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(EngineError, match="openvino is not installed"):
        list(open_sessions_by("openvino", tiny, ["gate"]))
    with pytest.raises(EngineError, match="does not compute in bf16"):
        open_sessions(tiny, ["gate"], precision="bf16")
