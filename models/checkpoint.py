"""PyTorch checkpoints, read without running code: plain values, descriptions of tensors, stand-ins for all else.

A checkpoint is a pickle, a program of some sixty instructions, with the bytes of its tensors beside it. The reader
follows the instructions itself and calls nothing that the file names: an object of any class but a tensor's becomes a
`StandIn`. Formats: torch/serialization.py (`_save`, a zip; `_legacy_save`, several pickles and then the bytes).
"""

from __future__ import annotations

import functools
import io
import os
import pickletools
import struct
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, BinaryIO

import torch
from torch import Tensor

from models.errors import InputError, size_text

MAX_INSTRUCTIONS = 2**20
"""Of a checkpoint's pickle: about as many as there are values beside the tensors."""
MAX_PICKLE_BYTES = 2**26
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
PLAIN = "save model.state_dict() alone, best as .safetensors"
DAMAGED = "copy or save it again"
_NUMBERS = {
    "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128,
}  # fmt: skip
DTYPES = {
    **{f"torch.{name}Storage": dtype for name, dtype in _NUMBERS.items()},
    **{str(dtype): dtype for dtype in _NUMBERS.values()},
    "torch.storage.UntypedStorage": torch.uint8,
    "torch.UntypedStorage": torch.uint8,
}
"""The dtype that a storage class or a dtype means in a pickle."""


class StandIn(dict[str, Any]):
    """An object of a class that is not imported: its class's name, its items if it is a mapping, its attributes."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.attributes: dict[str, Any] = {}


@dataclass(frozen=True, eq=False)
class Storage:
    """The bytes of one or more tensors in the file; `load` reads them, once."""

    dtype: torch.dtype | None
    nbytes: int
    load: Callable[[], bytearray]


@dataclass(frozen=True, eq=False)
class TensorRecord:
    """A tensor in a checkpoint, of which nothing has been read; `fault` says why it is none that can be."""

    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    storage: Storage | None = None
    offset: int = 0
    strides: tuple[int, ...] = ()
    fault: str = ""

    def read(self) -> Tensor:
        """The tensor on the CPU; tensors of one storage share memory, as they did when they were saved."""
        assert self.storage is not None, self.fault
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype)
        data = self.storage.load()
        values = torch.frombuffer(data, dtype=self.dtype, count=len(data) // self.dtype.itemsize)
        return values.as_strided(self.shape, self.strides, self.offset)


def read_checkpoint(file: BinaryIO, path: Path, key: str, max_bytes: int) -> Any:
    """The content of a checkpoint that is open as `file`, which stays open while its tensors are read.

    Raises InputError for a file that is damaged or no checkpoint, and for one of more than `max_bytes` unpacked.
    """
    try:
        file.seek(0)
        if file.read(4) != b"PK\3\4":
            file.seek(0)
            return _read_legacy(file, path, key)
        archive = zipfile.ZipFile(file)
        if (size := sum(part.file_size for part in archive.infolist())) > max_bytes:
            raise InputError(path, f"holds {size_text(size)}, far more than the model takes", PLAIN, key)
        return _read_zip(archive, path, key)
    except (InputError, OSError):
        raise
    except OverflowError as error:
        raise InputError(path, f"holds more than {MAX_INSTRUCTIONS:,} values besides tensors", PLAIN, key) from error
    except Exception as error:  # a damaged file can fail in any way
        raise damage(path, key) from error


def damage(path: Path, key: str) -> InputError:
    """The error of a checkpoint that cannot be read to its end."""
    return InputError(path, "is truncated or no PyTorch file", DAMAGED, key)


def _read_zip(archive: zipfile.ZipFile, path: Path, key: str) -> Any:
    names = archive.namelist()
    root = next((name.removesuffix("data.pkl") for name in names if name.endswith("/data.pkl")), None)
    if root is None:
        raise InputError(path, "is a zip archive that holds no PyTorch checkpoint", PLAIN, key)
    if f"{root}constants.pkl" in names:
        raise InputError(path, "is a TorchScript program, not a plain state dict", PLAIN, key)
    if f"{root}byteorder" in names and archive.read(f"{root}byteorder") != b"little":
        raise InputError(path, "was saved on a big-endian machine", "save it again on another", key)
    if archive.getinfo(f"{root}data.pkl").file_size > MAX_PICKLE_BYTES:
        raise InputError(path, f"holds more than {size_text(MAX_PICKLE_BYTES)} besides tensors", PLAIN, key)

    @functools.cache
    def load(name: str) -> bytearray:
        return bytearray(archive.read(name))

    @functools.cache
    def find_storage(kind: str, name: str, _: int) -> Storage:
        part = f"{root}data/{name}"
        return Storage(DTYPES.get(kind), archive.getinfo(part).file_size, functools.partial(load, part))

    return _unpickle(io.BytesIO(archive.read(f"{root}data.pkl")), find_storage)


def _read_legacy(file: BinaryIO, path: Path, key: str) -> Any:
    if _unpickle(file) != LEGACY_MAGIC:
        raise InputError(path, "is a pickle that torch.save did not write", PLAIN, key)
    _unpickle(file)  # the version of the format
    _unpickle(file)  # the sizes of numbers on the machine that saved it
    places: dict[str, tuple[int, int]] = {}
    storages: dict[str, Storage] = {}

    @functools.cache
    def load(name: str) -> bytearray:
        start, nbytes = places[name]
        file.seek(start)
        data = bytearray(file.read(nbytes))
        if len(data) < nbytes:
            raise ValueError("truncated")
        return data

    def find_storage(kind: str, name: str, count: int) -> Storage:
        dtype = DTYPES[kind]
        return storages.setdefault(name, Storage(dtype, count * dtype.itemsize, functools.partial(load, name)))

    content = _unpickle(file, find_storage)
    for name in map(str, _unpickle(file)):
        (count,) = struct.unpack("<q", file.read(8))
        dtype = storages[name].dtype
        assert dtype is not None
        places[name] = (file.tell(), count * dtype.itemsize)
        if places[name][1] != storages[name].nbytes or sum(places[name]) > os.fstat(file.fileno()).st_size:
            raise ValueError("truncated")
        file.seek(sum(places[name]))
    return content


def _unpickle(stream: IO[bytes], find_storage: Callable[[str, str, int], Storage] | None = None) -> Any:
    """Follow the instructions of one pickle; mappings keep only keys that are text. Raises any error for a bad one."""
    stack: list[Any] = []
    marked: list[list[Any]] = []
    memo: dict[int, Any] = {}

    def pop_to_mark() -> list[Any]:
        nonlocal stack
        items, stack = stack, marked.pop()
        return items

    # Without `tell`, which takes longer than all else.
    reader: Any = SimpleNamespace(read=stream.read, readline=stream.readline)
    argument: Any
    for count, (instruction, argument, _) in enumerate(pickletools.genops(reader)):
        if count >= MAX_INSTRUCTIONS:
            raise OverflowError
        match instruction.name:
            case "STOP":
                return stack.pop()
            case "PROTO" | "FRAME":
                continue
            case "MARK":
                marked.append(stack)
                stack = []
                continue
            case "POP" if stack:
                stack.pop()
                continue
            case "POP" | "POP_MARK":
                pop_to_mark()
                continue
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
                continue
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                if argument >= MAX_INSTRUCTIONS:  # larger numbers could be chosen to collide in the memo
                    raise ValueError("a place in the memo that no pickler numbers")
                memo[argument] = stack[-1]
                continue
            case "BUILD":
                _set_attributes(stack.pop(), stack[-1])
                continue
            case "APPEND":
                _add_items([stack.pop()], stack[-1])
                continue
            case "SETITEM":
                value, name = stack.pop(), stack.pop()
                _add_items([name, value], stack[-1])
                continue
            case "APPENDS" | "SETITEMS" | "ADDITEMS":
                items = pop_to_mark()
                _add_items(items, stack[-1])
                continue
            case "GET" | "BINGET" | "LONG_BINGET":
                value = memo[argument]
            case "DUP":
                value = stack[-1]
            case "NONE":
                value = None
            case "NEWTRUE" | "NEWFALSE":
                value = instruction.name == "NEWTRUE"
            case "EMPTY_LIST" | "LIST":
                value = [] if instruction.name == "EMPTY_LIST" else pop_to_mark()
            case "EMPTY_DICT" | "DICT":
                value = {}
                _add_items([] if instruction.name == "EMPTY_DICT" else pop_to_mark(), value)
            case "EMPTY_SET" | "FROZENSET":
                value = StandIn("set")
                _ = [] if instruction.name == "EMPTY_SET" else pop_to_mark()
            case "EMPTY_TUPLE" | "TUPLE":
                value = () if instruction.name == "EMPTY_TUPLE" else tuple(pop_to_mark())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                length = int(instruction.name[-1])
                value = tuple(stack[-length:])
                del stack[-length:]
            case "GLOBAL":
                value = StandIn(argument.replace(" ", ".", 1))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                value = StandIn(f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else "object")
            case "REDUCE" | "NEWOBJ":
                arguments, function = stack.pop(), stack.pop()
                value = _make(function, arguments)
            case "NEWOBJ_EX":
                _, arguments, function = stack.pop(), stack.pop(), stack.pop()
                value = _make(function, arguments)
            case "OBJ" | "INST":
                items = pop_to_mark()
                value = StandIn(argument or "object")
            case "BINPERSID":
                value = _find(stack.pop(), find_storage)
            case _ if argument is not None and len(instruction.stack_after) == 1:
                value = argument  # a number or a text
            case other:
                raise ValueError(f"{other} is no instruction of a checkpoint")
        stack.append(value)
    raise EOFError


def _add_items(items: Sequence[Any], target: Any) -> None:
    """Append to a list, or set the items of a mapping: names and values in turn."""
    if isinstance(target, list):
        target.extend(items)
    elif isinstance(target, dict):
        target.update((name, value) for name, value in zip(items[::2], items[1::2]) if isinstance(name, str))


def _set_attributes(state: Any, target: Any) -> None:
    if isinstance(state, tuple) and state and isinstance(state[0], dict):  # (attributes, slots)
        state = state[0]
    if isinstance(target, StandIn) and isinstance(state, dict):
        target.attributes = state


def _find(reference: Any, find_storage: Callable[[str, str, int], Storage] | None) -> Any:
    """What a reference out of the pickle names: a storage, or the class of a module."""
    if reference[0] == "module":
        return reference[1]
    _, kind, name, _, count = reference[:5]
    if find_storage is None or type(name) not in (str, int) or any(view is not None for view in reference[5:]):
        raise ValueError("a storage where none can be")
    return find_storage(kind.path, str(name), count)


def _make(function: Any, arguments: Any) -> Any:
    """What a call in the pickle makes: a tensor's description, a parameter's tensor, a stand-in for all else."""
    path = function.path if isinstance(function, StandIn) else "object"
    if path in ("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"):
        return _describe_tensor(*arguments)
    if path in ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"):
        return arguments[0]
    if path == "torch._tensor._rebuild_from_type_v2":  # a subclass: function, class, arguments, attributes
        return _make(arguments[0], arguments[2])
    if path.startswith("torch._utils._rebuild_"):
        return TensorRecord(fault=path.removeprefix("torch._utils._rebuild_").replace("_", " "))
    made = StandIn(path)
    if path == "collections.OrderedDict" and arguments and isinstance(arguments[0], list):  # of Python 2
        made.update(pair for pair in arguments[0] if len(pair) == 2 and isinstance(pair[0], str))
    return made


def _describe_tensor(
    storage: Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *more: Any
) -> TensorRecord:
    """A tensor after its place in the storage is checked; `more`: requires_grad, hooks, a dtype, signs of a view."""
    if not isinstance(storage, Storage):
        return TensorRecord(fault="tensor without storage")
    given = [one.path for one in more if isinstance(one, StandIn) and one.path.startswith("torch.")]
    dtype = DTYPES.get(given[0]) if given else storage.dtype
    if dtype is None or any(isinstance(one, dict) and one for one in more):
        return TensorRecord(fault="tensor of another dtype" if dtype is None else "conjugate or negative view")
    numbers = (offset, *shape, *strides)
    if len(shape) != len(strides) or any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("a shape that is none")
    last = offset + sum((length - 1) * stride for length, stride in zip(shape, strides))
    if 0 not in shape and (last + 1) * dtype.itemsize > storage.nbytes:
        raise ValueError("a tensor beyond its storage")
    return TensorRecord(tuple(shape), dtype, storage, offset, tuple(strides))
