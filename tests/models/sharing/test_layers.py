"""Layers, signatures, groups and the ceiling, against counts made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torchvision
import yaml
from torch import nn
from torch.nn.utils import weight_norm as old_weight_norm
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from gemel.models.sharing.groups import ceiling_bytes, groups
from gemel.models.sharing.layers import (
    describe,
    layers_of,
    layers_of_all,
    model_bytes,
    state_bytes,
    weight_key,
    weight_of,
    weights_in,
)
from gemel.models.workload import load_workload
from gemel.models.zoo import build, names
from gemel.models.zoo.registry import ENTRIES
from tests.parameters import one_in


def _workload(folder: Path, *models: str, classes: int = 2):
    queries = [
        {"id": f"q{index}", "camera": "c", "task": "detection" if "ssd" in model else "classification",
         "classes": [f"k{k}" for k in range(classes)], "model": model, "input_size": 320 if "ssd" in model else 224}
        for index, model in enumerate(models)
    ]  # fmt: skip
    path = folder / "w.yaml"
    path.write_text(yaml.safe_dump({"name": "w", "cameras": {"c": {"source": "x"}}, "queries": queries}))
    return load_workload(path)


def test_resnet18_has_its_published_size_and_a_private_head(tmp_path: Path) -> None:
    query = _workload(tmp_path, "resnet18", classes=1000).queries[0]
    layers = layers_of(query)
    assert [layer.path for layer in layers if layer.head] == ["fc"]
    assert sum(layer.bytes for layer in layers) == 4 * (11_689_512 - 9_600 - 1000)  # less norms and the head's bias
    statistics = sum(b.nbytes for b in torchvision.models.resnet18().buffers())
    assert model_bytes(query) == 4 * 11_689_512 + statistics


def test_ceiling_of_two_equal_models_is_one_backbone(tmp_path: Path) -> None:
    workload = _workload(tmp_path, "resnet18", "resnet18")
    layers = layers_of_all(workload.queries)
    shareable = sum(layer.bytes for layer in layers if not layer.head) // 2
    assert ceiling_bytes(layers) == shareable
    assert sum(group.saved_bytes for group in groups(layers)) == shareable


def test_strict_signature_separates_layers_by_bias(tmp_path: Path) -> None:
    workload = _workload(tmp_path, "vgg16", "resnet34")
    layers = layers_of_all(workload.queries)
    shapes = {(group.signature) for group in groups(layers, "wide")}
    assert any(signature.startswith("conv2d 512x512x3x3") for signature in shapes)
    assert groups(layers, "strict") == []


@pytest.mark.parametrize("model", one_in(5, names()))
def test_describe_zoo_model_as_it_is_built(model: str) -> None:
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
def test_weights_in_skips_computed_weights(computed) -> None:
    model = nn.Sequential(computed(nn.Conv2d(3, 4, 1)), nn.Conv2d(4, 4, 1), computed(nn.Linear(4, 2)))
    assert [path for path, *_ in weights_in(model)] == ["1"]


def test_packed_and_plain_attention_have_equal_signatures() -> None:
    found = {path: wide for path, wide, *_ in describe("vit_b_16", 10, 224, "classification").layers}
    packed = "encoder.layers.encoder_layer_0.self_attention.in_proj"
    assert found[packed] == "linear 2304x768 float32"
    swin = [wide for _, wide, *_ in describe("swin_t", 10, 224, "classification").layers]
    assert found[packed] in swin
