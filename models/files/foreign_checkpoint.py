"""Reads a stranger's PyTorch checkpoint in confined children: one says what it holds, one reads what is chosen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from gemel.models.errors import InputError
from gemel.models.files.checkpoint import (
    DTYPES,
    PLAIN,
    Storage,
    TensorRecord,
    damage,
    read_checkpoint,
)
from gemel.models.files.confined import run_confined
from gemel.models.files.confined_server import ConfinedResult
from gemel.models.files.io import open_regular
from gemel.models.files.state_dict import FileStates, find_states
from gemel.models.labels.class_names import StatedNames

PATH_HINT = "give the path of a weights file"
MAX_TENSORS = 2**17
"""Of a checkpoint, with all that an optimiser keeps of each."""


@dataclass(frozen=True)
class ForeignFile:
    """A checkpoint that is read in children: its path, the key that names it, and its bytes at most once unpacked."""

    path: Path
    key: str
    max_bytes: int


@dataclass(frozen=True, eq=False)
class ForeignTensor(TensorRecord):
    """A tensor that a child has described; `state` and `name` are its place among the file's states."""

    file: ForeignFile | None = None
    state: int = 0
    name: str = ""


@dataclass(frozen=True)
class _Record:
    """A tensor as a child describes it; `storage` is a number that tensors with the same bytes have alike."""

    shape: tuple[int, ...]
    dtype: str
    storage: int
    offset: int
    strides: tuple[int, ...]
    fault: str


@dataclass(frozen=True)
class _Description:
    """What a checkpoint holds: its tensors, and the names in each state of the places in `records`."""

    records: tuple[_Record, ...]
    states: tuple[tuple[str, dict[str, int]], ...]
    kind: str
    is_swapped: bool
    class_names: tuple[StatedNames, ...]


_DESCRIPTION = TypeAdapter(_Description)


def describe_checkpoint(path: Path, key: str, max_bytes: int) -> FileStates:
    """The states of a checkpoint, of whose tensors nothing is read; InputError as `read_checkpoint`, and for limits."""
    file = ForeignFile(path, key, max_bytes)
    answer = run_confined(f"{__name__}:list_tensors", [str(path), key, max_bytes], path)
    try:
        description = _DESCRIPTION.validate_python(answer.value)
        storages = {record.storage: Storage(None, 0, bytearray) for record in description.records}
        states = []
        for number, (keys, places) in enumerate(description.states):
            tensors = {
                name: _of_record(description.records[place], storages, file, number, name)
                for name, place in places.items()
            }
            states.append((keys, tensors))
    except (ValidationError, LookupError) as error:
        raise damage(path, key) from error
    return FileStates(
        tuple(states), description.kind, description.is_swapped, description.class_names
    )


def read_foreign(tensors: Mapping[str, ForeignTensor]) -> dict[str, Tensor]:
    """The tensors themselves; InputError where a child cannot read them."""
    by_file: dict[ForeignFile, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        assert tensor.file is not None
        by_file[tensor.file].append(name)
    read: dict[str, Tensor] = {}
    for file, names in by_file.items():
        places = [[tensors[name].state, tensors[name].name] for name in names]
        answer = run_confined(
            f"{__name__}:read_tensors",
            [str(file.path), file.key, file.max_bytes, places],
            file.path,
        )
        for number, name in enumerate(names):
            tensor = answer.tensors.get(str(number))
            expected = tensors[name]
            if (
                tensor is None
                or tuple(tensor.shape) != expected.shape
                or tensor.dtype != expected.dtype
            ):
                raise damage(file.path, file.key)
            read[name] = tensor
    return read


def _of_record(
    record: _Record, storages: Mapping[int, Storage], file: ForeignFile, state: int, name: str
) -> ForeignTensor:
    dtype = DTYPES[record.dtype]
    storage = storages[record.storage]
    return ForeignTensor(
        record.shape, dtype, storage, record.offset, record.strides, record.fault, file, state, name
    )


# In the child


def list_tensors(path: str, key: str, max_bytes: int) -> ConfinedResult:
    """The description of a checkpoint."""
    states = _find(path, key, max_bytes)
    records: dict[int, int] = {}
    storages: dict[int, int] = {}
    rows: list[dict[str, Any]] = []
    state_rows = []
    for keys, tensors in states.states:
        places = {}
        for name, record in tensors.items():
            if id(record) not in records:
                assert isinstance(record, TensorRecord)
                records[id(record)] = len(rows)
                rows.append(
                    {
                        "shape": record.shape,
                        "dtype": str(record.dtype),
                        "offset": record.offset,
                        "storage": storages.setdefault(id(record.storage), len(storages)),
                        "strides": record.strides,
                        "fault": record.fault,
                    }
                )
            places[name] = records[id(record)]
        state_rows.append([keys, places])
    if max(len(rows), sum(len(places) for _, places in state_rows)) > MAX_TENSORS:
        raise InputError(path, f"holds more than {MAX_TENSORS:,} tensors", PLAIN, key)
    value = {
        "records": rows,
        "states": state_rows,
        "kind": states.kind,
        "is_swapped": states.is_swapped,
        "class_names": [vars(stated) for stated in states.class_names],
    }
    return ConfinedResult(value, {})


def read_tensors(
    path: str, key: str, max_bytes: int, places: Sequence[Sequence[Any]]
) -> ConfinedResult:
    """The tensors at these places, each a state's number and a name, by their number among them."""
    with open_regular(Path(path), PATH_HINT, key) as file:
        states = find_states(read_checkpoint(file, Path(path), key, max_bytes))
        try:
            tensors = {str(number): _read(states, *place) for number, place in enumerate(places)}
        except (InputError, OSError, MemoryError):
            raise
        except Exception as error:  # a damaged file can fail in any way
            raise damage(Path(path), key) from error
    return ConfinedResult(None, tensors)


def _find(path: str, key: str, max_bytes: int) -> FileStates:
    with open_regular(Path(path), PATH_HINT, key) as file:
        return find_states(read_checkpoint(file, Path(path), key, max_bytes))


def _read(states: FileStates, state: int, name: str) -> Tensor:
    record = states.states[state][1][name]
    return record if isinstance(record, torch.Tensor) else record.read()
