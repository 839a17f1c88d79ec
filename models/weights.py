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
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from models.bundle.format import has_code
from models.darknet import read_darknet
from models.errors import InputError, join_names, size_text
from models.io import open_atomic, open_regular
from models.notes import add_note
from models.published import Published, fetch
from models.zoo import check_input
from models.zoo.registry import ENTRIES

if TYPE_CHECKING:
    from models.workload import Query

Source = Path | Published
SAFETENSORS_SUFFIX, DARKNET_SUFFIX, PICKLE_SUFFIXES = ".safetensors", ".weights", (".pt", ".pth", ".th")
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
PATH_HINT = "give the path of a weights file"
PLAIN = "save model.state_dict() alone, best as .safetensors"
PLAIN_DTYPE = "save it in plain float32"
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
    state = _without_extras(query.model, _read_named(query.weights, key, module), own)
    _check_fit(query, key, own, state)
    _check_classes(query, key)
    _check_values(query.weights, key, state, own)
    check_input(query, module)
    return state


def load_matching(module: nn.Module, source: Source, key: str = "init") -> tuple[str, ...]:
    """Load every tensor of some weights whose name and shape fit, and return the module's names that were loaded.

    Names fit when they are equal without PREFIXES; so a head of another class count stays as it is. A note names the
    tensors that do not fit. Raises InputError when the weights cannot be read, hold NaN, or no weight of them fits.
    """
    given = _read_named(source, key, module)
    by_bare_name = {_bare(name): name for name in given}
    chosen: dict[str, Tensor] = {}
    unused, new = set(given), list[str]()
    for name, own in module.state_dict().items():
        source_name = name if name in given else by_bare_name.get(_bare(name))
        if source_name is not None and given[source_name].shape == own.shape:
            chosen[name] = given[source_name]
            unused.discard(source_name)
        elif not name.endswith(COUNTER):
            new.append(name)
    if not any(tensor.ndim >= 2 for tensor in chosen.values()):
        problem = f"none of its {len(given)} tensors fits {type(module).__name__} by name and shape"
        raise InputError(str(source), problem, "give weights of the same backbone", key)
    _check_values(source, key, chosen, module.state_dict())
    left_out = sorted(name for name in unused if not name.endswith(COUNTER))
    if new or left_out:
        parts = [f"{len(chosen)} tensors taken as `{key}`"]
        parts += [f"{len(left_out)} left out ({join_names(left_out, 3)})"] if left_out else []
        parts += [f"{len(new)} of the model are made new ({join_names(new, 3)})"] if new else []
        add_note(str(source), ", ".join(parts), "expected for a head of other classes; else give weights of this model")
    module.load_state_dict(chosen, strict=False)
    return tuple(chosen)


def fingerprint(weights: Source | None) -> bytes:
    """What changes when the weights do: the digest of the file, or the published one's name; empty without any."""
    if isinstance(weights, Published):
        return weights.file_name.encode()
    if weights is None or not os.path.exists(weights):
        return b""
    digest = hashlib.sha256()
    with open_regular(weights, PATH_HINT, "weights") as file:
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
    # Copies, since safetensors refuses tensors that share memory.
    tensors = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in state.items()
    }
    with open_atomic(path, overwrite) as file:
        file.write(safetensors.torch.save(tensors, None if classes is None else {CLASSES: json.dumps(list(classes))}))


# Reading


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
    if suffix == DARKNET_SUFFIX and module is not None:
        return read_darknet(path, module, key)
    if suffix == SAFETENSORS_SUFFIX:
        return _plain_state(path, key, _read_safetensors(path, key)[0])
    own = 0 if module is None else sum(tensor.nbytes for tensor in module.state_dict().values())
    return _plain_state(path, key, _read_pickle(path, key, MAX_EXTRA_BYTES + MAX_EXTRA_FACTOR * own))


def _read_safetensors(path: Path, key: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a file."""
    try:
        # By its descriptor, since the library takes no path whose bytes are no UTF-8.
        with open_regular(path, DAMAGED, key) as file, safe_open(f"/dev/fd/{file.fileno()}", "pt") as tensors:
            return {name: tensors.get_tensor(name) for name in tensors.keys()}, tensors.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        text = " ".join(str(error).split())[:120] or type(error).__name__
        raise InputError(path, f"is truncated or no safetensors file ({text})", DAMAGED, key) from error


def _read_pickle(path: Path, key: str, max_bytes: int) -> Any:
    """The content of a .pt, .pth or .th file, on the CPU, by torch's unpickler of tensors and plain values alone.

    Raises InputError for one that is damaged, holds code, or more than `max_bytes` once unpacked.
    """
    try:
        with open_regular(path, PATH_HINT, key) as file:
            size = os.fstat(file.fileno()).st_size
            if zipfile.is_zipfile(file):
                with zipfile.ZipFile(file) as archive:
                    size = max(size, sum(part.file_size for part in archive.infolist()))
            if size > max_bytes:
                raise InputError(path, f"holds {size_text(size)}, far more than the model takes", PLAIN, key)
            file.seek(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return torch.load(file, map_location="cpu", weights_only=True)
    except InputError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        if "TorchScript" in (text := str(error)):
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
            where = f"'{name:.200}'" if isinstance(name, str) else f"the value of a key {type(name).__name__}"
            raise InputError(path, f"is not a plain state dict: {where} is a {type(value).__name__}", PLAIN, key)
        if value.layout != torch.strided or value.device.type != "cpu" or value.is_nested or not has_code(value.dtype):
            kind = f"{value.layout}, {value.dtype}, device {value.device}".replace("torch.", "")
            raise InputError(path, f"{name:.200} is no plain tensor but {kind}", PLAIN_DTYPE, key)
    if not content:
        raise InputError(path, "holds no tensors", PLAIN, key)
    return dict(content)


# Names


def _read_named(source: Source, key: str, module: nn.Module) -> dict[str, Tensor]:
    """The tensors of a file under the names that the architecture has today, without what the model was wrapped in."""
    return current_names(module, _without_wrapper(read_state(source, key, module), module.state_dict()))


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
    auxiliary = ENTRIES[model].auxiliary if model in ENTRIES else ()
    extra = [name for name in state if name not in own and (name.startswith(auxiliary) or name.endswith(COUNTER))]
    return {name: tensor for name, tensor in state.items() if name not in extra}


def _bare(name: str) -> str:
    """The name without PREFIXES."""
    while prefix := next((prefix for prefix in PREFIXES if name.startswith(prefix)), ""):
        name = name.removeprefix(prefix)
    return name


# Checks


def _check_fit(query: Query, key: str, own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Raise InputError, with the number of differing tensors and examples, unless `state` is one of `own`'s model."""
    lacking = [f"{name} {tuple(own[name].shape)}" for name in own if name not in state and not name.endswith(COUNTER)]
    unknown = [f"{name} {tuple(state[name].shape)}" for name in state if name not in own]
    wrong = [name for name, tensor in state.items() if name in own and tensor.shape != own[name].shape]
    shapes = [f"{name} is {tuple(state[name].shape)} and should be {tuple(own[name].shape)}" for name in wrong]
    # In a network of other widths throughout, inputs differ too.
    if wrong and not lacking and not unknown and all(own[name].shape[1:] == state[name].shape[1:] for name in wrong):
        examples = join_names(shapes, 2)
        problem = f"only the head does not fit the class list ({len(query.classes)} in the query): {examples}"
        hint = "list in `classes` the classes these weights were trained for, or give them as `init:` and train"
        raise InputError(str(query.weights), problem, hint, key)
    problems = [
        f"{text}: {join_names(examples, 2)}"
        for examples, text in (
            (lacking, f"lacks {len(lacking)} of the {len(own)} tensors of {query.model}"),
            (unknown, f"has {len(unknown)} that {query.model} does not know"),
            (shapes, f"{len(shapes)} of {len(own)} tensors have another shape in {query.model}"),
        )
        if examples
    ]
    if problems:
        hint = "give weights of this architecture, or correct `model` and `model_args`"
        raise InputError(str(query.weights), "; ".join(problems), hint, key)


def _check_classes(query: Query, key: str) -> None:
    """Raise InputError for weights that name other classes than the query, or in another order."""
    if not isinstance(query.weights, Path) or query.weights.suffix != SAFETENSORS_SUFFIX:
        return
    named = _read_safetensors(query.weights, key)[1].get(CLASSES)
    if named is None or named == json.dumps(list(query.classes)):
        return
    wanted = str(list(query.classes))
    problem = f"was trained for the classes {named:.150}, in this order, and the query asks for {wanted:.150}"
    hint = "list in `classes` those of the weights, or give them as `init:` and train"
    raise InputError(query.weights, problem, hint, key)


def _check_values(source: Source, key: str, state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise InputError for values that are not finite, or that the module's own dtype cannot hold."""
    for name, tensor in state.items():
        if not own[name].is_floating_point():
            continue
        if not tensor.is_floating_point():
            given, wanted = (str(one.dtype).removeprefix("torch.") for one in (tensor, own[name]))
            raise InputError(str(source), f"{name} holds {given} and should hold {wanted}", PLAIN_DTYPE, key)
        if not bool(torch.isfinite(tensor.to(own[name].dtype)).all()):
            raise InputError(str(source), f"{name} holds NaN or infinite values", "train or export it again", key)
