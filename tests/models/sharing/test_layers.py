"""Layers, signatures, groups and the ceiling, against counts made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torchvision
import yaml
from torch import nn
from torch.nn.utils import weight_norm as old_weight_norm
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from models.cost import flops, workspace_bytes
from models.sharing.groups import ceiling_bytes, groups
from models.sharing.layers import (
    describe,
    layers_of,
    layers_of_all,
    model_bytes,
    state_bytes,
    weight_key,
    weight_of,
    weights_in,
)
from models.sharing.plan import SharingPlan, tie
from models.workload import load_workload
from models.zoo import build, names
from models.zoo.registry import ENTRIES
from tests.exhaustive import one_in
from tests.merger.tiny import write_workload


def _workload(folder: Path, *models: str, classes: int = 2):
    queries = [
        {"id": f"q{index}", "camera": "c", "task": "detection" if "ssd" in model else "classification",
         "classes": [f"k{k}" for k in range(classes)], "model": model, "input_size": 320 if "ssd" in model else 224}
        for index, model in enumerate(models)
    ]  # fmt: skip
    path = folder / "w.yaml"
    path.write_text(yaml.safe_dump({"name": "w", "cameras": {"c": {"source": "x"}}, "queries": queries}))
    return load_workload(path)


def test_a_resnet18_has_its_published_size_and_a_private_head(tmp_path: Path) -> None:
    query = _workload(tmp_path, "resnet18", classes=1000).queries[0]
    layers = layers_of(query)
    assert [layer.path for layer in layers if layer.head] == ["fc"]
    assert sum(layer.bytes for layer in layers) == 4 * (11_689_512 - 9_600 - 1000)  # less norms and the head's bias
    statistics = sum(b.nbytes for b in torchvision.models.resnet18().buffers())
    assert model_bytes(query) == 4 * 11_689_512 + statistics


def test_two_equal_models_can_share_all_but_heads_norms_and_biases(tmp_path: Path) -> None:
    workload = _workload(tmp_path, "resnet18", "resnet18")
    layers = layers_of_all(workload.queries)
    shareable = sum(layer.bytes for layer in layers if not layer.head) // 2
    assert ceiling_bytes(layers) == shareable
    assert sum(group.saved_bytes for group in groups(layers)) == shareable


def test_detector_heads_that_depend_on_the_classes_are_private(tmp_path: Path) -> None:
    query = _workload(tmp_path, "ssdlite320_mobilenet_v3_large").queries[0]
    heads = [layer.path for layer in layers_of(query) if layer.head]
    assert heads and all("classification_head" in path for path in heads)
    assert not any(layer.head for layer in layers_of(query) if "regression_head" in layer.path)


def test_a_bias_keeps_layers_apart_for_the_paper_but_not_for_us(tmp_path: Path) -> None:
    workload = _workload(tmp_path, "vgg16", "resnet34")
    layers = layers_of_all(workload.queries)
    shapes = {(group.signature) for group in groups(layers, "wide")}
    assert any(signature.startswith("conv2d 512x512x3x3") for signature in shapes)
    assert groups(layers, "strict") == []


def test_a_users_own_module_is_described(tmp_path: Path) -> None:
    workload = load_workload(write_workload(tmp_path, queries=2, frames=2))
    layers = layers_of(workload.queries[1])
    assert [layer.path for layer in layers] == ["stem.0", "body.0", "extra.0", "last.0", "head"]
    assert [layer.path for layer in layers if layer.head] == ["head"]


@pytest.mark.parametrize("model", one_in(5, names()))
def test_every_zoo_model_is_described_as_it_is_built(model: str) -> None:
    entry = ENTRIES[model]
    found = describe(model, 7, entry.input_size, entry.task)
    built = build(model, 7, {}, entry.input_size, entry.task, device="meta")
    assert found.bytes == state_bytes(built)
    assert found.parameters == sum(parameter.numel() for parameter in built.parameters())
    for path, wide, _, nbytes, _, _ in found.layers:
        owner, name = weight_of(built, path)
        weight = getattr(owner, name)
        assert weight.nbytes == nbytes and "x".join(str(size) for size in weight.shape) in wide
        assert weight_key(built.state_dict(), path) in built.state_dict()
    heads = [path for path, *_, head, _ in found.layers if head]
    assert heads and len(heads) < len(found.layers)


@pytest.mark.parametrize("computed", [weight_norm, spectral_norm, old_weight_norm])
def test_a_weight_that_is_computed_from_others_stays_private(computed) -> None:
    model = nn.Sequential(computed(nn.Conv2d(3, 4, 1)), nn.Conv2d(4, 4, 1), computed(nn.Linear(4, 2)))
    assert [path for path, *_ in weights_in(model)] == ["1"]


def test_attention_is_made_of_linear_weights_however_it_is_packed() -> None:
    found = {path: wide for path, wide, *_ in describe("vit_b_16", 10, 224, "classification").layers}
    packed = "encoder.layers.encoder_layer_0.self_attention.in_proj"
    assert found[packed] == "linear 2304x768 float32"
    swin = [wide for _, wide, *_ in describe("swin_t", 10, 224, "classification").layers]
    assert found[packed] in swin


def test_attention_whose_packed_projections_are_tied_computes_with_the_shared_weight() -> None:
    models = {query: build("vit_b_16", 3, {}, 32).eval() for query in "ab"}
    torch.nn.init.normal_(models["b"].get_parameter("heads.head.weight"))  # it begins as zeros, which would hide all
    path = "encoder.layers.encoder_layer_0.self_attention.in_proj"
    frames = torch.rand(1, 3, 32, 32)
    before = models["b"](frames)
    tie(models, SharingPlan(((("a", path), ("b", path)),)))
    owners = [weight_of(models[query], path) for query in "ab"]
    assert getattr(*owners[0]) is getattr(*owners[1])
    assert not torch.allclose(before, models["b"](frames))


def test_operations_and_workspace_of_a_resnet18() -> None:
    model = build("resnet18", ["a"] * 1000, {}, 224, device="meta")
    assert flops(model, 224) == pytest.approx(2 * 1.814e9, rel=0.01)
    assert flops(model, 224, batch=4) == 4 * flops(model, 224)
    map_bytes = 64 * 112 * 112 * 4
    assert 2 * map_bytes <= workspace_bytes(model, 224) <= 3 * map_bytes
    assert workspace_bytes(model, 224, batch=2) == pytest.approx(2 * workspace_bytes(model, 224), rel=0.01)


def test_a_model_keeps_its_mode_when_it_is_measured() -> None:
    model = build("mobilenet_v2", ["a", "b"], {}, 64, device="meta").train()
    flops(model, 64)
    assert model.training and not any(p.device != torch.device("meta") for p in model.parameters())
