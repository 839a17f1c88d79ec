"""Weights files: safetensors, PyTorch's own, darknet's and torchvision's published ones.

Nothing in a file is executed. The tensors are checked against the architecture before any is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from models.bundle.format import code_of, encode_header, has_code, place, raw_bytes
from models.darknet import read_darknet
from models.errors import InputError, join_names, size_text
from models.io import open_atomic, open_regular
from models.published import Published, fetch
from models.zoo import check_input
from models.zoo.registry import ENTRIES

if TYPE_CHECKING:
    from models.workload import Query

Source = Path | Published
PICKLE_SUFFIXES = (".pt", ".pth", ".th")
DARKNET_SUFFIX = ".weights"
SAFETENSORS_SUFFIX = ".safetensors"
CHUNK_BYTES = 2**20
MAX_FILE_BYTES = 2**32
"""Of weights as they are merged: twice what the largest model may take."""
MAX_EXTRA_BYTES, MAX_EXTRA_FACTOR = 2**28, 16
"""A checkpoint may hold this many bytes besides so many times the model's own: optimiser states, averages and more."""
WRAPPERS = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts keep the state dict in a checkpoint."""
CLASSES = "gemel.classes"
"""Metadata key of the classes that weights were trained for, as a JSON list; a head alone does not tell their names."""
PREFIXES = ("module.", "backbone.", "body.", "features.")
"""Prefixes that a tensor's name has in one file and not in another."""
COUNTER = "num_batches_tracked"
DENSE_LAYER = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")
"""DenseNet's published tensors are called norm.1 and conv.2 where its modules are called norm1 and conv2 today."""
MAX_QUOTED = 200
PLAIN = "save model.state_dict() alone, best as .safetensors"
DAMAGED = "copy or save it again"


def load_weights(query: Query, module: nn.Module) -> nn.Module:
    """Load a query's weights into its architecture, in place, and return it; published ones are fetched first.

    Raises InputError, naming file, key, problem and hint, when the file is missing, damaged, holds more than
    a plain state dict or NaN, or does not fit the architecture, the class list or the input size; then the module is
    unchanged.
    """
    state = check_weights(query, module)
    module.load_state_dict({**module.state_dict(), **state}, strict=True)
    return module


def check_weights(query: Query, module: nn.Module) -> dict[str, Tensor]:
    """A query's weights under the names of its architecture; InputError as `load_weights`.

    `module` is not changed, and may be on the device "meta".
    """
    key = f"weights ({query.id})"
    if query.weights is None:
        raise InputError(query.file or query.id, "has no weights file", "add `weights:` to the query", key)
    own = module.state_dict()
    state = _without_wrapper(read_state(query.weights, key, module), own)
    state = _without_extras(query.model, current_names(module, state), own)
    _check_fit(query, key, own, state)
    _check_classes(query, key)
    _check_values(query.weights, key, state, own)
    check_input(query, module)
    return state


def load_matching(module: nn.Module, source: Source, key: str = "init") -> tuple[str, ...]:
    """Load every tensor of some weights whose name and shape fit, and return the module's names that were loaded.

    Names fit when they are equal without PREFIXES; so a head of another class count stays as it is. Raises InputError
    when the weights cannot be read, hold NaN, or no weight of them fits.
    """
    given = current_names(module, _without_wrapper(read_state(source, key, module), module.state_dict()))
    by_bare_name = {_bare(name): tensor for name, tensor in given.items()}
    chosen: dict[str, Tensor] = {}
    for name, own in module.state_dict().items():
        found = given.get(name, by_bare_name.get(_bare(name)))
        if found is not None and found.shape == own.shape:
            chosen[name] = found
    if not any(tensor.ndim >= 2 for tensor in chosen.values()):
        problem = f"none of its {len(given)} tensors fits {type(module).__name__} by name and shape"
        raise InputError(str(source), problem, "give weights of the same backbone", key)
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
    with open_regular(weights, "give the path of a weights file") as file:
        if os.fstat(file.fileno()).st_size > MAX_FILE_BYTES:
            problem = f"is larger than {size_text(MAX_FILE_BYTES)}"
            raise InputError(weights, problem, "give weights of this architecture", "weights")
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.digest()


def save_weights(
    path: str | Path, state: Mapping[str, Tensor], overwrite: bool = True, classes: Sequence[str] | None = None
) -> None:
    """Write a state dict as safetensors, whole or not at all; raises InputError when it cannot be written.

    With `classes` the file names those it was trained for, and is refused for a query with others.
    """
    # Widest dtypes first, so that every tensor is aligned without gap fillers, which a state dict cannot hold.
    names = sorted(state, key=lambda name: -state[name].itemsize)
    entries = place(
        ((name, code_of(state[name].dtype), tuple(state[name].shape), state[name].nbytes) for name in names),
        alignment=1,
    )
    with open_atomic(path, overwrite) as file:
        file.write(encode_header(entries, {} if classes is None else {CLASSES: json.dumps(list(classes))}))
        for name in names:
            file.write(raw_bytes(state[name]))


def read_state(source: str | Source, key: str = "weights", module: nn.Module | None = None) -> dict[str, Tensor]:
    """The tensors of a weights file by name, on the CPU; nothing in the file is executed.

    .safetensors; .pt, .pth or .th, where a checkpoint's `state_dict` is unwrapped; darknet's .weights, whose names
    come from `module`. Raises InputError.
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
        own = 0 if module is None else sum(tensor.nbytes for tensor in module.state_dict().values())
        content = _read_pickled(path, key, MAX_EXTRA_BYTES + MAX_EXTRA_FACTOR * own)
    return _plain_state(path, key, content)


def _read_safetensors(path: Path, key: str) -> dict[str, Tensor]:
    try:
        with open_regular(path, DAMAGED) as file:
            return load_file(_fd_path(file))
    except InputError as error:
        raise InputError(path, error.problem, DAMAGED, key) from error
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        problem = f"is truncated or no safetensors file ({_one_line(error)})"
        raise InputError(path, problem, DAMAGED, key) from error


def _read_pickled(path: Path, key: str, max_bytes: int) -> Any:
    """The content of a .pt, .pth or .th file, on the CPU, by torch's unpickler of tensors and plain values alone.

    Raises InputError for one that is damaged, holds code, or more than `max_bytes` once unpacked.
    """
    try:
        with open_regular(path, "give the path of a weights file") as file:
            size = os.fstat(file.fileno()).st_size
            if zipfile.is_zipfile(file):
                with zipfile.ZipFile(file) as archive:
                    size = max(size, sum(part.file_size for part in archive.infolist()))
            if size > max_bytes:
                problem = f"holds {size_text(size)}, far more than the model takes"
                raise InputError(path, problem, PLAIN, key)
            file.seek(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return torch.load(file, map_location="cpu", weights_only=True)
    except InputError as error:
        raise InputError(path, error.problem, error.hint, key) from error
    except Exception as error:  # a damaged pickle can fail in any way
        text = str(error)
        if "TorchScript" in text:
            raise InputError(path, "is a TorchScript program, not a plain state dict", PLAIN, key) from error
        if isinstance(error, pickle.UnpicklingError) and ("Unsupported" in text or "GLOBAL" in text):
            raise InputError(path, "is not a plain state dict: reading it would run code", PLAIN, key) from error
        raise InputError(path, "is truncated or no PyTorch file", DAMAGED, key) from error


def _plain_state(path: Path, key: str, content: Any) -> dict[str, Tensor]:
    """The state dict in a file's content; InputError when there is none."""
    if isinstance(content, Mapping):
        content = next((content[name] for name in WRAPPERS if isinstance(content.get(name), Mapping)), content)
    if not isinstance(content, Mapping):
        raise InputError(path, f"holds a {type(content).__name__}, not a plain state dict", PLAIN, key)
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            where = f"'{_clip(name)}'" if isinstance(name, str) else f"the value of a key {type(name).__name__}"
            raise InputError(path, f"is not a plain state dict: {where} is a {type(value).__name__}", PLAIN, key)
        if not _is_plain(value):
            kind = "sparse" if value.layout != torch.strided else "quantised" if value.is_quantized else value.dtype
            where = "" if value.device.type == "cpu" else f" on the device {value.device}"
            problem = f"{_clip(name)} is no plain tensor but {kind}{where}"
            raise InputError(path, problem, "save it in plain float32", key)
    if not content:
        raise InputError(path, "holds no tensors", PLAIN, key)
    return dict(content)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is dense numbers in CPU memory, of a dtype that layers have."""
    is_dense = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_nested
    return is_dense and not tensor.is_quantized and has_code(tensor.dtype)


def _fd_path(file: BinaryIO) -> str:
    """The path of an open file, for libraries that take no path whose bytes are no UTF-8."""
    return f"/dev/fd/{file.fileno()}"


# Names and fit


def _without_wrapper(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state without a prefix of all its names, from a model that was saved inside another module.

    `module.` of DataParallel, `_orig_mod.` of torch.compile, the attribute of a LightningModule: removed until one
    of `own`'s names is met, and left where none is.
    """
    found = dict(state)
    while not found.keys() & own.keys():
        prefix = next(iter(found), "").partition(".")[0] + "."
        if not all(name.startswith(prefix) for name in found):
            return dict(state)
        found = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    return found


def current_names(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state under the names that the architecture has today; old published files have older ones.

    torchvision's parts (feature pyramids, the region proposal head, attention's MLP) rename their own.
    """
    found = {DENSE_LAYER.sub(r"\1\2", name): tensor for name, tensor in state.items()}
    for path, part in module.named_modules():
        renames = type(part)._load_from_state_dict is not nn.Module._load_from_state_dict
        if renames and not part._parameters and not part._buffers:  # with tensors of its own it would load them
            part._load_from_state_dict(found, f"{path}." if path else "", {}, False, [], [], [])
    return found


def _without_extras(model: str, state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state without a zoo model's auxiliary heads, and without counters that the architecture lacks."""
    entry = ENTRIES.get(model)
    prefixes = entry.auxiliary if entry is not None else ()
    return {
        name: tensor
        for name, tensor in state.items()
        if name in own or not (name.startswith(prefixes) or name.endswith(COUNTER))
    }


def _check_fit(query: Query, key: str, own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Raise InputError, with the number of differing tensors and examples, unless `state` is one of `own`'s model."""
    missing = [name for name in own if name not in state and not name.endswith(COUNTER)]
    unknown = [name for name in state if name not in own]
    wrong = [name for name, tensor in state.items() if name in own and tensor.shape != own[name].shape]
    shapes = [f"{name} is {tuple(state[name].shape)} and should be {tuple(own[name].shape)}" for name in wrong]
    if wrong and not missing and not unknown and all(_differs_in_width(own[name], state[name]) for name in wrong):
        count, examples = len(query.classes), _examples(shapes)
        problem = f"only the head does not fit the class list ({count} in the query): {examples}"
        hint = "list in `classes` the classes these weights were trained for, or give them as `init:` and train"
        raise InputError(str(query.weights), problem, hint, key)
    problems = []
    if missing:
        examples = _examples([f"{name} {tuple(own[name].shape)}" for name in missing])
        problems.append(f"lacks {len(missing)} of the {len(own)} tensors of {query.model}: {examples}")
    if unknown:
        examples = _examples([f"{name} {tuple(state[name].shape)}" for name in unknown])
        problems.append(f"has {len(unknown)} that {query.model} does not know: {examples}")
    if wrong:
        examples = _examples(shapes)
        problems.append(f"{len(wrong)} of {len(own)} tensors have another shape in {query.model}: {examples}")
    if problems:
        hint = "give weights of this architecture, or correct `model` and `model_args`"
        raise InputError(str(query.weights), "; ".join(problems), hint, key)


def _differs_in_width(own: Tensor, given: Tensor) -> bool:
    """Whether only the outputs differ, as of a head; in a network of other widths throughout, inputs differ too."""
    return own.ndim == given.ndim and given.shape[1:] == own.shape[1:]


def _examples(shown: Sequence[str]) -> str:
    return join_names(shown, 2)


def _check_classes(query: Query, key: str) -> None:
    """Raise InputError for weights that name other classes than the query, or in another order."""
    if not isinstance(query.weights, Path) or query.weights.suffix != SAFETENSORS_SUFFIX:
        return
    with (
        open_regular(query.weights, "give the path of a weights file") as file,
        safe_open(_fd_path(file), "pt") as tensors,
    ):
        named = (tensors.metadata() or {}).get(CLASSES)
    if named is None or named == json.dumps(list(query.classes)):
        return
    wanted = _clip(str(list(query.classes)))
    problem = f"was trained for the classes {_clip(named)}, in this order, and the query asks for {wanted}"
    hint = "list in `classes` those of the weights, or give them as `init:` and train"
    raise InputError(query.weights, problem, hint, key)


def _check_values(source: Source, key: str, state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise InputError for values that are not finite, or that the module's own dtype cannot hold."""
    for name, tensor in state.items():
        is_float = own[name].is_floating_point()
        if is_float and not tensor.is_floating_point():
            problem = f"{name} holds {_dtype_name(tensor)} and should hold {_dtype_name(own[name])}"
            raise InputError(str(source), problem, "save it in plain float32", key)
        if is_float and not bool(torch.isfinite(tensor.to(own[name].dtype)).all()):
            raise InputError(str(source), f"{name} holds NaN or infinite values", "train or export it again", key)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bare(name: str) -> str:
    """The name without PREFIXES."""
    while prefix := next((prefix for prefix in PREFIXES if name.startswith(prefix)), ""):
        name = name.removeprefix(prefix)
    return name


def _clip(text: str) -> str:
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}..."


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


# Published weights
