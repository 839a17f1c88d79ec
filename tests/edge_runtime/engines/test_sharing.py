"""Sharing, proved on ResNet-50 in every engine: a shared tensor changed in the arena changes both queries' outputs."""

from __future__ import annotations

import pytest
import torch

from edge_runtime.engines.registry import ENGINES, engine_class, make_engine
from edge_runtime.engines.setup import resident_arena
from tests.edge_runtime.engines.sharing_bundle import SIZE, sharing_bundle
from tests.exhaustive import every

SHARED = ("conv1.weight", "layer1.0.conv2.weight", "layer4.2.conv3.weight")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return sharing_bundle(tmp_path_factory.mktemp("bundle") / "resnet50.safetensors", "resnet50")


@pytest.mark.slow
@pytest.mark.parametrize("name", every(ENGINES, few=("torch", "onnx")))
def test_a_shared_tensor_is_one_for_all_queries_and_outputs_are_those_of_the_plain_model(
    bundle, name, tmp_path, monkeypatch
):
    why = engine_class(name).missing("cpu")
    if why is not None:
        pytest.skip(why)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engines = {query.id: make_engine(name, bundle, query.id) for query in bundle.queries}
    arena = resident_arena(bundle, engines)
    frames = torch.rand(1, 3, SIZE, SIZE).contiguous(memory_format=torch.channels_last)
    state = {query.id: query.tensors for query in bundle.queries}
    with torch.inference_mode():
        before = {}
        for query, engine in engines.items():
            before[query] = engine.forward(frames).clone()
            torch.testing.assert_close(before[query], bundle.build(query)(frames), rtol=1e-3, atol=1e-3)
        for path in SHARED:
            tensor_name = state["first"][path]
            assert state["second"][path] == tensor_name
            placed = arena.residency.placement(tensor_name)  # its bytes, in whatever order they lie
            tensor = arena.transfer.memory[placed.offset : placed.offset + placed.nbytes].view(torch.float32)
            kept = tensor.clone()
            tensor.mul_(1.5)
            assert all(not torch.equal(engine.forward(frames), before[query]) for query, engine in engines.items())
            tensor.copy_(kept)
            assert all(torch.equal(engine.forward(frames), before[query]) for query, engine in engines.items())
