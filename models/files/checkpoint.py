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

from gemel.models.errors import InputError, size_text

MAX_INSTRUCTIONS = 2**20
"""Of a checkpoint's pickle: about as many as there are values beside the tensors."""
MAX_PICKLE_BYTES = 2**26
"""Of a checkpoint's pickle, and of all texts and bytes that one pickle of the older format holds."""
MAX_INTEGER_BITS = 64
"""A wider integer, such as the state of a generator of random numbers, is nothing that a tensor is described by."""
MAX_NAME = 400
"""Characters of a class's or a storage's name, and of a key; mappings keep only keys up to it."""
MAX_AXES = 64
MAX_CALL_ARGUMENTS = 16
"""Of a call that describes a tensor; torch's own have at most nine."""
REFERENCE_PARTS = 6
"""Of a reference to a storage: its sort, class, name, device, length and, in old files, a view of another."""
READ_BYTES = 2**20
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
        self.path = path[:MAX_NAME]
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
        # No zip: the format before torch 1.6.
        if file.read(4) != b"PK\3\4":
            file.seek(0)
            return _read_legacy(file, path, key)
        archive = zipfile.ZipFile(file)
        if (size := sum(part.file_size for part in archive.infolist())) > max_bytes:
            raise InputError(
                path, f"holds {size_text(size)}, far more than the model takes", PLAIN, key
            )
        return _read_zip(archive, path, key)
    except (InputError, OSError):
        raise
    except OverflowError as error:
        raise InputError(
            path, f"holds more than {MAX_INSTRUCTIONS:,} values besides tensors", PLAIN, key
        ) from error
    except Exception as error:  # a damaged file can fail in any way
        raise damage(path, key) from error


def damage(path: Path, key: str) -> InputError:
    """The error of a checkpoint that cannot be read to its end."""
    return InputError(path, "is truncated or no PyTorch file", DAMAGED, key)


def _read_zip(archive: zipfile.ZipFile, path: Path, key: str) -> Any:
    names = archive.namelist()
    root = next(
        (name.removesuffix("data.pkl") for name in names if name.endswith("/data.pkl")), None
    )
    if root is None:
        raise InputError(path, "is a zip archive that holds no PyTorch checkpoint", PLAIN, key)
    # A program's code would have to run.
    if f"{root}constants.pkl" in names:
        raise InputError(path, "is a TorchScript program, not a plain state dict", PLAIN, key)
    if f"{root}byteorder" in names and archive.read(f"{root}byteorder") != b"little":
        raise InputError(path, "was saved on a big-endian machine", "save it again on another", key)
    if archive.getinfo(f"{root}data.pkl").file_size > MAX_PICKLE_BYTES:
        raise InputError(
            path, f"holds more than {size_text(MAX_PICKLE_BYTES)} besides tensors", PLAIN, key
        )

    @functools.cache
    def load(name: str) -> bytearray:
        return _read_part(archive, name)

    @functools.cache
    def find_storage(kind: str, name: str, _: int) -> Storage:
        part = f"{root}data/{name}"
        return Storage(
            DTYPES.get(kind), archive.getinfo(part).file_size, functools.partial(load, part)
        )

    return _unpickle(io.BytesIO(archive.read(f"{root}data.pkl")), find_storage)


def _read_part(archive: zipfile.ZipFile, name: str) -> bytearray:
    """A part's bytes, without a second copy of them while it is unpacked; its checksum is checked."""
    data = bytearray(archive.getinfo(name).file_size)
    view = memoryview(data)
    at = 0
    with archive.open(name) as part:
        file: Any = part  # a reader of bytes, which its type does not say
        while count := file.readinto(view[at : at + READ_BYTES]):
            at += count
    if at < len(data):
        raise ValueError("truncated")
    return data


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
        return storages.setdefault(
            name, Storage(dtype, count * dtype.itemsize, functools.partial(load, name))
        )

    content = _unpickle(file, find_storage)
    names = _unpickle(file)
    if not isinstance(names, list) or not all(type(name) in (str, int) for name in names):
        raise ValueError("names of storages that are none")
    for name in map(str, names):
        (count,) = struct.unpack("<q", file.read(8))
        dtype = storages[name].dtype
        assert dtype is not None
        places[name] = (file.tell(), count * dtype.itemsize)
        if (
            places[name][1] != storages[name].nbytes
            or sum(places[name]) > os.fstat(file.fileno()).st_size
        ):
            raise ValueError("truncated")
        file.seek(sum(places[name]))
    return content


def _unpickle(
    stream: IO[bytes], find_storage: Callable[[str, str, int], Storage] | None = None
) -> Any:
    """Follow the instructions of one pickle; mappings keep only keys that are text. Raises any error for a bad one."""
    stack: list[Any] = []
    marked: list[list[Any]] = []
    memo: dict[int, Any] = {}

    def pop_to_mark() -> list[Any]:
        nonlocal stack
        items = stack
        stack = marked.pop()
        return items

    # Without `tell`, which takes longer than all else.
    reader: Any = SimpleNamespace(read=stream.read, readline=stream.readline)
    argument: Any
    work = characters = 0
    for instruction, argument, _ in pickletools.genops(reader):
        work += 1
        if type(argument) in (str, bytes, bytearray):
            characters += len(argument)
        if work > MAX_INSTRUCTIONS or characters > MAX_PICKLE_BYTES:
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
                # Larger numbers could be chosen to collide in the memo.
                if argument >= MAX_INSTRUCTIONS:
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
                value = stack.pop()
                name = stack.pop()
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
                name = stack.pop()
                module = stack.pop()
                is_text = isinstance(module, str) and isinstance(name, str)
                value = StandIn(f"{module[:MAX_NAME]}.{name[:MAX_NAME]}" if is_text else "object")
            case "REDUCE" | "NEWOBJ":
                arguments = stack.pop()
                function = stack.pop()
                work += _count_copies(arguments)
                value = _make(function, arguments)
            case "NEWOBJ_EX":
                _ = stack.pop()
                arguments = stack.pop()
                function = stack.pop()
                work += _count_copies(arguments)
                value = _make(function, arguments)
            case "OBJ" | "INST":
                items = pop_to_mark()
                value = StandIn(argument or "object")
            case "BINPERSID":
                value = _find(stack.pop(), find_storage)
            case _ if argument is not None and len(instruction.stack_after) == 1:
                value = argument  # a number or a text
                if (
                    type(value) is int
                    and value.bit_length() > MAX_INTEGER_BITS
                    and value != LEGACY_MAGIC
                ):
                    value = StandIn("int")
            case other:
                raise ValueError(f"{other} is no instruction of a checkpoint")
        stack.append(value)
    raise EOFError


def _add_items(items: Sequence[Any], target: Any) -> None:
    """Append to a list, or set the items of a mapping: names and values in turn."""
    if isinstance(target, list):
        target.extend(items)
    elif isinstance(target, dict):
        for name, value in zip(items[::2], items[1::2]):
            if type(name) is int and isinstance(value, str) and 0 <= name < MAX_INSTRUCTIONS:
                name = str(name)  # the names of classes by their index
            if _is_key(name):
                target[name] = value


def _is_key(name: Any) -> bool:
    return isinstance(name, str) and len(name) <= MAX_NAME


def _set_attributes(state: Any, target: Any) -> None:
    # Objects with slots keep their attributes in the first of a pair.
    if isinstance(state, tuple) and state and isinstance(state[0], dict):  # (attributes, slots)
        state = state[0]
    if isinstance(target, StandIn) and isinstance(state, dict):
        target.attributes = state


def _find(reference: Any, find_storage: Callable[[str, str, int], Storage] | None) -> Any:
    """What a reference out of the pickle names: a storage, or the class of a module."""
    # The older format kept the source of classes beside them.
    if reference[0] == "module":
        return reference[1]
    if not isinstance(reference, tuple) or len(reference) > REFERENCE_PARTS:
        raise ValueError("a reference that is none")
    _, kind, name, _, count = reference[:5]
    if (
        find_storage is None
        or type(name) not in (str, int)
        or any(view is not None for view in reference[5:])
    ):
        raise ValueError("a storage where none can be")
    name = str(name)
    if type(count) is not int or len(name) > MAX_NAME:
        raise ValueError("a storage that is none")
    return find_storage(kind.path, name, count)


def _count_copies(arguments: Any) -> int:
    """Items that a call may copy: those of a list that it gets."""
    return len(arguments[0]) if arguments and isinstance(arguments[0], list) else 0


def _make(function: Any, arguments: Any) -> Any:
    """What a call in the pickle makes: a tensor's description, a parameter's tensor, a stand-in for all else."""
    path = function.path if isinstance(function, StandIn) else "object"
    if path == "collections.OrderedDict":
        mapping = StandIn(path)
        if arguments and isinstance(arguments[0], list):  # of Python 2
            mapping.update(pair for pair in arguments[0] if len(pair) == 2 and _is_key(pair[0]))
        return mapping
    # A subclass: function, class, arguments, attributes.
    if path == "torch._tensor._rebuild_from_type_v2":
        function = arguments[0]
        arguments = arguments[2]
        path = function.path if isinstance(function, StandIn) else "object"
    if not path.startswith("torch._utils._rebuild_"):
        return StandIn(path)
    if len(arguments) > MAX_CALL_ARGUMENTS:
        raise ValueError("a tensor that is none")
    kind = path.removeprefix("torch._utils._rebuild_")
    if kind in ("tensor", "tensor_v2", "tensor_v3"):
        return _describe_tensor(*arguments)
    if kind in ("parameter", "parameter_with_state"):
        return arguments[0]
    return TensorRecord(fault=kind.replace("_", " "))


def _describe_tensor(
    storage: Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *more: Any
) -> TensorRecord:
    """A tensor after its place in the storage is checked; `more`: requires_grad, hooks, a dtype, signs of a view."""
    if not isinstance(storage, Storage):
        return TensorRecord(fault="tensor without storage")
    dtypes = [
        item.path for item in more if isinstance(item, StandIn) and item.path.startswith("torch.")
    ]
    dtype = DTYPES.get(dtypes[0]) if dtypes else storage.dtype
    if dtype is None or any(isinstance(item, dict) and item for item in more):
        return TensorRecord(
            fault="tensor of another dtype" if dtype is None else "conjugate or negative view"
        )
    if not len(shape) == len(strides) <= MAX_AXES:
        raise ValueError("a shape that is none")
    numbers = (offset, *shape, *strides)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("a shape that is none")
    last = offset + sum((length - 1) * stride for length, stride in zip(shape, strides))
    if 0 not in shape and (last + 1) * dtype.itemsize > storage.nbytes:
        raise ValueError("a tensor beyond its storage")
    return TensorRecord(tuple(shape), dtype, storage, offset, tuple(strides))
