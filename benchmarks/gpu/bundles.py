"""Bundles of random weights that a stage runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from benchmarks.bundles.samples import bundle_query, write_measured_bundle
from gemel.models import zoo
from gemel.models.bits import Bits
from gemel.models.bundle import Bundle
from gemel.models.export.export_document import export_documents
from gemel.models.quantization import choices, pack

CLASSES = ("car", "bus", "truck")
FAMILIES = (
    "resnet50", "mobilenet_v2", "efficientnet_b0", "vgg11_bn", "densenet121", "convnext_tiny", "swin_t",
    "ssdlite320_mobilenet_v2",
)  # fmt: skip
FEW = ("cifar_resnet20", "ssdlite320_mobilenet_v3_large")
SIZE, SMALL_SIZE = 224, 32
DETECTOR_SIZE, SMALL_DETECTOR_SIZE = 320, 96


def size_of(model: str, small: bool) -> int:
    """Pixels of a frame."""
    if model in zoo.names("detection"):
        return SMALL_DETECTOR_SIZE if small else DETECTOR_SIZE
    return SMALL_SIZE if small else SIZE


def bundle_of(
    path: Path,
    names: Sequence[str],
    model: str,
    small: bool,
    width: Bits | None = None,
    shared: bool = True,
    has_documents: bool = False,
) -> Bundle:
    """Queries of one model that share all convolutions, unless not `shared`; with a width every weight that can be is
    stored so, with `has_documents` their networks, too.
    """
    size, models = size_of(model, small), {}
    for seed, name in enumerate(names):
        torch.manual_seed(seed)
        task = "detection" if model in zoo.names("detection") else "classification"
        models[name] = _randomise(zoo.build(model, CLASSES, {}, size, task).eval())
    first = models[names[0]].state_dict()
    for own in models.values():
        for key, tensor in own.state_dict().items():
            if shared and tensor.ndim == 4:
                tensor.copy_(first[key])
    queries = [bundle_query(name, model, CLASSES, size) for name in names]
    stored = {} if width is None else {"packed": {name: _pack_weights(one, width) for name, one in models.items()}}
    documents = export_documents(models, queries) if has_documents else {}
    return write_measured_bundle(path, models, queries, documents=documents, **stored)


def _randomise(model: nn.Module) -> nn.Module:
    """Biases and norms with values of their own, so that outputs depend on all of them."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point() and tensor.ndim == 1:
                tensor.add_(torch.rand_like(tensor) * 0.05)
    return model


def _pack_weights(model: nn.Module, width: Bits) -> dict:
    kinds = {key: choices(key, tensor.shape, width) for key, tensor in model.state_dict().items()}
    return {key: pack(model.state_dict()[key], own[0]) for key, own in kinds.items() if own}
