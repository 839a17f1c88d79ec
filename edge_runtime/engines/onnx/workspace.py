"""The workspace of a run in ONNX Runtime, which tells nobody what it allocates: the peak of the process meanwhile."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from models.export import INPUT

RESET_PEAK = "5"
"""What clear_refs takes to begin a new peak (proc(5))."""


def measured(runtime: Any, graph: onnx.GraphProto, size: int, batches: tuple[int, ...]) -> dict[int, int]:
    """Peak bytes of a run by batch, frames included; empty where the system does not tell (it does on Linux).

    `runtime` is a session of `graph`. The weights are zeros that nobody has written, which take no memory.
    """
    weights = {one.name: np.zeros(*_kind(one)) for one in graph.input if one.name != INPUT}
    peaks = {}
    for batch in batches:
        frames = np.zeros((batch, 3, size, size), np.float32)
        peak = peak_bytes(lambda: runtime.run(None, {INPUT: frames, **weights}))  # noqa: B023 (it is called at once)
        if peak is None:
            return {}
        peaks[batch] = peak + frames.nbytes
    return peaks


def peak_bytes(run: Callable[[], object]) -> int | None:
    """By how much the process's memory was larger during `run` than before; None where the system does not tell.

    It runs twice: the first time sets up more than a run needs. What other threads allocate meanwhile counts too.
    """
    run()
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # freed memory that was kept would be taken again unseen
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)
        run()
        return max(0, _status("VmHWM") - before)
    except (OSError, AttributeError, StopIteration):
        return None


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _kind(value: onnx.ValueInfoProto) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of an input."""
    described = value.type.tensor_type
    dtype = onnx.helper.tensor_dtype_to_np_dtype(described.elem_type)
    return tuple(axis.dim_value for axis in described.shape.dim), dtype
