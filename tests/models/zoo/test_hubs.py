"""Models of timm and of Hugging Face's folders: built, prepared, stored in a bundle and refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from gemel.models import zoo
from gemel.models.bundle import BundleQuery, Made, open_bundle, verify_bundle, write_bundle
from gemel.models.errors import InputError
from gemel.models.files.weights import load_weights, save_weights
from gemel.models.notes import collect_notes
from gemel.models.preprocess import Preprocess
from gemel.models.workload import Query, load_workload
from gemel.models.zoo.hubs import build_hub

HALVES = (0.5, 0.5, 0.5)


def ask(folder: Path, model: str, **keys: Any) -> Query:
    query = {"id": "gate", "camera": "c", "classes": ["empty", "busy"], "model": model, **keys}
    document = {"name": "hub", "cameras": {"c": {"source": "c.mp4"}}, "queries": [query]}
    (folder / "workload.yaml").write_text(yaml.safe_dump(document))
    return load_workload(folder / "workload.yaml").query("gate")


def ask_timm(folder: Path, name: str = "test_vit_relpos", **keys: Any) -> Query:
    timm = pytest.importorskip("timm")
    args = {"img_size": 32} if "vit" in name else {}
    save_weights(folder / "w.safetensors", timm.create_model(name, num_classes=2, **args).state_dict())
    return ask(folder, f"timm/{name}", weights="w.safetensors", **{"input_size": 32, **keys})


def save_hf(folder: Path, **processor: Any) -> nn.Module:
    """A tiny ViT as save_pretrained writes it, with this preprocessing."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=32, patch_size=8,
        num_labels=2,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config).eval()
    model.save_pretrained(folder)
    keys = {"size": {"height": 32, "width": 32}, "image_mean": HALVES, "image_std": HALVES, "resample": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps({**keys, **processor}))
    return model


def test_timm_model_has_its_own_preprocessing_and_size(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    with collect_notes() as notes:
        query = ask(tmp_path, "timm/test_vit")
    assert query.task == "classification" and query.input_size == 160
    assert zoo.preprocess_of(query) == Preprocess((160, 160), "center-crop", 0.95, mean=HALVES, std=HALVES)
    assert len(notes) == 1 and notes[0].startswith("timm/test_vit: was trained on frames resized by 'bicubic'")
    own = zoo.preprocess_of(ask(tmp_path, "timm/test_vit", input_size=32, preprocess={"resize": "stretch"}))
    assert (own.size, own.resize, own.mean) == ((32, 32), "stretch", HALVES)
    assert zoo.build_query(query)(torch.zeros(2, 3, 160, 160)).shape == (2, 2)


def test_timm_model_takes_weights_of_the_cache(tmp_path: Path, monkeypatch) -> None:
    timm = pytest.importorskip("timm")
    found = tmp_path / "cached.safetensors"
    save_weights(found, timm.create_model("test_resnet", num_classes=2).state_dict())
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda repository, name: str(found))
    assert ask(tmp_path, "timm/test_resnet.r160_in1k").weights == found
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda repository, name: None)
    assert ask(tmp_path, "timm/test_resnet").weights is None


@pytest.mark.parametrize("name", ["test_resnet", "test_vit_relpos"])
def test_timm_model_of_a_bundle_is_built_without_factories(tmp_path: Path, name: str) -> None:
    query = ask_timm(tmp_path, name)
    model = load_weights(query, zoo.build_query(query)).eval()
    frames = torch.rand(2, 3, 32, 32)
    record = BundleQuery.of(query)
    write_bundle(tmp_path / "b.safetensors", {"gate": model}, [record], Made("w", "none", 0))
    assert verify_bundle(tmp_path / "b.safetensors") == []
    assert torch.equal(open_bundle(tmp_path / "b.safetensors").build("gate")(frames), model(frames))


def test_hf_folder_is_a_query_without_other_keys(tmp_path: Path) -> None:
    saved = save_hf(tmp_path / "my vit")
    query = ask(tmp_path, "hf/my vit")
    assert (query.model, query.input_size, query.weights) == ("hf/my_vit", 32, tmp_path / "my vit")
    assert zoo.preprocess_of(query) == Preprocess((32, 32), mean=HALVES, std=HALVES)
    model, frames = load_weights(query, zoo.build_query(query)).eval(), torch.rand(2, 3, 32, 32)
    assert torch.equal(model(frames), saved(pixel_values=frames).logits)
    write_bundle(tmp_path / "b.safetensors", {"gate": model}, [BundleQuery.of(query)], Made("w", "none", 0))
    assert torch.equal(open_bundle(tmp_path / "b.safetensors").build("gate")(frames), model(frames))


PROCESSORS: dict[str, tuple[dict[str, Any], Preprocess]] = {
    "a side as a number": ({"size": 32}, Preprocess((32, 32), mean=HALVES, std=HALVES)),
    "a crop": (
        {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}, "do_center_crop": True},
        Preprocess((32, 32), "center-crop", 0.8, mean=HALVES, std=HALVES),
    ),
    "ConvNeXt's crop": (
        {"size": {"shortest_edge": 32}, "crop_pct": 0.875},
        Preprocess((32, 32), "center-crop", 0.875, mean=HALVES, std=HALVES),
    ),
    "no normalisation": ({"do_normalize": False}, Preprocess((32, 32), mean=(0, 0, 0), std=(1, 1, 1))),
    "no scaling": ({"do_rescale": False}, Preprocess((32, 32), scale=255, mean=HALVES, std=HALVES)),
}  # fmt: skip


@pytest.mark.parametrize("kind", PROCESSORS)
def test_hf_processor_becomes_the_preprocessing(tmp_path: Path, kind: str) -> None:
    keys, expected = PROCESSORS[kind]
    save_hf(tmp_path / "vit", **keys)
    assert zoo.preprocess_of(ask(tmp_path, "hf/vit")) == expected


def test_hf_folder_without_a_processor_needs_preprocess(tmp_path: Path) -> None:
    save_hf(tmp_path / "vit")
    (tmp_path / "vit/preprocessor_config.json").unlink()
    with pytest.raises(InputError, match="nothing says the size and the mean and the std"):
        zoo.preprocess_of(ask(tmp_path, "hf/vit"))


REFUSED = {
    "no name of timm": ("timm/resnet_18x", "is no name of a model of timm"),
    "an address": ("timm/hf-hub:timm/resnet18", "is no name of a model of timm; timm.list_models"),
    "no folder": ("hf/none", "is no folder; give a local folder as `save_pretrained` writes it"),
    "no config": ("hf/empty", "config.json: cannot be read|cannot be read"),
    "a detector": ("hf/detr", "holds a DetrForObjectDetection, no image classifier; export it as .onnx"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_hub_model_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    model, message = REFUSED[kind]
    if model.startswith("timm/"):
        pytest.importorskip("timm")
    for name in ("empty", "detr"):
        (tmp_path / name).mkdir()
    (tmp_path / "detr/config.json").write_text('{"architectures": ["DetrForObjectDetection"]}')
    with pytest.raises(InputError, match=message) as caught:
        ask(tmp_path, model)
    assert str(caught.value).startswith(str(tmp_path / "workload.yaml")) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "args", "message"),
    [
        ("timm/test_resnet", {"pretrained": True}, "takes bounded numbers and words alone"),
        ("timm/test_resnet", {"checkpoint_path": "x.pt"}, "takes bounded numbers and words alone"),
        ("timm/test_resnet", {"stem_width": 10**9}, "takes bounded numbers and words alone"),
        ("timm/test_resnet", {"nonsense": 3}, "cannot be built: .*nonsense"),
        ("timm/test_vit", {"embed_dim": 60000}, "cannot be built"),
        ("hf/x", {"config": {"model_type": "none"}}, "cannot be built"),
        ("hf/x", {"config": {"model_type": "vit", "hidden_size": 60000}}, "cannot be built"),
        ("hf/x", {"config": {"model_type": "vit"}, "cache_dir": "a"}, "takes no argument 'cache_dir'"),
    ],
)
def test_hub_model_of_a_hostile_bundle_is_refused(model: str, args: dict[str, Any], message: str) -> None:
    pytest.importorskip("timm" if model.startswith("timm") else "transformers")
    with pytest.raises(InputError, match=message):
        build_hub(model, 2, args, "classification")


def test_hub_model_without_its_package_names_the_extra(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(InputError, match=r"needs timm; pip install 'gemel\[timm\]'"):
        ask(tmp_path, "timm/resnet18")


LOOSE = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.conv = nn.Conv2d(3, num_classes, 3)
        self.scale = torch.full((1, 3, 1, 1), 3.0)
        self.register_buffer("shift", torch.full((1, 3, 1, 1), 0.5), persistent=False)
    def forward(self, x):
        return self.conv(x * self.scale + self.shift).mean((2, 3))
"""


def test_bundle_builds_a_model_with_tensors_outside_its_state(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(LOOSE)
    query = ask(tmp_path, "nets:Net", task="classification", input_size=32)
    model, frames = zoo.build_query(query).eval(), torch.rand(2, 3, 32, 32)
    write_bundle(tmp_path / "b.safetensors", {"gate": model}, [BundleQuery.of(query)], Made("w", "none", 0))
    bundle = open_bundle(tmp_path / "b.safetensors", ["nets:Net"], tmp_path)
    assert torch.equal(bundle.build("gate")(frames), model(frames))
    unbound = bundle.build_unbound("gate", "cpu")
    assert unbound.conv.weight.is_meta and unbound.scale.max() == 3 and unbound.shift.max() == 0.5  # type: ignore
