"""Weights files: safetensors, PyTorch's checkpoints and torchvision's published ones; whole or in shards.

Nothing in a file is executed. The tensors are checked against the architecture before any is loaded. What is chosen
among several, left out or converted is noted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from gemel.models.bundle.format import has_code
from gemel.models.errors import InputError, join_names, size_text
from gemel.models.files.checkpoint import DAMAGED, PLAIN, TensorRecord, damage
from gemel.models.files.foreign_checkpoint import (
    PATH_HINT,
    ForeignTensor,
    describe_checkpoint,
    read_foreign,
)
from gemel.models.files.io import open_atomic, open_regular, read_bounded, read_json
from gemel.models.files.published import Published, fetch
from gemel.models.files.state_dict import (
    AVERAGED,
    FileState,
    FileStates,
    StateChoice,
    choose_state,
    find_states,
)
from gemel.models.labels.class_names import (
    ASKED,
    KEYS,
    MAX_METADATA,
    StatedNames,
    find_displaced,
    find_names,
)
from gemel.models.notes import add_note
from gemel.models.zoo import check_input, file_of
from gemel.models.zoo.hubs import CONFIG_FILE, read_saved
from gemel.models.zoo.registry import ENTRIES
from gemel.models.zoo.user_models import EXPORTED, EXPORTED_HINT, MODEL_FILES, is_model_file

if TYPE_CHECKING:
    from gemel.models.workload import Query

Source = Path | Published
SAFETENSORS_SUFFIX, PICKLE_SUFFIXES = ".safetensors", (".pt", ".pth", ".th", ".ckpt", ".bin")
INDEX_SUFFIX = ".index.json"
FOLDER_FILES = (
    "model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin",
)  # fmt: skip
"""What a folder given as weights may hold, the first preferred."""
CLASS_FILES = (
    "classes.txt", "labels.txt", "class_names.txt", "names.txt", "classes.json", "labels.json", "class_names.json",
    "class_indices.json", "idx_to_class.json", "class_to_idx.json", "id2label.json",
)  # fmt: skip
"""What training scripts call the list of classes that they write beside weights."""
CHUNK_BYTES = 2**20
MAX_FILE_BYTES = 2**32
"""Of weights as they are merged: twice what the largest model may take."""
MAX_EXTRA_BYTES, MAX_EXTRA_FACTOR = 2**28, 16
"""A checkpoint may hold this many bytes besides so many times the model's own: optimiser states, averages and more."""
MAX_SHARDS = 1000
PREFIXES = ("module.", "backbone.", "body.", "features.")
"""Prefixes that a tensor's name has in one file and not in another."""
COUNTER = "num_batches_tracked"
TRAINING = re.compile(
    r"(criterion|loss|metrics?|teacher|n_averaged|.*_loss)(\.|$)|(.*\.)?total_(ops|params)$"
)
"""Names of tensors that only training or a counter of FLOPs (thop) uses."""
DENSE_LAYER = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")
"""DenseNet's published tensors are called norm.1 and conv.2 where its modules are called norm1 and conv2 today."""
PLAIN_DTYPE = "save it in plain float32"


def load_weights(query: Query, module: nn.Module) -> nn.Module:
    """Load a query's weights into its architecture, in place, and return it; published ones are fetched first.

    Raises InputError, naming file, key, problem and hint, when the file is missing, damaged, holds more than
    a plain state dict or NaN, or does not fit the architecture, the class list or the input size; then the module is
    unchanged.
    """
    if _holds_weights(query):
        return module  # built with them
    state = check_weights(query, module)
    module.load_state_dict({**module.state_dict(), **state}, strict=True)
    return module


def check_weights(query: Query, module: nn.Module) -> dict[str, Tensor]:
    """A query's weights under the names of its architecture; InputError as `load_weights`.

    `module` is not changed, and may be on the device "meta".
    """
    key = f"weights ({query.id})"
    if query.weights is None:
        raise InputError(
            query.file or query.id, "has no weights file", "add `weights:` to the query", key
        )
    model_state = module.state_dict()
    if _holds_weights(query):
        return file_of(query).weights()

    def count_fit(state: FileState) -> int:
        return sum(
            name in state and state[name].shape == tensor.shape
            for name, tensor in model_state.items()
            if not _is_counter(name)
        )

    with _open_weights(query.weights, key, module, (model_state,), count_fit) as (
        path,
        choice,
        class_names,
    ):
        state = choice.candidate.state
        extra = dict.fromkeys(_extra_names(query.model, state, model_state))
        state = {name: tensor for name, tensor in state.items() if name not in extra}
        _check_plain(path, key, state)
        _check_fit(query, key, model_state, state)
        _check_classes(query, key, class_names)
        tensors = _read_tensors(state)
    _check_values(query.weights, key, tensors, model_state)
    check_input(query, module)
    left_out = [*choice.candidate.left_out, *(name for name in extra if not _is_counter(name))]
    parts = [f"left out: {join_names([name[:100] for name in left_out], 3)}"] if left_out else []
    _add_note(
        f"{query.weights}: {key}",
        [choice.note, *parts, *_conversions(tensors, model_state)],
        choice.hint,
    )
    return tensors


def _holds_weights(query: Query) -> bool:
    """Whether the model is a file that holds its weights, and no others were given."""
    return is_model_file(query.model) and str(query.weights) == query.model


def load_matching(module: nn.Module, source: Source, key: str = "init") -> tuple[str, ...]:
    """Load every tensor of some weights whose name and shape fit, and return the module's names that were loaded.

    Names fit when they are equal without PREFIXES; so a head of another class count stays as it is. A note names the
    tensors that do not fit. Raises InputError when the weights cannot be read, hold NaN, or no weight of them fits.
    """
    model_state = module.state_dict()

    def match(state: FileState) -> dict[str, str]:
        """The file's names of the module's tensors that fit."""
        by_bare_name = {_bare(name): name for name in state}
        sources = {
            name: name if name in state else by_bare_name.get(_bare(name), "")
            for name in model_state
        }
        return {
            name: source_name
            for name, source_name in sources.items()
            if source_name and state[source_name].shape == model_state[name].shape
        }

    names = (model_state, {_bare(name) for name in model_state})
    with _open_weights(source, key, module, names, lambda state: len(match(state))) as (
        path,
        choice,
        _,
    ):
        state = choice.candidate.state
        matches = match(state)
        if not any(model_state[name].ndim >= 2 for name in matches):
            problem = (
                f"none of its {len(state)} tensors fits {type(module).__name__} by name and shape"
            )
            raise InputError(str(source), problem, "give weights of the same backbone", key)
        state_to_load = {name: state[source_name] for name, source_name in matches.items()}
        _check_plain(path, key, state_to_load)
        tensors = _read_tensors(state_to_load)
    _check_values(source, key, tensors, model_state)
    module.load_state_dict(tensors, strict=False)
    new = [name for name in model_state if name not in tensors and not _is_counter(name)]
    used = set(matches.values())
    left_out = [
        *choice.candidate.left_out,
        *(name for name in state if name not in used and not _is_counter(name)),
    ]
    parts = [choice.note, *_conversions(tensors, model_state)]
    if new or left_out:
        text = f"{len(tensors)} tensors taken as `{key}`"
        text += (
            f", {len(left_out)} left out ({join_names(sorted(left_out), 3)})" if left_out else ""
        )
        parts.append(
            text + (f", {len(new)} of the model are made new ({join_names(new, 3)})" if new else "")
        )
    hint = (
        "expected for a head of other classes; else give weights of this model"
        if new or left_out
        else choice.hint
    )
    _add_note(str(source), parts, hint)
    return tuple(tensors)


def fingerprint(weights: Source | None) -> bytes:
    """What changes when the weights do: the digest of the file, or the published one's name; empty without any."""
    if isinstance(weights, Published):
        return weights.file_name.encode()
    if weights is None or not os.path.exists(weights):
        return b""
    digest = hashlib.sha256()
    path = _find_file(weights, "weights")
    shards = _list_shards(path, "weights") if path.name.endswith(INDEX_SUFFIX) else ()
    for file_path in (path, *(path.parent / shard for shard in shards)):
        with open_regular(file_path, PATH_HINT, "weights") as file:
            if os.fstat(file.fileno()).st_size > MAX_FILE_BYTES:
                problem = f"is larger than {size_text(MAX_FILE_BYTES)}"
                raise InputError(file_path, problem, "give weights of this architecture", "weights")
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest.digest()


def save_weights(
    path: str | Path,
    state: Mapping[str, Tensor],
    overwrite: bool = True,
    classes: Sequence[str] | None = None,
) -> None:
    """Write a state dict as safetensors, whole or not at all; raises InputError when it cannot be written.

    With `classes` the file names those it was trained for, and is refused for a query with others.
    """
    # Copies, since safetensors refuses tensors that share memory.
    tensors = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in state.items()
    }
    with open_atomic(path, overwrite) as file:
        file.write(
            safetensors.torch.save(
                tensors, None if classes is None else {ASKED: json.dumps(list(classes))}
            )
        )


# Reading


@contextmanager
def _open_weights(
    source: Source,
    key: str,
    module: nn.Module,
    names: Sequence[Collection[str]],
    count_fit: Callable[[FileState], int],
) -> Iterator[tuple[Path, StateChoice, Sequence[StatedNames]]]:
    """The path, the state dict that fits best, and the classes that it names, of a file that is open meanwhile."""
    location = fetch(source, key) if isinstance(source, Published) else Path(source)
    if not os.path.exists(location):
        raise InputError(
            location, "does not exist", "give the path of a weights file, or train one first", key
        )
    max_bytes = MAX_EXTRA_BYTES + MAX_EXTRA_FACTOR * sum(
        tensor.nbytes for tensor in module.state_dict().values()
    )
    path = _find_file(location, key)
    saved = read_saved(location, module)
    with ExitStack() as files:
        if saved is not None:
            states = find_states(saved)
        elif path.name.endswith(INDEX_SUFFIX):
            states = find_states(_open_shards(files, path, key, max_bytes))
        else:
            states = _open_file(files, path, key, max_bytes)
        yield (
            path,
            choose_state(
                states, names, lambda state: current_names(module, state), count_fit, path, key
            ),
            [*states.class_names, *_named_beside(location)],
        )


def _find_file(path: Path, key: str) -> Path:
    """The weights file of a folder as Hugging Face lays it out; any other path as it is."""
    if not path.is_dir():
        return path
    files = [path / name for name in FOLDER_FILES if (path / name).exists()]
    if not files:
        raise InputError(
            path,
            "is a folder without weights",
            f"give a file, or a folder with {FOLDER_FILES[1]}",
            key,
        )
    if files[1:]:
        ignored = join_names([other.name for other in files[1:]])
        add_note(
            f"{path}: {key}",
            f"{files[0].name} taken; {ignored} left out",
            "to use another, give its path",
        )
    return files[0]


def _open_shards(files: ExitStack, index: Path, key: str, max_bytes: int) -> dict[str, Any]:
    """The tensors of all shards that an index lists, each under its name."""
    content: dict[str, Any] = {}
    remaining_bytes = max_bytes
    for shard, names in _list_shards(index, key).items():
        states = _open_file(files, index.parent / shard, key, remaining_bytes)
        part = states.outermost
        remaining_bytes -= (index.parent / shard).stat().st_size
        if lacking := [name for name in names if name not in part]:
            problem = f"lacks {join_names(lacking, 2)}, which {index.name} lists"
            raise InputError(
                index.parent / shard, problem, "copy or download all shards again", key
            )
        content.update((name, part[name]) for name in names)
    return content


def _list_shards(index: Path, key: str) -> dict[str, list[str]]:
    """The files that an index lists, all in its own folder, and the names of the tensors in each."""
    names = read_json(index, DAMAGED).get("weight_map")
    shards: dict[str, list[str]] = {}
    for name, shard in names.items() if isinstance(names, dict) else ():
        if (
            not isinstance(shard, str)
            or not shard
            or Path(shard).name != shard
            or shard.endswith(INDEX_SUFFIX)
        ):
            raise InputError(
                index, f"names the shard {shard!r:.100}, no file beside it", DAMAGED, key
            )
        shards.setdefault(shard, []).append(name)
    if not 0 < len(shards) <= MAX_SHARDS:
        raise InputError(index, f"lists {len(shards)} shards under `weight_map`", DAMAGED, key)
    return shards


def _open_file(files: ExitStack, path: Path, key: str, max_bytes: int) -> FileStates:
    """States of one file; its first bytes tell the format, and its suffix where they do not."""
    suffix = path.suffix.lower()
    if suffix in MODEL_FILES:
        raise InputError(
            path,
            f"is {EXPORTED[suffix]}, which holds its network too",
            "give it as `model` instead",
            key,
        )
    if suffix in EXPORTED:
        raise InputError(path, f"is {EXPORTED[suffix]}, which is not read", EXPORTED_HINT, key)
    file = files.enter_context(open_regular(path, PATH_HINT, key))
    head = file.read(64)
    if head.startswith(b"version https://git-lfs"):
        raise InputError(path, "is a Git LFS pointer, not the file itself", "run git lfs pull", key)
    if (size := os.fstat(file.fileno()).st_size) > max_bytes:
        raise InputError(
            path, f"holds {size_text(size)}, far more than the model takes", PLAIN, key
        )
    # The bytes tell the format more surely than the suffix.
    if head[8:9] != b"{" and (head[:4] == b"PK\3\4" or head[:1] == b"\x80"):
        return describe_checkpoint(path, key, max_bytes)
    if head[8:9] == b"{" or suffix == SAFETENSORS_SUFFIX:
        tensors, metadata = _read_safetensors(file, path, key)
        stated = find_names(metadata)
        return replace(find_states(tensors), class_names=() if stated is None else (stated,))
    # OpenVINO uses the suffix, too.
    if suffix == ".bin" and path.with_suffix(".xml").exists():
        raise InputError(path, f"is of {EXPORTED['.xml']}, which is not read", EXPORTED_HINT, key)
    if suffix in PICKLE_SUFFIXES:
        raise damage(path, key)
    suffixes = ", ".join((SAFETENSORS_SUFFIX, *PICKLE_SUFFIXES))
    raise InputError(path, f"'{path.suffix}' files are not read", f"give one of {suffixes}", key)


def _read_safetensors(
    file: BinaryIO, path: Path, key: str
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a file."""
    try:
        # By its descriptor, since the library takes no path whose bytes are no UTF-8.
        with safe_open(f"/dev/fd/{file.fileno()}", "pt") as tensors:
            names = tensors.keys()
            return {name: tensors.get_tensor(name) for name in names}, tensors.metadata() or {}
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        text = " ".join(str(error).split())[:120] or type(error).__name__
        raise InputError(
            path, f"is truncated or no safetensors file ({text})", DAMAGED, key
        ) from error


def _check_plain(path: Path, key: str, state: FileState) -> None:
    """Raise InputError for a tensor that is sparse, quantised or of a dtype that no bundle holds."""
    for name, tensor in state.items():
        kind = tensor.fault if isinstance(tensor, TensorRecord) else ""
        if kind or not has_code(tensor.dtype):
            kind = kind or str(tensor.dtype).removeprefix("torch.")
            raise InputError(path, f"{name:.200} is no plain tensor but {kind}", PLAIN_DTYPE, key)


def _read_tensors(state: FileState) -> dict[str, Tensor]:
    """The tensors of a state, those of a checkpoint from their file."""
    read = {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    read.update(
        read_foreign(
            {name: tensor for name, tensor in state.items() if isinstance(tensor, ForeignTensor)}
        )
    )
    return {name: read[name] for name in state}


# Names


def current_names(module: nn.Module, state: FileState) -> FileState:
    """The state under the names that the architecture has today; old published files have older ones.

    torchvision's parts (feature pyramids, the region proposal head, attention's MLP) rename their own.
    """
    renamed: Any = {DENSE_LAYER.sub(r"\1\2", name): tensor for name, tensor in state.items()}
    for path, part in module.named_modules():
        renames = type(part)._load_from_state_dict is not nn.Module._load_from_state_dict
        # With tensors of its own it would load them.
        if renames and not part._parameters and not part._buffers:
            part._load_from_state_dict(renamed, f"{path}." if path else "", {}, False, [], [], [])
    return renamed


def _extra_names(model: str, state: FileState, model_state: Mapping[str, Tensor]) -> list[str]:
    """Names that the architecture does without: auxiliary heads, counters, empty tensors, what only training uses."""
    auxiliary = ENTRIES[model].auxiliary if model in ENTRIES else ()
    return [
        name
        for name, tensor in state.items()
        if name not in model_state
        and (
            name.startswith(auxiliary)
            or _is_counter(name)
            or (0 in tensor.shape)
            or TRAINING.match(name)
            or AVERAGED.search(name.partition(".")[0])
        )
    ]


def _is_counter(name: str) -> bool:
    return name.endswith(COUNTER)


def _bare(name: str) -> str:
    """The name without PREFIXES."""
    while prefix := next((prefix for prefix in PREFIXES if name.startswith(prefix)), ""):
        name = name.removeprefix(prefix)
    return name


# Checks


def _check_fit(query: Query, key: str, model_state: Mapping[str, Tensor], state: FileState) -> None:
    """Raise InputError, with the number of differing tensors and examples, unless `state` fits the model."""
    lacking = [
        f"{name} {tuple(model_state[name].shape)}"
        for name in model_state
        if name not in state and not name.endswith(COUNTER)
    ]
    unknown = [f"{name} {tuple(state[name].shape)}" for name in state if name not in model_state]
    wrong = [
        name
        for name, tensor in state.items()
        if name in model_state and tensor.shape != model_state[name].shape
    ]
    shapes = [
        f"{name} is {tuple(state[name].shape)} and should be {tuple(model_state[name].shape)}"
        for name in wrong
    ]
    # In a network of other widths throughout, inputs differ too.
    if (
        wrong
        and not lacking
        and not unknown
        and all(model_state[name].shape[1:] == state[name].shape[1:] for name in wrong)
    ):
        examples = join_names(shapes, 2)
        problem = f"only the head does not fit the class list ({len(query.classes)} in the query): {examples}"
        hint = "list in `classes` the classes these weights were trained for, or give them as `init:` and train"
        raise InputError(str(query.weights), problem, hint, key)
    problems = [
        f"{text}: {join_names(examples, 2)}"
        for examples, text in (
            (lacking, f"lacks {len(lacking)} of the {len(model_state)} tensors of {query.model}"),
            (unknown, f"has {len(unknown)} that {query.model} does not know"),
            (
                shapes,
                f"{len(shapes)} of {len(model_state)} tensors have another shape in {query.model}",
            ),
        )
        if examples
    ]
    if problems:
        hint = "give weights of this architecture, or correct `model` and `model_args`"
        raise InputError(str(query.weights), "; ".join(problems), hint, key)


def _named_beside(weights: Path) -> list[StatedNames]:
    """The classes that Hugging Face's config beside weights names, or a list of them in their folder."""
    folder = weights if weights.is_dir() else weights.parent
    class_names = list[StatedNames]()
    for name in (CONFIG_FILE, *CLASS_FILES):
        path = folder / name
        with suppress(InputError):
            if name == CONFIG_FILE and path.is_file():
                stated = find_names(read_json(path, DAMAGED, foreign=True))
                class_names += (
                    [] if stated is None else [replace(stated, key=f"{name}: {stated.key}")]
                )
            elif path.is_file():
                text = read_bounded(path, MAX_METADATA, DAMAGED).decode("utf-8-sig", "replace")
                stated = find_names({KEYS[0]: text})
                class_names += [] if stated is None else [replace(stated, key=name)]
    return class_names


def _check_classes(query: Query, key: str, class_names: Sequence[StatedNames]) -> None:
    """Refuse weights that name the query's classes in another order; note those that name others.

    Of weights that this project wrote, others are refused too.
    """
    classes = str(list(query.classes))
    for stated in class_names:
        names = list(stated.names)
        is_own = stated.key == ASKED and names != list(query.classes)
        # The same names in another order would answer wrongly without any sign.
        if is_own or find_displaced(names, query.classes):
            where = "" if stated.key == ASKED else f" (`{stated.key}`)"
            problem = f"was trained for the classes {json.dumps(names):.150}, in this order{where}"
            hint = "list in `classes` those of the weights, or give them as `init:` and train"
            raise InputError(
                str(query.weights), f"{problem}, and the query asks for {classes:.150}", hint, key
            )
        if not set(query.classes) <= set(names):
            text = f"its classes (`{stated.key}`) are {join_names(names, 4) or 'in a form that is not read'}"
            add_note(
                f"{query.weights}: {key}",
                f"{text}; the query's are others",
                "check that their order is the same",
            )


def _check_values(
    source: Source, key: str, state: Mapping[str, Tensor], model_state: Mapping[str, Tensor]
) -> None:
    """Raise InputError for values that are not finite, or that the module's own dtype cannot hold."""
    for name, tensor in state.items():
        if not model_state[name].is_floating_point():
            continue
        if not tensor.is_floating_point():
            file_dtype, model_dtype = (
                str(tensor.dtype).removeprefix("torch.") for tensor in (tensor, model_state[name])
            )
            raise InputError(
                str(source),
                f"{name} holds {file_dtype} and should hold {model_dtype}",
                PLAIN_DTYPE,
                key,
            )
        if not bool(torch.isfinite(tensor.to(model_state[name].dtype)).all()):
            raise InputError(
                str(source), f"{name} holds NaN or infinite values", "train or export it again", key
            )


# Notes


def _conversions(tensors: Mapping[str, Tensor], model_state: Mapping[str, Tensor]) -> list[str]:
    """How many tensors change their dtype as they are loaded."""
    pairs = [
        (str(tensor.dtype), str(model_state[name].dtype))
        for name, tensor in tensors.items()
        if not _is_counter(name)
    ]
    return [
        f"{pairs.count(pair)} tensors converted from {pair[0]} to {pair[1]}".replace("torch.", "")
        for pair in sorted(set(pairs))
        if pair[0] != pair[1]
    ]


def _add_note(where: str, parts: Sequence[str], hint: str) -> None:
    """One note on all that was chosen, left out and converted; none where all of a plain state dict was taken."""
    if any(parts):
        add_note(where, "; ".join(filter(None, parts)), hint)
