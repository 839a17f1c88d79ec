"""Scales of convolutions are private again, and go back into them where a file is written."""

from __future__ import annotations

from dataclasses import replace

import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn

from gemel.models.graph import Cut, build_graph, load_graph
from gemel.models.graph.fill import fill_graph
from gemel.models.graph.stored import restore_graph, store_graph
from gemel.models.graph.unfold import ChannelAffine, unfold_norms
from tests.models.graph.onnx_files import METADATA, SIDE, write_classifier


@pytest.fixture
def frames() -> torch.Tensor:
    return torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


def answer(document: bytes, state: dict[str, torch.Tensor], frames: torch.Tensor) -> torch.Tensor:
    """The outputs of a graph."""
    network = build_graph(document)
    network.load_state_dict(state)
    with torch.no_grad():
        return network(frames)[0]


def test_an_unfolded_graph_answers_the_same_with_unit_rows(tmp_path, frames):
    graph = load_graph(write_classifier(tmp_path / "a.onnx"))
    found = unfold_norms(graph)
    wanted = answer(graph.document, graph.state, frames)
    torch.testing.assert_close(answer(found.document, found.state, frames), wanted, atol=1e-5, rtol=1e-5)
    lengths = found.state["body.weight"].flatten(1).norm(dim=1)
    torch.testing.assert_close(lengths, torch.ones(8))
    assert found.state.keys() - graph.state.keys() == {
        f"{layer}_affine.{key}" for layer in ("stem", "body", "deep") for key in ("weight", "bias")
    }
    assert (found.input, found.outputs) == (graph.input, graph.outputs)
    network = build_graph(found.document)
    affines = [module for module in network.modules() if isinstance(module, ChannelAffine)]
    assert len(affines) == 3 and not any(isinstance(module, nn.BatchNorm2d) for module in network.modules())


def test_rows_equal_up_to_scale_become_equal(tmp_path):
    files = (write_classifier(tmp_path / f"{seed}.onnx", seed, scales=0.5) for seed in (1, 2))
    one, other = (unfold_norms(load_graph(file)).state for file in files)
    assert not torch.allclose(one["body_affine.weight"], other["body_affine.weight"], rtol=0.01)
    for layer in ("stem", "body", "deep"):
        torch.testing.assert_close(one[f"{layer}.weight"], other[f"{layer}.weight"], atol=1e-6, rtol=1e-5)


def test_a_convolution_with_a_norm_is_left_alone(tmp_path):
    graph = load_graph(write_classifier(tmp_path / "a.onnx", norm=True))
    found = unfold_norms(graph)
    assert torch.equal(found.state["stem.weight"], graph.state["stem.weight"])
    assert "stem_affine.weight" not in found.state and "body_affine.weight" in found.state


def test_unfolding_twice_changes_nothing(tmp_path):
    found = unfold_norms(load_graph(write_classifier(tmp_path / "a.onnx")))
    assert unfold_norms(found).document == found.document


@pytest.mark.parametrize("kept", [(), ("body",), ("stem", "body", "deep")])
def test_a_filled_graph_answers_as_the_file_in_onnxruntime(tmp_path, frames, kept):
    file = write_classifier(tmp_path / "a.onnx", scales=0.5)
    graph = unfold_norms(load_graph(file))
    model = fill_graph(store_graph(graph), lambda key: graph.state[key].numpy(), kept).to_proto()
    onnx.checker.check_model(model, full_check=True)
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("BatchNormalization") == len(kept) + ("body" in kept)
    assert [(one.name) for one in (*model.graph.input, *model.graph.output)] == ["frames", "scores"]
    assert {one.key: one.value for one in model.metadata_props} == METADATA
    sources = str(file), model.SerializeToString()
    wanted, found = (onnxruntime.InferenceSession(one).run(None, {"frames": frames.numpy()})[0] for one in sources)
    torch.testing.assert_close(torch.from_numpy(found), torch.from_numpy(wanted), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["MatMul", "Gemm"])
def test_a_filled_linear_layer_has_its_weight_as_the_file_had_it(tmp_path, frames, kind):
    file = write_classifier(tmp_path / "a.onnx")
    proto = onnx.load(file)
    weight = next(one for one in proto.graph.initializer if one.name == "fc.weight")
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight).T.copy(), "fc.weight"))
    del proto.graph.node[-1]
    if kind == "Gemm":
        proto.graph.node.append(helper.make_node("Gemm", ["h", "fc.weight", "fc.bias"], ["scores"]))
    else:
        proto.graph.node.append(helper.make_node("MatMul", ["h", "fc.weight"], ["m"]))
        proto.graph.node.append(helper.make_node("Add", ["m", "fc.bias"], ["scores"]))
    onnx.save(proto, file)
    graph = unfold_norms(load_graph(file))
    filled = fill_graph(store_graph(graph), lambda key: graph.state[key].numpy()).to_proto().SerializeToString()
    wanted, found = (
        onnxruntime.InferenceSession(one).run(None, {"frames": frames.numpy()})[0] for one in (str(file), filled)
    )
    torch.testing.assert_close(torch.from_numpy(found), torch.from_numpy(wanted), atol=1e-5, rtol=1e-5)


def test_a_stored_graph_is_restored_without_its_weights(tmp_path):
    graph = load_graph(write_classifier(tmp_path / "a.onnx"))
    cut = Cut("TopK", "best", ("scores",), ("rows",), {"axis": 1})
    for own in (graph, replace(graph, cut=cut), replace(graph, metadata={**METADATA, "gemel.cut": "[]"})):
        document = store_graph(own)
        found = restore_graph(document)
        metadata = {key: text for key, text in own.metadata.items() if key != "gemel.cut"}
        assert found == replace(own, state={}, metadata=metadata)
        assert store_graph(found) == document
