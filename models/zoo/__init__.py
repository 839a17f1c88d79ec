"""Architectures by name: `build` makes one, `preprocess_of` says how its input is scaled."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from models.errors import InputError
from models.preprocess import Preprocess
from models.zoo.registry import ENTRIES, ZooEntry

__all__ = ["build", "check_name", "is_zoo_name", "names", "preprocess_of"]

for _family in pkgutil.iter_modules(__path__):  # every module of this folder enters its models into the registry
    importlib.import_module(f"{__name__}.{_family.name}")


def names(task: str | None = None) -> list[str]:
    """All names of the zoo, or those that answer one task."""
    return sorted(name for name, entry in ENTRIES.items() if task in (None, entry.task))


def is_zoo_name(model: str) -> bool:
    """Whether the zoo itself builds this model, so that nothing foreign is imported for it."""
    return model in ENTRIES


def check_name(model: str, task: str, where: str, key: str = "model") -> None:
    """Raise InputError when `model` is neither in the zoo for this task nor `package.module:factory`."""
    entry = ENTRIES.get(model)
    if entry is None and ":" not in model:
        near = difflib.get_close_matches(model, ENTRIES, n=3)
        hint = f"did you mean {', '.join(near)}?" if near else "see `gemel inspect --help`"
        raise InputError(where, f"'{model}' is not in the zoo", f"{hint} or give package.module:factory", key)
    if entry is not None and entry.task != task:
        raise InputError(where, f"'{model}' does {entry.task}, not {task}", f"use one of {names(task)}", key)


def build(
    model: str,
    classes: Sequence[str],
    model_args: Mapping[str, Any] | None = None,
    input_size: int = 224,
    task: str = "classification",
    device: str | torch.device = "cpu",
    factories: Collection[str] | None = None,
    num_classes: int | None = None,
) -> nn.Module:
    """Build an architecture with random weights; on device "meta" nothing is allocated.

    A name `package.module:factory` is imported; `factories`, where given, is the list of those that may be.
    Classification: x f32 (N, 3, S, S) -> logits (N, C). Detection: -> logits (N, A, C + 1) with class 0
    the background, and box deltas (N, A, 4). `num_classes` overrides the width that `classes` gives.
    """
    width = num_classes if num_classes is not None else len(classes) + (task == "detection")
    with torch.device(device):
        if is_zoo_name(model):
            factory = ENTRIES[model].factory
        else:
            if factories is not None and model not in factories:
                raise InputError(model, "this factory may not be imported", "list it under `factories`")
            factory = _foreign_factory(model)
        try:
            module = factory(width, input_size=input_size, **(model_args or {}))
        except (TypeError, ValueError) as error:
            remedy = "check model_args and input_size"
            raise InputError(model, f"cannot be built: {error}", remedy, "model_args") from error
    if not isinstance(module, nn.Module):
        raise InputError(model, f"the factory returned {type(module).__name__}", "it must return a torch nn.Module")
    return module


def preprocess_of(model: str, input_size: int) -> Preprocess:
    """How frames are prepared for this model."""
    entry = ENTRIES.get(model, ZooEntry(model, "", nn.Identity))
    return Preprocess(input_size, entry.mean, entry.std)


def _foreign_factory(model: str):
    module_name, _, attribute = model.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(model, f"cannot be imported: {error}", "check the name and PYTHONPATH", "model") from error
    if "input_size" in inspect.signature(factory).parameters:
        return factory
    return lambda num_classes, input_size, **args: factory(num_classes, **args)
