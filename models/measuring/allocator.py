"""The memory that torch gives back on the CPU: kept by the process, for what it asks for next."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # glibc's malloc.h
NEVER = 2**31 - 1


@cache
def keep_freed_memory() -> bool:
    """Let this process keep what is freed; whether its C library can (glibc does).

    Left to itself, glibc gives a large block back to the system as soon as it is freed, and the system clears every
    page of it again for the next layer that asks: half the time of a batch of large frames
    (benchmarks/engines/step.py). The process stays as large as it was at its largest, which for batches of one size is
    what it needs again anyway.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, NEVER))
