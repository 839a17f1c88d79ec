"""Weights files: read without running anything, checked against the architecture, written whole or not at
all.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from models.bundle.container import encode_header, place, raw_bytes
from models.bundle.dtypes import code_of, has_code
from models.errors import InputError
from models.files.atomic import writing
from models.files.bounded import Fault, opened
from models.files.bounded_json import parsed
from models.sizes import size_text
from models.weights.darknet import read_darknet
from models.weights.fit import check_fit, current_names, without_extras, without_wrapper
from models.weights.pickled import read_pickled
from models.weights.published import Published, fetch
from models.zoo import check_input

if TYPE_CHECKING:
    from models.workload import Query

Source = Path | Published
PICKLE_SUFFIXES = (".pt", ".pth", ".th")
DARKNET_SUFFIX = ".weights"
SAFETENSORS_SUFFIX = ".safetensors"
MAX_HEADER_BYTES = 2**22
"""Some 40,000 tensors."""
MAX_TOLD = 200
PART_BYTES = 2**20
MAX_FILE_BYTES = 2**32
"""Of weights as they are merged: twice what the largest model may take."""
MAX_BESIDE_BYTES, MAX_TIMES = 2**28, 16
"""A checkpoint is that large besides so many times the model's own bytes, at most."""
WRAPPERS = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts keep the state dict in a checkpoint."""
CLASSES = "gemel.classes"
"""Metadata key of the classes that weights were trained for, as a JSON list; a head alone does not tell their names."""
PREFIXES = ("module.", "backbone.", "body.", "features.")
"""What may stand before a tensor's name in one file and not in another."""


def load_weights(query: Query, module: nn.Module) -> nn.Module:
    """Load a query's weights into its architecture, in place, and return it; published ones are fetched first.

    Raises InputError, naming file, key, fault and remedy, when the file is missing, damaged, holds more than
    a plain state dict or NaN, or does not fit the architecture, the class list or the input size; then the module is
    unchanged.
    """
    state = check_weights(query, module)
    module.load_state_dict({**module.state_dict(), **state}, strict=True)
    return module


def check_weights(query: Query, module: nn.Module) -> dict[str, Tensor]:
    """A query's weights under the names of its architecture; InputError as `load_weights` says.

    `module` is not changed, and may lie on the device "meta".
    """
    key = f"weights ({query.id})"
    if query.weights is None:
        raise InputError(query.file or query.id, "has no weights file", "add `weights:` to the query", key)
    own = module.state_dict()
    state = without_wrapper(read_state(query.weights, key, module), own)
    state = without_extras(query.model, current_names(module, state), own)
    check_fit(query, key, own, state)
    _check_classes(query, key)
    _check_values(query.weights, key, state, own)
    check_input(query, module)
    return state


def load_matching(module: nn.Module, source: Source, key: str = "init") -> tuple[str, ...]:
    """Load every tensor of some weights whose name and shape fit, and return the module's names that were loaded.

    Names fit when they are equal after what may stand before a backbone (PREFIXES) is taken off; so a head of another
    class count stays as it is. Raises InputError when the weights cannot be read, hold NaN, or no weight of them fits.
    """
    given = current_names(module, without_wrapper(read_state(source, key, module), module.state_dict()))
    by_bare_name = {_bare(name): tensor for name, tensor in given.items()}
    chosen: dict[str, Tensor] = {}
    for name, own in module.state_dict().items():
        found = given.get(name, by_bare_name.get(_bare(name)))
        if found is not None and found.shape == own.shape:
            chosen[name] = found
    if not any(tensor.ndim >= 2 for tensor in chosen.values()):
        fault = f"none of its {len(given)} tensors fits {type(module).__name__} by name and shape"
        raise InputError(str(source), fault, "give weights of the same backbone", key)
    _check_values(source, key, chosen, module.state_dict())
    module.load_state_dict(chosen, strict=False)
    return tuple(chosen)


def fingerprint(weights: Source | None) -> bytes:
    """What changes when the weights do: the digest of the file, or the published one's name; empty without any."""
    if isinstance(weights, Published):
        return weights.file_name.encode()
    if weights is None or not os.path.exists(weights):
        return b""
    digest = hashlib.sha256()
    with opened(weights, "give the path of a weights file") as file:
        if os.fstat(file.fileno()).st_size > MAX_FILE_BYTES:
            fault = f"is larger than {size_text(MAX_FILE_BYTES)}"
            raise InputError(weights, fault, "give weights of this architecture", "weights")
        while part := file.read(PART_BYTES):
            digest.update(part)
    return digest.digest()


def save_weights(
    path: str | Path, state: Mapping[str, Tensor], overwrite: bool = True, classes: Sequence[str] | None = None
) -> None:
    """Write a state dict as safetensors, whole or not at all; raises InputError when it cannot be written.

    With `classes` the file names those it was trained for, and is refused for a query that asks for others.
    """
    # Widest dtypes first, so that every tensor lies aligned without gap fillers, which a state dict has no room for.
    names = sorted(state, key=lambda name: -state[name].itemsize)
    entries = place(
        ((name, code_of(state[name].dtype), tuple(state[name].shape), state[name].nbytes) for name in names),
        alignment=1,
    )
    with writing(path, overwrite) as file:
        file.write(encode_header(entries, {} if classes is None else {CLASSES: json.dumps(list(classes))}))
        for name in names:
            file.write(raw_bytes(state[name]))


def read_state(source: str | Source, key: str = "weights", module: nn.Module | None = None) -> dict[str, Tensor]:
    """The tensors of a weights file by name, on the CPU; nothing in the file is run.

    .safetensors; .pt, .pth or .th, where a checkpoint's `state_dict` is unwrapped; darknet's .weights, which holds no
    names, so that `module` has to give them. Raises InputError.
    """
    path = fetch(source, key) if isinstance(source, Published) else Path(source)
    suffix = path.suffix
    if suffix not in (SAFETENSORS_SUFFIX, *PICKLE_SUFFIXES) and (suffix != DARKNET_SUFFIX or module is None):
        known = ", ".join((SAFETENSORS_SUFFIX, *PICKLE_SUFFIXES, DARKNET_SUFFIX))
        raise InputError(path, f"'{suffix}' files are not read", f"give one of {known}", key)
    if not os.path.exists(path):
        raise InputError(path, "does not exist", "give the path of a weights file, or train one first", key)
    if suffix == SAFETENSORS_SUFFIX:
        content: Any = _read_safetensors(path, key)
    elif suffix == DARKNET_SUFFIX and module is not None:
        content = read_darknet(path, module, key)
    else:
        content = read_pickled(path, key, _most_bytes(module))
    return _plain_state(path, key, content)


def _read_safetensors(path: Path, key: str) -> dict[str, Tensor]:
    remedy = "copy or export it again"
    try:
        with opened(path, remedy) as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise Fault(f"its header claims {length} bytes, more than {MAX_HEADER_BYTES}")
            header = parsed(file.read(length))
            if not isinstance(header, dict):
                raise Fault("its header is no mapping")
            return load_file(_by_number(file))
    except InputError as error:
        raise InputError(path, error.fault, remedy, key) from error
    except (Fault, SafetensorError, OSError, ValueError, KeyError) as error:
        fault = f"is truncated or no safetensors file ({_one_line(error)})"
        raise InputError(path, fault, remedy, key) from error


def _by_number(file: BinaryIO) -> str:
    """An open file's name for libraries that take no name whose bytes are no UTF-8."""
    return f"/dev/fd/{file.fileno()}"


def _most_bytes(module: nn.Module | None) -> int:
    """What a checkpoint of this module may hold: the optimiser's values, averages and more besides the weights."""
    own = 0 if module is None else sum(tensor.nbytes for tensor in module.state_dict().values())
    return MAX_BESIDE_BYTES + MAX_TIMES * own


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
            said = f"'{_clipped(name)}'" if isinstance(name, str) else f"what stands under a {type(name).__name__}"
            raise InputError(path, f"is not a plain state dict: {said} is a {type(value).__name__}", remedy, key)
        if not _is_plain(value):
            kind = "sparse" if value.layout != torch.strided else "quantised" if value.is_quantized else value.dtype
            where = "" if value.device.type == "cpu" else f" on the device {value.device}"
            fault = f"{_clipped(name)} is no plain tensor but {kind}{where}"
            raise InputError(path, fault, "save it in plain float32", key)
    if not content:
        raise InputError(path, "holds no tensors", remedy, key)
    return dict(content)


def _is_plain(tensor: Tensor) -> bool:
    """Whether these are numbers in memory, of a kind that layers have."""
    held = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_nested
    return held and not tensor.is_quantized and has_code(tensor.dtype)


def _check_classes(query: Query, key: str) -> None:
    """Raise InputError for weights that name other classes than the query, or in another order."""
    if not isinstance(query.weights, Path) or query.weights.suffix != SAFETENSORS_SUFFIX:
        return
    with opened(query.weights, "give the path of a weights file") as file, safe_open(_by_number(file), "pt") as tensors:
        named = (tensors.metadata() or {}).get(CLASSES)
    if named is None or named == json.dumps(list(query.classes)):
        return
    asked = _clipped(str(list(query.classes)))
    fault = f"was trained for the classes {_clipped(named)}, in this order, and the query asks for {asked}"
    remedy = "list in `classes` those of the weights, or give them as `init:` and train"
    raise InputError(query.weights, fault, remedy, key)


def _check_values(source: Source, key: str, state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise InputError for values that the module's own tensors could not hold, or that are none."""
    for name, tensor in state.items():
        floats = own[name].is_floating_point()
        if floats and not tensor.is_floating_point():
            fault = f"{name} holds {_dtype(tensor)} and should hold {_dtype(own[name])}"
            raise InputError(str(source), fault, "save it in plain float32", key)
        if floats and not bool(torch.isfinite(tensor.to(own[name].dtype)).all()):
            raise InputError(str(source), f"{name} holds NaN or infinite values", "train or export it again", key)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bare(name: str) -> str:
    """The name without what may stand before it."""
    while prefix := next((prefix for prefix in PREFIXES if name.startswith(prefix)), ""):
        name = name.removeprefix(prefix)
    return name


def _clipped(text: str) -> str:
    return text if len(text) <= MAX_TOLD else f"{text[:MAX_TOLD]}..."


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__
