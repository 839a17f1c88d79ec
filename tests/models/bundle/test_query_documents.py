"""Bundles that carry every network as an ONNX document without weights: once for an architecture, equal in answers."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from gemel.models import zoo
from gemel.models.bundle import Made, open_bundle, verify_bundle, write_bundle, write_substituted
from gemel.models.detector import Detector
from gemel.models.export.export_document import OUTPUTS_KEY, export_document, export_documents
from tests.models.bundle.conftest import Sample, record, tied_models, write

MADE = Made("yard", "none", 0)


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Sample:
    """The sample with documents, written once, since that takes seconds."""
    models, queries = tied_models()
    path = tmp_path_factory.mktemp("written") / "sample_with_documents.safetensors"
    return Sample(path, models, queries, write(path, models, queries, documents=export_documents(models, queries)))


@pytest.fixture
def sample_with_documents(original: Sample, tmp_path: Path) -> Sample:
    """A copy of it."""
    path = tmp_path / "sample_with_documents.safetensors"
    shutil.copy(original.path, path)
    return replace(original, path=path)


def fill(document: bytes, state: dict[str, Tensor]) -> bytes:
    """The document with its weights inside."""
    model = onnx.load_from_string(document)
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            filled = onnx.numpy_helper.from_array(state[tensor.name].detach().numpy(), tensor.name)
            tensor.CopyFrom(filled)
    return model.SerializeToString()


def run_filled(document: bytes, model: nn.Module, frames: Tensor) -> Sequence[Any]:
    session = onnxruntime.InferenceSession(fill(document, model.state_dict()), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: frames.numpy()})


def test_documents_of_one_architecture_are_one_tensor(sample_with_documents):
    bundle = open_bundle(sample_with_documents.path)
    north, south, gate = bundle.queries
    assert north.document == south.document != gate.document is not None
    assert verify_bundle(sample_with_documents.path) == []
    first = bundle.header.tensors[0]
    assert first.name == north.document and first.dtype == "U8"
    assert north.document not in bundle.names_in_order("north"), "a document is no weight"


def test_documents_name_the_weights_and_answer_as_the_networks(sample_with_documents):
    bundle = open_bundle(sample_with_documents.path)
    frames = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    for query in bundle.queries:
        document = bundle.tensor(str(query.document)).numpy().tobytes()
        graph = onnx.load_from_string(document).graph
        names = {one.name for one in graph.initializer if one.data_location == onnx.TensorProto.EXTERNAL}
        weights = {key for key in query.tensors if not key.endswith("num_batches_tracked")}
        assert names == weights
        assert graph.input[0].type.tensor_type.shape.dim[0].dim_param, "the batch is open"
        model = sample_with_documents.models[query.id]
        with torch.no_grad():
            expected = model(frames)
        (answer,) = run_filled(document, model, frames)
        torch.testing.assert_close(torch.from_numpy(answer), expected, rtol=1e-4, atol=1e-4)


def test_documents_change_neither_weights_nor_bytes(sample_with_documents, sample):
    plain, other = sample.manifest, sample_with_documents.manifest
    assert other.bytes == plain.bytes
    assert [query.tensors for query in other.queries] == [query.tensors for query in plain.queries]
    assert [query.document for query in plain.queries] == [None] * 3


def test_documents_written_twice_are_the_same_bytes(sample_with_documents, tmp_path):
    models, queries = tied_models()
    write(tmp_path / "again", models, queries, documents=export_documents(models, queries))
    assert (tmp_path / "again").read_bytes() == sample_with_documents.path.read_bytes()


def test_documents_come_along_where_a_query_is_substituted(sample_with_documents, tmp_path):
    models, queries = tied_models()
    gate = {"gate": models["gate"]}
    write_bundle(tmp_path / "other", gate, queries[2:], MADE, documents=export_documents(gate, queries[2:]))
    other = open_bundle(tmp_path / "other")
    write_substituted(tmp_path / "both", open_bundle(sample_with_documents.path), {"gate": other})
    assert verify_bundle(tmp_path / "both") == []
    assert open_bundle(tmp_path / "both").query("gate").document == other.query("gate").document


class Deciding(nn.Module):
    """A forward that decides by what the picture shows."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(3, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        means = x.mean((2, 3))
        return self.fc(means) if means.sum().item() > 0 else self.fc(-means)


def test_a_network_that_cannot_be_exported_is_noted_and_has_no_document(caplog):
    with caplog.at_level(logging.WARNING, "gemel.notes"):
        models = {"gate": Deciding(2).eval()}
        assert export_documents(models, [record("gate", "m:deciding")]) == {}
    assert "gate: m:deciding has no graph in the bundle" in caplog.text and "gemel[merge]" in caplog.text


def test_a_document_with_weights_of_another_network_is_refused(sample_with_documents, rewrite):
    def edit(manifest, data, types):
        first, last = manifest["queries"][0], manifest["queries"][2]
        first["document"], last["document"] = last["document"], first["document"]

    rewrite(sample_with_documents.path, edit)
    assert any("its document" in problem for problem in verify_bundle(sample_with_documents.path))


def test_a_weight_is_no_document(sample_with_documents, rewrite):
    def edit(manifest, data, types):
        manifest["queries"][0]["document"] = manifest["queries"][0]["tensors"]["fc.weight"]

    rewrite(sample_with_documents.path, edit)
    assert any("is no graph" in problem for problem in verify_bundle(sample_with_documents.path))


NETWORKS = {
    "resnet18": 64,
    "mobilenet_v2": 64,
    "ssdlite320_mobilenet_v3_large": 96,
    "lraspp_mobilenet_v3_large": 64,
    "vit_b_16": 32,
}
"""Sides of their inputs by name."""


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_documents_of_the_zoo_answer_as_its_networks(name):
    side = NETWORKS[name]
    torch.manual_seed(0)
    task = next(task for task in ("classification", "detection", "segmentation") if name in zoo.names(task))
    model = zoo.build(name, ("a", "b", "c"), {}, side, task).eval()
    frames = torch.randn(2, 3, side, side)
    document = export_document(model, side)
    outputs = json.loads({one.key: one.value for one in onnx.load_from_string(document).metadata_props}[OUTPUTS_KEY])
    assert outputs["kind"] == ("candidates" if task == "detection" else "logits")
    with torch.no_grad():
        expected = model.export_outputs(frames) if isinstance(model, Detector) else model(frames)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for answer, tensor in zip(run_filled(document, model, frames), expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(answer), tensor, rtol=1e-4, atol=1e-4)
