"""Weights files: safetensors, PyTorch's own, darknet's and torchvision's published ones.

Nothing in a file is executed. The tensors are checked against the architecture before any is loaded.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import json
import os
import pickle
import re
import struct
import sys
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickletools import StackObject, genops, markobject
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from models.bundle.format import code_of, encode_header, has_code, place, raw_bytes
from models.darknet import read_darknet
from models.errors import InputError, size_text
from models.io import ParseError, open_atomic, opened, parse_json
from models.zoo import check_input
from models.zoo.registry import ENTRIES

if TYPE_CHECKING:
    from models.workload import Query


COUNTER = "num_batches_tracked"
DENSE_LAYER = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")
"""DenseNet's published tensors are called norm.1 and conv.2 where its parts have been called norm1 and conv2 since."""
SHOWN = 2
OTHER_WEIGHTS = "give weights of this architecture, or correct `model` and `model_args`"


def without_wrapper(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state without what stands before all of its names because the model was saved inside something else.

    `module.` of DataParallel, `_orig_mod.` of torch.compile, the attribute of a LightningModule: taken off until one
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
    """The state under the names that the architecture has today; published files of years ago have older ones.

    torchvision's parts (feature pyramids, the region proposal head, attention's MLP) rename their own.
    """
    found = {DENSE_LAYER.sub(r"\1\2", name): tensor for name, tensor in state.items()}
    for path, part in module.named_modules():
        renames = type(part)._load_from_state_dict is not nn.Module._load_from_state_dict
        if renames and not part._parameters and not part._buffers:  # with tensors of its own it would load them
            part._load_from_state_dict(found, f"{path}." if path else "", {}, False, [], [], [])
    return found


def without_extras(model: str, state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state without what nobody needs: a zoo model's auxiliary heads, and counters that the architecture lacks."""
    entry = ENTRIES.get(model)
    prefixes = entry.auxiliary if entry is not None else ()
    return {
        name: tensor
        for name, tensor in state.items()
        if name in own or not (name.startswith(prefixes) or name.endswith(COUNTER))
    }


def check_fit(query: Query, key: str, own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Raise InputError, saying how many tensors differ and how, unless `state` is one of `own`'s architecture."""
    missing = [name for name in own if name not in state and not name.endswith(COUNTER)]
    unknown = [name for name in state if name not in own]
    wrong = [name for name, tensor in state.items() if name in own and tensor.shape != own[name].shape]
    if wrong and not missing and not unknown and _only_heads(wrong, own, state):
        differing = _listed([_both(name, own, state) for name in wrong])
        fault = f"only the head does not fit the class list ({len(query.classes)} in the query): {differing}"
        remedy = "list in `classes` the classes these weights were trained for, or give them as `init:` and train"
        raise InputError(str(query.weights), fault, remedy, key)
    faults = []
    if missing:
        shown = _listed([f"{name} {tuple(own[name].shape)}" for name in missing])
        faults.append(f"lacks {len(missing)} of the {len(own)} tensors of {query.model}: {shown}")
    if unknown:
        shown = _listed([f"{name} {tuple(state[name].shape)}" for name in unknown])
        faults.append(f"has {len(unknown)} that {query.model} does not know: {shown}")
    if wrong:
        shown = _listed([_both(name, own, state) for name in wrong])
        faults.append(f"{len(wrong)} of {len(own)} tensors have another shape in {query.model}: {shown}")
    if faults:
        raise InputError(str(query.weights), "; ".join(faults), OTHER_WEIGHTS, key)


def _only_heads(wrong: Sequence[str], own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> bool:
    """Whether these differ in their outputs alone; a network of other widths throughout differs in its inputs, too."""
    return all(own[name].ndim == state[name].ndim and state[name].shape[1:] == own[name].shape[1:] for name in wrong)


def _both(name: str, own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str:
    return f"{name} is {tuple(state[name].shape)} and should be {tuple(own[name].shape)}"


def _listed(shown: Sequence[str]) -> str:
    """`a`, or `a, b and 12 more`."""
    rest = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return ", ".join(shown[:SHOWN]) + rest


MAX_PICKLE_BYTES, MAX_DIRECTORY_BYTES = 2**22, 2**23
MAX_OPERATIONS = 1_000_000
"""Some 30 for each tensor."""
MAX_DEPTH = 50
ZIP, END, END_BYTES, END_WITHIN = b"PK\3\4", b"PK\5\6", 22, 2**16
OLD_PICKLES = 5
TUPLES = frozenset(("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"))
REMEDY = "copy or save it again"
PLAIN = "save model.state_dict() alone, best as .safetensors"


def read_pickled(path: Path, key: str, most_bytes: int) -> Any:
    """What a .pt, .pth or .th file holds, on the CPU.

    Raises InputError for one that is damaged, out of bounds, holds code, or more than `most_bytes`.
    """
    try:
        with opened(path, "give the path of a weights file") as file:
            check = _check_zip if file.read(len(ZIP)) == ZIP else _check_old
            check(file, most_bytes)
            file.seek(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return torch.load(file, map_location="cpu", weights_only=True)
    except InputError as error:
        raise InputError(path, error.problem, error.hint, key) from error
    except pickle.UnpicklingError as error:
        if "Unsupported" not in str(error) and "GLOBAL" not in str(error):
            raise InputError(path, "is truncated or no PyTorch file", REMEDY, key) from error
        fault = "is not a plain state dict: reading it would run code"
        raise InputError(path, fault, PLAIN, key) from error
    except ParseError as fault:
        raise InputError(path, f"is not a plain state dict: {fault}", REMEDY, key) from fault
    except Exception as error:  # a damaged pickle can fail in any way
        raise InputError(path, "is truncated or no PyTorch file", REMEDY, key) from error


def _check_zip(file: BinaryIO, most_bytes: int) -> None:
    """Fault unless the parts lie in the file as they are, none packed and none twice, and the pickle is in bounds."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - END_BYTES - END_WITHIN))
    end = file.read()
    at = end.rindex(END)
    if struct.unpack_from("<L", end, at + 12)[0] > MAX_DIRECTORY_BYTES:
        raise ParseError("it has too many parts")
    with zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
        if any("/code/" in part.filename for part in parts):
            raise InputError("", "is a TorchScript program, not a plain state dict", PLAIN)
        if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
            raise ParseError("its parts are packed, as torch packs none")
        total = sum(part.file_size for part in parts)
        if total > size:
            raise ParseError("its parts are said to be larger than the file")
        _check_bytes(total, most_bytes)
        for part in parts:
            if part.filename.endswith(".pkl"):
                if part.file_size > MAX_PICKLE_BYTES:
                    raise ParseError(f"its pickle takes {part.file_size} bytes, more than {MAX_PICKLE_BYTES}")
                _check_pickle(io.BytesIO(archive.read(part)))


def _check_old(file: BinaryIO, most_bytes: int) -> None:
    size = file.seek(0, io.SEEK_END)
    _check_bytes(size, most_bytes)
    file.seek(0)
    for _ in range(OLD_PICKLES):
        if file.tell() < size:
            _check_pickle(file)


def _check_bytes(found: int, most_bytes: int) -> None:
    if found > most_bytes:
        raise ParseError(f"it holds {size_text(found)}, far more than the model takes")


def _check_pickle(file: Any) -> None:
    """Walk through one pickle without making a value of it: Fault for too many operations or too deep tuples.

    On the walk's stack stands how deep each value is nested in tuples, None for a mark.
    """
    stack: list[int | None] = []
    memo: dict[Any, int] = {}
    for count, (operation, argument, _) in enumerate(genops(file)):
        if count > MAX_OPERATIONS:
            raise ParseError("more tensors or other values than any state dict has")
        name = operation.name
        if name == "MARK":
            stack.append(None)
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1] or 0
        elif "PUT" in name:
            memo[argument] = stack[-1] or 0
        elif "GET" in name:
            stack.append(memo[argument])
        elif name == "DUP":
            stack.append(stack[-1])
        else:
            nested = _popped(stack, operation.stack_before)
            depth = 1 + max(nested, default=0) if name in TUPLES else 0
            if depth > MAX_DEPTH:
                raise ParseError(f"tuples nested more than {MAX_DEPTH} deep")
            stack += [depth] * len(operation.stack_after)


def _popped(stack: list[int | None], kinds: Sequence[StackObject]) -> list[int]:
    """What an operation takes from the stack: all down to a mark, if it wants one, and as many single values."""
    found: list[int] = []
    single = len(kinds)
    if markobject in kinds:
        single = kinds.index(markobject)
        while (depth := stack.pop()) is not None:
            found.append(depth)
    for _ in range(single):
        depth = stack.pop()
        if depth is None:
            raise ValueError("a mark where a value should be")
        found.append(depth)
    return found


PREFIX = "torchvision:"
_HASH = re.compile(r"-([0-9a-f]{8,})\.")


@dataclass(frozen=True)
class Published:
    """Weights that torchvision publishes, by their full name there, such as `ResNet50_Weights.IMAGENET1K_V2`."""

    name: str

    def __str__(self) -> str:
        return PREFIX + self.name

    def exists(self) -> bool:
        """As a path would say; a published file is there, or is fetched when it is read."""
        return True

    @property
    def file_name(self) -> str:
        """The published file's name, which ends with the beginning of its SHA-256."""
        return Path(_weights(self.name).url).name


def find_published(text: str, model: str, where: str | Path, key: str) -> Published:
    """The weights `torchvision:NAME` means for a zoo model.

    NAME is a member of the model's own weights there, DEFAULT, or the full name of another model's (`init` takes its
    backbone). Raises InputError, with the names there are, for one that does not exist.
    """
    import torchvision

    name = text.removeprefix(PREFIX)
    if "." in name:
        try:
            return Published(_full_name(torchvision.models.get_weight(name)))
        except (ValueError, KeyError) as error:
            example = "such as torchvision:ResNet18_Weights.IMAGENET1K_V1"
            raise InputError(where, f"torchvision publishes no '{name}'", f"give a full name {example}", key) from error
    entry = ENTRIES.get(model)
    if entry is None or entry.published is None:
        remedy = "give a file, or the full name of another model's weights, such as ResNet18_Weights.IMAGENET1K_V1"
        raise InputError(where, f"torchvision publishes no weights of {model}", remedy, key)
    published = torchvision.models.get_model_weights(entry.published)
    known = [*published.__members__]
    if name not in known:
        near = difflib.get_close_matches(name.upper(), known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        fault = f"torchvision publishes no weights '{name}' of {model}"
        raise InputError(where, fault, f"{hint}there are {', '.join(known)}", key)
    return Published(_full_name(published[name]))


def fetch(published: Published, key: str = "weights") -> Path:
    """The file of these weights in torch's own cache; downloaded, and its hash checked, when it is not there yet.

    Raises InputError when it cannot be downloaded or stored.
    """
    import torch

    folder = Path(torch.hub.get_dir()) / "checkpoints"
    file = folder / published.file_name
    if file.is_file():
        return file
    digest = _HASH.search(file.name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(
            _weights(published.name).url, str(file), digest and digest[1], progress=sys.stderr.isatty()
        )
    except RuntimeError as error:  # how torch says that the hash is another
        raise InputError(str(published), "the download is damaged: its hash is another", "try again", key) from error
    except OSError as error:  # no network, no such file there, no room here
        remedy = f"try again with a network, or put {file.name} into {_shown(folder)}"
        raise InputError(str(published), f"cannot be downloaded ({_reason(error)})", remedy, key) from error
    return file


def _weights(name: str):
    import torchvision

    return torchvision.models.get_weight(name)


def _full_name(weights) -> str:
    return f"{type(weights).__name__}.{weights.name}"


def _reason(error: OSError) -> str:
    inner = getattr(error, "reason", None)
    said = inner.strerror if isinstance(inner, OSError) and inner.strerror else inner or error.strerror or error
    return " ".join(str(said).split())[:120] or type(error).__name__


def _shown(folder: Path) -> str:
    home = Path.home()
    return f"~{os.sep}{folder.relative_to(home)}" if folder.is_relative_to(home) else str(folder)


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
    with open_atomic(path, overwrite) as file:
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
                raise ParseError(f"its header claims {length} bytes, more than {MAX_HEADER_BYTES}")
            header = parse_json(file.read(length))
            if not isinstance(header, dict):
                raise ParseError("its header is no mapping")
            return load_file(_by_number(file))
    except InputError as error:
        raise InputError(path, error.problem, remedy, key) from error
    except (ParseError, SafetensorError, OSError, ValueError, KeyError) as error:
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
