"""Bundles of zoo models, made only to be measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from gemel.models import zoo
from gemel.models.bundle import Bundle, BundleQuery, Made, open_bundle, write_bundle

CLASSES, INPUT_SIZE = tuple(f"class {index}" for index in range(10)), 224


def bundle_query(query: str, model: str, classes: Sequence[str] = CLASSES, size: int = INPUT_SIZE) -> BundleQuery:
    """A query of so many classes and pixels for a zoo model."""
    task: Any = "detection" if model in zoo.names("detection") else "classification"
    return BundleQuery(
        id=query, camera="bridge", task=task, classes=tuple(classes), model=model, model_args={}, input_size=size,
        preprocess=zoo.zoo_preprocess(model, size), fps=5.0, sla_ms=100.0, accuracy_target=0.95,
    )  # fmt: skip


def write_measured_bundle(
    path: Path, models: Mapping[str, nn.Module], queries: Sequence[BundleQuery], **more: Any
) -> Bundle:
    """Written, over what was there, and opened; `more` as `write_bundle` takes it."""
    write_bundle(path, models, queries, Made("benchmark", "ceiling", 0), overwrite=True, **more)
    return open_bundle(path)
