"""What memory this process takes, as the system counts it (Linux). Needs no torch."""

from __future__ import annotations

import ctypes
import functools
import gc
from collections.abc import Callable, Mapping
from pathlib import Path


def interpolate_workspace(measured: Mapping[int, int], count: int) -> int:
    """Bytes of a run of `count` frames, on the line through those of the smallest and the largest measured batch."""
    first, last = min(measured), max(measured)
    per_frame = (measured[last] - measured[first]) / max(1, last - first)
    return max(measured[first], round(measured[first] + per_frame * (count - first)))


def process_peak_bytes(run: Callable[[], object]) -> int | None:
    """By how much the process's memory grew during `run`; None where the system does not report it.

    It runs twice: the first run sets up more than a run needs. Allocations of other threads count too.
    """
    run()
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # freed memory would be reused unnoticed
        before = process_status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # begins a new peak (proc(5))
        run()
        return max(0, process_status("VmHWM") - before)
    except (OSError, AttributeError, StopIteration):
        return None


def process_status(field: str) -> int:
    """Bytes of a field of /proc/self/status; OSError or StopIteration where there is none."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def memory_rollup() -> dict[str, int]:
    """Bytes of this process by the fields of smaps_rollup, such as Pss and Anonymous; empty where there is none."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return {}
    words = [line.split() for line in lines if line.endswith(" kB")]
    return {word[0].rstrip(":"): int(word[1]) * 1024 for word in words}


PROCESS_BYTES = 110 << 20
"""PSS of a box without torch before it has loaded a weight, as a plan takes it: 105 MB of libraries were measured."""
DECODER_BYTES = 24 << 20
"""Of one camera: four decoders of 1080p H.264 took 95 MB."""


def planned_base_bytes(cameras: int) -> int:
    """What the process of a box takes besides weights and workspaces, as a plan takes it."""
    return PROCESS_BYTES + DECODER_BYTES * cameras


@functools.cache
def base_bytes() -> int:
    """What this process takes before it has loaded a weight, libraries included; measured by the first call."""
    return memory_rollup().get("Pss", 0)
