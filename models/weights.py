"""Weights files: read without running anything, checked against the architecture, written whole or not at
all.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from models.atomic import writing
from models.bundle.container import CODES, encode_header, place, raw_bytes
from models.errors import InputError

if TYPE_CHECKING:
    from models.workload import Query

PICKLE_SUFFIXES = (".pt", ".pth", ".th")
WRAPPERS = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts keep the state dict in a checkpoint."""
PREFIXES = ("module.", "backbone.", "features.")
"""What may stand before a tensor's name in one file and not in another."""
COUNTER = "num_batches_tracked"


def load_weights(query: Query, module: nn.Module) -> nn.Module:
    """Load a query's weights file into its architecture, in place, and return it.

    Raises InputError, naming file, key, fault and remedy, when the file is missing, damaged, holds more than
    a plain state dict or NaN, or does not fit the architecture or the class list; then the module is
    unchanged.
    """
    key = f"weights ({query.id})"
    if query.weights is None:
        raise InputError(query.id, "has no weights file", "add `weights:` to the query", "weights")
    state = read_state(query.weights, key)
    own = module.state_dict()
    _check_names(query, key, own, state)
    _check_shapes(query, key, own, state)
    _check_finite(query.weights, key, state)
    module.load_state_dict({**own, **state}, strict=True)
    return module


def load_matching(module: nn.Module, path: str | Path, key: str = "init") -> tuple[str, ...]:
    """Load every tensor of a file whose name and shape fit, and return the module's names that were loaded.

    Names fit when they are equal after leading `module.`, `backbone.` and `features.` are taken off. Raises
    InputError when the file cannot be read, holds NaN, or has no weight that fits.
    """
    path = Path(path)
    source = read_state(path, key)
    by_bare_name = {_bare(name): tensor for name, tensor in source.items()}
    chosen: dict[str, Tensor] = {}
    for name, own in module.state_dict().items():
        given = source.get(name, by_bare_name.get(_bare(name)))
        if given is not None and given.shape == own.shape:
            chosen[name] = given
    if not any(tensor.ndim >= 2 for tensor in chosen.values()):
        fault = f"none of its {len(source)} tensors fits {type(module).__name__} by name and shape"
        raise InputError(path, fault, "give weights of the same backbone", key)
    _check_finite(path, key, chosen)
    module.load_state_dict(chosen, strict=False)
    return tuple(chosen)


def save_weights(path: str | Path, state: Mapping[str, Tensor], overwrite: bool = True) -> None:
    """Write a state dict as safetensors, whole or not at all; raises InputError when it cannot be written."""
    # Widest dtypes first, so that every tensor lies aligned without gap fillers, which a state dict has no room for.
    names = sorted(state, key=lambda name: -state[name].itemsize)
    entries = place(
        ((name, CODES[state[name].dtype], tuple(state[name].shape), state[name].nbytes) for name in names), alignment=1
    )
    with writing(path, overwrite) as file:
        file.write(encode_header(entries, {}))
        for name in names:
            file.write(raw_bytes(state[name]))


def read_state(path: str | Path, key: str = "weights") -> dict[str, Tensor]:
    """The tensors of a .safetensors, .pt or .pth file by name, on the CPU; nothing in the file is run.

    A checkpoint's `state_dict` is unwrapped and a `module.` before every name taken off. Raises InputError.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(path, "does not exist", "give the path of a weights file, or train one first", key)
    if path.suffix == ".safetensors":
        content: Any = _read_safetensors(path, key)
    elif path.suffix in PICKLE_SUFFIXES:
        content = _read_pickle(path, key)
    else:
        known = ", ".join((".safetensors", *PICKLE_SUFFIXES))
        raise InputError(path, f"'{path.suffix}' files are not read", f"give one of {known}", key)
    state = _plain_state(path, key, content)
    if all(name.startswith("module.") for name in state):
        state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    return state


def _read_safetensors(path: Path, key: str) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        fault = f"is truncated or no safetensors file ({_one_line(error)})"
        raise InputError(path, fault, "copy or export it again", key) from error


def _read_pickle(path: Path, key: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "Unsupported" not in str(error) and "GLOBAL" not in str(error):
            raise _unreadable(path, key) from error
        fault = "is not a plain state dict: reading it would run code"
        raise InputError(path, fault, "save model.state_dict() alone, best as .safetensors", key) from error
    except Exception as error:  # a damaged pickle can fail in any way
        raise _unreadable(path, key) from error


def _unreadable(path: Path, key: str) -> InputError:
    return InputError(path, "is truncated or no PyTorch file", "copy or save it again", key)


def _plain_state(path: Path, key: str, content: Any) -> dict[str, Tensor]:
    """The state dict in what a file holds; InputError when it is none."""
    if isinstance(content, Mapping):
        for wrapper in WRAPPERS:
            if isinstance(content.get(wrapper), Mapping):
                content = content[wrapper]
                break
    remedy = "save model.state_dict() alone, best as .safetensors"
    if not isinstance(content, Mapping):
        raise InputError(path, f"holds a {type(content).__name__}, not a plain state dict", remedy, key)
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            fault = f"is not a plain state dict: {str(name)[:80]!r} is a {type(value).__name__}"
            raise InputError(path, fault, remedy, key)
        if value.layout != torch.strided or value.is_quantized:
            raise InputError(path, f"{name} is a sparse or quantised tensor", "save it in plain float32", key)
    if not content:
        raise InputError(path, "holds no tensors", remedy, key)
    return dict(content)


def _check_names(query: Query, key: str, own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    missing = [name for name in own if name not in state and not name.endswith(COUNTER)]
    unknown = [name for name in state if name not in own]
    faults = []
    if missing:
        faults.append(f"lacks {_listed(missing)}, which {query.model} needs")
    if unknown:
        faults.append(f"has {_listed(unknown)}, which {query.model} does not know")
    if faults:
        remedy = "give weights of this architecture, or correct `model` and `model_args`"
        raise InputError(query.weights or "", " and ".join(faults), remedy, key)


def _check_shapes(query: Query, key: str, own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    wrong = [name for name, tensor in state.items() if tensor.shape != own[name].shape]
    if not wrong:
        return
    first = wrong[0]
    given, wanted = tuple(state[first].shape), tuple(own[first].shape)
    fault = f"{_listed(wrong)}: {given} in the file, {wanted} in {query.model} with {len(query.classes)} classes"
    remedy = "give weights of this architecture, or correct `model` and `model_args`"
    if all(state[name].ndim == own[name].ndim and state[name].shape[1:] == own[name].shape[1:] for name in wrong):
        fault = f"only the head does not fit the class list: {fault}"
        remedy = "list in `classes` the classes these weights were trained for, or train new weights"
    raise InputError(query.weights or "", fault, remedy, key)


def _check_finite(path: Path, key: str, state: Mapping[str, Tensor]) -> None:
    for name, tensor in state.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise InputError(path, f"{name} holds NaN or infinite values", "train or export it again", key)


def _bare(name: str) -> str:
    """The name without what may stand before it."""
    while prefix := next((prefix for prefix in PREFIXES if name.startswith(prefix)), ""):
        name = name.removeprefix(prefix)
    return name


def _listed(names: list[str]) -> str:
    """`a` or `a, b and 12 more`."""
    rest = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + rest


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__
