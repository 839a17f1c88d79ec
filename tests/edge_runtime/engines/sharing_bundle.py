"""A bundle of two queries that share every convolution of a zoo model; norms and heads are their own."""

from __future__ import annotations

from pathlib import Path

import torch

from models import zoo
from models.bundle import Bundle, BundleQuery, Made, open_bundle, write_bundle

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
    queries = [
        BundleQuery(
            id=name,
            camera="bridge",
            task="classification",
            classes=CLASSES,
            model=model,
            model_args={},
            input_size=SIZE,
            preprocess=zoo.preprocess_of(model, SIZE),
            fps=5.0,
            sla_ms=100.0,
            accuracy_target=0.95,
        )
        for name in models
    ]
    write_bundle(path, models, queries, Made("w", "ceiling", 0))
    return open_bundle(path)
