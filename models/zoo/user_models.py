"""Models from the user's own code, `package.module:factory`: import, build, check."""

from __future__ import annotations

import copy
import difflib
import hashlib
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gemel.models.detector import Detector, OneStage
from gemel.models.errors import InputError
from gemel.models.preprocess import InputSize, height_width, size_of_input
from gemel.models.tasks import task_of
from gemel.models.zoo.hubs import is_hub_model
from gemel.models.zoo.registry import ENTRIES, Factory, names

NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(?<!\.py):[A-Za-z_]\w*")
FORM = "write it as package.module:factory, the module without .py"
MODEL_FILES = (".onnx", ".pt2")
"""Suffixes of the files that hold a graph and its weights."""
EXPORTED = {
    ".onnx": "an ONNX file", ".xml": "an OpenVINO model", ".engine": "a TensorRT engine", ".plan": "a TensorRT engine",
    ".trt": "a TensorRT engine", ".tflite": "a TensorFlow Lite model", ".pb": "a TensorFlow graph",
    ".h5": "a Keras model", ".keras": "a Keras model", ".mlmodel": "a Core ML model", ".param": "an ncnn model",
    ".pt2": "an exported program",
}  # fmt: skip
"""Files of networks that other tools made, by suffix."""
EXPORTED_HINT = (
    "give the PyTorch weights of the same network as `weights`, and its code as `model: "
    "package.module:factory`"
)
EXPORT_HINT = (
    "export it as .onnx (torch.onnx.export, or its package's exporter) or .pt2 (torch.export.save), or name its "
    "network in a workload (a name of the zoo, or package.module:factory) beside its `weights`"
)
DETECTOR_METHODS = ("loss", "distill")
ONE_STAGE_METHODS = ("decode", "loss", "distill")


def foreign_factory(model: str, folder: Path | None) -> Factory:
    """The factory that `package.module:factory` names, from `folder` first and from Python's path after it.

    It gets `num_classes` and `input_size` by name where it has such parameters, and model_args. Raises InputError when
    it cannot be found or imported.
    """
    if not NAME.fullmatch(model):
        raise InputError(model, "is no name of a factory", FORM, "model")
    module_name, _, attribute = model.partition(":")
    is_local = folder is not None and _has_module(folder, module_name)
    try:
        module = _import(module_name, folder if is_local else None)
    except Exception as error:  # a user's module can fail in any way while it is imported
        beside = f"put the module into {folder}, or " if folder is not None else ""
        hint = (
            "correct the module"
            if is_local
            else f"check the name; {beside}put its folder on PYTHONPATH"
        )
        raise InputError(model, f"cannot be imported: {reason(error)}", hint, "model") from error
    factory: Factory | None = getattr(module, attribute, None)
    if not callable(factory):
        problem = (
            f"{module_name} has no '{attribute}'"
            if factory is None
            else f"{attribute} cannot be called"
        )
        callables = [name for name, value in vars(module).items() if callable(value)]
        near = difflib.get_close_matches(attribute, callables)
        hint = (
            f"did you mean {', '.join(near)}?"
            if near
            else "name a function that returns the module"
        )
        raise InputError(model, problem, hint, "model")
    parameters = _parameters(factory)

    def call(num_classes: int, input_size: InputSize, **args: Any) -> nn.Module:
        values = {"num_classes": num_classes, "input_size": input_size}
        return factory(
            **{**{name: value for name, value in values.items() if name in parameters}, **args}
        )

    call.parameters = parameters  # type: ignore[attr-defined]
    return call


def _parameters(factory: Factory) -> tuple[str, ...]:
    """The names of a factory's parameters; `num_classes` too where it takes any, and where it does not tell."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return ("num_classes",)
    takes_any = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    return (*parameters, "num_classes") if takes_any else tuple(parameters)


def has_fixed_head(factory: Factory) -> bool:
    """Whether a factory takes no class count."""
    return "num_classes" not in getattr(factory, "parameters", ("num_classes",))


def build_foreign(
    model: str, factory: Factory, width: int, input_size: InputSize, model_args: dict[str, Any]
) -> nn.Module:
    """Call a user's factory; InputError for anything it raises and for a result that is no module."""
    try:
        module = factory(width, input_size=input_size, **model_args)
    except InputError:
        raise
    except Exception as error:  # a user's code can fail in any way
        problem = f"cannot be built: {reason(error)}{_location(error)}"
        hint = "correct the factory, or check model_args and input_size"
        if isinstance(error, TypeError) and not _location(error):
            names = ", ".join(dict.fromkeys(getattr(factory, "parameters", ())))
            hint = f"it takes ({names}): num_classes and input_size are given by these names, the others by model_args"
        raise InputError(model, problem, hint, "model_args") from error
    if not isinstance(module, nn.Module):
        raise InputError(
            model,
            f"the factory returned {type(module).__name__}",
            "it must return a torch nn.Module",
        )
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise InputError(
            model, "the factory returned TorchScript, whose layers cannot be shared", EXPORT_HINT
        )
    return module


def reason(error: Exception) -> str:
    """An error of foreign code in one line, with its type."""
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _location(error: Exception) -> str:
    """The line of the user's code that raised; empty where the call itself did not fit."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__
    ]
    frames = [frame for frame in frames if "site-packages" not in frame.filename]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def _has_module(folder: Path, name: str) -> bool:
    base = folder.joinpath(*name.split("."))
    return base.with_name(f"{base.name}.py").is_file() or (base / "__init__.py").is_file()


def _import(name: str, folder: Path | None) -> ModuleType:
    """Import a module; one in `folder` gets a package of its own, so its models.py collides with no other."""
    if folder is None:
        return importlib.import_module(name)
    package = f"gemel_folder_{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
    if package not in sys.modules:
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [str(folder)]
    # A module may import its neighbours by their plain names, as a script may.
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(f"{package}.{name}")
    finally:
        sys.path.remove(str(folder))


def check_foreign(model: str, module: nn.Module, task: str) -> None:
    """Raise InputError for a module whose tensors cannot be stored and shared one by one, or which is no detector."""
    if task_of(task).has_background:
        base, methods = (
            (OneStage, ONE_STAGE_METHODS)
            if isinstance(module, OneStage)
            else (Detector, DETECTOR_METHODS)
        )
        missing = [
            name
            for name in methods
            if getattr(type(module), name, None) in (None, getattr(base, name))
        ]
        if missing or not hasattr(module, "nms_iou"):
            problem = f"{type(module).__name__} is no detector: it lacks {', '.join(missing or ['nms_iou'])}"
            raise InputError(model, problem, "derive it from models.detector.OneStage or Detector")
    names: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        first = names.setdefault(id(tensor), name)
        if first != name:
            hint = f"give {name} a parameter of its own: nn.Parameter({first}.detach().clone())"
            raise InputError(model, f"{first} and {name} are one tensor", hint)
        if not tensor.is_contiguous():
            problem = (
                f"{name} is not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()})"
            )
            raise InputError(model, problem, f"store {name} as .contiguous() in the factory")


def check_answer(
    model: str, module: nn.Module, input_size: InputSize, task: str, width: int
) -> None:
    """Raise InputError when the module fails on two frames of its size, or gives no logits (2, width).

    The frames are on the meta device, where nothing is computed. A module with weights that fails there gets real ones.
    """
    try:
        outputs = _answer(module, input_size, 2)
    except Exception as error:  # a user's forward can fail in any way
        entry = ENTRIES.get(model)
        hint = (
            f"choose another input_size; it was made for {entry.input_size}"
            if entry
            else "correct its forward"
        )
        problem = f"cannot take frames of {size_of_input(input_size)} ({reason(error)})"
        key = "input_size"
        with suppress(Exception):
            _answer(module, input_size, 1)
            problem = f"takes one frame at a time, not two ({reason(error)})"
            key = "model"
            hint = "let its forward take batches (N, 3, H, W) of any N"
        raise InputError(model, problem, hint, key) from error
    check_outputs(model, outputs, task, width)


def check_outputs(model: str, outputs: Any, task: str, width: int, is_fixed: bool = False) -> None:
    """Raise InputError when a module's outputs for two frames are not those of its task.

    `is_fixed`: its factory takes no class count.
    """
    if task == "classification":
        check_logits(model, outputs, width, is_fixed)
    # Of one frame.
    shapes = [(1, *leaf.shape[1:]) for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    if misfit := task_of(task).find_misfit(shapes, width):
        raise InputError(model, misfit, "correct its forward, `classes` or `task`", "task")


def check_logits(model: str, outputs: Any, width: int, is_fixed: bool = False) -> None:
    """Raise InputError when a classifier's outputs for two frames are not a tensor (2, width)."""
    if isinstance(outputs, Tensor) and outputs.shape == (2, width):
        return
    if isinstance(outputs, Tensor) and outputs.ndim == 2 and len(outputs) == 2:
        problem = f"answers with {outputs.shape[1]} classes where {width} were asked for"
        hint = ""
        if is_fixed:
            problem = f"{problem}: its factory takes no `num_classes`, so its head is fixed"
            hint = f"list its {outputs.shape[1]} classes, or "
        raise InputError(model, problem, f"{hint}make its last layer `num_classes` wide", "classes")
    answer = (
        f"a tensor {tuple(outputs.shape)}"
        if isinstance(outputs, Tensor)
        else f"a {type(outputs).__name__}"
    )
    problem = f"answers two frames with {answer}, not with logits (2, {width})"
    raise InputError(model, problem, "return one row of plain logits for each frame", "model")


def answer_on_meta(module: nn.Module, input_size: InputSize) -> Any:
    """The module's outputs for two frames on the meta device; None where it cannot run there."""
    try:
        return _run_on_meta(module, input_size, 2)
    except Exception:  # a user's module may fail in any way
        return None


def _answer(module: nn.Module, input_size: InputSize, frames: int) -> Any:
    """The outputs for frames of zeros: on the meta device, else where the module has values."""
    try:
        return _run_on_meta(module, input_size, frames)
    except Exception:
        if any(tensor.is_meta for tensor in module.state_dict().values()):
            raise
        device = next(module.parameters()).device
        with _inference_mode(module):
            return module(torch.zeros(frames, 3, *height_width(input_size), device=device))


def _run_on_meta(module: nn.Module, input_size: InputSize, frames: int) -> Any:
    """Outputs of a copy of the module on the meta device: a forward may keep tensors for later calls."""
    tensors = list(_tensors_in([vars(part) for part in module.modules()]))
    meta = {
        id(tensor): tensor.detach().to("meta").requires_grad_(tensor.requires_grad)
        for tensor in tensors
    }
    parameters = {
        id(tensor): nn.Parameter(meta[id(tensor)], tensor.requires_grad)
        for tensor in tensors
        if isinstance(tensor, nn.Parameter)
    }
    copied = copy.deepcopy(module, {**meta, **parameters})
    with torch.device("meta"), _inference_mode(copied):
        return copied(torch.zeros(frames, 3, *height_width(input_size)))


def _tensors_in(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict) and depth:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item, depth - 1)


def has_loose_tensors(module: nn.Module) -> bool:
    """Whether a module on the meta device lacks values outside its state dict: of attributes, or other buffers."""
    identities = {id(tensor) for tensor in module.state_dict(keep_vars=True).values()}
    tensors = _tensors_in([vars(part) for part in module.modules()])
    return any(tensor.is_meta and id(tensor) not in identities for tensor in tensors)


def fill_loose_tensors(module: nn.Module, twin: nn.Module, device: str | torch.device) -> nn.Module:
    """Give a module on the meta device the tensors that its twin with values holds outside the state dict."""
    for part, counterpart in zip(module.modules(), twin.modules(), strict=True):
        for name in counterpart._non_persistent_buffers_set:
            if (tensor := counterpart._buffers[name]) is not None:
                part._buffers[name] = tensor.to(device)
        for name, value in vars(counterpart).items():
            if isinstance(value, Tensor):
                setattr(part, name, value.to(device))
    return module


@contextmanager
def _inference_mode(module: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; each part returns to the mode it had."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training


def is_model_file(model: str) -> bool:
    """Whether `model` is the path of a file that holds a graph and its weights."""
    return model.lower().endswith(MODEL_FILES)


def is_external(model: str) -> bool:
    """Whether `model` is a file, or a model of timm or Hugging Face."""
    return is_model_file(model) or is_hub_model(model)


def check_suffix(model: str, where: str, key: str = "model") -> None:
    """Raise InputError for the path of a network in a form that is not read."""
    pickled = dict.fromkeys(
        (".pt", ".pth", ".pkl", ".torchscript"),
        "weights without their network, or a pickled or TorchScript module",
    )
    if kind := (EXPORTED | pickled).get(Path(model).suffix.lower()):
        raise InputError(where, f"'{model}' is {kind}, which is not read", EXPORT_HINT, key)


def check_name(model: str, task: str, where: str, key: str = "model") -> None:
    """Raise InputError when `model` is neither in the zoo for this task, nor a file, a hub's or a factory's name."""
    if is_external(model):
        return
    entry = ENTRIES.get(model)
    check_suffix(model, where, key)
    if entry is None and ":" in model:
        if not NAME.fullmatch(model):
            raise InputError(where, f"'{model}' is no name of a factory", FORM, key)
    elif entry is None:
        near = difflib.get_close_matches(model.lower().replace("-", "_"), names(task), n=3)
        hint = f"did you mean {', '.join(near)}?" if near else "docs/guide.md describes the zoo,"
        raise InputError(
            where,
            f"'{model}' is not in the zoo",
            f"{hint} or give package.module:factory, a .onnx or a .pt2 file",
            key,
        )
    elif entry.task != task:
        raise InputError(
            where,
            f"'{model}' does {entry.task}, not {task}",
            f"use one of {', '.join(names(task))}",
            key,
        )
