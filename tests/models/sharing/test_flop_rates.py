"""FLOPs a second: every query alone, and with the prefix that queries of one camera have in common."""

from __future__ import annotations

import pytest
import torch

from gemel.models.bundle import Made, open_bundle, write_bundle
from gemel.models.export.cost import flops, layer_flops
from gemel.models.sharing.flop_rates import flop_rates
from tests.edge_runtime.tiny import FACTORY, SIZE, net, query, trained_looking


@pytest.fixture
def bundle(tmp_path):
    """`a` and `b` differ in the head alone, `c` is on another camera."""
    models = {name: trained_looking(1) for name in "abc"}
    for seed, model in enumerate(models.values()):
        torch.manual_seed(seed)
        torch.nn.init.normal_(list(model.parameters())[-2])
    queries = [query("a", "left"), query("b", "left"), query("c", "right")]
    write_bundle(tmp_path / "flops.safetensors", models, queries, Made("flops", "none", 0))
    return open_bundle(tmp_path / "flops.safetensors", [FACTORY])


def test_layer_flops_end_with_those_of_the_model():
    with torch.device("meta"):
        model = net(3)
    layers = layer_flops(model, SIZE)
    assert layers[0][0] == "0" and layers[-2:] == [("8", flops(model, SIZE)), ("", flops(model, SIZE))]


def test_flop_rates_count_a_common_prefix_once_a_frame(bundle):
    found = flop_rates(bundle, {"a": 10.0, "b": 4.0, "c": 1.0})
    layers = dict(layer_flops(bundle.build("a", "meta"), SIZE))
    assert found.alone == 15.0 * layers["8"]
    assert found.with_prefix == found.alone - 4.0 * layers["7"]
    assert "less" in found.to_text() and found.to_json()["flops_per_s"] == found.alone
