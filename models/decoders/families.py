"""How families of detectors prepare their frames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemel.models.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess, Size

OPENCV: dict[str, Any] = {"antialias": False}
"""Resized by OpenCV, bilinear."""
PLAIN: dict[str, Any] = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
"""Values 0..1 as they are."""
IMAGENET: dict[str, Any] = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
MMDET: dict[str, Any] = {
    **OPENCV,
    "scale": 255, "channels": "bgr", "mean": (103.53, 116.28, 123.675), "std": (57.375, 57.12, 58.395),
}  # fmt: skip
"""ImageNet's mean and deviation on 0..255, blue first, as OpenMMLab writes them."""
CENTRED: dict[str, Any] = {"resize": "letterbox", **OPENCV}
CORNERED: dict[str, Any] = {**CENTRED, "anchor": "top-left"}

PADDLE = {**IMAGENET, **OPENCV}
YOLO = {**CENTRED, **PLAIN}
YOLO_NAS = {**YOLO, "crop_fraction": 636 / 640}
"""super-gradients' processing of its COCO models: within 636 of 640 pixels."""
FASTESTDET = {**PLAIN, **OPENCV, "channels": "bgr"}
YOLOX = {**CORNERED, **PLAIN, "scale": 255, "channels": "bgr"}
ULTRALYTICS = "Ultralytics"
"""The author in the metadata of its exporter."""
FAMILIES = {
    "yolox": YOLOX, "yolo9": {**CORNERED, **PLAIN}, "rtmdet": {**CORNERED, **MMDET}, "picodet": PADDLE,
    "ppyoloe": PADDLE, "rtdetr": PLAIN, "dfine": PLAIN, "deim": PLAIN, "rfdetr": IMAGENET, "detr": IMAGENET,
    "lwdetr": IMAGENET, "deformable_detr": IMAGENET, "ec": IMAGENET,
}  # fmt: skip
"""By the name under which LibreYOLO exports a family."""


def family_preprocess(
    metadata: Mapping[str, str], size: Size, default: Mapping[str, Any] | None
) -> Preprocess | None:
    """The preparation of the family that the metadata name, else `default`; None for a family that is not known."""
    family = metadata.get("model_family", "")
    default = YOLO if default is None and metadata.get("author") == ULTRALYTICS else default
    keys = FAMILIES.get(family) or FAMILIES.get(family.split("_")[0]) if family else default
    if family.startswith("yolo9") and metadata.get("letterbox_pad") == "center":
        keys = YOLO
    if metadata.get("author") == ULTRALYTICS and keys is not None:
        keys = {**keys, **OPENCV}
    return None if keys is None else Preprocess(size, **keys)
