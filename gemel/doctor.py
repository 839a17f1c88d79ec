"""`gemel doctor`: what this machine can do: how fast it copies and reads, and which engines run here."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from edge_runtime.simulation.profile_io import describe_machine
from gemel.text import table
from models.errors import InputError

GIGA = 1e9
COPY_BYTES = 64 * 2**20
STORAGE_BYTES = 128 * 2**20
CHUNK_BYTES = 4 * 2**20
ROUNDS = 7
UNPROVED = (
    "anything on a GPU (CUDA): swapping, engines, training",
    "the engine tensorrt",
    "merges over several GPUs (NCCL)",
    "a Jetson, and GStreamer's decoder on one",
)
"""Built and tested with stand-ins, never run on the real hardware."""


@dataclass(frozen=True)
class Diagnosis:
    """What was measured; keys of `to_json` are those of `gemel doctor --json`. Bandwidths in 10^9 bytes a second."""

    device: str
    machine: dict[str, Any]
    copy_gb_s: float
    storage_gb_s: float
    storage_dropped: bool
    storage_path: str
    engines: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "machine": self.machine,
            "copy_gb_s": self.copy_gb_s,
            "storage_gb_s": self.storage_gb_s,
            "storage_cache_dropped": self.storage_dropped,
            "storage_path": self.storage_path,
            "engines": list(self.engines),
            "unproved": list(UNPROVED),
        }

    def to_text(self) -> str:
        rows = [(one["engine"], "yes" if one["available"] else "no", one["detail"]) for one in self.engines]
        dropped = "read after its pages were dropped from the cache (posix_fadvise), which the system may not heed"
        if not self.storage_dropped:
            dropped = "this system has no posix_fadvise: read from the cache, most likely"
        return "\n".join([
            f"{self.machine['name']}, {self.machine['cores']} cores, torch {self.machine['torch']}, "
            f"device {self.device}",
            f"copies into device memory: {self.copy_gb_s:.2f} GB/s (median of {ROUNDS})",
            f"storage at {self.storage_path}: {self.storage_gb_s:.2f} GB/s (median of {ROUNDS}); {dropped}",
            "",
            table(("engine", "runs", "how"), rows),
            "",
            f"tested with stand-ins only, never run: {'; '.join(UNPROVED)}",
        ])  # fmt: skip


def diagnose(folder: str | Path | None = None, copy_bytes: int = COPY_BYTES,
             storage_bytes: int = STORAGE_BYTES) -> Diagnosis:  # fmt: skip
    """Measure this machine, copies and storage in turns so that both see the same disturbances.

    `folder` is where storage is measured (the system's folder for temporary files unless given); a file of
    `storage_bytes` is written there and removed. Raises InputError when it cannot be written.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = Path(folder or _temporary())
    copies: list[float] = []
    reads: list[float] = []
    copy = _copier(device, copy_bytes)
    try:
        with tempfile.NamedTemporaryFile(dir=where, prefix="gemel-doctor-") as file:
            _fill(file.fileno(), storage_bytes)
            for _ in range(ROUNDS):
                copies.append(copy_bytes / _seconds(copy))
                dropped = _drop_cache(file.fileno())
                reads.append(storage_bytes / _seconds(lambda: _read(file.name)))
    except OSError as error:
        raise InputError(where, f"storage cannot be measured here: {error.strerror}", "give a folder that can be "
                         "written", "--folder") from error  # fmt: skip
    return Diagnosis(device, describe_machine(device), median(copies) / GIGA, median(reads) / GIGA, dropped, str(where),
                     tuple(_engines(device)))  # fmt: skip


def _temporary() -> str:
    try:
        return tempfile.gettempdir()
    except OSError as error:
        tried = "no folder for temporary files can be written"
        raise InputError("TMPDIR", tried, "set it to a folder that can be, or give --folder") from error


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return max(time.perf_counter() - start, 1e-9)


def _copier(device: str, nbytes: int) -> Callable[[], None]:
    """One copy as a load makes it: from host memory (pinned, for a GPU) into device memory."""
    import torch

    source = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device == "cuda")
    target = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        if device == "cuda":
            torch.cuda.synchronize()

    return copy


def _fill(descriptor: int, nbytes: int) -> None:
    """Random bytes, since a file system may store others more cheaply than weights."""
    chunk = os.urandom(min(CHUNK_BYTES, nbytes))
    for at in range(0, nbytes, len(chunk)):
        os.write(descriptor, chunk[: nbytes - at])
    os.fsync(descriptor)


def _drop_cache(descriptor: int) -> bool:
    """Ask the system to forget the file's pages; whether it can be asked."""
    if not hasattr(os, "posix_fadvise"):
        return False
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def _read(path: str) -> None:
    buffer = bytearray(CHUNK_BYTES)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _engines(device: str) -> list[dict[str, Any]]:
    """Each engine, whether it can run here, by what or why not, and whether it ever ran on such a device."""
    from edge_runtime.engines.registry import ENGINES, engine_class

    found = []
    for name in ENGINES:
        engine = engine_class(name)
        missing = engine.missing(device)
        detail = engine.detail(device) if missing is None else missing
        proved = device in engine.tested_on
        detail += "" if proved else " (never run)"
        found.append({"engine": name, "available": missing is None, "detail": detail, "proved": proved})
    return found
