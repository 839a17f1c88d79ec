"""Writes a bundle: equal tensors once, in load order, straight to the disk, whole or not at all."""

from __future__ import annotations

import dataclasses
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from models.bundle.format import Entry, code_of, encode_header, place, raw_bytes, tensor_name
from models.bundle.manifest import (
    FORMAT,
    MANIFEST_KEY,
    SCALE,
    BundleQuery,
    Manifest,
    StoredTensor,
    count_bytes,
    parse_manifest,
    shared_of,
)
from models.errors import InputError
from models.io import ParseError, check_output, open_atomic

if TYPE_CHECKING:
    from torch import Tensor, nn

    from models.quantization import PackedWeight

_HASH_THREADS = 2  # hashlib lets go of the interpreter; more than two threads wait for memory
_PUSH_BYTES = 32 << 20
_MAX_WAITING_BYTES = 256 << 20  # tensors held for hashing: with models on a GPU each is a copy


@dataclasses.dataclass(frozen=True)
class Made:
    """Where a bundle comes from: workload, method, and the bytes that sharing could save."""

    workload: str
    method: str
    ceiling_bytes: int


def write_bundle(
    path: str | Path,
    models: Mapping[str, nn.Module],
    queries: Sequence[BundleQuery],
    made: Made,
    *,
    overwrite: bool = False,
    packed: Mapping[str, Mapping[str, PackedWeight]] | None = None,
) -> Manifest:
    """Write the models of a workload as one bundle and return its manifest.

    `models` holds each query's module, tied; what is shared is found by content. `queries` are records without
    tensors (`BundleQuery.of`), in the order they shall have. The bytes before and after are counted here. `packed`
    maps queries and state dict keys to what is stored in place of the model's tensor; queries that share a weight
    should have the same one. Raises InputError, with nothing written, when the path exists or cannot be written or
    the disk is full, and ValueError when models and queries don't fit together.
    """
    path = check_output(path, overwrite)
    packed = packed or {}
    if len({query.id for query in queries}) < len(queries) or {query.id for query in queries} != set(models):
        raise ValueError(f"models {sorted(models)} and queries {[query.id for query in queries]} differ")
    states = {query.id: _stored_state(models[query.id].state_dict(), packed.get(query.id, {})) for query in queries}
    drafts = _draft_names(tensor for state in states.values() for tensor in state.values())
    tensors = {drafts[_identity(tensor)]: tensor for state in states.values() for tensor in state.values()}
    records = [_bind(query, states[query.id], packed.get(query.id, {}), drafts) for query in queries]
    sizes = [(name, code_of(tensors[name].dtype), tuple(tensors[name].shape), tensors[name].nbytes)
             for name in load_order(records)]  # fmt: skip
    entries = place(sizes)

    def manifest_with(names: Mapping[str, str]) -> Manifest:
        named = tuple(_rename_tensors(query, names) for query in records)
        by_name = {names[entry.name]: entry for entry in entries if not entry.is_pad}
        counts = count_bytes(named, by_name, made.ceiling_bytes)
        return Manifest(FORMAT, made.workload, made.method, counts, named, shared_of(named))

    draft = manifest_with({name: name for name in tensors}).to_json()
    try:
        if parse_manifest(draft).bytes.before < made.ceiling_bytes:
            raise ValueError(f"{made.ceiling_bytes} bytes cannot be saved: there are fewer")
    except ParseError as error:
        raise InputError(path, f"this bundle could not be read again: {error}", "change the workload") from None
    head_bytes = len(encode_header(entries, {MANIFEST_KEY: draft}))
    with open_atomic(path, overwrite) as file:
        file.write(bytes(head_bytes))
        names = _write_tensors(file, entries, tensors)
        text = manifest_with(names).to_json()
        named = [entry if entry.is_pad else dataclasses.replace(entry, name=names[entry.name]) for entry in entries]
        file.seek(0)
        if file.write(encode_header(named, {MANIFEST_KEY: text})) != head_bytes:
            raise AssertionError("the header's length depends on the tensors' names")
    return parse_manifest(text)


def _write_tensors(file: BinaryIO, entries: Sequence[Entry], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Write tensors and gaps in order while other threads hash them and push them to the disk.

    Returns draft name -> content name, once everything is on the disk.
    """
    waiting: deque[tuple[Entry, Future[str]]] = deque()
    waiting_bytes = unpushed = 0
    names: dict[str, str] = {}
    with ThreadPoolExecutor(_HASH_THREADS) as hashing, ThreadPoolExecutor(1) as pushing:
        pushed = pushing.submit(int)
        for entry in entries:
            data = memoryview(bytes(entry.nbytes)) if entry.is_pad else raw_bytes(tensors[entry.name])
            if not entry.is_pad:
                waiting.append((entry, hashing.submit(tensor_name, entry.dtype, entry.shape, data)))
                waiting_bytes += entry.nbytes
            for start in range(0, len(data), _PUSH_BYTES):
                unpushed += file.write(data[start : start + _PUSH_BYTES])
                if unpushed >= _PUSH_BYTES and pushed.done():
                    pushed.result()
                    pushed, unpushed = pushing.submit(os.fdatasync, file.fileno()), 0
            while waiting_bytes > _MAX_WAITING_BYTES and len(waiting) > 1:
                done, future = waiting.popleft()
                names[done.name] = future.result()
                waiting_bytes -= done.nbytes
        pushed.result()
        file.flush()
        os.fdatasync(file.fileno())
        return names | {entry.name: future.result() for entry, future in waiting}


def load_order(queries: Sequence[BundleQuery]) -> tuple[str, ...]:
    """Tensor names in file order: each sharing set together, then each query's private tensors.

    A sharing set is all tensors used by the same two or more queries; the widest sets come first, and within
    a set or a query the tensors follow layer by layer.
    """
    users: dict[str, list[int]] = {}
    for index, query in enumerate(queries):
        for name in query.places().values():
            who = users.setdefault(name, [])
            if index not in who:
                who.append(index)
    first_use = {name: at for at, name in enumerate(users)}

    def rank(name: str) -> tuple[bool, int, list[int], int]:
        who = users[name]
        return len(who) == 1, -len(who), who, first_use[name]

    return tuple(sorted(users, key=rank))


def _identity(tensor: Tensor) -> tuple[object, ...]:
    """Equal for tensors that are the same memory read the same way: tied tensors are hashed once."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _draft_names(tensors: Iterable[Tensor]) -> dict[tuple[object, ...], str]:
    """Identity -> a draft name of 64 digits, the same for equal contents.

    With draft names the whole layout is known before anything is hashed, so that hashing and writing overlap.
    Only tensors that begin alike are compared in full.
    """
    unique = {_identity(tensor): tensor for tensor in tensors}
    alike: dict[tuple[object, ...], list[tuple[object, ...]]] = {}
    for identity, tensor in unique.items():
        first_row = tensor[0] if tensor.ndim > 1 and len(tensor) else tensor
        alike.setdefault((tensor.dtype, tensor.shape, bytes(raw_bytes(first_row))), []).append(identity)
    contents: dict[object, str] = {}
    names: dict[tuple[object, ...], str] = {}
    for identities in alike.values():
        for identity in identities:
            tensor = unique[identity]
            content: object = identity
            if len(identities) > 1:
                content = tensor_name(code_of(tensor.dtype), tensor.shape, raw_bytes(tensor))
            names[identity] = contents.setdefault(content, f"{len(contents):064d}")
    return names


def _stored_state(state: Mapping[str, Tensor], packed: Mapping[str, PackedWeight]) -> dict[str, Tensor]:
    """The state with packed tensors in place of float32 ones and their scales beside them."""
    stored: dict[str, Tensor] = {}
    for key, tensor in state.items():
        weight = packed.get(key)
        stored[key] = tensor if weight is None else weight.tensor
        if weight is not None and weight.shape != tensor.shape:
            raise ValueError(f"{key} has shape {tuple(tensor.shape)}, its packed tensor {weight.shape}")
        if weight is not None and weight.scale is not None:
            stored[f"{key}.{SCALE}"] = weight.scale
    if unknown := packed.keys() - state.keys():
        raise ValueError(f"the model has no {sorted(unknown)[0]} that could be packed")
    return stored


def _rename_tensors(query: BundleQuery, names: Mapping[str, str]) -> BundleQuery:
    return dataclasses.replace(
        query,
        tensors={path: names[name] for path, name in query.tensors.items()},
        stored={
            key: dataclasses.replace(packed, scale=names[packed.scale]) if packed.scale is not None else packed
            for key, packed in query.stored.items()
        },
    )


def _bind(
    query: BundleQuery,
    state: Mapping[str, Tensor],
    packed: Mapping[str, PackedWeight],
    names: Mapping[tuple[object, ...], str],
) -> BundleQuery:
    """The query's record with the names of its tensors and scales."""
    paths = {path: names[_identity(tensor)] for path, tensor in state.items()}
    stored = {}
    for key, weight in packed.items():
        shape = weight.shape if weight.shape != weight.tensor.shape else None
        stored[key] = StoredTensor(weight.width, paths.pop(f"{key}.{SCALE}", None), shape)
    return dataclasses.replace(query, tensors=paths, stored=stored)
