"""`gemel doctor`: what this machine can do: how fast it copies and reads, and which engines run here."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from gemel.edge_runtime.simulation.profile_io import describe_machine
from gemel.models.errors import InputError
from gemel.models.files.confined import describe_confinement
from gemel.models.files.extras import has_cuda
from gemel.models.plugins import find_foreign
from gemel.text import table

GIGA = 1e9
COPY_BYTES = 64 * 2**20
STORAGE_BYTES = 128 * 2**20
CHUNK_BYTES = 4 * 2**20
ROUNDS, MIN_S = 7, 1e-9
UNPROVED = (
    "anything on a GPU (CUDA): swapping, engines, training",
    "merges over several GPUs (NCCL)",
    "a Jetson, and GStreamer's decoder on one",
)
"""Built and tested with stand-ins, never run on the real hardware."""


@dataclass(frozen=True)
class Diagnosis:
    """What was measured; the fields are keys of `gemel doctor --json`. Bandwidths in 10^9 bytes a second.

    `storage_cache_dropped`: reads follow a request to the system to forget the file's pages. `confinement`: what holds
    a process that reads a model of others.
    """

    device: str
    machine: dict[str, Any]
    copy_gb_s: float
    storage_gb_s: float
    storage_cache_dropped: bool
    storage_path: str
    engines: tuple[dict[str, Any], ...]
    confinement: str
    others: tuple[dict[str, str], ...] = ()
    """What other packages have registered by name."""

    def to_json(self) -> dict[str, Any]:
        """The keys of `gemel doctor --json`."""
        lists = {"engines": list(self.engines), "others": list(self.others), "unproved": list(UNPROVED)}
        return {**self.__dict__, **lists}

    def to_text(self) -> str:
        """The machine, its bandwidths and its engines, for a terminal."""
        rows = [(one["engine"], "yes" if one["available"] else "no", one["detail"]) for one in self.engines]
        dropped = "read after its pages were dropped from the cache (posix_fadvise), which the system may not heed"
        if not self.storage_cache_dropped:
            dropped = "this system has no posix_fadvise: read from the cache, most likely"
        return "\n".join([
            f"{self.machine['name']}, {self.machine['cores']} cores, torch {self.machine['torch'] or 'not installed'}, "
            f"device {self.device}",
            f"copies into device memory: {self.copy_gb_s:.2f} GB/s (median of {ROUNDS})",
            f"storage at {self.storage_path}: {self.storage_gb_s:.2f} GB/s (median of {ROUNDS}); {dropped}",
            "",
            table(("engine", "runs", "how"), rows),
            *(f"{one['kind']} {one['name']}: of {one['package']}" for one in self.others),
            "",
            self.confinement,
            f"tested with stand-ins only, never run: {'; '.join(UNPROVED)}",
        ])  # fmt: skip

    __repr__ = to_text


def diagnose(
    folder: str | Path | None = None, copy_bytes: int = COPY_BYTES, storage_bytes: int = STORAGE_BYTES
) -> Diagnosis:
    """Measure this machine, copies and storage in turns so that both see the same disturbances.

    `folder` is where storage is measured (the system's folder for temporary files unless given); a file of
    `storage_bytes` is written there and removed. Raises InputError when it cannot be written.
    """
    device = "cuda" if has_cuda() else "cpu"
    copy = _make_copy(copy_bytes, device)
    copies, reads, can_drop = list[float](), list[float](), hasattr(os, "posix_fadvise")
    try:
        where = Path(folder or tempfile.gettempdir())
        with tempfile.NamedTemporaryFile(dir=where, prefix="gemel-doctor-") as file:
            _fill(file.fileno(), storage_bytes)
            for _ in range(ROUNDS):
                start = time.perf_counter()
                copy()
                copies.append(copy_bytes / max(time.perf_counter() - start, MIN_S) / GIGA)
                if can_drop:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                reads.append(storage_bytes / _read_seconds(file.name) / GIGA)
    except OSError as error:
        problem = f"storage cannot be measured here: {error.strerror}"
        raise InputError(folder or "TMPDIR", problem, "give a folder that can be written", "--folder") from error
    engines = tuple(_describe_engines(device))
    return Diagnosis(
        device, describe_machine(device), median(copies), median(reads), can_drop, str(where), engines,
        describe_confinement(), tuple(_describe_others()),
    )  # fmt: skip


def _describe_others() -> Iterator[dict[str, str]]:
    for noun, point in find_foreign():
        package = "" if point.dist is None else f"{point.dist.name} {point.dist.version}"
        yield {"kind": noun, "name": point.name, "package": package}


def _make_copy(nbytes: int, device: str) -> Callable[[], object]:
    """Copies so many bytes as a load does: from host memory, pinned for a GPU."""
    if device == "cpu":
        target = np.zeros(nbytes, np.uint8)
        return partial(np.copyto, target, np.ones(nbytes, np.uint8))
    import torch

    pinned = torch.ones(nbytes, dtype=torch.uint8, pin_memory=True)
    on_device = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def copy() -> None:
        on_device.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize()

    return copy


def _fill(descriptor: int, nbytes: int) -> None:
    """Random bytes, since a file system may store others more cheaply than weights."""
    chunk = os.urandom(min(CHUNK_BYTES, nbytes))
    for at in range(0, nbytes, len(chunk)):
        os.write(descriptor, chunk[: nbytes - at])
    os.fsync(descriptor)


def _read_seconds(path: str) -> float:
    buffer, start = bytearray(CHUNK_BYTES), time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return max(time.perf_counter() - start, MIN_S)


def _describe_engines(device: str) -> Iterator[dict[str, Any]]:
    """Each engine, whether it can run here, by what or why not, and whether it ever ran on such a device."""
    from gemel.edge_runtime.engines.base import ENGINES

    for name in ENGINES:
        try:
            engine = ENGINES.find(name)
        except InputError as error:
            detail = f"{error.problem}: {error.hint}"
            yield {"engine": name, "available": False, "detail": detail, "proved": True}
            continue
        missing, proved = engine.missing(device), device in engine.tested_on
        detail = (engine.detail(device) if missing is None else missing) + ("" if proved else " (never run)")
        yield {"engine": name, "available": missing is None, "detail": detail, "proved": proved}
