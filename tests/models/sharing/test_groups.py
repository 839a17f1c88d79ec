"""Groups of layers and their pairing, which never costs bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemel.models.sharing.groups import Pairing, ceiling_bytes, groups
from gemel.models.sharing.layers import Layer, describe
from gemel.models.sharing.plan import SharingPlan
from gemel.models.sharing.similarity import cosine_likeness
from gemel.models.zoo import build

_LAYERS = st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("xyz"), st.booleans()), max_size=40)


@given(_LAYERS, st.sampled_from(["aligned", "order"]), st.booleans())
def test_groups_save_the_ceiling(rows, pairing: Pairing, alike: bool) -> None:
    size = {"x": 10, "y": 7, "z": 3}
    layers = [Layer(q, f"{index}", s, s, size[s], head) for index, (q, s, head) in enumerate(rows)]
    likeness = (lambda one, other: (len(one.path) * 7 + len(other.path)) % 5 / 5) if alike else None
    found = groups(layers, pairing=pairing, likeness=likeness)
    for group in found:
        assert len({query for query, _ in group.members}) == len(group.members) > 1
    members = [member for group in found for member in group.members]
    assert len(members) == len(set(members))
    assert SharingPlan.of(found).saved_bytes(layers) == ceiling_bytes(layers)


@pytest.mark.parametrize("detector", ["fasterrcnn_resnet50_fpn", "fasterrcnn_resnet50_c5"])
@pytest.mark.parametrize("first", ["classifier", "detector"])
def test_groups_pair_a_backbone_layer_by_layer(detector: str, first: str) -> None:
    rows = [_layers("classifier", "resnet50"), _layers("detector", detector, "detection")]
    found = groups(rows[0] + rows[1] if first == "classifier" else rows[1] + rows[0])
    pairs = {dict(group.members)["classifier"]: dict(group.members)["detector"] for group in found}
    assert len(pairs) == 53
    assert all(met == f"backbone.body.{path}" for path, met in pairs.items())


def test_groups_of_other_depths_keep_roles() -> None:
    found = groups(_layers("shallow", "resnet18") + _layers("deep", "resnet34"))
    pairs = [[path.rpartition(".")[2] for _, path in group.members] for group in found]
    assert len(pairs) == 20 and all(one == other for one, other in pairs)


def test_groups_of_one_model_pair_equal_paths() -> None:
    found = groups([layer for query in "abcdefgh" for layer in _layers(query, "mobilenet_v2")])
    assert all(len({path for _, path in group.members}) == 1 and len(group.members) == 8 for group in found)


def test_groups_pair_similar_weights_against_the_order() -> None:
    weights = [torch.randn(16, 16, generator=torch.Generator().manual_seed(index)) for index in range(6)]
    states = {
        "ancestor": {f"{index}.linear.weight": weight for index, weight in enumerate(weights)},
        "child": {"0.linear.weight": weights[1], "1.linear.weight": weights[4]},
    }
    layers = [
        Layer(query, f"{index}.linear", "linear", "linear", 1024, False, index / (count - 1))
        for query, count in (("ancestor", 6), ("child", 2))
        for index in range(count)
    ]
    without_weights = {group.members for group in groups(layers)}
    with_weights = groups(layers, likeness=cosine_likeness(states))
    assert without_weights == {
        (("ancestor", "0.linear"), ("child", "0.linear")),
        (("ancestor", "5.linear"), ("child", "1.linear")),
    }
    assert {group.members for group in with_weights} == {
        (("ancestor", "1.linear"), ("child", "0.linear")), (("ancestor", "4.linear"), ("child", "1.linear")),
    }  # fmt: skip
    assert {group.paired for group in with_weights} == {"likeness"}


def test_likeness_is_the_cosine_of_the_weights() -> None:
    states = {query: build("resnet18", 2, {}, 32).state_dict() for query in "ab"}
    states["c"] = {name: 3 * tensor for name, tensor in states["a"].items()}
    likeness = cosine_likeness(states)
    layers = {query: next(layer for layer in _layers(query, "resnet18") if layer.path == "conv1") for query in "abcd"}
    assert likeness(layers["a"], layers["c"]) == pytest.approx(1, abs=1e-5)
    assert likeness(layers["a"], layers["b"]) < 0.1
    assert likeness(layers["a"], layers["d"]) == 0  # no weights


def _layers(query: str, model: str, task: str = "classification") -> list[Layer]:
    return [Layer(query, *row) for row in describe(model, 5, 320 if task == "detection" else 224, task).layers]
