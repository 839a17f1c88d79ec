"""Activations in eight bits: which, in what ranges, and answers near those of the packed network."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from gemel.merger.computed import QueryNetwork
from gemel.models.export.export_document import export_document
from gemel.models.graph.activations import INPUT, find_activations, measure_errors
from gemel.models.graph.proto_graph import ProtoGraph
from tests.edge_runtime.engines.sample_bundles import pack_weights
from tests.edge_runtime.tiny import query, trained_looking


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return trained_looking(1)


@pytest.fixture(scope="module")
def network(model) -> QueryNetwork:
    record = query("one", "left")
    return QueryNetwork(record, export_document(model, record.input_size), model, pack_weights(model, "int8", True))


@pytest.fixture(scope="module")
def frames(model) -> torch.Tensor:
    size = query("one", "left").input_size
    return torch.rand((8, 3, size, size), generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]


def optimise(graph: ProtoGraph, path: Path) -> list[str]:
    """The operators that ONNX Runtime runs for a graph."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.optimized_model_filepath = 3, str(path)
    data = graph.to_proto().SerializeToString()
    onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(path).graph.node]


def test_products_are_computed_in_integers_and_the_answer_stays_wide(network, frames, tmp_path):
    built = network.build(network.measure(frames))
    operators = optimise(built, tmp_path / "optimised.onnx")
    assert operators.count("QLinearConv") == 2 and "Conv" not in operators
    (answer,) = built.output_names
    assert answer not in find_activations(built, network.places)
    producer = built.producer(answer)
    assert producer is not None and producer.op_type == "Gemm"


def test_ranges_are_those_of_the_frames(network, frames):
    ranges = network.measure(frames)
    assert ranges[INPUT] == (0.0, pytest.approx(float(frames.max())))
    graph, places = network.build({}), network.places
    sources = {places[value]: graph.producer(value) for value in find_activations(graph, places)}
    after_relu = [place for place, node in sources.items() if node is not None and node.op_type == "Relu"]
    assert after_relu and all(ranges[place][0] == 0.0 < ranges[place][1] for place in after_relu)


def test_answers_in_integers_are_near_those_of_packed_weights(model, network, frames):
    packed, computed = (network.answerer(model, ranges)(frames) for ranges in ({}, network.measure(frames)))
    spread = float((packed - packed.mean(0)).norm())
    assert 0 < float((computed - packed).norm()) < 0.2 * spread


def test_activation_whose_codes_say_nothing_moves_the_heads_most(network, frames):
    ranges = network.measure(frames)
    for place in ranges:
        coarse = {**ranges, place: (-1e4, 1e4)}
        errors = measure_errors(network.build({}), network.places, coarse, frames[:1].numpy())
        assert errors.keys() == ranges.keys() and all(error >= 0 for error in errors.values())
        assert max(errors, key=errors.__getitem__) == place


def test_layer_beside_an_activation_without_range_is_computed_in_float32(network, frames, tmp_path):
    ranges = network.measure(frames)
    built = network.build({place: limits for place, limits in ranges.items() if place != INPUT})
    operators = optimise(built, tmp_path / "optimised.onnx")
    assert operators.count("QLinearConv") == 1 and operators.count("Conv") + operators.count("FusedConv") == 1
    wide = [constant.array for name, constant in built.constants.items() if name.endswith("wide_weight")]
    (first,) = [array for array in wide if array is not None and array.ndim == 4]
    assert first.dtype == np.float32


def test_last_layer_before_the_head_is_computed_in_integers(model, frames, tmp_path):
    record = query("one", "left")
    body = {key: weight for key, weight in pack_weights(model, "int8", True).items() if len(weight.shape) == 4}
    network = QueryNetwork(record, export_document(model, record.input_size), model, body)
    ranges = network.measure(frames)
    operators = optimise(network.build(ranges), tmp_path / "optimised.onnx")
    assert "Gemm" in operators and "Conv" not in operators
    errors = measure_errors(network.build({}), network.places, ranges, frames[:1].numpy())
    assert all(error > 0 for error in errors.values())
