"""A bundle of two queries that share every convolution of a zoo model; norms and heads are their own."""

from __future__ import annotations

from pathlib import Path

import torch

from models import zoo
from models.bundle import Bundle, Made, open_bundle, write_bundle
from tests.edge_runtime.tiny import query

SIZE, CLASSES = 64, ("car", "bus", "truck")


def sharing_bundle(path: Path, model: str) -> Bundle:
    """Written and opened; the queries are "first" and "second"."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    models = {name: zoo.build(model, CLASSES, {}, SIZE).eval() for name in ("first", "second")}
    trunk = models["first"].state_dict()
    for key, tensor in models["second"].state_dict().items():
        if tensor.ndim == 4:
            tensor.copy_(trunk[key])
        elif tensor.is_floating_point():
            tensor.copy_(torch.rand_like(tensor) * 0.2 + 0.9)
    keys = {"classes": CLASSES, "model": model, "input_size": SIZE, "preprocess": zoo.preprocess_of(model, SIZE)}
    write_bundle(path, models, [query(name, "bridge", **keys) for name in models], Made("w", "ceiling", 0))
    return open_bundle(path)
