"""Bundles that hold networks as graphs: built from the bundle alone, exported as they came, refused when they lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from gemel.models.bundle import BundleQuery, Made, open_bundle, verify_bundle, write_bundle
from gemel.models.bundle.delta import apply_update, write_update
from gemel.models.bundle.format import tensor_name
from gemel.models.decoders.files import ModelFile
from gemel.models.decoders.graph_model import GraphDetector
from gemel.models.errors import BundleError, InputError
from gemel.models.export.export_folder import export_folder
from gemel.models.export.query_export import export_query
from gemel.models.workload import Query, load_workload
from gemel.models.zoo import build_query
from tests.models.decoders.tiny_graphs import TinyYolox, export
from tests.models.graph.onnx_files import CLASSES, METADATA, SIDE, write_classifier


@dataclass(frozen=True)
class GraphSample:
    """A bundle of two queries, and what it was made of."""

    path: Path
    models: dict[str, nn.Module]
    queries: list[BundleQuery]
    frames: torch.Tensor


def load_queries(folder: Path) -> list[Query]:
    """Two queries whose models are files with other scales."""
    for index, name in enumerate(("gate", "yard")):
        write_classifier(folder / f"{name}.onnx", index, scales=0.5)
    queries = [{"id": name, "camera": "one", "model": f"{name}.onnx"} for name in ("gate", "yard")]
    workload = {"name": "w", "cameras": {"one": {"source": "one.mp4"}}, "queries": queries}
    (folder / "w.yaml").write_text(json.dumps(workload))
    return list(load_workload(folder / "w.yaml").queries)


@pytest.fixture
def sample(tmp_path: Path) -> GraphSample:
    """The first convolution is one, the second is shared by its direction."""
    queries = load_queries(tmp_path)
    models = {query.id: build_query(query) for query in queries}
    gate, yard = (model.get_submodule("network") for model in models.values())
    yard.body.weight = gate.body.weight  # type: ignore[union-attr]
    yard.stem.weight, yard.stem_affine.weight = gate.stem.weight, gate.stem_affine.weight  # type: ignore[union-attr]
    records = [BundleQuery.of(query) for query in queries]
    write_bundle(tmp_path / "box", models, records, Made("w", "none", 0))
    for name in models:
        (tmp_path / f"{name}.onnx").unlink()  # a box has the bundle alone
    frames = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    return GraphSample(tmp_path / "box", models, records, frames)


def test_a_model_is_built_from_the_bundle_alone(sample):
    bundle = open_bundle(sample.path)
    assert verify_bundle(sample.path) == []
    for query, model in sample.models.items():
        bundle.check(query)
        built = bundle.build(query)
        with torch.no_grad():
            assert torch.equal(built(sample.frames), model(sample.frames))
    gate, yard = bundle.queries
    assert (gate.model, gate.decoder, gate.classes) == ("graph", "classifier", ("car", "bus", "truck"))
    assert gate.graph == yard.graph and bundle.header.tensors[0].name == gate.graph
    assert gate.graph not in bundle.names_in_order("gate")
    states = {
        id(tensor): tensor for model in sample.models.values() for tensor in model.state_dict(keep_vars=True).values()
    }
    assert bundle.manifest.bytes.after <= sum(tensor.nbytes for tensor in states.values())


def test_models_of_a_bundle_are_written_again_as_they_are(sample, tmp_path):
    bundle = open_bundle(sample.path)
    models = {query.id: bundle.build(query.id) for query in bundle.queries}
    write_bundle(tmp_path / "again", models, sample.queries, Made("w", "none", 0))
    assert (tmp_path / "again").read_bytes() == sample.path.read_bytes()


def test_an_update_ships_the_graph(sample, tmp_path):
    first = {"gate": sample.models["gate"]}
    write_bundle(tmp_path / "old", first, sample.queries[:1], Made("w", "none", 0))
    with torch.no_grad():
        first["gate"].get_parameter("network.fc.bias").add_(1)
    write_update(tmp_path / "old", sample.path, tmp_path / "update")
    apply_update(tmp_path / "old", tmp_path / "update", tmp_path / "new")
    assert (tmp_path / "new").read_bytes() == sample.path.read_bytes()


def test_exported_files_answer_under_the_names_that_came_in(sample, tmp_path):
    bundle = open_bundle(sample.path)
    written = export_folder(bundle, tmp_path / "onnx")
    export_query(bundle, "gate", tmp_path / "one.onnx")
    for query, file in [("gate", "onnx/gate.onnx"), ("yard", "onnx/yard.onnx"), ("gate", "one.onnx")]:
        session = onnxruntime.InferenceSession(str(tmp_path / file))
        (found,) = session.run(["scores"], {"frames": sample.frames.numpy()})
        with torch.no_grad():
            wanted = sample.models[query](sample.frames)
        torch.testing.assert_close(torch.from_numpy(found), wanted, atol=1e-4, rtol=1e-4)
        metadata = session.get_modelmeta().custom_metadata_map
        assert metadata.items() >= METADATA.items() and metadata["gemel.query"] == f'"{query}"'
    shape = ("batch", 3, SIDE, SIDE)
    assert written.files["yard"].inputs == {"frames": shape}
    assert written.files["yard"].outputs == {"scores": ("batch", CLASSES)}
    written.to_json()


def test_only_weights_shared_with_other_scales_keep_them_apart(sample, tmp_path):
    written = export_folder(open_bundle(sample.path), tmp_path / "onnx")
    offsets = []
    for query in sample.models:
        graph = onnx.load(tmp_path / "onnx" / f"{query}.onnx", load_external_data=False).graph
        assert [node.op_type for node in graph.node].count("BatchNormalization") == 2  # body, called twice
        places = {one.name: {entry.key: entry.value for entry in one.external_data} for one in graph.initializer}
        offsets.append(places["body.weight"]["offset"])
    assert offsets[0] == offsets[1]
    assert written.weights_bytes == sample.models["gate"].get_parameter("network.body.weight").nbytes


@pytest.mark.parametrize("kept", [0, 2, -1])
def test_a_fixed_batch_is_written_or_refused(sample, tmp_path, kept):
    bundle = open_bundle(sample.path)
    if kept >= 0:
        export_query(bundle, "gate", tmp_path / "one.onnx", kept or None)
        (found,) = onnxruntime.InferenceSession(str(tmp_path / "one.onnx")).get_inputs()
        assert found.shape == [kept or "batch", 3, SIDE, SIDE]
    else:
        with pytest.raises(InputError, match="a batch of -1 holds nothing"):
            export_query(bundle, "gate", tmp_path / "one.onnx", kept)


def change_query(manifest: dict[str, Any], **keys: Any) -> None:
    manifest["queries"][0].update(keys)


LIES: dict[str, tuple[Callable[[Any, bytes], bytes | None], str]] = {
    "no document": (lambda m, graph: b"\xff" * len(graph), "its graph cannot be built: is damaged"),
    "another network": (lambda m, graph: graph.replace(b"fc.", b"fd."), "needs network.f"),
    "an unknown operator": (lambda m, graph: graph.replace(b"Relu", b"Rule"), "Rule"),
    "no such class": (lambda m, graph: change_query(m, classes=["car", "tram"]), "its graph cannot be built"),
    "another decoder": (lambda m, graph: change_query(m, decoder="yolox"), "yolox does not fit"),
    "no graph": (lambda m, graph: change_query(m, graph=None), "model 'graph' has one"),
    "a zoo model": (lambda m, graph: change_query(m, model="alexnet"), "model 'graph' has one"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_graph_that_lies_is_refused_in_one_line(sample, rewrite, lie):
    make, reason = LIES[lie]

    def edit(manifest, data, types):
        old = manifest["queries"][0]["graph"]
        document = make(manifest, data[old]) or data[old]
        name = tensor_name("U8", [len(document)], document)
        for query in manifest["queries"]:
            if query["graph"]:
                query["graph"] = name
        rest = {key: data[key] for key in list(data) if key != old}
        data.clear()
        data.update({name: document, **rest})
        types[name] = ("U8", (len(document),))

    rewrite(sample.path, edit)
    problems = verify_bundle(sample.path)
    assert problems and reason in problems[0] and "\n" not in "".join(problems), problems
    with pytest.raises(BundleError):
        open_bundle(sample.path).build("gate")


def test_a_weight_is_no_graph(sample, rewrite):
    def edit(manifest, data, types):
        manifest["queries"][0]["graph"] = manifest["queries"][0]["tensors"]["network.fc.weight"]

    rewrite(sample.path, edit)
    assert any("is no graph" in problem for problem in verify_bundle(sample.path))


def test_export_of_some_classes_read_again_names_the_same_columns(tmp_path: Path) -> None:
    export(tmp_path / "all.onnx", TinyYolox(80))
    query = {"id": "gate", "camera": "one", "model": "all.onnx", "classes": ["truck", "car"]}
    workload = {"name": "w", "cameras": {"one": {"source": "one.mp4"}}, "queries": [query]}
    (tmp_path / "w.yaml").write_text(json.dumps(workload))
    (loaded,) = load_workload(tmp_path / "w.yaml").queries
    write_bundle(tmp_path / "box", {"gate": build_query(loaded)}, [BundleQuery.of(loaded)], Made("w", "none", 0))
    written = export_query(open_bundle(tmp_path / "box"), "gate", tmp_path / "gate.onnx")
    again = ModelFile(tmp_path / "gate.onnx").complete()
    assert again.classes == ("truck", "car")
    model = again.build()
    assert isinstance(model, GraphDetector) and model.boxes.columns == (7, 2)
    assert json.loads(written.metadata["gemel.columns"]) == [7, 2]
    assert len(json.loads(written.metadata["gemel.names"])) == 80
