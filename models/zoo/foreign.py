"""A user's own models: finds what `package.module:factory` names, and calls it."""

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
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from models.errors import InputError
from models.zoo.registry import Factory

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
