"""Models from the user's own code, `package.module:factory`: import, build, check."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from models.detector import Detector, OneStage
from models.errors import InputError
from models.zoo.registry import ENTRIES, Factory

NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(?<!\.py):[A-Za-z_]\w*")
FORM = "write it as package.module:factory, the module without .py"
OURS = ("models", "merger", "edge_runtime", "gemel", "video_samples")
"""This project's own packages, which a module of these names on Python's path cannot replace."""


def foreign_factory(model: str, folder: Path | None) -> Factory:
    """The factory that `package.module:factory` names, taken from `folder` first and from Python's path after it.

    Called as (num_classes, input_size, **model_args); one that knows no `input_size` is called without. Raises
    InputError when it cannot be found or imported.
    """
    if not NAME.fullmatch(model):
        raise InputError(model, "is no name of a factory", FORM, "model")
    module_name, _, attribute = model.partition(":")
    module = _module(model, module_name, folder)
    factory = getattr(module, attribute, None)
    if factory is None and module_name.partition(".")[0] in OURS and not _lies_in(folder, module_name):
        raise _collision(model, folder)
    if not callable(factory):
        fault = f"{module_name} has no '{attribute}'" if factory is None else f"{attribute} cannot be called"
        near = difflib.get_close_matches(attribute, _callables(module))
        remedy = f"did you mean {', '.join(near)}?" if near else "name a function that returns the module"
        raise InputError(model, fault, remedy, "model")
    return _with_input_size(factory)


def build_foreign(model: str, factory: Factory, width: int, input_size: int, model_args: dict[str, Any]) -> nn.Module:
    """Call a user's factory; whatever it raises or returns amiss becomes one InputError."""
    try:
        module = factory(width, input_size=input_size, **model_args)
    except InputError:
        raise
    except Exception as error:  # a user's code can fail in any way
        fault = f"cannot be built: {reason(error)}{_place(error)}"
        raise InputError(model, fault, "mend the factory, or check model_args and input_size", "model_args") from error
    if not isinstance(module, nn.Module):
        raise InputError(model, f"the factory returned {type(module).__name__}", "it must return a torch nn.Module")
    return module


def reason(error: Exception) -> str:
    """An error of somebody else's code on one line, with its type."""
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _place(error: Exception) -> str:
    """Where in the user's own code an error came up; empty where the call itself did not fit."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


def _module(model: str, name: str, folder: Path | None) -> ModuleType:
    try:
        if folder is not None and _lies_in(folder, name):
            with _first_on_path(folder):
                return importlib.import_module(f"{_package_of(folder)}.{name}")
        return importlib.import_module(name)
    except Exception as error:  # a user's module can fail in any way while it is imported
        if name.partition(".")[0] in OURS and not _lies_in(folder, name):
            raise _collision(model, folder) from error
        remedy = "mend the module" if _lies_in(folder, name) else _where(folder)
        raise InputError(model, f"cannot be imported: {reason(error)}", remedy, "model") from error


def _collision(model: str, folder: Path | None) -> InputError:
    """A module that is looked for under the name of one of our packages, and does not lie where it would be found."""
    name, _, attribute = model.partition(":")
    beside = "" if folder is None else f" (there is none in {folder})"
    fault = f"'{name}' is a package of this project, which has no '{attribute}'{beside}"
    return InputError(model, fault, f"call your file another name: nets.py, nets:{attribute}", "model")


def _where(folder: Path | None) -> str:
    beside = f"put the module into {folder}, or " if folder is not None else ""
    return f"check the name; {beside}put its folder on PYTHONPATH"


def _lies_in(folder: Path | None, name: str) -> bool:
    if folder is None:
        return False
    base = folder.joinpath(*name.split("."))
    return base.with_name(f"{base.name}.py").is_file() or (base / "__init__.py").is_file()


def _package_of(folder: Path) -> str:
    """A package of its own for a folder, so that its models.py meets no other module of that name."""
    name = f"gemel_folder_{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    return name


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    """Let a module import its neighbours by their plain names, as a script may."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _callables(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if callable(value)]


def _with_input_size(factory: Callable[..., Any]) -> Factory:
    if "input_size" in inspect.signature(factory).parameters:
        return factory
    return lambda num_classes, input_size, **args: factory(num_classes, **args)


DETECTOR_METHODS = ("candidates", "loss", "distill", "exported")
ONE_STAGE_METHODS = ("decode", "loss", "distill")


def check_foreign(model: str, module: nn.Module, task: str) -> None:
    """Raise InputError for a module whose tensors cannot be stored and shared one by one, or which is no detector."""
    if task == "detection":
        _check_detector(model, module)
    tensors = module.state_dict(keep_vars=True)
    _check_untied(model, tensors)
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            fault = f"{name} is not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()})"
            raise InputError(model, fault, f"store {name} as .contiguous() in the factory")
    _check_apart(model, tensors)


def _check_detector(model: str, module: nn.Module) -> None:
    base, needed = (OneStage, ONE_STAGE_METHODS) if isinstance(module, OneStage) else (Detector, DETECTOR_METHODS)
    missing = [name for name in needed if getattr(type(module), name, None) in (None, getattr(base, name))]
    if missing or not hasattr(module, "nms_iou"):
        fault = f"{type(module).__name__} is no detector: it lacks {', '.join(missing or ['nms_iou'])}"
        raise InputError(model, fault, "derive it from models.detector.OneStage or Detector")


def _check_untied(model: str, tensors: dict[str, Tensor]) -> None:
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        first = names.setdefault(id(tensor), name)
        if first != name:
            remedy = f"give {name} a parameter of its own: nn.Parameter({first}.detach().clone())"
            raise InputError(model, f"{first} and {name} are one tensor", remedy)


def _check_apart(model: str, tensors: dict[str, Tensor]) -> None:
    """No two tensors may use the same memory."""
    spans = sorted(
        (tensor.untyped_storage()._cdata, tensor.storage_offset() * tensor.itemsize, tensor.nbytes, name)
        for name, tensor in tensors.items()
        if tensor.nbytes
    )
    for (storage, start, nbytes, name), (other_storage, other_start, _, other) in pairwise(spans):
        if storage == other_storage and other_start < start + nbytes:
            raise InputError(model, f"{name} and {other} overlap in memory", f"store {other} as a .clone() of its own")


def check_answer(model: str, module: nn.Module, input_size: int, task: str, width: int) -> None:
    """Raise InputError when the module fails on a frame of (3, input_size, input_size), or its logits are not
    (1, width).

    The frame is sent through on the meta device, which computes nothing. Only where that fails, and the module has
    weights, does a real one decide: a user's module may do what the meta device cannot.
    """
    try:
        answer = _on_meta(module, input_size)
    except Exception as error:
        if _is_meta(module):
            raise _refused(model, input_size, error) from error
        try:
            answer = _for_real(module, input_size)
        except Exception as real_error:
            raise _refused(model, input_size, real_error) from real_error
    if task == "classification":
        check_logits(model, answer, width)


def check_logits(model: str, answer: Any, width: int) -> None:
    """Raise InputError when a classifier's answer to one frame is not a tensor (1, width)."""
    if isinstance(answer, Tensor) and answer.shape == (1, width):
        return
    if isinstance(answer, Tensor) and answer.ndim == 2:
        fault = f"answers with {answer.shape[1]} classes where {width} were asked for"
        raise InputError(model, fault, "make its last layer `num_classes` wide", "classes")
    given = f"a tensor {tuple(answer.shape)}" if isinstance(answer, Tensor) else f"a {type(answer).__name__}"
    fault = f"answers one frame with {given}, not with logits (1, {width})"
    raise InputError(model, fault, "return one row of plain logits for each frame", "model")


def answer_on_meta(module: nn.Module, input_size: int) -> Any:
    """What the module answers to one frame on the meta device; None where it cannot run there."""
    try:
        return _on_meta(module, input_size)
    except Exception:  # a user's module may fail in any way
        return None


def _on_meta(module: nn.Module, input_size: int) -> Any:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    state = {name: tensor.detach().to("meta") for name, tensor in tensors.items()}
    with _evaluating(module), torch.no_grad(), torch.device("meta"):
        return functional_call(module, state, (torch.zeros(1, 3, input_size, input_size),))


def _for_real(module: nn.Module, input_size: int) -> Any:
    device = next(module.parameters()).device
    with _evaluating(module), torch.no_grad():
        return module(torch.zeros(1, 3, input_size, input_size, device=device))


def _is_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in module.state_dict().values())


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode for a while; each part goes back to the mode it had."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def _refused(model: str, input_size: int, error: Exception) -> InputError:
    entry = ENTRIES.get(model)
    remedy = f"choose another input_size; it was made for {entry.input_size}" if entry else "mend its forward"
    return InputError(model, f"cannot take frames of {input_size}x{input_size} ({reason(error)})", remedy, "input_size")
