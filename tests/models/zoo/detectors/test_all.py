"""The zoo's detectors: shapes, names of parameters, default boxes, the meta device."""

from __future__ import annotations

import pytest
import torch
import torchvision

from gemel.models import zoo
from gemel.models.zoo.detectors.single_stage import SingleStage

torch.set_num_threads(1)

SMALL = {
    "ssdlite320_mobilenet_v2": 96,
    "ssd320_squeezenet1_0": 96,
    "ssd_resnet18": 64,
    "ssdlite320_mobilenet_v3_large": 64,
}


def detector(name: str, classes: int = 2, size: int | None = None, device: str = "cpu", **args) -> SingleStage:
    size = size or SMALL.get(name, 300)
    model = zoo.build(name, [f"class{i}" for i in range(classes)], args, size, "detection", device=device)
    assert isinstance(model, SingleStage)
    return model.eval()


@pytest.mark.parametrize("name", [*SMALL, "ssd300_vgg16"])
def test_ssd_on_meta_has_default_boxes(name):
    model = detector(name, device="meta", size=300)
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
    boxes = model.default_boxes()
    assert boxes.device.type == "cpu"
    assert not any("box" in key for key in model.state_dict())
    assert model(torch.zeros(1, 3, 300, 300, device="meta"))[0].shape[1] == len(boxes)


@pytest.mark.parametrize("name", ["ssdlite320_mobilenet_v3_large", "ssd300_vgg16"])
def test_ssd_keys_and_default_boxes_are_torchvisions(name):
    with torch.device("meta"):
        theirs = getattr(torchvision.models.detection, name)(weights=None, weights_backbone=None, num_classes=91)
    size = 320 if "320" in name else 300
    ours = detector(name, classes=90, size=size, device="meta")
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    grids = [[side, side] for side in ((20, 10, 5, 3, 2, 1) if size == 320 else (38, 19, 10, 5, 3, 1))]
    expected = theirs.anchor_generator._grid_default_boxes(grids, [size, size])
    boxes = ours.default_boxes()
    torch.testing.assert_close((boxes[:, :2] + boxes[:, 2:]) / 2, expected[:, :2])
    torch.testing.assert_close(boxes[:, 2:] - boxes[:, :2], expected[:, 2:])


@pytest.mark.parametrize(
    ("name", "classifier"),
    [
        ("ssdlite320_mobilenet_v2", "mobilenet_v2"),
        ("ssd320_squeezenet1_0", "squeezenet1_0"),
        ("ssd_resnet18", "resnet18"),
    ],
)
def test_classifier_weights_fit_under_backbone(name, classifier):
    with torch.device("meta"):
        pretrained = torchvision.models.get_model(classifier, weights=None).state_dict()
    own = detector(name, device="meta").state_dict()
    features = {key: value for key, value in pretrained.items() if not key.startswith(("classifier.", "fc."))}
    assert all(own[f"backbone.{key}"].shape == value.shape for key, value in features.items())
