"""What a network costs by its document: near what PyTorch's run is counted as."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pytest import approx

from gemel.models import zoo
from gemel.models.export.cost import flops, layer_flops, workspace_bytes
from gemel.models.export.document_costs import count_document
from gemel.models.export.export_document import export_document
from tests.edge_runtime.engines.sample_bundles import make_query


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "shufflenet_v2_x0_5"])
def test_costs_of_a_document_are_near_those_of_its_architecture(name):
    model = zoo.build(name, ("a", "b", "c"), {}, 64).eval()
    query = make_query("one", name, 64)
    cost = count_document(query, export_document(model, 64))
    meta = zoo.build(name, ("a", "b", "c"), {}, 64, device="meta").eval()
    assert cost.flops == approx(flops(meta, 64), rel=0.01)
    assert cost.workspace_bytes == approx(workspace_bytes(meta, 64), rel=0.5)
    leaves = [path for path, module in meta.named_modules() if not any(module.children())]
    assert cost.calls == approx(len(leaves), rel=0.5)
    paths = [path for path, _ in cost.layers if path]
    assert paths == [path for path, _ in layer_flops(meta, 64) if path in set(paths)]
    assert {path for path in leaves if f"{path}.running_mean" in meta.state_dict()} == cost.norms
    assert cost.layers[-1] == ("", cost.flops)


def test_a_document_of_a_graph_names_layers_as_a_state_dict():
    model = zoo.build("resnet18", ("a", "b", "c"), {}, 64).eval()
    query = replace(make_query("one", "resnet18", 64), graph="a" * 64)
    assert all(path.startswith("network.") for path, _ in count_document(query, export_document(model, 64)).layers[:-1])
