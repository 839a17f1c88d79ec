"""Writes a bundle: equal tensors once, in load order, straight to the disk, whole or not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor, nn

from models.atomic import check_output, writing
from models.bundle.container import CODES, Fault, encode_header, place, raw_bytes, tensor_name
from models.bundle.manifest import (
    FORMAT,
    MANIFEST_KEY,
    RESIDUAL_A,
    RESIDUAL_B,
    BundleQuery,
    ByteCounts,
    Manifest,
    ResidualTensors,
    parse_manifest,
    shared_of,
)
from models.errors import InputError
from models.residual import residual_layers

_HASH_THREADS = 2  # hashlib lets go of the interpreter; more than two threads wait for memory


def write_bundle(
    path: str | Path,
    models: Mapping[str, nn.Module],
    queries: Sequence[BundleQuery],
    *,
    workload: str,
    method: str,
    ceiling_bytes: int,
    overwrite: bool = False,
) -> Manifest:
    """Write the models of a workload as one bundle of format 1 and return its manifest.

    `models` holds each query's module, tied and with residuals attached; what is shared is found by content.
    `queries` are records without tensors (`BundleQuery.of`), in the order they shall have. `ceiling_bytes`
    are the bytes that could be saved; before and after are counted here. Raises InputError, with nothing
    written, when the path exists or cannot be written or the disk is full, and ValueError when models and
    queries don't fit together.
    """
    path = check_output(path, overwrite)
    states = {query.id: models[query.id].state_dict() for query in queries}
    if len(states) < len(queries) or set(states) != set(models):
        raise ValueError(f"models {sorted(models)} and queries {[query.id for query in queries]} differ")
    names = _names_of(tensor for state in states.values() for tensor in state.values())
    records = tuple(_bind(query, models[query.id], states[query.id], names) for query in queries)
    tensors = {names[_identity(tensor)]: tensor for state in states.values() for tensor in state.values()}
    manifest = Manifest(
        format=FORMAT, workload=workload, method=method,
        bytes=count_bytes(records, {name: tensor.nbytes for name, tensor in tensors.items()}, ceiling_bytes),
        queries=records, shared=shared_of(records),
    )  # fmt: skip
    if ceiling_bytes > manifest.bytes.before:
        raise ValueError(f"{ceiling_bytes} of {manifest.bytes.before} bytes cannot be saved")
    text = manifest.to_json()
    try:
        manifest = parse_manifest(text)  # what we write, we must be able to read
    except Fault as fault:
        raise InputError(path, f"this bundle could not be read again: {fault}", "change the workload") from None
    entries = place(
        (name, CODES[tensors[name].dtype], tuple(tensors[name].shape), tensors[name].nbytes)
        for name in load_order(records)
    )
    with writing(path, overwrite) as file:
        file.write(encode_header(entries, {MANIFEST_KEY: text}))
        for entry in entries:
            file.write(bytes(entry.nbytes) if entry.is_pad else raw_bytes(tensors[entry.name]))
    return manifest


def load_order(queries: Sequence[BundleQuery]) -> tuple[str, ...]:
    """Tensor names as they lie in the file: each sharing set together, then each query's private tensors.

    A sharing set is all tensors used by the same two or more queries; the widest sets come first, and within
    a set or a query the tensors stand layer by layer.
    """
    users: dict[str, list[int]] = {}
    for index, query in enumerate(queries):
        for name in query.state().values():
            who = users.setdefault(name, [])
            if index not in who:
                who.append(index)
    first_use = {name: at for at, name in enumerate(users)}

    def rank(name: str) -> tuple[bool, int, list[int], int]:
        who = users[name]
        return len(who) == 1, -len(who), who, first_use[name]

    return tuple(sorted(users, key=rank))


def count_bytes(queries: Iterable[BundleQuery], nbytes: Mapping[str, int], ceiling_bytes: int) -> ByteCounts:
    """before = the sum over queries of the unique tensors of each plain model; after = all unique tensors,
    residuals included.
    """
    before = 0
    unique: set[str] = set()
    for query in queries:
        before += sum(nbytes[name] for name in set(query.tensors.values()))
        unique.update(query.state().values())
    return ByteCounts(before, sum(nbytes[name] for name in unique), ceiling_bytes)


def _identity(tensor: Tensor) -> tuple[object, ...]:
    """Equal for tensors that are the same memory read the same way: tied tensors are hashed once."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _names_of(tensors: Iterable[Tensor]) -> dict[tuple[object, ...], str]:
    unique = {_identity(tensor): tensor for tensor in tensors}
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        return dict(zip(unique, pool.map(_name_of, unique.values()), strict=True))


def _name_of(tensor: Tensor) -> str:
    return tensor_name(CODES[tensor.dtype], tensor.shape, raw_bytes(tensor))


def _bind(
    query: BundleQuery, model: nn.Module, state: Mapping[str, Tensor], names: Mapping[tuple[object, ...], str]
) -> BundleQuery:
    """The query's record with the names of its tensors and residuals."""
    paths = {path: names[_identity(tensor)] for path, tensor in state.items()}
    residuals = {
        layer: ResidualTensors(
            rank=module.residual_a.shape[0],
            a=paths.pop(f"{layer}.{RESIDUAL_A}"),
            b=paths.pop(f"{layer}.{RESIDUAL_B}"),
        )
        for layer, module in residual_layers(model).items()
    }
    return dataclasses.replace(query, tensors=paths, residuals=residuals)
