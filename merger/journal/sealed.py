"""A file of plain values and tensors with a seal at its end: what is read is, byte for byte, what was written here.

So nothing in it has to be checked again, however deep it lies. The seal is no secret: it tells damage, and files of
others, from our own.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import stat
from pathlib import Path
from typing import Any, BinaryIO

import torch

SEAL = b"\ngemel seal sha256 "
LENGTH = len(SEAL) + 64
CHUNK_BYTES = 2**20
FAULTS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
)
"""What reading a file that is none, or a damaged one, comes to."""


class _Sealing:
    """A file as `torch.save` writes to it, which remembers a digest of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def save_sealed(content: Any, file: BinaryIO) -> None:
    """Write plain values and tensors, then the seal; torch alone can read it too."""
    sealing = _Sealing(file)
    torch.save(content, sealing)  # type: ignore[arg-type]
    file.write(SEAL + sealing.digest.hexdigest().encode())


def load_sealed(path: Path) -> Any:
    """What `save_sealed` wrote. Raises one of FAULTS for every other file, links and pipes among them.

    Nothing of it is unpacked before the seal was found and its digest was seen to be right.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no regular file")
        left = found.st_size - LENGTH
        file.seek(max(0, left))
        seal = file.read(LENGTH)
        if left < 0 or not seal.startswith(SEAL):
            raise ValueError("it was cut, changed, or written by another version")
        file.seek(0)
        digest = hashlib.sha256()
        while left > 0 and (chunk := file.read(min(left, CHUNK_BYTES))):
            digest.update(chunk)
            left -= len(chunk)
        if seal[len(SEAL) :] != digest.hexdigest().encode():
            raise ValueError("it was changed since it was written")
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)
