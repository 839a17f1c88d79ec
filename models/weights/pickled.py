"""PyTorch's own files, held against bounds before they are loaded, and loaded without running anything.

Such a file is a zip of one pickle and the bytes of every storage, or, before torch 1.6, five pickles and the bytes
after them. The pickle is walked through first: its operations are counted, and tuples in tuples, whose hashes Python
takes by calls within calls until the process dies.
"""

from __future__ import annotations

import io
import pickle
import struct
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from pickletools import StackObject, genops, markobject
from typing import Any, BinaryIO

import torch

from models.errors import InputError
from models.files.bounded import Fault, opened
from models.sizes import size_text

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
        raise InputError(path, error.fault, error.remedy, key) from error
    except pickle.UnpicklingError as error:
        if "Unsupported" not in str(error) and "GLOBAL" not in str(error):
            raise InputError(path, "is truncated or no PyTorch file", REMEDY, key) from error
        fault = "is not a plain state dict: reading it would run code"
        raise InputError(path, fault, PLAIN, key) from error
    except Fault as fault:
        raise InputError(path, f"is not a plain state dict: {fault.text}", REMEDY, key) from fault
    except Exception as error:  # a damaged pickle can fail in any way
        raise InputError(path, "is truncated or no PyTorch file", REMEDY, key) from error


def _check_zip(file: BinaryIO, most_bytes: int) -> None:
    """Fault unless the parts lie in the file as they are, none packed and none twice, and the pickle is in bounds."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - END_BYTES - END_WITHIN))
    end = file.read()
    at = end.rindex(END)
    if struct.unpack_from("<L", end, at + 12)[0] > MAX_DIRECTORY_BYTES:
        raise Fault("it has too many parts")
    with zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
        if any("/code/" in part.filename for part in parts):
            raise InputError("", "is a TorchScript program, not a plain state dict", PLAIN)
        if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
            raise Fault("its parts are packed, as torch packs none")
        total = sum(part.file_size for part in parts)
        if total > size:
            raise Fault("its parts are said to be larger than the file")
        _check_bytes(total, most_bytes)
        for part in parts:
            if part.filename.endswith(".pkl"):
                if part.file_size > MAX_PICKLE_BYTES:
                    raise Fault(f"its pickle takes {part.file_size} bytes, more than {MAX_PICKLE_BYTES}")
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
        raise Fault(f"it holds {size_text(found)}, far more than the model takes")


def _check_pickle(file: Any) -> None:
    """Walk through one pickle without making a value of it: Fault for too many operations or too deep tuples.

    On the walk's stack stands how deep each value is nested in tuples, None for a mark.
    """
    stack: list[int | None] = []
    memo: dict[Any, int] = {}
    for count, (operation, argument, _) in enumerate(genops(file)):
        if count > MAX_OPERATIONS:
            raise Fault("more tensors or other values than any state dict has")
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
                raise Fault(f"tuples nested more than {MAX_DEPTH} deep")
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
