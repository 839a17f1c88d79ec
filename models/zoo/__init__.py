"""Architectures by name: `build_query` builds a query's model, `preprocess_of` says how its input is scaled."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemel.models.errors import InputError
from gemel.models.preprocess import (
    UNPREPARED_HINT,
    InputSize,
    Preprocess,
    height_width,
    side_or_sides,
)
from gemel.models.tasks import task_of
from gemel.models.zoo.hubs import build_hub, is_hub_model
from gemel.models.zoo.registry import (
    ENTRIES,
    Factory,
    ZooEntry,
    built_on,
    check_arguments,
    check_size,
)
from gemel.models.zoo.registry import names as names
from gemel.models.zoo.user_models import (
    answer_on_meta,
    build_foreign,
    check_answer,
    check_foreign,
    check_outputs,
    foreign_factory,
    has_fixed_head,
    is_external,
    is_model_file,
    reason,
)

if TYPE_CHECKING:
    from gemel.models.decoders.files import ModelFile
    from gemel.models.workload import Query

USUAL_WIDTH = 2000
"""Class counts up to this make no architecture of the zoo much larger than it was published."""

for _family in pkgutil.walk_packages(
    __path__, f"{__name__}."
):  # every module here registers its models
    importlib.import_module(_family.name)
OWN = frozenset(ENTRIES)
"""The names that this project registered; others may register more."""


def is_zoo_name(model: str) -> bool:
    """Whether the zoo itself, timm or transformers builds this model, so that no user's code is imported for it."""
    return model in ENTRIES or is_hub_model(model)


def width_of(task: str, classes: Sequence[str]) -> int:
    """The `num_classes` of a factory: a detector's background counts."""
    return len(classes) + task_of(task).has_background


def build(
    model: str,
    classes: Sequence[str] | int,
    model_args: Mapping[str, Any] | None = None,
    input_size: InputSize = 224,
    task: str = "classification",
    device: str | torch.device = "cpu",
    folder: Path | None = None,
) -> nn.Module:
    """Build an architecture with random weights; on device "meta" nothing is allocated.

    A name `package.module:factory` is imported, from `folder` first and from Python's path after it; the caller decides
    whether that is allowed. `classes` may be the width itself, as a factory counts it (`width_of`).
    Classification: x f32 (N, 3, H, W) -> logits (N, C); segmentation: logits (N, C, h, w). Detection: see
    models.detector. Raises InputError when the
    model cannot be built, and for a user's own module that could not be merged or has another width.
    """
    width = classes if isinstance(classes, int) else width_of(task, classes)
    args = dict(model_args or {})
    if is_hub_model(model):
        return build_hub(model, width, args, task, device)
    if is_zoo_name(model):
        return _build_zoo_model(model, width, input_size, args, device)
    factory = foreign_factory(model, folder)
    module = _build_user_model(model, factory, width, input_size, args, device)
    check_foreign(model, module, task)
    module = module.to(device)
    outputs = answer_on_meta(module, input_size)
    if outputs is not None:
        check_outputs(model, outputs, task, width, has_fixed_head(factory))
    return module


def build_query(query: Query, device: str | torch.device = "cpu") -> nn.Module:
    """Build a query's own model with random weights, or a file's with its own; errors name query and workload file."""
    with naming(query):
        if is_model_file(query.model):
            return file_of(query).build(device)
        args = (query.model, query.classes, query.model_args, input_size_of(query), query.task)
        return build(*args, device=device, folder=folder_of(query))


def file_of(query: Query) -> ModelFile:
    """The file that is a query's model."""
    from gemel.models.decoders.files import ModelFile

    size = None if query.input_size is None else height_width(query.input_size)
    return ModelFile(Path(query.model), size, query.decoder, query.task, query.classes)


def finds_outlines(query: Query) -> bool:
    """Whether the model of a query finds masks or rotated boxes of its objects; a file yet to be trained does not."""
    is_there = is_model_file(query.model) and Path(query.model).exists()
    return query.task == "detection" and is_there and file_of(query).has_outlines()


def check_input(query: Query, module: nn.Module) -> None:
    """Raise InputError when the query's model cannot take frames of its input size, or has another class count.

    One frame goes through on the meta device (about ten milliseconds), where nothing is computed.
    """
    if is_model_file(query.model):
        return  # its decoder was chosen by the shapes of its outputs
    with naming(query):
        check_answer(
            query.model,
            module,
            input_size_of(query),
            query.task,
            width_of(query.task, query.classes),
        )


def folder_of(query: Query) -> Path | None:
    """The folder of the query's workload file, where its factory may lie; None for a zoo model."""
    file: Path | None = getattr(query, "file", None)
    return None if file is None or is_zoo_name(query.model) else file.parent


@contextmanager
def naming(query: Query) -> Iterator[None]:
    """Let an error about a query's model begin with the workload file and the query."""
    try:
        yield
    except InputError as error:
        where = getattr(query, "file", None) or query.id
        key = f"{error.key or 'model'} ({query.id})"
        raise InputError(where, f"{query.model}: {error.problem}", error.hint, key) from error


def preprocess_of(query: Query) -> Preprocess:
    """How frames are prepared for the query's model: its own way, with what the query's `preprocess` says instead.

    Raises InputError where neither says the size, the mean and the deviation.
    """
    stated = query.preprocess
    if isinstance(stated, Preprocess):
        return stated
    default = _own_preprocess(query)
    keys = dict(stated or {}) if default is None else {**vars(default), **(stated or {})}
    if query.input_size is not None:
        keys["size"] = height_width(query.input_size)
    missing = [key for key in ("size", "mean", "std") if key not in keys]
    if missing:
        problem = f"nothing says the {' and the '.join(missing)} with which {Path(query.model).name} was trained"
        keys_hint = (
            "write as it was trained `preprocess: {size: [height, width], mean: [..], std: [..]}`"
        )
        hint = keys_hint if "size" in missing else UNPREPARED_HINT
        raise InputError(query.file or query.id, problem, hint, f"preprocess ({query.id})")
    return Preprocess(**keys)


def input_size_of(query: Query) -> InputSize:
    """The side of a square input, or (H, W): the query's own, or that of its preprocessing."""
    return (
        side_or_sides(preprocess_of(query).size) if query.input_size is None else query.input_size
    )


def zoo_preprocess(model: str, input_size: InputSize) -> Preprocess:
    """How frames are prepared for a model of the zoo, and for a factory's."""
    entry = ENTRIES.get(model, ZooEntry(model, "", nn.Identity))
    return Preprocess(height_width(input_size), mean=entry.mean, std=entry.std)


def _own_preprocess(query: Query) -> Preprocess | None:
    """How the model's own source prepares frames; None where it does not say."""
    if is_model_file(query.model):
        with naming(query):
            return file_of(query).preprocess()
    if is_external(query.model):
        return None
    return None if query.input_size is None else zoo_preprocess(query.model, query.input_size)


def _build_user_model(
    model: str,
    factory: Factory,
    width: int,
    input_size: InputSize,
    args: dict[str, Any],
    device: str | torch.device,
) -> nn.Module:
    """A user's own model; one that reads values while it is built, which "meta" has none of, is built on the CPU."""
    try:
        with built_on(device):
            return build_foreign(model, factory, width, input_size, args)
    except InputError:
        if torch.device(device).type != "meta":
            raise
    with torch.random.fork_rng(devices=[]), built_on("cpu"):
        return build_foreign(model, factory, width, input_size, args)


def _build_zoo_model(
    model: str, width: int, input_size: InputSize, args: dict[str, Any], device: str | torch.device
) -> nn.Module:
    """A zoo model; one of unusual size is built on the meta device first, where its bytes are counted."""
    if model in OWN:
        check_arguments(model, args)
    is_meta = torch.device(device).type == "meta"
    if args or width > USUAL_WIDTH or is_meta:
        with built_on("meta"):
            module = _call_factory(model, width, input_size, args)
        check_size(model, module)
        if is_meta:
            return module
    with built_on(device):
        return _call_factory(model, width, input_size, args)


def _call_factory(model: str, width: int, input_size: InputSize, args: dict[str, Any]) -> nn.Module:
    try:
        return ENTRIES[model].factory(width, input_size=input_size, **args)
    except (
        Exception
    ) as error:  # within their bounds arguments may still contradict each other, in many ways
        if not args and not isinstance(error, TypeError | ValueError):
            raise
        key = "input_size" if "input_size" in str(error) else "model_args"
        text = error if isinstance(error, TypeError | ValueError) else reason(error)
        raise InputError(model, f"cannot be built: {text}", f"correct `{key}`", key) from error
