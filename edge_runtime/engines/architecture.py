"""The key of an architecture: two queries with one key are served by one compiled package."""

from __future__ import annotations

import functools
import hashlib
import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn

import models
from models.bundle import BundleQuery


def key_of(query: BundleQuery, model: nn.Module, device: torch.device) -> dict[str, Any]:
    """What an engine's product depends on, weights apart, as JSON values.

    The model's name, arguments, width and input size; the shape and dtype of each tensor; the
    source of its modules; versions, and the processor or card.
    """
    tensors = [(path, str(tensor.dtype), list(tensor.shape)) for path, tensor in model.state_dict().items()]
    return {
        "model": query.model,
        "model_args": dict(query.model_args),
        "task": query.task,
        "classes": len(query.classes),
        "input_size": query.input_size,
        "tensors": _digest(repr(tensors).encode()),
        "source": source_of(model),
        "machine": machine_key(device.type),
    }


def source_of(model: nn.Module) -> str:
    """A digest of the files that say what a model computes: those of its modules' classes, and the whole zoo."""
    files = {inspect.getsourcefile(kind) or "" for kind in {type(module) for module in model.modules()}}
    return _digest(*(_contents(file) for file in sorted({*files, *_zoo_files()} - {""})))


@functools.lru_cache
def machine_key(device: str) -> dict[str, Any]:
    """Versions, threads, and the processor's or card's kind, as far as machine code depends on them."""
    found = {"torch": torch.__version__, "device": device, "threads": torch.get_num_threads()}
    if device == "cuda":
        return found | {
            "card": torch.cuda.get_device_name(),
            "capability": list(torch.cuda.get_device_capability()),
            "cuda": torch.version.cuda,
        }
    return found | {"processor": processor()}


def processor() -> str:
    """A digest of the processor's name and features: packages are compiled for exactly these."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kept = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return _digest(torch.backends.cpu.get_cpu_capability().encode(), *(line.encode() for line in sorted(kept)))


@functools.lru_cache
def _zoo_files() -> tuple[str, ...]:
    return tuple(str(path) for path in sorted(Path(models.__file__).parent.glob("zoo/**/*.py")))


@functools.cache
def _contents(file: str) -> bytes:
    return hashlib.sha256(Path(file).read_bytes()).digest()


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]
