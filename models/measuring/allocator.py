"""The memory that a process frees on the CPU: kept for what it asks for next, or given back."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # glibc's malloc.h
NEVER = 2**31 - 1


@cache
def keep_freed_memory() -> bool:
    """Let this process keep what is freed; whether its C library can (glibc does).

    Left to itself, glibc gives a large block back to the system as soon as it is freed, and the system clears every
    page of it again for the next layer that asks: half the time of a batch of large frames
    (benchmarks/engines/step.py). The process stays as large as it was at its largest, which for batches of one size is
    what it needs again anyway.
    """
    return _told((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER))


@cache
def keep_one_heap() -> bool:
    """Let all threads of this process have their memory from one heap; whether its C library can (glibc does).

    Left to itself, glibc makes another for a thread that asks while others do, up to eight a core. Each keeps what was
    freed in it, and of what lies at its end nothing is given back, whatever it is told: a process of many threads, as a
    box with cameras, never holds less again than in its worst moment (docs/figures.md, "A box at work"). To be called
    before the first thread: a heap that is there is used.
    """
    return _told((M_ARENA_MAX, 1))


def give_back_freed() -> bool:
    """Give all pages that hold nothing any more back to the system; whether this C library can (glibc does).

    Left to itself, glibc keeps what lies below something still in use: a process whose moments of most memory come
    seldom stays as large as in the worst of them. It takes about a millisecond.
    """
    trim = _libc("malloc_trim")
    return trim is not None and trim(0) >= 0


def _told(*options: tuple[int, int]) -> bool:
    mallopt = _libc("mallopt")
    return mallopt is not None and all(mallopt(*option) for option in options)


@cache
def _libc(function: str) -> Any | None:
    return getattr(ctypes.CDLL(None), function, None) if sys.platform.startswith("linux") else None
